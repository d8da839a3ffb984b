"""The reference to beat: a plain loop of a snapshot buffer and two threads with direct I/O. No checksums, no recovery.

What somebody would write in an afternoon, made as fast as it simply can be. One buffer of the state's size (pinned on
CUDA) and two preallocated files that are written in turn; one checkpoint in progress at a time. A save waits until the
last one is on the disk, and copies every tensor: on CUDA on a side stream, with the optimizer waiting for an event on
the device; on the CPU at once, with all of torch's threads. Then two threads write the buffer in blocks of 4 MiB, and
flush, and one sector is written that says which file is the newest.

It remembers where the tensors are, so it fails on a training that makes new ones; and what is no tensor it leaves out.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from time import perf_counter
from typing import Any, ClassVar

import torch

from lastgood.checkpointers.base import DEFAULT_TIMEOUT_S, Checkpointer
from lastgood.checkpointers.copies.host import PinnedMemory
from lastgood.checkpointers.events import CheckpointEvent, Outcome
from lastgood.checkpointers.options import BaseOptions
from lastgood.errors import NoCheckpoint, StorageError, WaitTimeout
from lastgood.state import flatten
from lastgood.units import MIB

_SECTOR = 4096


class PlainLoopOptions(BaseOptions):
    """As large as PCcheck's chunks and as many threads."""

    writer_threads: int = 2
    chunk_bytes: int = 4 * MIB

    def host_bytes(self, state_bytes: int) -> int:
        """The snapshot buffer."""
        return state_bytes


class PlainLoop(Checkpointer):
    """One snapshot, two threads, two files."""

    name: ClassVar[str] = "plain_loop"
    Options: ClassVar[type[BaseOptions]] = PlainLoopOptions

    def __init__(self, directory: Any, options: PlainLoopOptions | None = None) -> None:
        super().__init__(directory, options)
        self._pinned: PinnedMemory | None = None
        self.knobs = options or PlainLoopOptions()
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(part of the buffer, live tensor), both as bytes."""
        self._memory: Any = None
        self._written: memoryview = memoryview(b"")
        self._descriptors: list[int] = []
        self._commit_descriptor = -1
        self._stream: Any = None
        self._copied: Any = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="plain-loop")
        self._writers = ThreadPoolExecutor(self.knobs.writer_threads, thread_name_prefix="plain-loop-writer")
        self._under_way: Future[None] | None = None
        self._saves = 0
        self._latest: int | None = None

    # -- life ------------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Once, at the first save: by then the optimizer has made its tensors. Files of an earlier run serve again."""
        flat = flatten(self.state)
        size = -(-flat.layout.stream_bytes // _SECTOR) * _SECTOR
        on_device = any(block.is_cuda for block in flat.blocks)
        if on_device:
            self._stream = torch.cuda.Stream()
            self._pinned = PinnedMemory(size)
            self._memory = self._pinned.tensor[:size]
            self._written = memoryview(self._memory.numpy())
        else:
            # A mapping starts at a page, as direct I/O asks.
            mapping = mmap.mmap(-1, size)
            self._memory = torch.frombuffer(mapping, dtype=torch.uint8)
            self._written = memoryview(mapping)
        self._memory.zero_()
        offsets = flat.layout.block_offsets()
        self._pairs = [
            (self._memory[offset : offset + block.numel()], block)
            for offset, block in zip(offsets, flat.blocks, strict=True)
        ]
        self.directory.mkdir(parents=True, exist_ok=True)
        for number in range(2):
            descriptor = self._open(f"plain-{number}.bin")
            self._descriptors.append(descriptor)
            if os.fstat(descriptor).st_size != size:
                os.ftruncate(descriptor, 0)
                os.posix_fallocate(descriptor, 0, size)
                self._write_all(descriptor)
                os.fsync(descriptor)
        self._commit_descriptor = self._open("plain-commit.bin")
        self._commit(0)

    def _open(self, name: str) -> int:
        return os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT, 0o644)

    def _close(self) -> None:
        try:
            self.drain()
        finally:
            for pool in (self._background, self._writers):
                pool.shutdown(wait=True, cancel_futures=True)
            for descriptor in (*self._descriptors, self._commit_descriptor):
                if descriptor >= 0:
                    os.close(descriptor)
            self._descriptors, self._commit_descriptor = [], -1
            self._pairs, self._copied = [], None
            if self._pinned is not None:
                self._pinned.release()
                self._pinned = None

    def storage_facts(self) -> dict[str, Any]:
        """Always direct."""
        return {"direct_io": True, "durability": "data, fdatasync, commit sector, fdatasync"}

    # -- saving ----------------------------------------------------------------------------------------------------

    def _save(self, event: CheckpointEvent) -> None:
        """Wait for the checkpoint before, copy or have copied, and return."""
        if not self._pairs:
            self._make_room()
        self._wait(DEFAULT_TIMEOUT_S)
        self._copy()
        self._saves += 1
        self._under_way = self._background.submit(self._persist, event, self._saves % 2)

    def _copy(self) -> None:
        if self._stream is None:
            for target, source in self._pairs:
                target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source in self._pairs:
                target.copy_(source, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _persist(self, event: CheckpointEvent, number: int) -> None:
        try:
            if self._copied is not None:
                self._copied.synchronize()
            event.copied_s = perf_counter()
            descriptor = self._descriptors[number]
            self._write_all(descriptor)
            os.fdatasync(descriptor)
            self._commit(event.step, number)
        except Exception as error:  # this thread has no caller
            self._fail(event, error)
            return
        event.bytes_written = len(self._written) + _SECTOR
        event.finished_s = perf_counter()
        event.outcome = Outcome.DURABLE
        self._latest = event.step

    def _write_all(self, descriptor: int) -> None:
        """Every thread takes the next block until none is left; the interpreter's lock is free while it is written."""
        offsets = iter(range(0, len(self._written), self.knobs.chunk_bytes))
        for writer in [
            self._writers.submit(self._write_blocks, descriptor, offsets) for _ in range(self.knobs.writer_threads)
        ]:
            writer.result(DEFAULT_TIMEOUT_S)

    def _write_blocks(self, descriptor: int, offsets: Iterator[int]) -> None:
        for offset in offsets:
            block = self._written[offset : offset + self.knobs.chunk_bytes]
            if os.pwrite(descriptor, block, offset) != len(block):
                raise StorageError(f"{self.directory}: a short write at offset {offset}")

    def _commit(self, step: int, number: int = 0) -> None:
        with mmap.mmap(-1, _SECTOR) as sector:
            sector[:16] = step.to_bytes(8, "little") + number.to_bytes(8, "little")
            os.pwrite(self._commit_descriptor, sector, 0)
        os.fdatasync(self._commit_descriptor)

    def before_update(self) -> None:
        """On CUDA: the current stream waits until the last copy has run. On the CPU the copy is done already."""
        if self._copied is None or self._copied.query():
            return
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream()
        before.record(stream)
        stream.wait_event(self._copied)
        after.record(stream)
        self._hooks.device_waits.append((before, after))

    def _wait(self, timeout_s: float) -> None:
        if self._under_way is None:
            return
        try:
            self._under_way.result(timeout_s)
        except FutureTimeout:
            raise WaitTimeout(f"waited {timeout_s:.0f} s for the plain loop's last checkpoint") from None
        self._under_way = None

    def drain(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait for the one that is in progress."""
        self._wait(timeout_s)

    def latest(self) -> int | None:
        """The last step that this object made durable."""
        return self._latest

    def restore(self, state: Mapping[str, Any], step: int | None = None) -> int:
        """There is no recovery."""
        del state, step
        raise NoCheckpoint(f"{self.directory}: the plain loop cannot restore")
