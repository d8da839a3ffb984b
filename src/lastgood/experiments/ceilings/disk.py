"""The disk's part of the ceilings: write and read rates over jobs and block sizes, and the price of one flush."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lastgood.errors import StorageError
from lastgood.experiments.ceilings.fio import fio_bytes_per_s
from lastgood.experiments.machine.facts import free_bytes
from lastgood.files import closed_after, open_new, storage_errors, temporary_beside
from lastgood.models import FrozenModel
from lastgood.mounts import refuse_memory
from lastgood.storage.files import direct_io_works
from lastgood.units import MIB, format_bytes

__all__ = ["DiskCeilings", "DiskPlan", "DiskPoint", "disk_bursts", "measure_disk"]

_SPARE_BYTES = 64 * MIB
_SECTOR_BYTES = 4096

Direction = Literal["write", "read"]


@dataclass(frozen=True)
class DiskPlan:
    """How much to measure."""

    file_bytes: int = 512 * MIB
    """Size of the file; a slow disk gets less, see `fill_budget_s`."""
    jobs: tuple[int, ...] = (1, 2, 4)
    block_bytes: tuple[int, ...] = (MIB, 4 * MIB)
    directions: tuple[Direction, ...] = ("write", "read")
    repetitions: int = 5
    fill_budget_s: float = 1.5
    """After this long the file is as large as it will be (but one block for each job at least)."""
    pass_budget_s: float = 0.25
    """A repetition ends after its file's end or this long; so 60 of them take 15 seconds, and their flushes."""
    flushes: int = 50
    flush_budget_s: float = 0.5
    fio: bool = True
    """Whether fio, if it is installed, looks at the best combination too."""

    @classmethod
    def quick(cls) -> DiskPlan:
        """A short look: about a second, for tests and for `--quick`."""
        return cls(
            file_bytes=32 * MIB,
            jobs=(1, 2),
            repetitions=2,
            pass_budget_s=0.1,
            flushes=10,
            flush_budget_s=0.2,
            fio=False,
        )


class DiskPoint(FrozenModel):
    """One combination of jobs and block size."""

    jobs: int
    block_bytes: int
    bytes_per_s: list[float]
    """One value per repetition, the closing flush included."""
    median_bytes_per_s: float


class DiskCeilings(FrozenModel):
    """What one file system took and gave."""

    direct_io: bool
    """False if O_DIRECT is refused: then buffered writes with fdatasync, and reads after dropping cached pages."""
    file_bytes: int
    write: list[DiskPoint]
    read: list[DiskPoint]
    write_bytes_per_s: float
    """The best combination's median; 0 if the plan left this direction out."""
    write_spread_bytes_per_s: tuple[float, float]
    """The slowest and the fastest repetition of that same combination."""
    read_bytes_per_s: float
    read_spread_bytes_per_s: tuple[float, float]
    fdatasync_s: list[float]
    """Seconds of each overwrite of 4 KiB with its fdatasync."""
    median_fdatasync_s: float
    fio_write_bytes_per_s: float | None = None
    """What fio says of the best combination, as a check; None if it is not installed."""
    fio_read_bytes_per_s: float | None = None


def measure_disk(scratch: Path, plan: DiskPlan) -> DiskCeilings:
    """Measure the file system of `scratch`. Leaves no file behind, even when killed: it has a name for a moment only.

    Repetitions go round over all combinations, forwards and backwards in turn, so that a drift of the disk touches all
    of them alike. A combination counts by its median: the best single pass of many would be the luckiest one.
    """
    refuse_memory(scratch)
    try:
        scratch.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{scratch}: cannot make this folder: {error.strerror}; choose another --scratch") from error
    with _filled_file(scratch, plan, max(plan.jobs), max(plan.block_bytes)) as file:
        combinations = [(jobs, block) for jobs in plan.jobs for block in plan.block_bytes]
        rates: dict[tuple[Direction, int, int], list[float]] = {}
        for repetition in range(plan.repetitions):
            for direction in plan.directions:
                for jobs, block in combinations if repetition % 2 == 0 else reversed(combinations):
                    rate = file.one_pass(direction, jobs, block, plan.pass_budget_s)
                    rates.setdefault((direction, jobs, block), []).append(rate)
        flushes = file.time_flushes(plan)
        points: dict[Direction, list[DiskPoint]] = {"write": [], "read": []}
        for (direction, jobs, block), values in rates.items():
            median = statistics.median(values)
            points[direction].append(
                DiskPoint(jobs=jobs, block_bytes=block, bytes_per_s=values, median_bytes_per_s=median)
            )
        witness = {
            direction: file.by_fio(direction, found) for direction, found in points.items() if plan.fio and found
        }
    write_bytes_per_s, write_spread = _best(points["write"])
    read_bytes_per_s, read_spread = _best(points["read"])
    return DiskCeilings(
        direct_io=file.direct,
        file_bytes=file.nbytes,
        write=points["write"],
        read=points["read"],
        write_bytes_per_s=write_bytes_per_s,
        write_spread_bytes_per_s=write_spread,
        read_bytes_per_s=read_bytes_per_s,
        read_spread_bytes_per_s=read_spread,
        fdatasync_s=flushes,
        median_fdatasync_s=statistics.median(flushes),
        fio_write_bytes_per_s=witness.get("write"),
        fio_read_bytes_per_s=witness.get("read"),
    )


@contextmanager
def disk_bursts(scratch: Path) -> Iterator[Callable[[], float]]:
    """What the disk takes at a moment: a function that makes a short burst of plain writes to a file written before.

    It returns bytes per second, the flush included, and takes about 0.15 s. Leaves no file behind. Raises ConfigError
    and StorageError as `measure_disk` does.
    """
    jobs, block_bytes = 2, 4 * MIB
    plan = DiskPlan(file_bytes=64 * MIB, pass_budget_s=0.15, fill_budget_s=0.5)
    refuse_memory(scratch)
    with _filled_file(scratch, plan, jobs, block_bytes) as file:
        yield lambda: file.one_pass("write", jobs, block_bytes, plan.pass_budget_s)


def _best(points: list[DiskPoint]) -> tuple[float, tuple[float, float]]:
    """The best median, and the range of its repetitions."""
    if not points:
        return 0.0, (0.0, 0.0)
    best = max(points, key=lambda point: point.median_bytes_per_s)
    return best.median_bytes_per_s, (min(best.bytes_per_s), max(best.bytes_per_s))


@contextmanager
def _nameless_file(scratch: Path) -> Iterator[tuple[int, bool]]:
    """An open file without a name, and whether it takes direct I/O."""
    path = temporary_beside(scratch / "ceilings")
    try:
        direct = direct_io_works(scratch)
        descriptor = open_new(path, os.O_RDWR | (os.O_DIRECT if direct else 0))
        path.unlink()
    except OSError as error:
        raise StorageError(f"{path}: cannot make a file here: {error.strerror}; choose another --scratch") from error
    with closed_after(descriptor):
        yield descriptor, direct


@contextmanager
def _buffers(count: int, size_bytes: int) -> Iterator[list[mmap.mmap]]:
    """Page-aligned buffers of random bytes, so that no layer below can compress them away."""
    buffers = [mmap.mmap(-1, size_bytes) for _ in range(count)]
    try:
        for buffer in buffers:
            buffer[:] = secrets.token_bytes(size_bytes)
        yield buffers
    finally:
        for buffer in buffers:
            buffer.close()


def _fill(scratch: Path, descriptor: int, buffer: mmap.mmap, plan: DiskPlan, at_least: int) -> int:
    """Write the file once in full, so that no later pass pays for allocation; returns its size."""
    begin = time.perf_counter()
    size_bytes = 0
    with storage_errors(scratch, "writing a file to measure with", plan.file_bytes):
        os.posix_fallocate(descriptor, 0, plan.file_bytes)
        while size_bytes < plan.file_bytes:
            if size_bytes >= at_least and time.perf_counter() - begin > plan.fill_budget_s:
                break
            _transfer_whole(os.pwrite, descriptor, memoryview(buffer), size_bytes)
            size_bytes += len(buffer)
        os.fsync(descriptor)
    return size_bytes


def _transfer_whole(
    call: Callable[[int, memoryview, int], int], descriptor: int, view: memoryview, offset: int
) -> None:
    """Repeat a positioned read or write until all of `view` is done: the kernel may do less than asked."""
    done = 0
    with view:
        while done < len(view):
            with view[done:] as rest:
                moved = call(descriptor, rest, offset + done)
            if moved <= 0:
                raise OSError(errno.EIO, f"moved {moved} bytes at offset {offset + done}")
            done += moved


def _read_into(descriptor: int, view: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [view], offset)


@dataclass(frozen=True)
class _Filled:
    """A file that was written once in full, and buffers of random bytes."""

    descriptor: int
    direct: bool
    """Whether it takes direct I/O."""
    buffers: list[mmap.mmap]
    nbytes: int

    def one_pass(self, direction: Direction, jobs: int, block_bytes: int, budget_s: float) -> float:
        """Bytes per second of one pass over the file, each job on its own part of it."""
        if direction == "read" and not self.direct:
            os.fdatasync(self.descriptor)
            os.posix_fadvise(self.descriptor, 0, self.nbytes, os.POSIX_FADV_DONTNEED)
        call = os.pwrite if direction == "write" else _read_into
        blocks = self.nbytes // block_bytes // jobs
        begin = time.perf_counter()

        def job(number: int) -> int:
            moved = 0
            for block in range(number * blocks, (number + 1) * blocks):
                view = memoryview(self.buffers[number])[:block_bytes]
                _transfer_whole(call, self.descriptor, view, block * block_bytes)
                moved += block_bytes
                if time.perf_counter() - begin > budget_s:
                    break
            return moved

        with ThreadPoolExecutor(jobs) as pool:
            moved_bytes = sum(pool.map(job, range(jobs)))
        if direction == "write":
            os.fdatasync(self.descriptor)
        return moved_bytes / (time.perf_counter() - begin)

    def by_fio(self, direction: Direction, points: list[DiskPoint]) -> float | None:
        """What fio makes of the combination that was the best of `points`."""
        best = max(points, key=lambda point: point.median_bytes_per_s)
        return fio_bytes_per_s(
            self.descriptor,
            direction,
            jobs=best.jobs,
            block_bytes=best.block_bytes,
            nbytes=self.nbytes,
            direct=self.direct,
        )

    def time_flushes(self, plan: DiskPlan) -> list[float]:
        """Seconds of each overwrite of one sector with its fdatasync: the least that a commit of a checkpoint costs."""
        begin = time.perf_counter()
        found: list[float] = []
        while len(found) < plan.flushes and (not found or time.perf_counter() - begin < plan.flush_budget_s):
            before = time.perf_counter()
            _transfer_whole(os.pwrite, self.descriptor, memoryview(self.buffers[0])[:_SECTOR_BYTES], 0)
            os.fdatasync(self.descriptor)
            found.append(time.perf_counter() - before)
        return found


@contextmanager
def _filled_file(scratch: Path, plan: DiskPlan, jobs: int, block_bytes: int) -> Iterator[_Filled]:
    """A file without a name, with a buffer for each job."""
    needed, free = plan.file_bytes + _SPARE_BYTES, free_bytes(scratch)
    if free < needed:
        raise StorageError(
            f"{scratch}: measuring the disk needs {needed} bytes ({format_bytes(needed)}), and "
            f"{free} are free; make room or choose another --scratch"
        )
    with _nameless_file(scratch) as (descriptor, direct), _buffers(jobs, block_bytes) as buffers:
        nbytes = _fill(scratch, descriptor, buffers[0], plan, at_least=jobs * block_bytes)
        yield _Filled(descriptor, direct, buffers, nbytes)
