"""What frameworks need: wrapped modules and optimizers, loaders that are made first, gradient accumulation."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from lastgood import PCcheck
from lastgood.checkpointers.attach.data_cursor import CountedLoader
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import MismatchError
from lastgood.state import apply_tree, state_digest
from lastgood.state.compare import same_entries
from lastgood.state.optimizers import optimizers_beneath
from tests.checkpointers.support.wrapped_optimizers import Forwarding
from tests.suggestions.following import follows, refusal

SYSTEMS = ["sync", "checkfreq", "gpm", "pccheck", "dcp"]


# -- wrapped modules -----------------------------------------------------------------------------------------------


class Spread(torch.nn.Module):
    """As DistributedDataParallel: the model is its `module`."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def inner_compiled(model: torch.nn.Module) -> torch.nn.Module:
    model[0] = torch.compile(model[0])
    return model


WRAPS = {
    "plain": lambda model: model,
    "compiled": torch.compile,
    "ddp": Spread,
    "compiled ddp": lambda model: torch.compile(Spread(model)),
    "a compiled layer": inner_compiled,
}


def trained(directory, system: str, wrap: str, steps: int) -> tuple[int, dict]:
    torch.manual_seed(1)
    model = network()
    wrapped = WRAPS[wrap](model)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.1)
    checkpointer = checkpointer_class(system)(directory, interval_steps=1)
    step = checkpointer.attach(model=wrapped, optimizer=optimizer)
    for number in range(steps):
        for place, parameter in enumerate(wrapped.parameters()):
            parameter.grad = torch.full_like(parameter, float(step + number + place))
        optimizer.step()
        checkpointer.step()
    checkpointer.drain()
    checkpointer.close()
    # What the optimizer is called by is left out: torch numbers its parameters.
    return step, {"model": list(model.parameters()), "optimizer": optimizer.state_dict()["state"]}


@pytest.mark.parametrize("after", ["compiled", "ddp", "compiled ddp", "a compiled layer"])
@pytest.mark.parametrize("back", [False, True], ids=["wrapped later", "unwrapped later"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_wrapped_run_goes_on_without_and_the_other_way_round(system, after, back, tmp_path):
    kinds = [after, "plain"] if back else ["plain", after]
    _, straight = trained(tmp_path / "straight", system, "plain", 4)
    assert trained(tmp_path / "turned", system, kinds[0], 2)[0] == 0
    step, turned = trained(tmp_path / "turned", system, kinds[1], 2)
    assert step == 2
    assert state_digest(turned) == state_digest(straight)


def test_names_that_differ_otherwise_are_refused_as_ever(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    saved = {"_orig_mod.0.weight": model[0].weight.detach(), "_orig_mod.1.bias": model[0].bias.detach()}
    with pytest.raises(MismatchError, match=r"lacks \['0.bias', '0.weight'\] and holds \['_orig_mod.0.weight'"):
        apply_tree({"model": model}, {"model": saved}, "here")
    # Two entries that would be one name without the wrappers' words: nobody can say which is which.
    assert same_entries(["a.module.x", "a.x"], ["_orig_mod.a.x", "_orig_mod.a.module.x"]) is None
    assert same_entries(["module.a"], ["a", "b"]) is None
    assert same_entries(["module.a"], ["_orig_mod.a"]) == {"module.a": "_orig_mod.a"}


# -- optimizers that frameworks wrap -------------------------------------------------------------------------------


class AcceleratedOptimizer(Forwarding):
    """By its name as accelerate's, whose step does nothing in the middle of a window."""

    syncs = True

    def step(self, closure=None):
        return self.optimizer.step(closure) if self.syncs else None

    def train(self) -> None:
        """There for all, whether the inner one has it or not."""


AcceleratedOptimizer.__module__ = "accelerate.optimizer"


class Changed(AcceleratedOptimizer):
    """Somebody's own, which does more in its step."""

    def step(self, closure=None):
        return super().step(closure)


def test_the_hook_is_on_the_one_that_steps(tmp_path):
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = AcceleratedOptimizer(inner)
    assert optimizers_beneath({"all": [wrapper]}) == [inner]
    changed = Changed(inner)
    assert [type(one) for one in optimizers_beneath(changed)] == [Changed, torch.optim.SGD]
    checkpointer = PCcheck(tmp_path, interval_steps=1)
    checkpointer.attach(model=model, optimizers=[{"first": wrapper}])
    for wrapper.syncs in (False, False, True):
        wrapper.train()
        wrapper.step()
    assert checkpointer._hooks.updates == 1
    assert "step" not in vars(wrapper) and "train" not in vars(wrapper)
    checkpointer.step()
    checkpointer.close()


# -- loaders that are made first -----------------------------------------------------------------------------------


def numbers(count: int = 12) -> DataLoader:
    return DataLoader(torch.arange(float(count)).reshape(-1, 1), batch_size=2, shuffle=True)


def test_a_loader_is_counted_before_attach(tmp_path):
    seen: list[list[float]] = []
    for steps in (2, 4):
        torch.manual_seed(2)
        checkpointer = PCcheck(tmp_path, interval_steps=1)
        counted = checkpointer.count(numbers())
        assert checkpointer.attach(model=torch.nn.Linear(1, 1)) == (0 if steps == 2 else 2)
        assert checkpointer.data is counted
        for batch, _ in zip(counted, range(steps), strict=False):
            seen.append(batch.flatten().tolist())
            checkpointer.step()
        checkpointer.close()
    torch.manual_seed(2)
    torch.nn.Linear(1, 1)
    assert seen == [batch.flatten().tolist() for batch in numbers()]


def test_a_counted_loader_answers_as_the_loader_does():
    loader = numbers()
    counted = CountedLoader(loader)
    assert counted.dataset is loader.dataset and counted.batch_size == 2
    assert not hasattr(counted, "set_epoch")
    for made in (copy.copy(counted), pickle.loads(pickle.dumps(CountedLoader(range(3))))):
        assert len(made) in (3, 6)


@follows(
    "count() comes before attach()",
    "attach(data=...) was given another loader than count()",
    "batches were taken from the counted loader before attach()",
)
def test_bad_loaders_are_refused(tmp_path):
    checkpointer = PCcheck(tmp_path, interval_steps=1)
    begun = numbers()
    begun._iterator = iter(begun)  # as with persistent_workers
    said = refusal(lambda: checkpointer.count(begun))
    assert "count() of a DataLoader that was begun already" in said and said.endswith("before its first loop")
    assert "an iterator that can be gone through once" in refusal(lambda: checkpointer.count(iter(numbers())))
    checkpointer.count(numbers())
    refusal(lambda: checkpointer.attach(model=network(), data=numbers()))
    next(iter(checkpointer.count(numbers())))
    assert "1 batches" in refusal(lambda: checkpointer.attach(model=network()))
    counted = checkpointer.count(numbers())
    checkpointer.attach(model=network(), data=counted)
    refusal(lambda: checkpointer.count(numbers()))
    assert checkpointer.data is counted
    checkpointer.close()


# -- gradient accumulation -----------------------------------------------------------------------------------------

WINDOW = 3


def windows(directory, system: str, until: int, *, counts: bool, leave: int = 0) -> tuple[int, list[float]]:
    """Losses of each micro-batch up to update `until`, and `leave` more, after which a checkpoint is made."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(1, 6), torch.nn.Dropout(0.3), torch.nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    checkpointer = checkpointer_class(system)(directory, interval_steps=0)
    updates = {"done": 0}
    checkpointer.attach(model=model, optimizer=optimizer, updates=updates, data=numbers(28))
    began, losses, micro = updates["done"], [], 0
    while True:
        for batch in checkpointer.data:
            loss = (model(batch) - batch).square().mean() / WINDOW
            loss.backward()
            losses.append(loss.item())
            micro += 1
            if micro % WINDOW == 0:
                optimizer.step()
                optimizer.zero_grad()
                updates["done"] += 1
                if counts:
                    checkpointer.step()
            if updates["done"] == until and micro % WINDOW == leave:
                checkpointer.save(until)
                checkpointer.close()
                return began, losses


@pytest.mark.parametrize("leave", [1, 2])
@pytest.mark.parametrize("counts", [True, False], ids=["step", "save alone"])
@pytest.mark.parametrize("system", ["sync", "pccheck"])
def test_a_checkpoint_in_a_window_has_the_place_of_the_last_update(system, counts, leave, tmp_path):
    _, straight = windows(tmp_path / "straight", system, 11, counts=counts)
    # In the middle of an epoch of 14 batches, and in the next one.
    _, first = windows(tmp_path / "broken", system, 3, counts=counts, leave=leave)
    began, second = windows(tmp_path / "broken", system, 7, counts=counts, leave=leave)
    assert began == 3
    began, third = windows(tmp_path / "broken", system, 11, counts=counts)
    assert began == 7
    assert first[: 3 * WINDOW] + second[: 4 * WINDOW] + third == straight


def test_steps_that_a_scaler_left_out_are_done(tmp_path):
    """A batch of no update is in the state all the same: the scale was lowered by it."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = PCcheck(tmp_path, interval_steps=0)
    checkpointer.attach(
        model=model, optimizer=optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False), data=numbers()
    )
    for number, batch in enumerate(checkpointer.data):
        if number % 2 == 0:
            model(batch).sum().backward()
            optimizer.step()
        if number == 3:
            break
    assert checkpointer.data.state_dict()["batches"] == 4
    checkpointer.close()
