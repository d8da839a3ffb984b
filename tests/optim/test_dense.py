"""A shadow's steps against the trainer's own: torch on the whole model, the shadow on any part of it, to the bit."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lastgood.errors import ConfigError, MismatchError
from lastgood.optim import host_step
from lastgood.optim.dense import DenseOptimizer
from lastgood.optim.rule import ClipNorm, ClipValue, UpdateRule
from lastgood.optim.spec import OptimizerSpec

IMPLEMENTATIONS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "single": {"foreach": False, "fused": False},
}
CLASSES = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def bits(tensor):
    return tensor.detach().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


class Shadow:
    """Parts of a model on shards: each shard a flat buffer of its own, as buckets are."""

    def __init__(self, spec, parameters, shards, threads=1):
        self.spec = spec
        group_of = spec.group_of()
        places = [[i for i in range(len(parameters)) if i % shards == s and i in group_of] for s in range(shards)]
        self.places = [some for some in places if some]
        self.optimizers, self.views = [], {}
        for some in self.places:
            by_dtype = {}
            for i in some:
                by_dtype.setdefault(parameters[i].dtype, []).append(i)
            for dtype, which in by_dtype.items():
                flat = torch.cat([parameters[i].detach().reshape(-1) for i in which]).to(dtype)
                ends = torch.tensor([parameters[i].numel() for i in which]).cumsum(0).tolist()
                for i, end in zip(which, ends, strict=True):
                    self.views[i] = flat[end - parameters[i].numel() : end].view(parameters[i].shape)
            groups = [group_of[i] for i in some]
            views = [self.views[i] for i in some]
            self.optimizers.append(DenseOptimizer(spec, views, groups, threads, places=some))

    def step(self, gradients, rule):
        for optimizer, some in zip(self.optimizers, self.places, strict=True):
            optimizer.step([gradients[i] for i in some], rule)

    def assert_equals(self, parameters, optimizer):
        for some, own in zip(self.places, self.optimizers, strict=True):
            for i, state in zip(some, own.state(), strict=True):
                assert torch.equal(bits(self.views[i]), bits(parameters[i])), f"parameter {i}"
                theirs = {k: v for k, v in optimizer.state.get(parameters[i], {}).items() if v is not None}
                assert set(state) == set(theirs), f"state of parameter {i}"
                for key, tensor in state.items():
                    assert tensor.shape == theirs[key].shape and tensor.dtype == theirs[key].dtype
                    assert torch.equal(bits(tensor), bits(theirs[key])), f"{key} of parameter {i}"


def clip_by_norm(total, max_norm):
    """What `clip_grad_norm_` multiplied gradients of norm `total` by."""
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    return ClipNorm(float(coefficient), str(coefficient.dtype).removeprefix("torch."))


def received(parameters):
    """Gradients as a shadow receives them: before the trainer unscales or clips its own."""
    return [None if p.grad is None else p.grad.detach().clone() for p in parameters]


@pytest.mark.parametrize("implementation", list(IMPLEMENTATIONS))
@pytest.mark.parametrize("kind", list(CLASSES))
@pytest.mark.parametrize("steps", [300, pytest.param(1000, marks=pytest.mark.slow)])
def test_equal_after_many_steps_of_a_training(kind, implementation, steps):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 1))
    parameters = list(model.parameters())
    decayed = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.03}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
    more = {"momentum": 0.9} if kind == "sgd" else {}
    optimizer = CLASSES[kind](groups, lr=0.01, **more, **IMPLEMENTATIONS[implementation])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    spec = OptimizerSpec.from_data(OptimizerSpec.of(optimizer, parameters).to_data())
    assert (spec.kind, spec.implementation) == (kind, implementation)
    shadow = Shadow(spec, parameters, shards=2)
    # Gradients of a noisy bowl around `goal`: a training without the cost of one.
    goal = [torch.randn_like(p) for p in parameters]
    noise = [torch.randn(64, *p.shape) for p in parameters]
    for step in range(steps):
        for p, to, some in zip(parameters, goal, noise, strict=True):
            p.grad = (p.detach() - to) * 0.1 + some[step % 64]
            p.grad += some[(7 * step + 3) % 64]  # as a second batch adds to it
        gradients = received(parameters)
        norm = nn.utils.clip_grad_norm_(parameters, 9.0)
        rule = UpdateRule.from_data(UpdateRule.of(optimizer, clip=clip_by_norm(norm, 9.0)).to_data())
        optimizer.step()
        schedule.step()
        shadow.step(gradients, rule)
    shadow.assert_equals(parameters, optimizer)


@st.composite
def trainings(draw):
    """An optimizer of torch's over a few tensors, and what happens in each step."""
    kind = draw(st.sampled_from(list(CLASSES)))
    implementation = draw(st.sampled_from(list(IMPLEMENTATIONS)))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float64]))
    shapes = draw(st.lists(st.sampled_from([(1,), (5,), (3, 7), (64,), (129,), (2, 3, 4), ()]), min_size=1, max_size=6))
    seed = draw(st.integers(0, 10**6))
    torch.manual_seed(seed)
    parameters = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    cut = draw(st.integers(0, len(shapes) - 1))
    groups = []
    for members in (parameters[:cut], parameters[cut:]):
        if members:
            group = {
                "params": members,
                "lr": draw(st.floats(1e-5, 1.0)),
                "weight_decay": draw(st.sampled_from([0.0, 0.01, 0.5])),
                "maximize": draw(st.booleans()),
            }
            if kind == "sgd":
                group["momentum"] = draw(st.sampled_from([0.0, 0.9]))
                group["nesterov"] = group["momentum"] > 0 and draw(st.booleans())
                group["dampening"] = 0.0 if group["nesterov"] else draw(st.sampled_from([0.0, 0.3]))
            else:
                group["betas"] = (draw(st.floats(0.0, 0.99)), draw(st.floats(0.0, 0.999)))
                group["amsgrad"] = draw(st.booleans())
            groups.append(group)
    if draw(st.booleans()) and implementation == "single":
        for group in groups:
            group["lr"] = torch.tensor(group["lr"])
    optimizer = CLASSES[kind](groups, **IMPLEMENTATIONS[implementation])
    event = st.tuples(
        st.sampled_from(["norm", "value", "none"]),
        st.sampled_from([None, 2.0, 3.0]),  # a loss scale
        st.booleans(),  # a step that is skipped
        st.integers(0, len(shapes)),  # a parameter without a gradient, or none
        st.floats(0.1, 1.0),  # what a schedule does
    )
    return parameters, optimizer, draw(st.lists(event, min_size=1, max_size=5)), seed


@settings(max_examples=60, deadline=None)
@given(
    training=trainings(), shards=st.integers(1, 3), threads=st.sampled_from([1, 1, 1, 2]), reload_at=st.integers(0, 4)
)
def test_equals_any_training(training, shards, threads, reload_at):
    parameters, optimizer, events, seed = training
    spec = OptimizerSpec.of(optimizer, parameters)
    shadow = Shadow(spec, parameters, shards, threads)
    source = torch.Generator().manual_seed(seed)
    fused = spec.implementation == "fused"
    # torch's fused SGD wants momentum of all parameters, or of none.
    lagging = not (fused and spec.kind == "sgd")
    for number, (clip, scale, skipped, without, factor) in enumerate(events):
        for i, p in enumerate(parameters):
            p.grad = (torch.randn(p.shape, generator=source) * 4).to(p.dtype)
            if i == without and lagging:
                p.grad = None
        gradients = received(parameters)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor
        if skipped:
            continue
        rule = apply_as_a_trainer(parameters, optimizer, clip, scale, fused)
        shadow.step(gradients, UpdateRule.from_data(rule.to_data()))
        if number == reload_at:
            shadow = reloaded(shadow, parameters, spec, shards, threads)
    shadow.assert_equals(parameters, optimizer)


def apply_as_a_trainer(parameters, optimizer, clip, scale, fused):
    """One step of the trainer, which says what it did."""
    having = [p for p in parameters if p.grad is not None]
    grads = [p.grad for p in having]
    inverse_scale = in_kernel = coefficient = None
    if scale is not None and fused and clip == "none":
        in_kernel = scale
    elif scale is not None and grads:
        inverse_scale = float(torch.tensor(scale).double().reciprocal().float())
        torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(()), torch.tensor(inverse_scale))
    if clip == "norm" and grads:
        coefficient = clip_by_norm(nn.utils.clip_grad_norm_(having, 0.7), 0.7)
    elif clip == "value" and grads:
        coefficient = ClipValue(0.3)
        nn.utils.clip_grad_value_(having, 0.3)
    rule = UpdateRule.of(optimizer, inverse_scale=inverse_scale, grad_scale=in_kernel, clip=coefficient)
    if in_kernel is not None:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(in_kernel), torch.tensor(0.0)
    optimizer.step()
    optimizer.grad_scale = optimizer.found_inf = None
    return rule


def reloaded(shadow, parameters, spec, shards, threads):
    """Another shadow with the first one's parameters and state, as a fetch and a seed would make it."""
    values = [shadow.views.get(i, p.detach()).clone() for i, p in enumerate(parameters)]
    other = Shadow(spec, values, shards, threads)
    for new, old in zip(other.optimizers, shadow.optimizers, strict=True):
        new.load_state([{k: v.clone() for k, v in state.items()} for state in old.state()])
    return other


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_a_loss_scaler_that_backs_off(implementation):
    """GradScaler's own steps: gradients that overflow are skipped, the others unscaled before or inside the kernel."""
    torch.manual_seed(1)
    parameters = [torch.randn(37, requires_grad=True), torch.randn(5, 3, requires_grad=True)]
    optimizer = torch.optim.AdamW(parameters, lr=0.01, **IMPLEMENTATIONS[implementation])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    shadow = Shadow(OptimizerSpec.of(optimizer, parameters), parameters, 1)
    applied = 0
    for step in range(8):
        loss = sum((p * torch.randn_like(p)).sum() for p in parameters)
        if step in (2, 5):
            loss = loss * math.inf
        scaler.scale(loss).backward()
        gradients = received(parameters)
        scale = torch.tensor(scaler.get_scale())
        if all(g.isfinite().all() for g in gradients):
            own = (
                {"grad_scale": float(scale)}
                if implementation == "fused"
                else {"inverse_scale": float(scale.double().reciprocal().float())}
            )
            shadow.step(gradients, UpdateRule.of(optimizer, **own))
            applied += 1
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        shadow.assert_equals(parameters, optimizer)
    assert applied == 6


def test_state_lies_in_few_flat_buffers():
    parameters = [torch.randn(33), torch.randn(4, 5).double(), torch.randn(7)]
    optimizer = torch.optim.Adam(parameters, amsgrad=True)
    shadow = DenseOptimizer(OptimizerSpec.of(optimizer), [p.clone() for p in parameters], [0, 0, 0])
    assert shadow.state() == [{}, {}, {}]
    shadow.step([torch.ones_like(p) for p in parameters], UpdateRule.of(optimizer))
    states = shadow.state()
    assert [sorted(state) for state in states] == [["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"]] * 3
    buffers = {(key, t.dtype, t.untyped_storage().data_ptr()) for state in states for key, t in state.items()}
    dtypes = (torch.float32, torch.float64)
    keys = {(key, dtype) for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") for dtype in dtypes}
    assert {(key, dtype) for key, dtype, _ in buffers} == {("step", torch.float32), *keys}
    assert len(buffers) == len({address for *_, address in buffers}) == 7
    # What is written into them is the state.
    states[0]["exp_avg"].fill_(3.0)
    assert torch.equal(shadow.state()[0]["exp_avg"], torch.full((33,), 3.0))


def make(**more):
    parameters = [torch.ones(4), torch.ones(2, 3)]
    optimizer = torch.optim.AdamW(parameters, **more)
    return DenseOptimizer(OptimizerSpec.of(optimizer), [p.clone() for p in parameters], [0, 0]), optimizer


def test_what_does_not_fit_changes_nothing():
    shadow, optimizer = make(foreach=True)
    good = [torch.ones(4), torch.ones(2, 3)]
    rule = UpdateRule.of(optimizer)
    shadow.step(good, rule)
    before = [bits(p).clone() for p in shadow._parameters]
    for gradients, bad, message in (
        ([torch.ones(4)], rule, "1 gradients for 2"),
        ([torch.ones(4), torch.ones(3, 2)], rule, r"parameter 1 is torch.float32 \(3, 2\)"),
        ([torch.ones(4).double(), good[1]], rule, "parameter 0 is torch.float64"),
        ([good[0], torch.ones(3, 2).T], rule, "contiguous"),
        (good, UpdateRule(rule.groups * 2), "2 groups for an optimizer of 1"),
        (good, replace(rule, grad_scale=2.0), "a loss scale in the kernel, which foreach has not"),
    ):
        with pytest.raises(MismatchError, match=message):
            shadow.step(gradients, bad)
    assert all(torch.equal(bits(p), old) for p, old in zip(shadow._parameters, before, strict=True))
    assert float(shadow.state()[0]["step"]) == 1


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s[:1], "state of 1 parameters for an optimizer of 2"),
        (lambda s: [s[0], {k: v for k, v in s[1].items() if k != "exp_avg"}], "parameter 1 holds exp_avg_sq, step;"),
        (lambda s: [{**s[0], "exp_avg": torch.ones(5)}, s[1]], r"exp_avg of parameter 0 is torch.float32 \(5,\)"),
        (lambda s: [{**s[0], "exp_avg": torch.ones(4).double()}, s[1]], "exp_avg of parameter 0 is torch.float64"),
        (lambda s: [{**s[0], "step": torch.tensor(-1.0)}, s[1]], "step of parameter 0 is no count"),
        (lambda s: [{**s[0], "step": torch.ones(2)}, s[1]], "step of parameter 0 is no count"),
    ],
)
def test_state_that_does_not_fit_changes_nothing(change, message):
    shadow, optimizer = make()
    shadow.step([torch.ones(4), torch.ones(2, 3)], UpdateRule.of(optimizer))
    kept = [{k: v.clone() for k, v in state.items()} for state in shadow.state()]
    with pytest.raises(MismatchError, match=message):
        shadow.load_state(change([{k: v + 1 for k, v in state.items()} for state in kept]))
    for old, new in zip(kept, shadow.state(), strict=True):
        assert all(torch.equal(old[k], new[k]) for k in old)


def test_state_can_be_taken_back_to_none():
    shadow, optimizer = make()
    gradients = [torch.ones(4), torch.ones(2, 3)]
    shadow.step([g.clone() for g in gradients], UpdateRule.of(optimizer))
    shadow.load_state([{}, {}])
    assert shadow.state() == [{}, {}]
    for p in shadow._parameters:
        p.fill_(1.0)
    shadow.step(gradients, UpdateRule.of(optimizer))
    fresh, _ = make()
    fresh.step([torch.ones(4), torch.ones(2, 3)], UpdateRule.of(optimizer))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(shadow._parameters, fresh._parameters, strict=True))


def test_many_parts_are_stepped_as_one(monkeypatch):
    """A part holds at most so many elements, or one larger parameter: none is forgotten, or stepped twice."""
    monkeypatch.setattr(host_step, "_PART_ELEMENTS", 40)
    parameters = [torch.randn(n, requires_grad=True) for n in (30, 10, 1, 100, 5, 39, 2)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)
    shadow = Shadow(OptimizerSpec.of(optimizer), parameters, 1)
    assert [part.which for part in shadow.optimizers[0]._way._parts] == [[0, 1], [2], [3], [4], [5], [6]]
    for _ in range(3):
        for p in parameters:
            p.grad = torch.randn_like(p)
        shadow.step(received(parameters), UpdateRule.of(optimizer))
        optimizer.step()
    shadow.assert_equals(parameters, optimizer)


def test_steps_leave_torchs_threads_as_they_were():
    before = torch.get_num_threads()
    shadow, optimizer = make()
    shadow._way._threads = before + 1
    shadow.step([torch.ones(4), torch.ones(2, 3)], UpdateRule.of(optimizer))
    assert torch.get_num_threads() == before


def test_a_clipped_norm_that_is_no_number_is_kept_so():
    shadow, optimizer = make()
    shadow.step([torch.ones(4), torch.ones(2, 3)], UpdateRule.of(optimizer, clip=ClipNorm(math.nan)))
    assert all(p.isnan().all() for p in shadow._parameters)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (([torch.ones(4)], [0, 0]), MismatchError, "1 parameters, 2 groups"),
        (([torch.ones(4)], [1]), MismatchError, "group 1 of a trainer's optimizer that has 1"),
        (([torch.ones(4)], [-1]), MismatchError, "group -1"),
        (([torch.ones(4)], [0], 0), ConfigError, "at least one thread"),
        (([torch.ones(4, 4).T], [0]), ConfigError, "parameter 0 is no contiguous tensor"),
        (([torch.ones(4, requires_grad=True) * 2], [0]), ConfigError, "parameter 0 is no contiguous tensor of its own"),
    ],
)
def test_what_cannot_be_stepped_is_refused(arguments, error, message):
    spec = OptimizerSpec.of(torch.optim.SGD([torch.ones(4)]))
    with pytest.raises(error, match=message):
        DenseOptimizer(spec, *arguments)


def test_no_parameters_are_no_trouble():
    spec = OptimizerSpec.of(torch.optim.SGD([torch.ones(4)]))
    optimizer = DenseOptimizer(spec, [], [])
    optimizer.step([], UpdateRule.of(torch.optim.SGD([torch.ones(4)])))
    assert optimizer.state() == []
