"""The write curve of a disk: seconds until a checkpoint is durable, over how many at once, threads and chunk sizes.

It is measured with the real slot store, copies out of ordinary memory included, in a folder of its own below the job's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import numpy as np

from lastgood.checkpointers.pccheck.tuning_file import WritePoint
from lastgood.errors import ConfigError, LockHeld, StorageError, WaitTimeout
from lastgood.files import open_new, remove_tree, storage_errors
from lastgood.locks import FileLock
from lastgood.storage import ChunkPool, SlotStore
from lastgood.storage.format import BLOCK, stream_layout
from lastgood.storage.reader import find_slots
from lastgood.units import MIB, format_bytes

__all__ = ["PROBE_FOLDER", "Key", "WriteCurve", "grid", "most_that_fit", "probe_folder"]

PROBE_FOLDER = "tuning-probe"
"""Name of the folder below the job's in which files are written; left behind only by a killed process."""
_PROBE_MARK = ".lastgood-tuning"
"""A file in it that says whose it is."""

Key = tuple[int, int, int]
"""N, p, b."""
Report = Callable[[str], None]

_IN_FLIGHT = (1, 2, 3, 4)
_CHUNKS = (MIB, 4 * MIB, 16 * MIB)
_FIRST_CHUNK = 4 * MIB
_ROUNDS = 3
_SAMPLE_BYTES = 512 * MIB
_LEAST_SAMPLE_BYTES = 16 * MIB
_PILOT_BYTES = 32 * MIB
_SOURCE_BYTES = 128 * MIB
"""Larger than the caches, so that copies come out of memory. A stream repeats it."""
_CONFIRMATIONS = 4
_SEARCH_SHARE = 0.6
"""Of the time for the curve; the rest is for writing the best point again."""


# -- place ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def probe_folder(directory: Path) -> Iterator[Path]:
    """A folder for files to measure with, removed at the end; what a killed tuning left there is removed first.

    The lock is on `directory` itself, so that no lock file stays in it; the name is always the same, so that whatever
    has it while the lock is ours was left behind.
    """
    folder = directory / PROBE_FOLDER
    lock = FileLock(directory, f"tuning in {directory}", shared_with_forks=False, on_directory=True)
    try:
        with storage_errors(directory, "preparing to measure"):
            directory.mkdir(parents=True, exist_ok=True)
            lock.acquire()
            if SlotStore.peek(directory).held:
                raise LockHeld(
                    f"{directory}: a training has this folder open, and both would measure each other; tune before it "
                    "starts or after it has ended"
                )
            if os.path.lexists(folder):
                if not (folder / _PROBE_MARK).is_file() and (not folder.is_dir() or any(folder.iterdir())):
                    raise ConfigError(f"{folder}: was not made by a tuning, which needs this name; move it away")
                remove_tree(folder)
            folder.mkdir(0o700)
            os.close(open_new(folder / _PROBE_MARK))
        try:
            yield folder
        finally:
            with storage_errors(folder, "removing what was measured with"):
                shutil.rmtree(folder)
    finally:
        lock.release()


def most_that_fit(directory: Path, state_bytes: int, keep: int, disk_bytes: int | None) -> int:
    """The most checkpoints in flight, up to those tried, whose slots fit beside the kept ones.

    `disk_bytes` is the free space to count with; None for what is free. Raises StorageError if not even one fits.
    """
    slot_bytes = stream_layout(state_bytes, min(_CHUNKS))[2]
    # The job's slots of an earlier incarnation are used again.
    there = sum(path.stat().st_size for path in find_slots(directory).values())
    free = shutil.disk_usage(directory).free if disk_bytes is None else disk_bytes
    most = (free + there) // slot_bytes - keep
    if most < 1:
        needed = (keep + 1) * slot_bytes
        raise StorageError(
            f"{directory}: {keep} kept checkpoints and one in flight need {needed} bytes ({format_bytes(needed)}), and "
            f"{free + there} are there ({free} free, {there} in slots of this job); make room, keep fewer, or use "
            "another folder"
        )
    return min(most, max(_IN_FLIGHT))


def grid(state_bytes: int, most_in_flight: int, cores: int) -> list[Key]:
    """Every (N, p, b) that makes sense: no chunk beyond the state, no thread without a chunk of its own."""
    threads = sorted({*(1 << power for power in range(7) if 1 << power <= cores), min(cores, 64)})
    chunks = [b for b in _CHUNKS if b <= max(state_bytes, min(_CHUNKS))]
    return [
        (n, p, b)
        for n in _IN_FLIGHT
        if n <= most_in_flight
        for b in chunks
        for p in threads
        if p == 1 or p <= -(-state_bytes // b)
    ]


# -- the write curve -----------------------------------------------------------------------------------------------


class WriteCurve:
    """Measures points of the write curve in `folder`, within `seconds`.

    First every N and p with one chunk size, small ones first; then the other chunk sizes for the best three; then the
    rest. A point that would take too long is left out, but never the first one.
    """

    def __init__(
        self,
        folder: Path,
        state_bytes: int,
        pool_bytes: int | None,
        memory: int,
        keys: list[Key],
        seconds: float,
        report: Report,
    ) -> None:
        self.folder = folder
        self.direct_io = True
        self._state_bytes = state_bytes
        self._pool_share = 1.0 if pool_bytes is None else pool_bytes / state_bytes
        self._keys = keys
        self._report = report
        self._deadline = time.monotonic() + seconds
        self._search_deadline = time.monotonic() + seconds * _SEARCH_SHARE
        self._slots = max(n for n, _, _ in keys) + 1  # one complete checkpoint stays, as in the store's own life
        self._found: dict[Key, WritePoint] = {}
        self._confirmed: list[Key] = []
        self._step = 0
        # Random, so that a file system that compresses gains nothing; touched, so that no first use is timed.
        source = min(state_bytes, _SOURCE_BYTES, max(BLOCK, memory // 8))
        self._source = np.frombuffer(np.random.default_rng(0).bytes(source), dtype=np.uint8)
        least = max((p + 1) * b for _, p, b in keys)
        self._pool_memory = np.ones(max(least, min(state_bytes, _SAMPLE_BYTES, memory // 4)) + BLOCK, dtype=np.uint8)
        self._sample_bytes = self._choose_sample(seconds)

    def points(self) -> list[WritePoint]:
        """What was measured, in the order of N, p and b."""
        return [self._found[key] for key in sorted(self._found)]

    def measure_all(self) -> None:
        """Measure as many points as the time suffices for."""
        chunks = sorted({b for _, _, b in self._keys})
        first = _FIRST_CHUNK if _FIRST_CHUNK in chunks else chunks[-1]
        order = sorted(self._keys, key=lambda key: (key[2] != first, key[0] * key[1], key))
        for key in order:
            if key[2] == first:
                self._measure_in_time(key)
        promising = sorted(self._found, key=lambda key: self._found[key].worst_write_s / key[0])[:3]
        order.sort(key=lambda key: (key[0], key[1]) not in {(n, p) for n, p, _ in promising})
        for key in order:
            if key not in self._found:
                self._measure_in_time(key)

    def confirm(self, best: WritePoint) -> bool:
        """Write the best point again, in full size if time and disk allow; False once there is nothing to gain.

        The best of many points is also the luckiest of them, and its luck is not to be built upon.
        """
        key = (best.max_in_flight, best.writer_threads, best.chunk_bytes)
        left = self._deadline - time.monotonic()
        if key in self._confirmed or len(self._confirmed) == _CONFIRMATIONS or left <= 0:
            return False
        rate = self._state_bytes * key[0] / best.median_write_s
        # Slots may have to grow first, and are then written twice: half of the time is left for other candidates.
        in_time = int(rate * left / 2 / (self._slots + 2 * key[0]))
        size = min(self._state_bytes, self._on_disk(), max(in_time, self._sample_bytes))
        if size < self._state_bytes:
            size = max(self._sample_bytes, size // MIB * MIB)
        if in_time < self._sample_bytes:
            return False
        self._report(f"again the best: {_describe(key)}, {format_bytes(size)} each")
        self._measure(key, size, 2)
        self._confirmed.append(key)
        return True

    def _on_disk(self) -> int:
        """Bytes that each slot can have here, those that are there included; a twentieth of the disk stays free."""
        there = sum(path.stat().st_size for path in self.folder.glob("*.lgs"))
        return int((shutil.disk_usage(self.folder).free * 0.95 + there) / self._slots) - 2 * MIB

    def _choose_sample(self, seconds: float) -> int:
        """How much each write writes: so much that the first half of the time suffices for one chunk size."""
        pilot = min(self._state_bytes, _PILOT_BYTES)
        key = min(self._keys, key=lambda key: (key[0], key[1], key[2] != _FIRST_CHUNK))
        self._report("a first look at the disk")
        wanted = 2 * stream_layout(pilot, key[2])[2]
        free = shutil.disk_usage(self.folder.parent).free
        if free < wanted:
            raise StorageError(
                f"{self.folder.parent}: measuring needs {wanted} bytes ({format_bytes(wanted)}), and {free} are free; "
                "make room or use another folder"
            )
        rate = pilot / statistics.median(self._write(key, pilot, _ROUNDS, slots=2))
        each = {(n, p) for n, p, _ in self._keys}
        units = self._slots + _ROUNDS * sum(n for n, _ in each)
        size = min(_SAMPLE_BYTES, int(rate * seconds / 2 / units) // MIB * MIB)
        return min(self._state_bytes, self._on_disk(), max(size, _LEAST_SAMPLE_BYTES))

    def _measure_in_time(self, key: Key) -> None:
        if self._found:
            near = self._found[min(self._found, key=lambda other: (abs(other[0] - key[0]), abs(other[1] - key[1])))]
            share = near.stream_bytes / self._state_bytes
            needed = _ROUNDS * near.median_write_s * share * key[0] / near.max_in_flight
            if time.monotonic() + needed > self._search_deadline:
                return
        self._report(_describe(key))
        self._measure(key, self._sample_bytes, _ROUNDS)

    def _measure(self, key: Key, stream_bytes: int, rounds: int) -> None:
        scale = self._state_bytes / stream_bytes
        seconds = [scale * found for found in self._write(key, stream_bytes, rounds, slots=self._slots)]
        before = self._found.get(key)
        self._found[key] = WritePoint(
            max_in_flight=key[0],
            writer_threads=key[1],
            chunk_bytes=key[2],
            stream_bytes=max(stream_bytes, before.stream_bytes if before else 0),
            write_s=[*(before.write_s if before else []), *seconds],
        )

    def _write(self, key: Key, stream_bytes: int, rounds: int, *, slots: int) -> list[float]:
        """Seconds of each of `rounds` times N writes, N at once."""
        n, p, b = key
        timeout_s = 60.0 + n * stream_bytes / 1e6
        whole, rest = divmod(stream_bytes, self._source.nbytes)
        address = self._source.ctypes.data
        ranges = [(address, self._source.nbytes)] * whole + ([(address, rest)] if rest else [])
        room = min(self._pool_memory.nbytes, max(int(self._pool_share * stream_bytes), (p + 1) * b) + BLOCK)
        pool = ChunkPool(self._pool_memory.ctypes.data, room, b, self._pool_memory)
        with (
            ThreadPoolExecutor(n) as threads,
            SlotStore(self.folder, slots=slots, keep=1, chunk_bytes=b, writer_threads=p, pool=pool) as store,
        ):
            self.direct_io = store.direct_io
            store.reserve(stream_bytes)
            seconds: list[float] = []
            for _ in range(rounds):
                self._step += 1
                begun = [
                    threads.submit(_write_one, store, ranges, self._step, stream_bytes, timeout_s) for _ in range(n)
                ]
                try:
                    seconds += [written.result(2 * timeout_s) for written in begun]
                except FutureTimeout:
                    raise WaitTimeout(f"{self.folder}: waited {2 * timeout_s:.0f} s for {_describe(key)}") from None
        return seconds


def _write_one(
    store: SlotStore, ranges: list[tuple[int, int]], step: int, stream_bytes: int, timeout_s: float
) -> float:
    """Seconds that one checkpoint takes from its start until it is durable (or a newer one is)."""
    began = time.perf_counter()
    write = store.begin(step, stream_bytes, timeout_s)
    try:
        write.copy_host(ranges, timeout_s)
        write.commit(0, 0, bytes(32), timeout_s)
    finally:
        write.abort()
    return time.perf_counter() - began


def _describe(key: Key) -> str:
    n, p, b = key
    return f"{n} at once, {p} thread{'s' if p > 1 else ''} each, chunks of {format_bytes(b)}"
