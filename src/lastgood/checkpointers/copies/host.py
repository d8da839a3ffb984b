"""Copies of a flattened state on the host, taken while training goes on."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from lastgood._lazy import torch
from lastgood._native import ChunkPool
from lastgood.checkpointers.copies.copy_check import CopyCheck
from lastgood.checkpointers.copies.device_streams import DeviceStreams, copy_bytes
from lastgood.checkpointers.copies.still_weights import StillBlocks
from lastgood.errors import CheckpointError, StateError, WaitTimeout
from lastgood.host_memory import fresh_memory
from lastgood.state import FlatState

__all__ = [
    "CopyFence",
    "HostSnapshot",
    "KeptPool",
    "PinnedMemory",
    "freeze",
    "host_buffer",
    "make_pool",
]


def freeze(flat: FlatState, still: StillBlocks) -> list[torch.Tensor]:
    """All blocks as they are to be copied from: those that training may change at once are copied here.

    On the CPU now, on CUDA in the order of the current stream.
    """
    count = flat.layout.deferred_blocks
    live = {*range(count), *still.numbers}
    return [block if number in live else block.clone() for number, block in enumerate(flat.blocks)]


def host_buffer(size: int, pinned: bool) -> torch.Tensor:
    """A uint8 host tensor of `size` bytes, page-locked for copies from a CUDA device if asked for."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned, device="cpu")


class PinnedMemory:
    """Page-locked host memory of just the size asked for; torch's own allocator rounds up to a power of two.

    `tensor` starts at a page. Call `release` once no copy into it is in progress. Raises CheckpointError if the driver
    refuses (too much memory locked already).
    """

    def __init__(self, size: int) -> None:
        self.tensor = fresh_memory(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE)
        self.tensor = self.tensor[-self.tensor.data_ptr() % mmap.PAGESIZE :]
        error = torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), self.tensor.numel(), 0)
        if int(error) != 0:
            # It stays the runtime's last error, and torch would blame its next kernel for it.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device="cuda")
            raise CheckpointError(
                f"page-locking {size} bytes of host memory failed: {torch.cuda.cudart().cudaGetErrorString(error)}; "
                "set pool_bytes to less"
            )
        # It holds the memory as long as the pages are locked, also when this object is dropped without `release`.
        self._unlock = weakref.finalize(self, _unlock_pages, self.tensor)
        self._unlock.atexit = False

    def release(self) -> None:
        """Unlock the pages. Safe to call twice."""
        self._unlock()


def _unlock_pages(tensor: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


def make_pool(chunks: int, chunk_bytes: int, *, pinned: bool) -> tuple[ChunkPool, PinnedMemory | None]:
    """Buffers for `chunks` chunks; with `pinned` in page-locked memory, which the caller releases."""
    if not pinned:
        return ChunkPool(0, chunks * chunk_bytes, chunk_bytes), None
    memory = PinnedMemory(chunks * chunk_bytes)
    return ChunkPool(memory.tensor.data_ptr(), chunks * chunk_bytes, chunk_bytes, memory.tensor), memory


class KeptPool:
    """A pool that a process uses again: making one and page-locking it takes as long as writing many chunks.

    At most one is kept, of the newest size. Safe to use from several threads; a fork makes pools of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: tuple[tuple[int, int, int, bool], ChunkPool, PinnedMemory | None] | None = None

    @contextlib.contextmanager
    def use(self, chunks: int, chunk_bytes: int, *, pinned: bool) -> Iterator[tuple[ChunkPool, PinnedMemory | None]]:
        """As `make_pool`. When the block has ended without an error, all buffers must be back; it is kept then."""
        key = (os.getpid(), chunks, chunk_bytes, pinned)
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is None or kept[0] != key:
            _drop(kept)
            kept = (key, *make_pool(chunks, chunk_bytes, pinned=pinned))
        try:
            yield kept[1:]
        except BaseException:
            _drop(kept)
            raise
        with self._lock:
            kept, self._kept = self._kept, kept
        _drop(kept)


def _drop(kept: tuple[tuple[int, int, int, bool], ChunkPool, PinnedMemory | None] | None) -> None:
    """Pages that the parent of a fork has locked are its own."""
    if kept is not None and kept[2] is not None and kept[0][0] == os.getpid():
        kept[2].release()


class CopyFence:
    """Between a background copy and the optimizer: opened when the live bytes may be overwritten.

    Copies from a CUDA device are waited for on the device: its current stream waits for an event, the CPU goes on.

    Made in save(). Its `check` notices changes of deferred blocks that come neither before the save nor from an
    optimizer's step. Whoever copies looks (`CopyCheck.look`) when a group of blocks is copied, before `open`, and
    settles at the end.
    """

    def __init__(self, what: str, flat: FlatState, still: StillBlocks | None = None) -> None:
        self._what = what
        self.still = still or StillBlocks()
        self.check = CopyCheck(flat, [*range(flat.layout.deferred_blocks), *self.still.numbers])
        self._open = threading.Event()
        self._device_events: list[Any] = []

    def open(self, device_events: Sequence[Any] = ()) -> None:
        """Let updates go on, after `device_events` (from `DeviceStreams.mark`) on their devices if there are any."""
        self._device_events = list(device_events)
        self._open.set()

    def wait(self, timeout_s: float) -> list[tuple[Any, Any]]:
        """Return when an update may be issued: CUDA events before and after each wait that a device does for it.

        Raises WaitTimeout, naming what was copied.
        """
        if not self._open.wait(timeout_s):
            raise WaitTimeout(f"waited {timeout_s:.0f} s for {self._what} to be copied off the training's memory")
        self.check.look_at_versions()
        waits = []
        for device, event in self._device_events:
            if event.query():
                continue
            with torch.cuda.device(device):
                before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                stream = torch.cuda.current_stream(device)
                before.record(stream)
                stream.wait_event(event)
                after.record(stream)
            waits.append((before, after))
        return waits

    def settle(self) -> None:
        """Called when all copies have run: raise StateError if a block changed under them."""
        try:
            self.check.settle()
        except StateError:
            if self.check.changed is not None and self.check.changed[0] in self.still.numbers:
                self.still.distrust()
            raise


class HostSnapshot:
    """A whole state in host buffers. Made in save(), filled by `copy` in a background thread.

    On CUDA every copy is issued in save(), on side streams, and the optimizer waits on the device.
    """

    def __init__(
        self, flat: FlatState, buffers: Sequence[torch.Tensor], what: str, still: StillBlocks | None = None
    ) -> None:
        self.layout = flat.layout
        self.buffers = list(buffers)
        self.fence = CopyFence(what, flat, still)
        self._live = {number: flat.blocks[number] for group in self.fence.check.groups for number in group}
        self._copied: list[Any] = []
        self._on_device = any(block.is_cuda for block in flat.blocks)
        if self._on_device:
            blocks = freeze(flat, self.fence.still)
            streams = DeviceStreams(blocks)
            for number, (buffer, block) in enumerate(zip(self.buffers, blocks, strict=True)):
                streams.copy(buffer, block)
                self.fence.check.block_copied(number, streams)
            self._copied = streams.mark()
            self.fence.open(self._copied)
        else:
            for number, block in enumerate(flat.blocks):
                if number not in self._live:
                    copy_bytes(self.buffers[number], block)

    def copy(self) -> None:
        """Return when all bytes are in the buffers; opens the fence on the CPU. Called in a background thread.

        Raises StateError if something else than an optimizer's step changed meanwhile what is copied here.
        """
        if self._on_device:
            for _, event in self._copied:
                event.synchronize()
            self.fence.settle()
            return
        try:
            for number, block in self._live.items():
                copy_bytes(self.buffers[number], block)
                self.fence.check.block_copied(number, copies=self.buffers)
            self.fence.settle()
        finally:
            self.fence.open()
            self._live = {}
