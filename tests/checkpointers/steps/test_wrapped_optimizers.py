"""Optimizers that others step, or that keep what belongs to no parameter: saved, restored, and waited for."""

from __future__ import annotations

import copy

import pytest
import torch

from lastgood import PCcheck
from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.checkpointers.steps.step_hooks import see_steps
from lastgood.errors import ConfigError, StateError
from lastgood.gradients.trainer.parameters import TrackedParameters
from tests.checkpointers.support.wrapped_optimizers import WRAPPERS, CountsUnderAName, Forwarding

SYSTEMS = ["sync", "checkfreq", "gpm", "pccheck", "dcp"]


def adam(parameters):
    return torch.optim.Adam(parameters, 0.1)


def nested(parameters):
    return Forwarding(WRAPPERS[1](adam(parameters)))


def momentum(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


MAKERS = {kind.__name__: lambda parameters, kind=kind: kind(momentum(parameters)) for kind in WRAPPERS}
MAKERS |= {"nested": nested, "CountsUnderAName": CountsUnderAName}


def life(directory, make, system, until: int) -> tuple[int, list[float], torch.nn.Module]:
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 3)
    optimizer = make(model.parameters())
    checkpointer = checkpointer_class(system)(directory, interval_steps=2)
    began = step = checkpointer.attach(model=model, optimizer=optimizer)
    losses = []
    while step < until:
        loss = model(torch.ones(2, 6)).square().mean()
        loss.backward()
        optimizer.step()
        model.zero_grad()
        step = checkpointer.step()
        checkpointer.drain()  # of two in flight, the older may end last
        losses.append(loss.item())
    assert all(event.outcome is Outcome.DURABLE for event in checkpointer.events), checkpointer.events
    checkpointer.close()
    return began, losses, model


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_restart_goes_on_as_if_nothing_had_happened(system, kind, tmp_path):
    _, unbroken, model = life(tmp_path / "a", MAKERS[kind], system, 8)
    _, first, _ = life(tmp_path / "b", MAKERS[kind], system, 4)
    began, second, resumed = life(tmp_path / "b", MAKERS[kind], system, 8)
    assert (began, first + second) == (4, unbroken)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("kind", MAKERS)
def test_a_step_is_seen_before_it_changes_anything(kind):
    model = torch.nn.Linear(6, 3)
    optimizer = MAKERS[kind](model.parameters())
    before = model.weight.detach().clone()

    class Watch:
        seen = ended = 0

        def begins(self, one, frame):
            assert one is optimizer and self.seen == self.ended
            self.seen += 1
            if self.seen == 1:
                assert torch.equal(model.weight, before)

        def ends(self, one):
            assert one is optimizer and not torch.equal(model.weight, before)
            self.ended += 1

    watch = Watch()
    handles = see_steps(optimizer, watch.begins, watch.ends)
    model(torch.ones(2, 6)).mean().backward()
    optimizer.step()
    assert watch.seen == watch.ended == 1
    # A scheduler that is made later puts its own method over this one.
    if isinstance(optimizer, torch.optim.Optimizer) and kind != "OwnLayout":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        optimizer.step()
        assert watch.seen == 2
    for handle in handles:
        handle.remove()
    seen = watch.seen
    optimizer.step()
    assert watch.seen == seen


def test_weights_that_are_swapped_for_an_evaluation_are_waited_for(tmp_path):
    model = torch.nn.Linear(6, 3)
    optimizer = MAKERS["ScheduleFree"](model.parameters())
    checkpointer = PCcheck(tmp_path, interval_steps=0)
    checkpointer.attach(model=model, optimizer=optimizer)
    waits = []
    checkpointer.before_update = lambda: waits.append(model.weight.detach().clone())
    before = model.weight.detach().clone()
    optimizer.eval()
    assert len(waits) == 1 and torch.equal(waits[0], before)
    checkpointer.close()
    optimizer.train()
    assert len(waits) == 1 and not {"step", "train", "eval"} & vars(optimizer).keys()


def test_moments_beneath_a_wrapper_keep_their_dtype(tmp_path):
    def parts(kind):
        model = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        inner = adam(model.parameters())
        return model, inner, kind(inner)

    for number, kind in enumerate(WRAPPERS):
        model, inner, optimizer = parts(kind)
        moment = torch.full((4, 4), 1 / 3)
        inner.state[model.weight] = {"step": torch.tensor(1.0), "exp_avg": moment, "exp_avg_sq": moment.clone()}
        first = PCcheck(tmp_path / str(number), interval_steps=1)
        first.attach(model=model, optimizer=optimizer)
        first.step()
        first.close()
        model, inner, optimizer = parts(kind)
        again = PCcheck(tmp_path / str(number), interval_steps=1)
        assert again.attach(model=model, optimizer=optimizer) == 1
        assert torch.equal(inner.state[model.weight]["exp_avg"], moment), kind
        again.close()


def test_an_optimizer_that_nothing_can_be_put_into_is_saved_all_the_same(tmp_path):
    class Slots:
        __slots__ = ("inner",)

        def __init__(self, inner):
            self.inner = inner

        param_groups = property(lambda self: self.inner.param_groups)

        def step(self):
            self.inner.step()

        def state_dict(self):
            return self.inner.state_dict()

        def load_state_dict(self, state):
            self.inner.load_state_dict(state)

    _, unbroken, _ = life(tmp_path / "a", lambda parameters: Slots(adam(parameters)), "pccheck", 6)
    _, first, _ = life(tmp_path / "b", lambda parameters: Slots(adam(parameters)), "pccheck", 4)
    assert first + life(tmp_path / "b", lambda parameters: Slots(adam(parameters)), "pccheck", 6)[1] == unbroken


def test_state_of_a_replaced_parameter_is_named(tmp_path):
    model = torch.nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model.weight = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer.param_groups[0]["params"] = [model.weight]
    for system in ("sync", "pccheck"):
        with pytest.raises(StateError, match=r"state of 1 parameters .*shape \(2, 2\).* make the optimizer again"):
            checkpointer_class(system)(tmp_path / system, interval_steps=1).attach(model=model, optimizer=optimizer)


def test_checkmate_asks_for_the_optimizer_beneath():
    model = torch.nn.Linear(2, 2)
    optimizer = Forwarding(torch.optim.SGD(model.parameters()))
    with pytest.raises(ConfigError, match=r"attach\(optim=optim.optimizer\)"):
        TrackedParameters({"model": model, "optim": optimizer})
    assert TrackedParameters({"model": model, "optim": optimizer.optimizer}).optimizer is optimizer.optimizer


def test_a_copy_of_a_wrapper_steps_its_own_optimizer(tmp_path):
    """What is put into an object is copied with it (copy.deepcopy), and must not lead back to the first."""

    class Wrapper:
        def __init__(self, inner):
            self.inner, self.param_groups = inner, inner.param_groups

        def step(self):
            self.inner.step()

        def state_dict(self):
            return self.inner.state_dict()

        def load_state_dict(self, state):
            self.inner.load_state_dict(state)

    model = torch.nn.Linear(2, 1)
    wrapper = Wrapper(adam(model.parameters()))
    checkpointer = PCcheck(tmp_path, interval_steps=0)
    checkpointer.attach(model=model, optimizer=wrapper)
    twin, other = copy.deepcopy((model, wrapper))
    twin(torch.ones(1, 2)).sum().backward()
    before = model.weight.detach().clone(), twin.weight.detach().clone()
    other.step()
    assert torch.equal(model.weight, before[0]) and not torch.equal(twin.weight, before[1])
    checkpointer.close()
    other.step()
    assert torch.equal(model.weight, before[0])
