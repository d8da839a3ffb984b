"""Scenarios of a training with PCcheck on the faulty disk. Run as: pccheck_faults.py DIRECTORY SCENARIO..."""

from __future__ import annotations

import logging
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "checkpointers" / "support"))

import torch
from fault_tools import ANY, EIO, ENOSPC, FOR_EVER, SHORT, fault, fill, mount, own_mounts, run_scenarios, small_disk
from small_training import SmallTraining

from lastgood.checkpointers.base import Checkpointer
from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.options import BaseOptions
from lastgood.checkpointers.pccheck.system import PCcheck, PCcheckOptions
from lastgood.errors import CorruptCheckpoint, StorageError

WIDTH = 96
CHUNK = 16384


class Log(logging.Handler):
    """What was logged, as lines."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("lastgood").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def count(self, words: str) -> int:
        return sum(words in line for line in self.lines)


class Job:
    """A training with a system; `save` makes a step and a checkpoint of it, and says what became of it."""

    system: type[Checkpointer] = PCcheck

    def __init__(self, directory: Path, started: int = 2) -> None:
        torch.set_num_threads(1)
        self.log = Log()
        self.directory = directory
        self.training = SmallTraining(WIDTH)
        self.training.step()  # the optimizer has its moments, so that start() makes room
        self.checkpointer = self.system(directory, self.options())
        self.checkpointer.start(self.training.state)
        self.digests: dict[int, str] = {}
        for _ in range(started):
            assert self.save() is Outcome.DURABLE

    @staticmethod
    def options() -> BaseOptions:
        return PCcheckOptions(chunk_bytes=CHUNK, max_in_flight=1)

    def save(self) -> Outcome:
        self.training.step()
        step = self.training.step_number
        self.digests[step] = self.training.digest()
        self.checkpointer.save(step)
        self.training.step()  # goes on, whatever becomes of the checkpoint
        self.checkpointer.drain(60)
        event = self.checkpointer.events[-1]
        assert event.step == step
        return event.outcome

    @property
    def step(self) -> int:
        """Of the last checkpoint asked for."""
        return self.checkpointer.events[-1].step

    def check_restores(self, step: int) -> None:
        """A process that looks into the directory gets this step, to the bit."""
        fresh = SmallTraining(WIDTH, seed=1)
        assert self.system(self.directory, self.options()).restore(fresh.state) == step
        assert fresh.digest() == self.digests[step]

    def fail_twice(self, words: str) -> None:
        """Two saves fail: both are counted and told."""
        before = self.log.count("older ones stay")
        for _ in range(2):
            assert self.save() is Outcome.FAILED
            error = self.checkpointer.events[-1].error or ""
            assert re.search(words, error), f"{error} does not say {words}"
        logged = self.log.count("older ones stay") - before
        assert logged == 2, f"logged {logged} times: {self.log.lines}"

    def end(self, older: int, *, newest_may_be_there: bool = False) -> None:
        """The older checkpoint is whole, the next save works and can be restored."""
        if newest_may_be_there:
            fresh = SmallTraining(WIDTH, seed=1)
            found = self.system(self.directory, self.options()).restore(fresh.state)
            assert found >= older and fresh.digest() == self.digests[found]
            fresh = SmallTraining(WIDTH, seed=1)
            assert self.system(self.directory, self.options()).restore(fresh.state, step=older) == older
        else:
            self.check_restores(older)
        assert self.save() is Outcome.DURABLE, self.checkpointer.events[-1].error
        self.check_restores(self.step)
        self.checkpointer.close()


def failed_write(directory: Path) -> None:
    job = Job(directory)
    older = job.step
    for passing in (1, 0):  # the void record passes, and the data fails; then the void record fails
        with fault("write", "slot-", EIO, skip=passing, times=FOR_EVER):
            assert job.save() is Outcome.FAILED
    first, second = (event.error or "" for event in job.checkpointer.events[-2:])
    for error in (first, second):
        assert re.search(r"StorageError: .*slot-000\d\.lgs: .* of \d+ bytes .*failed: Input/output error", error), error
    assert job.log.count("older ones stay") == 2
    job.end(older)


def failed_flush(directory: Path, number: int) -> None:
    """Number 0 is that of the void record, 1 of the data, 2 of the commit record."""
    job = Job(directory)
    older = job.step
    for turn in range(2):
        with fault("flush", "slot-", EIO, skip=number, hits=1):
            assert job.save() is Outcome.FAILED, turn
        assert re.search(r"slot-000\d\.lgs: .*failed: Input/output error", job.checkpointer.events[-1].error or "")
    assert job.log.count("older ones stay") == 2
    # A record whose flush failed may have reached the disk all the same.
    job.end(older, newest_may_be_there=number == 2)


def each_kind_is_logged_once(directory: Path) -> None:
    job = Job(directory)
    older = job.step
    for error, name in ((EIO, "Input/output error"), (ENOSPC, "No space left")):
        with fault("write", "slot-", error, times=FOR_EVER):
            job.fail_twice(name)
    job.end(older)


def short_writes(directory: Path) -> None:
    job = Job(directory)
    for chunk in range(1, 5):
        with fault("write", "slot-", SHORT, skip=chunk, hits=1):
            assert job.save() is Outcome.DURABLE, job.checkpointer.events[-1].error
        job.check_restores(job.step)
    job.end(job.step)


def short_reads(directory: Path) -> None:
    job = Job(directory)
    for call in range(0, 200, 3):
        with fault("read", "slot-", SHORT, skip=call, hits=ANY) as struck:
            job.check_restores(job.step)
            if not struck():
                break
    assert call > 20, "a restore reads more often than that"
    job.end(job.step)


def failed_read_of_data(directory: Path) -> None:
    """A restore goes on to the checkpoint before, says so, and names file and reason."""
    job = Job(directory)
    newest = job.step
    older = sorted(job.digests)[-2]
    store = job.checkpointer._store
    assert store is not None
    path = store.committed()[0].path
    fresh = SmallTraining(WIDTH, seed=1)
    # Looking at the slot takes four reads. Then it is opened for its layout, and its record, its table and the layout
    # are read; then it is opened for all the rest.
    for passing in range(4, 13):
        with fault("read", path.name, EIO, skip=passing, times=FOR_EVER):
            step = PCcheck(directory, job.options()).restore(fresh.state)
        assert (step, fresh.digest()) == (older, job.digests[older])
        said = [line for line in job.log.lines if "trying the checkpoint before it" in line][-1]
        assert path.name in said and "Input/output error" in said, said
    job.end(newest)


def failed_read_of_the_only_one(directory: Path) -> None:
    """Nothing to fall back on: an error that names file and reason, and the state is untouched."""
    job = Job(directory, started=1)
    fresh = SmallTraining(WIDTH, seed=1)
    before = fresh.digest()
    with fault("read", "slot-", EIO, skip=8, times=FOR_EVER):
        try:
            PCcheck(directory, job.options()).restore(fresh.state)
        except (StorageError, CorruptCheckpoint) as error:
            assert re.search(r"slot-\d+\.lgs.*Input/output error", str(error)), error
        else:
            raise AssertionError("restored what cannot be read")
    assert fresh.digest() == before
    job.end(job.step)


def no_room_to_grow(directory: Path) -> None:
    """The state outgrows its slots while the disk is full."""
    job = Job(directory)
    older = job.step
    job.training.plain["moving"] = torch.zeros(400_000, dtype=torch.float64)
    for call in ("allocate", "write"):
        with fault(call, "slot-", ENOSPC, times=FOR_EVER):
            assert job.save() is Outcome.FAILED
            assert re.search(r"making a slot of \d+ bytes.*No space left", job.checkpointer.events[-1].error or "")
    assert job.log.count("older ones stay") == 2
    assert PCcheck(directory).latest() == older
    assert job.save() is Outcome.DURABLE, job.checkpointer.events[-1].error
    fresh = SmallTraining(WIDTH, seed=1)
    fresh.plain["moving"] = torch.zeros(400_000, dtype=torch.float64)
    assert PCcheck(directory).restore(fresh.state) == job.step
    assert fresh.digest() == job.digests[job.step]
    job.checkpointer.close()


def full_disk(directory: Path) -> None:
    """A real one: from the first save on, and later when the state grows."""
    disk = directory / "disk"
    small_disk(disk, 24)
    log = Log()
    training = SmallTraining(WIDTH)
    checkpointer = PCcheck(disk / "job", Job.options())
    checkpointer.start(training.state)  # before the first step no room is made
    filler = fill(disk)
    for _ in range(2):
        training.step()
        checkpointer.save(training.step_number)
        checkpointer.drain(60)
    assert [event.outcome for event in checkpointer.events] == [Outcome.FAILED] * 2
    assert "No space left" in (checkpointer.events[0].error or "")
    assert log.count("older ones stay") == 2
    assert not list((disk / "job").glob("*.lastgood-tmp"))
    filler.unlink()
    training.step()
    digest = training.digest()
    checkpointer.save(training.step_number)
    checkpointer.drain(60)
    assert checkpointer.events[-1].outcome is Outcome.DURABLE, checkpointer.events[-1].error
    filler = fill(disk)
    training.step()
    checkpointer.save(training.step_number)  # the slots are there already
    checkpointer.drain(60)
    assert checkpointer.events[-1].outcome is Outcome.DURABLE, checkpointer.events[-1].error
    checkpointer.close()
    filler.unlink()
    fresh = SmallTraining(WIDTH, seed=1)
    assert PCcheck(disk / "job").restore(fresh.state, step=3) == 3
    assert fresh.digest() == digest


def read_only_directory(directory: Path) -> None:
    """The file system turns read-only in the middle of a training, as ext4 does after an error, and back."""
    disk = directory / "disk"
    disk.mkdir()
    own_mounts()
    mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk))
    first = Job(disk / "job", started=1)
    first.checkpointer.close()  # the next life opens the lock for reading only, and does not hold the mount
    job = Job(disk / "job")
    older = job.step
    mount("-o", "remount,ro", str(disk))
    job.fail_twice("slot-000.*Read-only file system")
    job.check_restores(older)
    try:
        PCcheck(directory / "disk" / "other").start(SmallTraining(WIDTH).state)
    except StorageError as error:
        assert "Read-only file system; the file system is read-only, use another directory" in str(error), error
    else:
        raise AssertionError("started in a read-only directory")
    mount("-o", "remount,rw", str(disk))
    job.end(older)


def missing_directory(directory: Path) -> None:
    """Somebody removes it while the training runs, and makes it again."""
    job = Job(directory / "job")
    shutil.rmtree(directory / "job")
    job.fail_twice("job.*was it removed or unmounted")
    (directory / "job").mkdir()
    for _ in range(2):  # a slot may be found missing first
        outcome = job.save()
        if outcome is Outcome.DURABLE:
            break
    assert outcome is Outcome.DURABLE, job.checkpointer.events[-1].error
    job.check_restores(job.step)
    job.checkpointer.close()


def renamed_directory(directory: Path) -> None:
    """Moved away and back: the checkpoints in it stay."""
    job = Job(directory / "job")
    older = job.step
    (directory / "job").rename(directory / "elsewhere")
    job.fail_twice("job.*was it removed or unmounted")
    (directory / "elsewhere").rename(directory / "job")
    job.check_restores(older)
    for _ in range(4):
        outcome = job.save()
        if outcome is Outcome.DURABLE:
            break
    assert outcome is Outcome.DURABLE, job.checkpointer.events[-1].error
    job.check_restores(job.step)
    job.checkpointer.close()


SCENARIOS: dict[str, Callable[[Path], None]] = {
    **{
        f"failed_flush[{what}]": lambda directory, number=number: failed_flush(directory, number)  # type: ignore[misc]
        for number, what in enumerate(("void record", "data", "commit record"))
    },
    **{
        scenario.__name__: scenario
        for scenario in (
            failed_write,
            each_kind_is_logged_once,
            short_writes,
            short_reads,
            failed_read_of_data,
            failed_read_of_the_only_one,
            no_room_to_grow,
            missing_directory,
            renamed_directory,
            full_disk,
            read_only_directory,
        )
    },
}

if __name__ == "__main__":
    run_scenarios(SCENARIOS)
