"""One side of the storage benchmarks: a real slot store that saves from warm memory and reads into warm memory."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
from harness import cannot

from lastgood.storage import SlotStore
from lastgood.storage.reader import READ_THREADS
from lastgood.units import MIB

CHUNK_BYTES = 4 * MIB
WRITER_THREADS = 2
READER_THREADS = READ_THREADS
STREAM_UNIT = math.lcm(WRITER_THREADS, READER_THREADS) * CHUNK_BYTES
"""Sizes are multiples of this, so that all jobs of fio, which have equal parts, move as many bytes as the store."""


def whole_units(size: int) -> int:
    """`size` as the nearest multiple of `STREAM_UNIT`, at least one."""
    return max(1, round(size / STREAM_UNIT)) * STREAM_UNIT


class StoreSide:
    """Two slots that are overwritten in turn, a pool as large as the stream, as PCcheck has it by default."""

    def __init__(self, folder: Path, stream_bytes: int) -> None:
        self.stream_bytes = stream_bytes
        self.store = SlotStore(
            folder,
            slots=2,
            keep=1,
            chunk_bytes=CHUNK_BYTES,
            writer_threads=WRITER_THREADS,
            pool_bytes=stream_bytes,
        )
        if not self.store.direct_io:
            self.store.close()
            cannot(f"{folder}: this file system has no direct I/O, so the page cache would be measured")
        self.store.reserve(stream_bytes)
        # Random, so that no layer below can compress it away.
        self._source = np.frombuffer(np.random.default_rng(0).bytes(stream_bytes), dtype=np.uint8)
        self._target = np.full(stream_bytes, 1, dtype=np.uint8)
        self._step = 0
        for _ in range(2):
            self.save()
        self.read()
        if not np.array_equal(self._source, self._target):
            raise AssertionError(f"{folder}: the store gave back other bytes than it was given")

    def save(self) -> float:
        """Seconds of one checkpoint: void record, flush, copy, checksums, data, flush, commit record, flush."""
        self._step += 1
        begin = time.perf_counter()
        write = self.store.begin(self._step, self.stream_bytes)
        write.copy_host([(self._source.ctypes.data, self.stream_bytes)])
        outcome = write.commit(meta_offset=self.stream_bytes, meta_bytes=0, layout_digest=bytes(32))
        elapsed_s = time.perf_counter() - begin
        if outcome != "durable":
            raise AssertionError(f"step {self._step} is {outcome}, though nothing overtook it")
        return elapsed_s

    def read(self) -> float:
        """Seconds of reading the newest checkpoint, every checksum checked."""
        begin = time.perf_counter()
        info = self.store.committed()[0]
        self.store.read_into(info, [(self._target.ctypes.data, self.stream_bytes)], READER_THREADS)
        return time.perf_counter() - begin

    def close(self) -> None:
        """Release the directory."""
        self.store.close()
