"""Three lines in any loop: attach, data, step. What comes back after a restart is the unbroken run."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lastgood import PCcheck
from lastgood.checkpointers.attach.data_cursor import CountedLoader
from lastgood.checkpointers.options import BaseOptions
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpoint,
    DataError,
    MismatchError,
    NoCheckpoint,
    StateError,
)

SYSTEMS = ["sync", "checkfreq", "gpm", "pccheck"]
EPOCH = 7


class Noisy(Dataset):
    """Items that draw from all three generators, as augmentations do."""

    def __len__(self) -> int:
        return EPOCH * 2

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(4) + random.random() + float(np.random.rand())
        return torch.full((4,), float(index)) / EPOCH + noise / 10


def loader(workers: int = 0, own_generator: bool = False, **more) -> DataLoader:
    generator = torch.Generator().manual_seed(5) if own_generator else None
    return DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=workers, generator=generator, **more)


class Run:
    """A user's script: everything made anew in each life."""

    def __init__(self, directory, make=loader, system="pccheck", **knobs) -> None:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.loader = make()
        self.checkpointer = checkpointer_class(system)(directory, interval_steps=1, **knobs)
        self.seen: list[tuple[int, float, float]] = []

    def attach(self, **more) -> int:
        return self.checkpointer.attach(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, data=self.loader, scaler=None, **more
        )

    def train(self, until: int) -> None:
        while True:
            for batch in self.checkpointer.data:
                loss = (self.model(batch) - batch).square().mean()
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                step = self.checkpointer.step(loss)
                self.seen.append((step, float(batch.sum()), float(loss.detach())))
                if step == until:
                    self.checkpointer.drain()
                    return


@pytest.mark.parametrize(
    ("make", "system"),
    [*((loader, system) for system in SYSTEMS), (lambda: loader(own_generator=True), "pccheck")],
    ids=[*(f"global-{system}" for system in SYSTEMS), "own-generator-pccheck"],
)
def test_a_resumed_run_is_the_unbroken_one(make, system, tmp_path):
    unbroken = Run(tmp_path / "a", make, system)
    assert unbroken.attach() == 0
    unbroken.train(2 * EPOCH + 3)
    unbroken.checkpointer.close()
    broken: list[tuple[int, float, float]] = []
    # In the middle of an epoch, at its last batch, and in the middle of the next one.
    for stop in (3, EPOCH, 2 * EPOCH - 2, 2 * EPOCH + 3):
        life = Run(tmp_path / "b", make, system)
        assert life.attach() == len(broken)
        if broken:
            torch.rand(5)
            random.random()
            life.checkpointer.restore(life.checkpointer.state)  # a second time, over a training that went on
        life.train(stop)
        broken += life.seen
        life.checkpointer.close()
    assert broken == unbroken.seen


def test_worker_processes_that_run_ahead_are_not_counted(tmp_path):
    def make() -> DataLoader:
        return loader(2, prefetch_factor=3)

    unbroken = Run(tmp_path / "a", make)
    unbroken.attach()
    unbroken.train(EPOCH + 2)
    unbroken.checkpointer.close()
    broken = []
    for stop in (3, EPOCH + 2):
        life = Run(tmp_path / "b", make)
        assert life.attach() == len(broken)
        life.train(stop)
        broken += life.seen
        life.checkpointer.close()
    assert broken == unbroken.seen


class OwnState:
    """A loader that keeps its place itself, as torchdata's does."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self):
        while self.next < 5:
            self.next += 1
            yield torch.full((2, 4), float(self.next))
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def test_a_loader_with_a_state_of_its_own_is_asked_itself(tmp_path):
    first = Run(tmp_path, OwnState)
    first.attach()
    first.train(3)
    first.checkpointer.close()
    second = Run(tmp_path, OwnState)
    assert second.attach() == 3
    assert float(next(iter(second.checkpointer.data))[0, 0]) == 4
    second.checkpointer.close()
    third = Run(tmp_path, loader)
    with pytest.raises(DataError, match="a loader with a state of its own, and a loader without is attached"):
        third.attach()


def test_a_loop_that_was_left_keeps_its_place_until_the_next(tmp_path):
    counted = CountedLoader(range(5))
    for batch in counted:
        if batch == 2:
            break
    assert (counted.epoch, counted.batches, counted.total_batches) == (0, 3, 3)
    assert list(counted) == list(range(5))
    assert (counted.epoch, counted.batches, len(counted)) == (2, 0, 5)
    one, other = iter(counted), iter(counted)
    assert next(other) == 0
    with pytest.raises(DataError, match="two loops"):
        next(one)


def test_a_save_behind_an_error_goes_on_behind_the_last_batch(tmp_path):
    unbroken = Run(tmp_path / "a")
    unbroken.attach()
    unbroken.train(EPOCH)
    unbroken.checkpointer.close()
    first = Run(tmp_path / "b")
    first.attach()
    with pytest.raises(KeyboardInterrupt):
        for batch in first.checkpointer.data:
            loss = (first.model(batch) - batch).square().mean()
            loss.backward()
            first.optimizer.step()
            first.scheduler.step()
            first.optimizer.zero_grad()
            if first.checkpointer.state["progress"].step == 2:
                raise KeyboardInterrupt
            first.checkpointer.step(loss)
    # The loop is left; this is what a script does that saves before it goes.
    first.checkpointer.step(loss)
    first.checkpointer.close()
    second = Run(tmp_path / "b")
    assert second.attach() == 3
    second.train(EPOCH)
    assert second.seen == unbroken.seen[3:]
    second.checkpointer.close()


@pytest.mark.parametrize("make", [loader, OwnState], ids=["plain", "own-state"])
def test_a_look_at_the_first_batch_uses_a_resume_not_up(make, tmp_path):
    first = Run(tmp_path, make)
    first.attach()
    first.train(2)
    first.checkpointer.close()
    seen = []
    for looks in (0, 1, 2):
        again = Run(tmp_path, make)
        assert again.attach() == 2
        for _ in range(looks):
            next(iter(again.checkpointer.data))
        again.checkpointer.interval_steps = 0  # so that all three begin at one checkpoint
        again.train(4)
        seen.append(again.seen)
        again.checkpointer.close()
    assert seen[0] == seen[1] == seen[2]


class DrawsAtItsBeginning(OwnState):
    """As torchdata's loader does, which seeds its workers."""

    def __iter__(self):
        torch.rand(1)
        return super().__iter__()


def test_a_loader_with_a_state_of_its_own_leaves_the_generators_alone(tmp_path):
    unbroken = Run(tmp_path / "a", DrawsAtItsBeginning)
    unbroken.attach()
    unbroken.train(4)
    unbroken.checkpointer.close()
    broken = []
    for stop in (2, 4):
        life = Run(tmp_path / "b", DrawsAtItsBeginning)
        life.attach()
        life.train(stop)
        broken += life.seen
        life.checkpointer.close()
    assert broken == unbroken.seen


def test_an_iterator_is_no_data(tmp_path):
    run = Run(tmp_path, lambda: iter(loader()))
    with pytest.raises(DataError, match=r"an iterator that can be gone through once.*give the loader itself"):
        run.attach()


def test_plain_values_come_back_in_what_holds_them(tmp_path):
    with pytest.raises(ConfigError, match=r"attach\(epoch=3\): a plain int .*put it into a dict, attach\(epoch="):
        PCcheck(tmp_path, interval_steps=1).attach(epoch=3)

    def parts():
        return {"counts": {"epoch": 0}, "history": [0.5], "mean": np.zeros(3)}

    first = PCcheck(tmp_path, interval_steps=1)
    live = parts()
    first.attach(**live)
    live["counts"]["epoch"] = 7
    live["history"].append(0.25)
    live["mean"] += 2
    first.step()
    first.close()
    again = parts()
    second = PCcheck(tmp_path, interval_steps=1)
    assert second.attach(**again) == 1
    assert again["counts"] == {"epoch": 7} and again["history"] == [0.5, 0.25] and again["mean"].tolist() == [2, 2, 2]
    second.close()


def test_another_optimizer_is_refused(tmp_path):
    def attached(kind, **options):
        model = torch.nn.Linear(2, 2)
        checkpointer = PCcheck(tmp_path, interval_steps=1)
        checkpointer.attach(model=model, optimizer=kind(model.parameters(), **options))
        return checkpointer

    first = attached(torch.optim.Adam)
    first.step()
    first.close()
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop):
        with pytest.raises(MismatchError, match=f"optimizer: .*another optimizer's.*{kind.__name__}"):
            attached(kind)
    attached(torch.optim.Adam, lr=0.5).close()


def test_a_start_that_fails_holds_nothing(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    first = PCcheck(tmp_path)
    with pytest.raises(StateError, match="on meta"):
        first.start({"model": model, "optimizer": optimizer, "odd": torch.empty(2, device="meta")})
    assert not optimizer._optimizer_step_pre_hooks
    second = PCcheck(tmp_path)
    second.start({"model": model})
    second.close()
    with pytest.raises(ConfigError, match="options are BaseOptions, not PCcheckOptions"):
        PCcheck(tmp_path, BaseOptions())


def test_a_place_that_is_not_in_the_data_any_more_is_refused(tmp_path):
    counted = CountedLoader(range(5))
    batches = iter(counted)
    for _ in range(4):
        next(batches)
    shorter = CountedLoader(range(3))
    shorter.load_state_dict(counted.state_dict())
    with pytest.raises(DataError, match="after batch 4 of an epoch, and the loader now ends after 3"):
        list(shorter)


def test_a_loop_over_the_loader_itself_is_told(tmp_path):
    run = Run(tmp_path)
    run.attach()
    next(iter(run.loader))
    with pytest.raises(DataError, match="iterate over its `data`"):
        run.checkpointer.step()
    run.checkpointer.close()


def test_misuse_is_refused_with_what_to_do(tmp_path):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="needs interval_steps"):
        PCcheck(tmp_path).attach(model=model)
    with pytest.raises(ConfigError, match="nothing to keep"):
        PCcheck(tmp_path, interval_steps=1).attach(model=None)
    with pytest.raises(ConfigError, match=r"\['rng'\]"):
        PCcheck(tmp_path, interval_steps=1).attach(model=model, rng=3)
    with pytest.raises(ConfigError, match=r"no such option; did you mean writer_threads.*max_in_flight"):
        PCcheck(tmp_path, writer_thread=3)
    with pytest.raises(ConfigError, match="not both"):
        PCcheck(tmp_path, PCcheck.Options(), keep=3)
    with pytest.raises(ConfigError, match=r"writer_cpus.*may use CPUs"):
        PCcheck(tmp_path, writer_cpus=(100_000,))
    with pytest.raises(ConfigError, match="negative"):
        PCcheck(tmp_path, interval_steps=-1)
    checkpointer = PCcheck(tmp_path, interval_steps=0)
    with pytest.raises(CheckpointError, match="attach"):
        checkpointer.step()
    checkpointer.attach(model=model)
    with pytest.raises(CheckpointError, match="attached already"):
        checkpointer.attach(model=model)
    with pytest.raises(CheckpointError, match="no data"):
        _ = checkpointer.data
    checkpointer.step()
    assert checkpointer.latest() is None, "interval 0 never saves by itself"
    checkpointer.save(1)
    checkpointer.close()
    assert PCcheck(tmp_path).latest() == 1


def test_a_chosen_step_and_what_cannot_be_resumed(tmp_path):
    # One at a time: of two in flight, the newer may end first, and the older is dropped.
    run = Run(tmp_path, keep=3, max_in_flight=1)
    run.attach()
    run.train(4)
    run.checkpointer.close()
    again = Run(tmp_path, keep=3)
    with pytest.raises(NoCheckpoint, match=r"no complete checkpoint of step 77; committed steps: \[4, 3, 2"):
        again.attach(resume_step=77)
    assert again.attach(resume_step=3) == 3
    again.checkpointer.close()
    other = PCcheck(tmp_path, interval_steps=1, keep=3)
    with pytest.raises(MismatchError, match="the checkpoint lacks"):
        other.attach(model=run.model, ema=torch.zeros(3))
    for slot in tmp_path.glob("slot-*"):
        with slot.open("r+b") as file:
            file.seek((1 << 20) + 5)
            file.write(b"damage")
    with pytest.raises(CorruptCheckpoint, match="no checkpoint can be read"):
        Run(tmp_path, keep=3).attach()
    for slot in tmp_path.glob("slot-*"):
        with slot.open("r+b") as file:
            file.seek(65536 + 50)
            file.write(b"damage")
    with pytest.raises(CorruptCheckpoint, match=r"no complete checkpoint, and slots that are damaged: slot-0000.lgs"):
        Run(tmp_path, keep=3).attach()
    assert not [slot for slot in tmp_path.glob("lock") if PCcheck(tmp_path)._open() is None], "the lock was given back"


def test_another_world_is_refused_with_both_sides(tmp_path):
    model = torch.nn.Linear(2, 2)
    first = PCcheck(tmp_path, interval_steps=1, rank=1, world_size=4, control="off")
    first.attach(model=model)
    first.step()
    first.close()
    for kind in ({}, {"rank": 1, "world_size": 2}, {"rank": 0, "world_size": 4}):
        other = PCcheck(tmp_path, interval_steps=1, control="off", **kind)
        words = rf"rank 1 of 4.*rank {kind.get('rank', 0)} of {kind.get('world_size', 1)}"
        with pytest.raises(MismatchError, match=words):
            other.attach(model=model)
        with pytest.raises(MismatchError, match=words):
            other.restore({"model": model})
    again = PCcheck(tmp_path, interval_steps=1, rank=1, world_size=4, control="off")
    assert again.attach(model=model) == 1
    again.close()


def test_what_an_open_store_found_corrupt_is_not_forgotten(tmp_path):
    model = torch.nn.Linear(2, 2)
    checkpointer = PCcheck(tmp_path, interval_steps=1)
    checkpointer.attach(model=model)
    checkpointer.step()
    checkpointer.drain()
    with (tmp_path / "slot-0000.lgs").open("r+b") as file:
        file.seek((1 << 20) + 5)
        file.write(b"damage")
    for words in ("no checkpoint can be read", "slots that are damaged: slot-0000.lgs: found corrupt before"):
        with pytest.raises(CorruptCheckpoint, match=words):
            checkpointer.restore(checkpointer.state)
    checkpointer.close()


def test_a_checkpoint_between_two_epochs_keeps_the_loaders_generator(tmp_path):
    def life(epochs: int) -> tuple[int, list[float]]:
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 4)
        data = DataLoader(torch.arange(6.0), shuffle=True, generator=torch.Generator().manual_seed(5))
        checkpointer = PCcheck(tmp_path, interval_steps=1)
        resumed = checkpointer.attach(model=model, data=data)
        seen = [[float(batch) for batch in checkpointer.data] for _ in range(epochs)]
        checkpointer.step()  # behind the loop
        checkpointer.close()
        return resumed, seen

    straight = DataLoader(torch.arange(6.0), shuffle=True, generator=torch.Generator().manual_seed(5))
    expected = [[float(batch) for batch in straight] for _ in range(3)]
    assert life(1) == (0, expected[:1])
    assert life(2) == (1, expected[1:])


def test_memory_between_the_tensors_of_a_state_is_left_alone(tmp_path):
    def parts():
        base, wide = torch.zeros(4), torch.zeros(3, 4)
        model = torch.nn.Module()
        model.register_buffer("a", base[1:3])
        model.register_buffer("column", wide[:, 0])
        return base, wide, model

    base, wide, model = parts()
    base[:] = 1
    wide[:] = 1
    checkpointer = PCcheck(tmp_path, interval_steps=1)
    checkpointer.attach(model=model)
    checkpointer.step()
    checkpointer.close()
    base, wide, model = parts()
    again = PCcheck(tmp_path, interval_steps=1)
    assert again.attach(model=model) == 1
    assert base.tolist() == [0, 1, 1, 0]
    assert wide.sum() == 3
    again.close()
