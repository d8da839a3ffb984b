"""Scenarios of a training with GPM on the faulty disk. Run as: gpm_faults.py DIRECTORY SCENARIO..."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pccheck_faults
import torch
from fault_tools import EIO, ENOSPC, FOR_EVER, fault, fill, mount, own_mounts, run_scenarios, small_disk
from pccheck_faults import CHUNK, WIDTH, Log, SmallTraining

from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.gpm.system import GPM, GPMOptions
from lastgood.errors import StorageError


class Job(pccheck_faults.Job):
    """A training with GPM."""

    system = GPM

    @staticmethod
    def options() -> GPMOptions:
        return GPMOptions(chunk_bytes=CHUNK, copy_threads=2)


def failed_flush(directory: Path, number: int) -> None:
    """Number 0 is that of the void record, 1 of the data, 2 of the commit record: each an msync."""
    job = Job(directory)
    older = job.step
    for turn in range(2):
        with fault("flush", "slot-", EIO, skip=number, hits=1):
            assert job.save() is Outcome.FAILED, turn
        error = job.checkpointer.events[-1].error or ""
        assert re.search(r"StorageError: .*slot-000\d\.lgs: .* of \d+ bytes .*failed: Input/output error", error), error
    assert job.log.count("older ones stay") == 2
    # A record whose flush failed may have reached the disk all the same.
    job.end(older, newest_may_be_there=number == 2)


def each_kind_is_logged_once(directory: Path) -> None:
    job = Job(directory)
    older = job.step
    for error, name in ((EIO, "Input/output error"), (ENOSPC, "No space left")):
        with fault("flush", "slot-", error, times=FOR_EVER):
            job.fail_twice(name)
    job.end(older)


def no_room_to_grow(directory: Path) -> None:
    """The state outgrows its areas while the disk is full; later each area grows when its turn comes."""
    job = Job(directory)
    older = job.step
    job.training.plain["moving"] = torch.zeros(400_000, dtype=torch.float64)
    for call in ("allocate", "write"):
        with fault(call, "slot-", ENOSPC, times=FOR_EVER):
            assert job.save() is Outcome.FAILED
            assert re.search(r"making a slot of \d+ bytes.*No space left", job.checkpointer.events[-1].error or "")
    assert job.log.count("older ones stay") == 2
    assert GPM(directory).latest() == older
    for _ in range(3):
        assert job.save() is Outcome.DURABLE, job.checkpointer.events[-1].error
        fresh = SmallTraining(WIDTH, seed=1)
        fresh.plain["moving"] = torch.zeros(400_000, dtype=torch.float64)
        assert GPM(directory).restore(fresh.state) == job.step
        assert fresh.digest() == job.digests[job.step]
    job.checkpointer.close()


def full_disk(directory: Path) -> None:
    """A real one: from the first save on; and later, when the areas are there, it does not matter."""
    disk = directory / "disk"
    small_disk(disk, 24)
    log = Log()
    training = SmallTraining(WIDTH)
    checkpointer = GPM(disk / "job", Job.options())
    checkpointer.start(training.state)  # before the first step no room is made
    filler = fill(disk)
    for _ in range(2):
        training.step()
        checkpointer.save(training.step_number)
    assert [event.outcome for event in checkpointer.events] == [Outcome.FAILED] * 2
    assert "No space left" in (checkpointer.events[0].error or "")
    assert log.count("older ones stay") == 2
    assert not list((disk / "job").glob("*.lastgood-tmp"))
    filler.unlink()
    digests = {}
    for turn in range(3):
        training.step()
        digests[training.step_number] = training.digest()
        checkpointer.save(training.step_number)
        assert checkpointer.events[-1].outcome is Outcome.DURABLE, checkpointer.events[-1].error
        if turn == 0:
            fill(disk)
    checkpointer.close()
    for step in (5, 4):
        fresh = SmallTraining(WIDTH, seed=1)
        assert GPM(disk / "job").restore(fresh.state, step=step) == step
        assert fresh.digest() == digests[step]


def read_only_directory(directory: Path) -> None:
    """Reading needs no writable directory; a training that cannot save there is refused before its first step."""
    disk = directory / "disk"
    disk.mkdir()
    own_mounts()
    mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk))
    first = Job(disk / "job")
    first.checkpointer.close()
    mount("-o", "remount,ro", str(disk))
    first.check_restores(first.step)
    for name in ("job", "other"):
        checkpointer = GPM(disk / name)
        try:
            checkpointer.start(first.training.state)
        except StorageError as error:
            assert "Read-only file system; the file system is read-only, use another directory" in str(error), error
        else:
            raise AssertionError("started in a read-only directory")
        checkpointer.close()
    mount("-o", "remount,rw", str(disk))  # refused if anything were still mapped
    job = Job(disk / "job")
    job.end(job.step)


def missing_directory(directory: Path) -> None:
    """Somebody removes it while the training runs, and makes it again."""
    job = Job(directory / "job")
    shutil.rmtree(directory / "job")
    job.fail_twice("job.*was it removed or unmounted")
    (directory / "job").mkdir()
    assert job.save() is Outcome.DURABLE, job.checkpointer.events[-1].error
    job.check_restores(job.step)
    job.checkpointer.close()


def renamed_directory(directory: Path) -> None:
    """Moved away and back: the newest checkpoint stays while the next one is made."""
    job = Job(directory / "job")
    older = job.step
    (directory / "job").rename(directory / "elsewhere")
    job.fail_twice("job.*was it removed or unmounted")
    (directory / "elsewhere").rename(directory / "job")
    with fault("flush", "slot-", EIO, skip=1, hits=1):
        assert job.save() is Outcome.FAILED
    job.end(older)


def removed_area(directory: Path) -> None:
    """The newest one goes: the older one is what stays then, and the next goes where nothing is."""
    job = Job(directory)
    older = job.step - 2  # of two saves with two steps each
    (directory / "slot-0001.lgs").unlink()
    with fault("flush", "slot-0001", EIO, skip=2, hits=1):
        assert job.save() is Outcome.FAILED
    job.end(older)


def cut_area(directory: Path) -> None:
    """A file that somebody cut is filled up again before anything is stored into it: no SIGBUS."""
    job = Job(directory)
    older = job.step
    os.truncate(directory / "slot-0000.lgs", 8192)
    job.check_restores(older)
    job.end(older)


SCENARIOS: dict[str, Callable[[Path], None]] = {
    **{
        f"failed_flush[{what}]": lambda directory, number=number: failed_flush(directory, number)  # type: ignore[misc]
        for number, what in enumerate(("void record", "data", "commit record"))
    },
    **{
        scenario.__name__: scenario
        for scenario in (
            each_kind_is_logged_once,
            no_room_to_grow,
            missing_directory,
            renamed_directory,
            removed_area,
            cut_area,
            full_disk,
            read_only_directory,
        )
    },
}

if __name__ == "__main__":
    run_scenarios(SCENARIOS)
