"""The sparse optimizer against torch's dense ones, a naive twin, and itself after a resume."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.errors import ConfigError, CorruptCheckpoint, MismatchError
from lastgood.optim.host_adam import makes_torchs_steps
from lastgood.sparse import optimizer as module
from lastgood.sparse.blocks import SparseGradient, dense
from lastgood.sparse.optimizer import SparseOptimizer

SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
KINDS = {
    "sgd": (SGD, {"lr": 0.1}),
    "sgd-decay": (SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "dampened": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.02, "maximize": True}),
    "nesterov": (SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.03}),
    "adam": (ADAM, {"lr": 0.01}),
    "adam-decay": (ADAM, {"lr": 0.01, "weight_decay": 0.02, "betas": (0.8, 0.95), "maximize": True}),
    "adam-low-beta": (ADAM, {"lr": 0.01, "betas": (0.3, 0.9), "eps": 1e-5}),
    "adamw": (ADAMW, {"lr": 0.01, "weight_decay": 0.1}),
}
SGD_KINDS = [kind for kind, (made, _) in KINDS.items() if made is SGD]
kinds = pytest.mark.parametrize("kind", KINDS)
widths = pytest.mark.parametrize("width", [1, 16])


def drawn(seed, elements, width, share=0.2, dtype=torch.float32, empty=False):
    """Some places of a gradient, of a seed's choice."""
    source = np.random.default_rng(seed)
    places = -(-elements // width)
    count = 0 if empty else max(1, round(share * places))
    indices = np.sort(source.choice(places, count, replace=False)).astype(np.uint32)
    values = torch.from_numpy(source.standard_normal((count, width)).astype(np.float32)).to(dtype)
    if count and indices[-1] == places - 1:
        values[-1, width - (places * width - elements) :] = 0
    return SparseGradient(elements, width, indices, values.flatten())


def decompressed(gathered, scale):
    total = torch.zeros(gathered[0].elements)
    for one in gathered:
        total += dense(one)
    return total * scale


def model(sizes, seed=0):
    source = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(size, generator=source)) for size in sizes]


def groups(parameters, kind):
    """Two groups with different learning rates, if there are parameters for them."""
    made, options = KINDS[kind]
    listed = [{"params": parameters[:1]}]
    if parameters[1:]:
        listed.append({"params": parameters[1:], "lr": options["lr"] / 3})
    return made(listed, **options)


def near(one, other):
    return torch.allclose(one, other, rtol=2e-6, atol=2e-6)


class Pair:
    """A dense optimizer of torch's and a sparse one over equal parameters."""

    def __init__(self, kind, sizes, mode="lazy", threads=1):
        self.kind, self.mode = kind, mode
        self.parameters, self.twins = model(sizes), model(sizes)
        self.optimizer, self.dense = groups(self.parameters, kind), groups(self.twins, kind)
        self.sparse = SparseOptimizer(self.optimizer, mode=mode, threads=threads)

    def schedule(self, **numbers):
        for optimizer in (self.optimizer, self.dense):
            for group in optimizer.param_groups:
                for name, factor in numbers.items():
                    group[name] = group[name] * factor

    def step(self, iteration, gathered, scale=0.5):
        """`gathered`: for each parameter a list of blocks, or None for no gradient."""
        for parameter, twin, blocks in zip(self.parameters, self.twins, gathered, strict=True):
            twin.grad = None
            if blocks is not None:
                applied = self.sparse.apply(parameter, blocks, iteration=iteration, scale=scale)
                if applied:
                    twin.grad = decompressed(blocks, scale).view(twin.shape)
        self.dense.step()

    def check(self, equal=None):
        """SGD to the bit; Adam too where torch's kernel is the fused one, and else as near as its square root is."""
        equal = equal or (torch.equal if self.kind in SGD_KINDS else near)
        for number, (parameter, twin) in enumerate(zip(self.parameters, self.twins, strict=True)):
            assert equal(parameter.detach(), twin.detach()), f"parameter {number}"
            own, other = self.optimizer.state[parameter], self.dense.state[twin]
            for name in ("momentum_buffer", "exp_avg", "exp_avg_sq", "step"):
                if other.get(name) is not None:
                    assert equal(own[name], other[name]), f"{name} of parameter {number}"


def ranks(seed, elements, width, count=2, **more):
    return [drawn((seed, rank), elements, width, **more) for rank in range(count)]


@kinds
@widths
def test_lazy_is_torchs_dense_optimizer_to_the_bit(kind, width):
    pair = Pair(kind, [(5, 37), (3,), (64,)])
    for iteration in range(12):
        pair.step(iteration, [ranks((iteration, n), p.numel(), width) for n, p in enumerate(pair.parameters)])
        pair.schedule(lr=0.9)
    pair.sparse.catch_up(11)
    pair.check()


@kinds
def test_lazy_over_a_thousand_steps_with_gaps_longer_than_the_history(kind, monkeypatch):
    monkeypatch.setattr(module, "HISTORY_STEPS", 300)
    pair = Pair(kind, [(50,)])
    for iteration in range(1000):
        pair.step(iteration, [ranks(iteration, 50, 1, share=0.02)])
        if iteration % 100 == 50:
            pair.schedule(lr=0.8)
    assert pair.sparse.state_dict()["parameters"][0]["rows"].shape[0] < 300
    pair.sparse.catch_up()
    pair.check()


def test_lazy_adam_is_torchs_fused_kernel_to_the_bit():
    for kind in ("adam", "adam-decay", "adamw"):
        if not makes_torchs_steps(kind.split("-")[0], "float32"):
            pytest.skip("this torch's fused kernels round otherwise")
        made, options = KINDS[kind]
        parameter, twin = (torch.nn.Parameter(tensor.detach()) for tensor in (*model([(96,)]), *model([(96,)])))
        sparse = SparseOptimizer(optimizer := made([parameter], **options), mode="lazy")
        dense_one = made([twin], fused=True, **options)
        for iteration in range(200):
            blocks = ranks(iteration, 96, 1, share=0.05)
            sparse.apply(parameter, blocks, iteration=iteration, scale=0.5)
            twin.grad = decompressed(blocks, 0.5)
            dense_one.step()
        sparse.catch_up()
        assert torch.equal(parameter.detach(), twin.detach())
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[parameter][name], dense_one.state[twin][name])


def test_momentum_that_begins_ends_and_comes_back():
    pair = Pair("sgd-decay", [(40,)])
    for iteration, momentum in enumerate((0.0, 0.0, 0.9, 0.9, 0.0, 0.5, 0.5)):
        for optimizer in (pair.optimizer, pair.dense):
            optimizer.param_groups[0]["momentum"] = momentum
        pair.step(iteration, [ranks(iteration, 40, 1)])
    pair.sparse.catch_up()
    pair.check()


def test_blocks_of_another_width_follow():
    pair = Pair("adamw", [(70,)])
    for iteration, width in enumerate((1, 1, 16, 16, 1, 16)):
        pair.step(iteration, [ranks(iteration, 70, width)])
    pair.sparse.catch_up()
    pair.check()


def naive(kind, parameter, state, gradient, chosen, given, step):
    """One plain step in float64, element by element."""
    sign = -1 if given["maximize"] else 1
    for i in np.flatnonzero(chosen):
        g, p = sign * float(gradient[i]), float(parameter[i])
        lr, decay = given["lr"], given["weight_decay"]
        if "betas" in given:
            b1, b2 = given["betas"]
            if given.get("decoupled_weight_decay"):
                p *= 1 - lr * decay
            else:
                g += decay * p
            state["exp_avg"][i] = b1 * state["exp_avg"][i] + (1 - b1) * g
            state["exp_avg_sq"][i] = b2 * state["exp_avg_sq"][i] + (1 - b2) * g * g
            root = (state["exp_avg_sq"][i] / (1 - b2**step)) ** 0.5
            parameter[i] = p - lr / (1 - b1**step) * state["exp_avg"][i] / (root + given["eps"])
            continue
        g += decay * p
        if given["momentum"]:
            buffer = g if step == 1 else given["momentum"] * state["momentum_buffer"][i] + (1 - given["dampening"]) * g
            state["momentum_buffer"][i] = buffer
            g = g + given["momentum"] * buffer if given["nesterov"] else buffer
        parameter[i] = p - lr * g


@kinds
@widths
def test_plain_is_the_naive_twin(kind, width):
    pair = Pair(kind, [(330,)], mode="plain")
    parameter = pair.parameters[0]
    start = parameter.detach().clone()
    twin = start.double().numpy().copy()
    state = {name: np.zeros(330) for name in ("momentum_buffer", "exp_avg", "exp_avg_sq")}
    ever = np.zeros(330, bool)
    for iteration in range(8):
        blocks = ranks(iteration, 330, width, share=0.05)
        pair.sparse.apply(parameter, blocks, iteration=iteration, scale=0.5)
        ones = [SparseGradient(330, width, b.indices, torch.ones_like(b.values)) for b in blocks]
        chosen = (decompressed(ones, 1.0) != 0).numpy()
        ever |= chosen
        naive(kind, twin, state, decompressed(blocks, 0.5), chosen, pair.optimizer.param_groups[0], iteration + 1)
    np.testing.assert_allclose(parameter.detach().numpy(), twin, rtol=2e-5, atol=2e-6)
    assert torch.equal(parameter.detach()[~ever], start[~ever])
    assert 0 < ever.sum() < 330


@pytest.mark.parametrize("mode", ["plain", "lazy"])
def test_a_block_that_is_not_finite_changes_nothing(mode):
    pair = Pair("adamw", [(40,), (30,)], mode=mode)
    bad = SparseGradient(40, 1, np.empty(0, np.uint32), torch.empty(0), finite=False)
    pair.step(0, [ranks(0, 40, 1), ranks(1, 30, 1)])
    before = copy.deepcopy([pair.parameters[0], pair.optimizer.state[pair.parameters[0]]])
    pair.step(1, [[drawn(3, 40, 1), bad], ranks(2, 30, 1)])
    after = [pair.parameters[0], pair.optimizer.state[pair.parameters[0]]]
    assert torch.equal(before[0], after[0])
    assert all(torch.equal(before[1][name], after[1][name]) for name in before[1])
    pair.step(2, [ranks(4, 40, 1), ranks(5, 30, 1)])
    if mode == "lazy":
        pair.sparse.catch_up(2)
        pair.check()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), kind=st.sampled_from(sorted(KINDS)), width=st.sampled_from([1, 16]))
def test_lazy_under_any_course_of_things(seed, kind, width):
    """Sizes, ranks, schedules, gaps, gradients that are missing or not finite, catching up, and a resume in between."""
    choose = random.Random(seed)
    sizes = [(choose.randint(1, 90),) for _ in range(choose.randint(1, 3))]
    pair = Pair(kind, sizes)
    iteration = 0
    for _ in range(choose.randint(1, 25)):
        iteration += choose.randint(1, 3)
        gathered = []
        for number, (size,) in enumerate(sizes):
            what = choose.random()
            more = {"share": choose.random(), "dtype": choose.choice([torch.float32, torch.float16, torch.bfloat16])}
            blocks = ranks((seed, iteration, number), size, width, choose.randint(1, 4), empty=what < 0.1, **more)
            if what > 0.9:
                blocks[-1] = SparseGradient(size, width, np.empty(0, np.uint32), torch.empty(0), finite=False)
            gathered.append(None if 0.1 < what < 0.2 else blocks)
        pair.step(iteration, gathered, scale=choose.choice([1.0, 0.5, 1 / 3]))
        if choose.random() < 0.3:
            pair.schedule(lr=choose.uniform(0.5, 1.5), weight_decay=choose.uniform(0.5, 1.5))
        if choose.random() < 0.1:
            pair.sparse.catch_up(iteration)
        if choose.random() < 0.1:
            resume(pair)
    pair.sparse.catch_up(iteration)
    pair.check()


def resume(pair):
    """Put everything into new objects, through what a checkpoint holds."""
    held = copy.deepcopy((pair.sparse.state_dict(), pair.optimizer.state_dict()))
    values = [parameter.detach().clone() for parameter in pair.parameters]
    pair.parameters = [torch.nn.Parameter(value) for value in values]
    pair.optimizer = groups(pair.parameters, pair.kind)
    pair.sparse = SparseOptimizer(pair.optimizer, mode=pair.mode)
    pair.sparse.load_state_dict(held[0])
    pair.optimizer.load_state_dict(held[1])


@kinds
@pytest.mark.parametrize("mode", ["plain", "lazy"])
def test_a_resume_in_mid_history_is_exact(kind, mode):
    ends = []
    for resumed in (False, True):
        pair = Pair(kind, [(60,), (33,)], mode=mode)
        for iteration in range(10):
            pair.step(
                iteration, [ranks((iteration, n), p.numel(), 1, share=0.1) for n, p in enumerate(pair.parameters)]
            )
            if resumed and iteration in (3, 6):
                resume(pair)
        pair.sparse.catch_up(9)
        ends.append([p.detach().clone() for p in pair.parameters])
    assert all(torch.equal(*both) for both in zip(*ends, strict=True))


def test_a_host_copy_is_stepped_instead_of_a_parameter():
    parameter = torch.nn.Parameter(torch.randn(4, 6).t())
    optimizer = SGD([parameter], lr=0.1, momentum=0.9)
    sparse = SparseOptimizer(optimizer, mode="lazy")
    blocks = ranks(0, 24, 1)
    with pytest.raises(ConfigError, match="contiguous host copy as target"):
        sparse.apply(parameter, blocks, iteration=0)
    host = parameter.detach().contiguous().clone()
    before, kept = parameter.detach().clone(), host.clone()
    assert sparse.apply(parameter, blocks, iteration=0, target=host)
    sparse.catch_up(0)
    assert torch.equal(parameter.detach(), before)
    assert torch.allclose(host.flatten(), kept.flatten() - 0.1 * decompressed(blocks, 1.0))
    assert not torch.equal(host, kept)
    with pytest.raises(ConfigError, match="host copy of 23 elements"):
        sparse.set_target(parameter, torch.zeros(23))


def test_a_parameter_on_a_device_needs_a_host_copy():
    parameter = torch.nn.Parameter(torch.zeros(8, device="meta"))
    sparse = SparseOptimizer(SGD([parameter], lr=0.1))
    with pytest.raises(ConfigError, match="is on meta: give the sparse optimizer a host copy"):
        sparse.apply(parameter, ranks(0, 8, 1), iteration=0)
    host = torch.zeros(8)
    assert sparse.apply(parameter, ranks(0, 8, 1), iteration=0, target=host)
    assert host.any()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: torch.optim.RMSprop([p]), "not of RMSprop"),
        (lambda p: ADAM([p], amsgrad=True), "Adam, group 0: .* amsgrad"),
        (lambda p: SGD([p], lr=0.1, differentiable=True), "differentiable"),
        (lambda p: ADAM([p], capturable=True), "capturable"),
        (lambda p: SGD([p], lr=torch.tensor(0.1)), "lr as a tensor"),
        (lambda p: SGD([torch.nn.Parameter(p.detach().cfloat())], lr=0.1), "complex64"),
        (lambda p: SGD([torch.nn.Parameter(p.detach().bfloat16())], lr=0.1), "bfloat16: keep them in float32"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(make, text):
    with pytest.raises(ConfigError, match=text):
        SparseOptimizer(make(torch.nn.Parameter(torch.zeros(4))))


def test_what_cannot_be_asked_is_refused():
    pair = Pair("momentum", [(40,)])
    parameter, sparse = pair.parameters[0], pair.sparse
    with pytest.raises(ConfigError, match="no mode 'dense'"):
        SparseOptimizer(pair.optimizer, mode="dense")
    with pytest.raises(ConfigError, match="at least 1 thread"):
        SparseOptimizer(pair.optimizer, threads=0)
    with pytest.raises(ConfigError, match="in no group"):
        sparse.apply(pair.twins[0], ranks(0, 40, 1), iteration=0)
    before = parameter.detach().clone()
    unsorted = SparseGradient(40, 1, np.array([3, 2], np.uint32), torch.ones(2))
    infinite = SparseGradient(40, 1, np.array([3], np.uint32), torch.tensor([float("inf")]))
    beyond = SparseGradient(40, 1, np.array([40], np.uint32), torch.ones(1))
    tail = SparseGradient(40, 16, np.array([2], np.uint32), torch.ones(16))
    for bad in (unsorted, infinite, beyond, tail):
        with pytest.raises(CorruptCheckpoint, match="iteration 0: rank 1: not a sparse gradient"):
            sparse.apply(parameter, [drawn(0, 40, bad.width), bad], iteration=0)
    with pytest.raises(MismatchError, match="of 41 elements; this parameter has 40"):
        sparse.apply(parameter, ranks(0, 41, 1), iteration=0)
    with pytest.raises(MismatchError, match="rank 1 sent blocks of 16"):
        sparse.apply(parameter, [drawn(0, 40, 1), drawn(0, 40, 16)], iteration=0)
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a scale of"):
            sparse.apply(parameter, ranks(0, 40, 1), iteration=0, scale=scale)
    with pytest.raises(ValueError, match="no rank"):
        sparse.apply(parameter, [], iteration=0)
    assert torch.equal(parameter.detach(), before)
    assert not pair.optimizer.state
    sparse.apply(parameter, ranks(0, 40, 1), iteration=0)
    with pytest.raises(ValueError, match="iteration 0 of a parameter that is at iteration 0"):
        sparse.apply(parameter, ranks(0, 40, 1), iteration=0)
    sparse.apply(parameter, ranks(0, 40, 1), iteration=2)
    with pytest.raises(ValueError, match="beyond 1"):
        sparse.catch_up(1)


def test_a_schedule_counts_from_where_an_iteration_began():
    pair = Pair("momentum", [(20,), (20,)])
    blocks = ranks(0, 20, 1)
    pair.sparse.begin(0)
    pair.sparse.apply(pair.parameters[0], blocks, iteration=0)
    pair.schedule(lr=0.1)
    pair.sparse.apply(pair.parameters[1], blocks, iteration=0)
    moved = [p.detach() - start.detach() for p, start in zip(pair.parameters, model([(20,), (20,)]), strict=True)]
    assert torch.allclose(moved[0], 3 * moved[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["plain", "lazy"])
@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_several_parameters_at_once_are_stepped_as_one_by_one(kind, mode):
    shapes = [(40,), (3, 17), (100,)]
    once, each = Pair(kind, shapes, mode=mode), Pair(kind, shapes, mode=mode)
    for iteration in range(4):
        blocks = [ranks(9 * iteration + at, parameter.numel(), 1) for at, parameter in enumerate(once.parameters)]
        if iteration == 2:  # another state, as from a checkpoint
            once.optimizer.load_state_dict(copy.deepcopy(once.optimizer.state_dict()))
        once.sparse.apply_all(list(zip(once.parameters, blocks, strict=True))[iteration % 2 :], iteration=iteration)
        for parameter, block in list(zip(each.parameters, blocks, strict=True))[iteration % 2 :]:
            each.sparse.apply(parameter, block, iteration=iteration)
    for one, other in zip(once.parameters, each.parameters, strict=True):
        assert torch.equal(one, other)
        for name, value in once.optimizer.state[one].items():
            assert torch.equal(value, each.optimizer.state[other][name])
    if mode == "plain":
        before = [parameter.detach().clone() for parameter in once.parameters]
        bad = SparseGradient(100, 1, np.array([7, 7], np.uint32), torch.ones(2))
        good = ranks(0, 40, 1)
        with pytest.raises(CorruptCheckpoint, match="do not ascend"):
            once.sparse.apply_all([(once.parameters[0], good), (once.parameters[2], [bad])], iteration=9)
        with pytest.raises(ValueError, match="come twice"):
            once.sparse.apply_all([(once.parameters[0], good), (once.parameters[0], good)], iteration=9)
        assert all(torch.equal(one.detach(), held) for one, held in zip(once.parameters, before, strict=True))


def test_a_group_that_is_added_later_is_stepped():
    pair = Pair("momentum", [(20,)])
    blocks = ranks(0, 20, 1)
    pair.sparse.apply(pair.parameters[0], blocks, iteration=0)
    late = torch.nn.Parameter(torch.zeros(20))
    pair.optimizer.add_param_group({"params": [late]})
    pair.sparse.apply(late, blocks, iteration=1)
    assert late.detach().any()


def test_a_state_of_something_else_is_refused():
    pair = Pair("momentum", [(20,)])
    for iteration in range(3):
        pair.step(iteration, [ranks(iteration, 20, 1)])
    state = pair.sparse.state_dict()
    with pytest.raises(MismatchError, match="mode is 'lazy', here it is 'plain'"):
        Pair("momentum", [(20,)], mode="plain").sparse.load_state_dict(state)
    with pytest.raises(MismatchError, match="adam is False"):
        Pair("adam", [(20,)]).sparse.load_state_dict(state)
    with pytest.raises(MismatchError, match="of 1 parameters, here are 2"):
        Pair("momentum", [(20,), (20,)]).sparse.load_state_dict(state)
    with pytest.raises(MismatchError, match=r"parameter 0: \(20,\) counters .* 21 places"):
        Pair("momentum", [(21,)]).sparse.load_state_dict(state)
    for name, value in (("rows", None), ("rows", torch.zeros(2, 9)), ("touched", None), ("base", 7), ("base", -1)):
        broken = {**state, "parameters": [{**state["parameters"][0], name: value}]}
        with pytest.raises(CorruptCheckpoint, match="parameter 0"):
            Pair("momentum", [(20,)]).sparse.load_state_dict(broken)
    far = copy.deepcopy(state)
    far["parameters"][0]["touched"][3] = 9
    with pytest.raises(CorruptCheckpoint, match="counters beyond steps 0 to 3"):
        Pair("momentum", [(20,)]).sparse.load_state_dict(far)


@pytest.mark.slow  # 0.3 GB of memory: of parameter and momentum few pages are ever written; half a minute
@pytest.mark.parametrize("width", [1, 16])
@pytest.mark.parametrize("adam", [False, True])
def test_a_parameter_of_more_than_two_to_the_32_bytes(width, adam):
    elements = (1 << 30) + 4099
    parameter = torch.nn.Parameter(torch.zeros(elements))
    made = torch.optim.Adam([parameter], lr=0.1) if adam else torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    sparse = SparseOptimizer(made, threads=2)
    places = -(-elements // width)
    chosen = np.array([0, 1, places // 2, places // 4 * 3, places - 2, places - 1], np.uint32)
    values = torch.ones(len(chosen), width)
    if elements % width:
        values[-1, elements % width - width :] = 0
    for iteration in range(2):
        one = SparseGradient(elements, width, chosen, values.flatten())
        assert sparse.apply(parameter, [one, one], iteration=iteration, scale=0.5)
    small = torch.nn.Parameter(torch.zeros(1))
    other = type(made)([small], **{**made.defaults, "foreach": False})
    for _ in range(2):
        small.grad = torch.ones(1)
        other.step()
    touched = (torch.from_numpy(chosen.astype(np.int64))[:, None] * width + torch.arange(width)).flatten()
    touched = touched[touched < elements]
    torch.testing.assert_close(parameter.detach()[touched], small.detach().expand(len(touched)))
    step = 1 << 26
    assert sum(int(parameter[begin : begin + step].count_nonzero()) for begin in range(0, elements, step)) == len(
        touched
    )
