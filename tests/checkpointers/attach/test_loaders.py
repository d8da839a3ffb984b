"""Loaders that keep a place of their own, wrappers of loaders, and data that changes between two lives."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import DataError, MismatchError
from lastgood.state import RngState, state_digest

SYSTEMS = ["sync", "checkfreq", "gpm", "pccheck"]


class Asked:
    """As torchdata's StatefulDataLoader: asked for its state before it was begun, it begins, and draws."""

    def __init__(self) -> None:
        self.given: dict | None = None
        self.order: list[int] | None = None
        self.at = 0

    def _begin(self) -> None:
        if self.given is not None:
            self.order, self.at = list(self.given["order"]), self.given["at"]
        else:
            self.order, self.at = torch.randperm(6).tolist(), 0
        self.given = None

    def __iter__(self):
        self._begin()
        while self.at < len(self.order):
            self.at += 1
            yield torch.tensor([float(self.order[self.at - 1])])

    def state_dict(self):
        if self.order is None:
            self._begin()
        return {"order": list(self.order), "at": self.at}

    def load_state_dict(self, state):
        self.given = state


class AskedOnce(Asked):
    """As torchdata's nodes.Loader: what it was given is gone once it was asked, and the next loop begins anew."""

    def __iter__(self):
        if self.order is not None and self.given is None:
            self.order = None
        return super().__iter__()

    def state_dict(self):
        if self.given is not None:
            self.order, self.at, self.given = list(self.given["order"]), self.given["at"], None
        return super().state_dict()


class Wrapped:
    """As accelerate's: its methods fail if what is beneath has none, and it counts its passes."""

    def __init__(self) -> None:
        self.base_dataloader = DataLoader(torch.arange(6.0), shuffle=True)
        self.iteration = 0
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.iteration = epoch
        self.told.append(epoch)

    def __iter__(self):
        yield from self.base_dataloader
        self.iteration += 1

    def state_dict(self):
        return self.dl_state_dict

    def load_state_dict(self, state):
        self.base_dataloader.load_state_dict(state)


class Drawing(torch.utils.data.Dataset):
    """Items that draw, as collators of masked language models do."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(1) + index


class Ahead:
    """As accelerate's without workers: the batch after the one that it gives is made already."""

    def __init__(self) -> None:
        self.base_dataloader = DataLoader(Drawing(), shuffle=True)

    def __iter__(self):
        batches = iter(self.base_dataloader)
        held = next(batches)
        for batch in batches:
            yield held
            held = batch
        yield held


class Broken:
    """A wrapper that nobody knows, whose state_dict fails."""

    def __init__(self) -> None:
        self.inner = DataLoader(torch.arange(6.0), shuffle=True)

    def __iter__(self):
        return iter(self.inner)

    def state_dict(self):
        raise AttributeError("dl_state_dict")

    def load_state_dict(self, state):
        raise AttributeError("load_state_dict")


def life(directory, make, system: str, until: int) -> list[tuple[float, float]]:
    torch.manual_seed(4)
    model = torch.nn.Linear(1, 1)
    before = state_digest({"rng": RngState()})
    checkpointer = checkpointer_class(system)(directory, interval_steps=1)
    step = checkpointer.attach(model=model, data=make())
    assert step > 0 or state_digest({"rng": RngState()}) == before, "attach drew from the generators"
    seen = []
    while step < until:
        for batch in checkpointer.data:
            seen.append((float(batch), torch.rand(1).item()))
            step = checkpointer.step()
            checkpointer.drain()
            if step == until:
                break
    checkpointer.close()
    return seen


@pytest.mark.parametrize("make", [Asked, AskedOnce, Wrapped, Ahead, Broken])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_resumed_loop_is_the_unbroken_one(system, make, tmp_path):
    unbroken = life(tmp_path / "a", make, system, 9)
    first = life(tmp_path / "b", make, system, 4)
    assert first + life(tmp_path / "b", make, system, 9) == unbroken


def test_generators_stand_where_the_checkpoint_had_them(tmp_path):
    life(tmp_path, Asked, "pccheck", 4)
    digests = set()
    for system_again in range(2):
        torch.manual_seed(system_again)
        checkpointer = checkpointer_class("pccheck")(tmp_path, interval_steps=0)
        assert checkpointer.attach(model=torch.nn.Linear(1, 1), data=Asked()) == 4
        digests.add(state_digest({"rng": RngState()}))
        checkpointer.close()
    assert len(digests) == 1


def test_no_state_dict_of_a_users_object_is_called_before_its_load(tmp_path):
    class Watched:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def state_dict(self):
            self.calls.append("state_dict")
            return {"x": torch.ones(2)}

        def load_state_dict(self, state):
            self.calls.append("load")

    for system in [*SYSTEMS, "dcp"]:
        first = checkpointer_class(system)(tmp_path / system, interval_steps=1)
        first.attach(model=torch.nn.Linear(1, 1), own=Watched(), kept={"deep": [Watched()]})
        first.step()
        first.close()
        own, deep = Watched(), Watched()
        again = checkpointer_class(system)(tmp_path / system, interval_steps=1)
        assert again.attach(model=torch.nn.Linear(1, 1), own=own, kept={"deep": [deep]}) == 1
        again.close()
        assert own.calls[0] == deep.calls[0] == "load", system


def test_a_wrapper_that_counts_its_passes_goes_on_counting(tmp_path):
    life(tmp_path, Wrapped, "pccheck", 9)
    loader = Wrapped()
    checkpointer = checkpointer_class("pccheck")(tmp_path, interval_steps=0)
    checkpointer.attach(model=torch.nn.Linear(1, 1), data=loader)
    assert (loader.iteration, checkpointer.data.epoch, checkpointer.data.batches) == (1, 1, 3)
    checkpointer.close()


# -- data that changed -------------------------------------------------------------------------------------------------


def data(samples: int, batch: int, shuffle: bool = True) -> DataLoader:
    return DataLoader(torch.arange(samples), batch, shuffle=shuffle)


def seen_in(directory, loader, stop: int | None, system="pccheck", **more) -> list[int]:
    torch.manual_seed(0)
    checkpointer = checkpointer_class(system)(directory, interval_steps=2)
    checkpointer.attach(model=torch.nn.Linear(1, 1), data=loader, **more)
    seen: list[int] = []
    for batch in checkpointer.data:
        seen += batch.tolist()
        if checkpointer.step() == stop:
            break
    checkpointer.close()
    return seen


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(
    ("now", "words"),
    [
        ((24, 8), r"batch size 2 before, 8 now.*would skip 24 samples"),
        ((24, 1), r"batch size 2 before, 1 now.*would repeat 4 samples"),
        ((30, 2), r"samples 24 before, 30 now.*another order"),
        ((24, 2, False), r"sampler RandomSampler before, SequentialSampler now.*another order"),
    ],
)
def test_other_data_in_the_midst_of_an_epoch_is_refused(system, now, words, tmp_path):
    seen_in(tmp_path, data(24, 2), 4, system)
    model = torch.nn.Linear(1, 1)
    before = model.weight.detach().clone()
    checkpointer = checkpointer_class(system)(tmp_path, interval_steps=2)
    with pytest.raises(MismatchError, match=words) as error:
        checkpointer.attach(model=model, data=data(*now))
    assert "data_changed='samples'" in str(error.value) and "data_changed='epoch'" in str(error.value)
    assert torch.equal(model.weight, before), "something was loaded before it was refused"


def test_another_batch_size_goes_on_after_the_same_samples(tmp_path, caplog):
    first = seen_in(tmp_path, data(24, 2), 6)
    rest = seen_in(tmp_path, data(24, 4), None, data_changed="samples")
    assert sorted(first + rest) == list(range(24))
    assert "going on after 3 batches of now" in caplog.text


def test_samples_that_cannot_be_divided_come_again_and_are_counted(tmp_path, caplog):
    first = seen_in(tmp_path, data(24, 2), 2)
    rest = seen_in(tmp_path, data(24, 8), None, data_changed="samples")
    assert sorted(rest) == list(range(24)) and set(first) < set(rest)
    assert "the last 4 samples come again" in caplog.text


def test_the_rest_of_an_epoch_can_be_left_out(tmp_path, caplog):
    for shuffled in (True, False):
        seen_in(tmp_path / str(shuffled), data(24, 2, shuffled), 4)
        rest = seen_in(tmp_path / str(shuffled), data(30, 5, shuffled), None, data_changed="epoch")
        assert sorted(rest) == list(range(30))
    assert "the rest of epoch 0 is left out" in caplog.text


def test_between_two_epochs_data_may_change(tmp_path):
    seen_in(tmp_path, data(8, 2), None)
    assert sorted(seen_in(tmp_path, data(9, 3), None)) == list(range(9))


def test_a_loader_whose_length_is_nobodys_business_is_left_alone(tmp_path, recwarn):
    class Stream(torch.utils.data.IterableDataset):
        def __len__(self):
            return 2  # and yields more, which torch holds against whoever asked the loader for its length

        def __iter__(self):
            return iter(range(8))

    class Odd:
        dataset = property(lambda self: self)

        def __len__(self):
            raise RuntimeError("not yet")

        def __iter__(self):
            return iter([torch.tensor([1]), torch.tensor([2])])

    assert seen_in(tmp_path / "a", DataLoader(Stream(), 2), None) == list(range(8))
    assert seen_in(tmp_path / "b", Odd(), None) == [1, 2]
    assert not [one for one in recwarn if "Length of IterableDataset" in str(one.message)]


@pytest.mark.parametrize("own", [False, True], ids=["global", "own-generator"])
def test_the_length_of_a_loader_is_asked_once_an_epoch_and_draws_nothing(own, tmp_path):
    class Drawn:
        """Makes its batches when it is asked for their number, as samplers that sort by length do."""

        def __init__(self):
            self.generator = torch.Generator().manual_seed(3) if own else None
            self.asked = 0

        def __iter__(self):
            return iter([[number] for number in torch.randperm(12, generator=self.generator).tolist()])

        def __len__(self):
            self.asked += 1
            return sum(1 for _ in self)

    torch.manual_seed(3)
    wanted = [
        int(batch) for loader in [DataLoader(range(12), batch_sampler=Drawn())] for _ in range(2) for batch in loader
    ]
    sampler = Drawn()
    checkpointer = checkpointer_class("sync")(tmp_path, interval_steps=1)
    torch.manual_seed(3)
    checkpointer.attach(
        model=torch.nn.ParameterList([torch.ones(1)]), data=DataLoader(range(12), batch_sampler=sampler)
    )
    seen = []
    for _ in range(2):
        for batch in checkpointer.data:
            seen.append(int(batch))
            checkpointer.step()
    checkpointer.close()
    assert seen == wanted
    assert sampler.asked <= 5


def test_a_checkpoint_that_says_nothing_of_its_data_is_taken(tmp_path, monkeypatch):
    from lastgood.checkpointers.attach import data_cursor

    with monkeypatch.context() as older:
        older.setattr(data_cursor, "describe_data", lambda loader: None)
        seen_in(tmp_path, data(24, 2), 4)
    assert len(seen_in(tmp_path, data(24, 4), None)) == 24 - 4 * 4


def test_another_kind_of_loader_is_refused_before_anything_changes(tmp_path):
    life(tmp_path, Asked, "pccheck", 2)
    model = torch.nn.Linear(1, 1)
    before = model.weight.detach().clone()
    with pytest.raises(DataError, match="a loader with a state of its own, and a loader without is attached"):
        checkpointer_class("pccheck")(tmp_path, interval_steps=1).attach(model=model, data=data(4, 2))
    assert torch.equal(model.weight, before)


# -- generators --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "Philox", "SFC64"])
@pytest.mark.parametrize("system", ["sync", "pccheck"])
def test_any_kind_of_numpys_global_generator_comes_back(system, kind, tmp_path, caplog):
    usual = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(getattr(np.random, kind)(7))
        np.random.rand(3)
        first = checkpointer_class(system)(tmp_path, interval_steps=1)
        first.attach(counts={"n": 1})
        first.step()
        wanted = np.random.rand(4).tolist(), np.random.randn()
        first.close()
        again = checkpointer_class(system)(tmp_path, interval_steps=1)
        assert again.attach(counts={"n": 1}) == 1
        assert (np.random.rand(4).tolist(), np.random.randn()) == wanted
        again.close()
        np.random.set_bit_generator(usual)
        with pytest.raises(MismatchError, match=f"generator was a {kind}, and is a MT19937 now; call"):
            checkpointer_class(system)(tmp_path, interval_steps=1).attach(counts={"n": 1})
    finally:
        np.random.set_bit_generator(usual)
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


@pytest.mark.parametrize("system", [*SYSTEMS, "dcp"])
def test_a_default_device_that_is_not_the_cpu_changes_nothing(system, tmp_path):
    def attached():
        torch.manual_seed(1)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        checkpointer = checkpointer_class(system)(tmp_path, interval_steps=1)
        return checkpointer, model, optimizer

    checkpointer, model, optimizer = attached()
    with torch.device("meta"):  # as torch.set_default_device does
        assert checkpointer.attach(model=model, optimizer=optimizer, data=[1, 2, 3]) == 0
        next(iter(checkpointer.data))
        checkpointer.step(0.5)
        checkpointer.close()
    assert [str(event.outcome) for event in checkpointer.events] == ["durable"]
    saved = model.weight.detach().clone()
    again, model, optimizer = attached()
    with torch.no_grad():
        model.weight.zero_()
    with torch.device("meta"):
        assert again.attach(model=model, optimizer=optimizer, data=[1, 2, 3]) == 1
        again.close()
    assert torch.equal(model.weight, saved)
