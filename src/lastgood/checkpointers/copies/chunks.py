"""How blocks of a state become the chunks of a slot's stream, from host memory and from CUDA devices."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lastgood._lazy import torch
from lastgood.addresses import address_in
from lastgood.checkpointers.copies.device_streams import DeviceStreams
from lastgood.checkpointers.copies.host import CopyFence
from lastgood.state import Layout
from lastgood.state.layout import BLOCK_ALIGNMENT
from lastgood.storage import SlotWrite

__all__ = ["Lander", "copy_through_pool", "fill_chunks", "host_ranges", "stream_buffers"]


@functools.cache
def _padding() -> torch.Tensor:
    """Zeros to write between blocks; kept, as their address is handed on."""
    return torch.zeros(BLOCK_ALIGNMENT, dtype=torch.uint8, device="cpu")


def host_ranges(blocks: Sequence[torch.Tensor], sizes: Sequence[int], *, writes: bool) -> list[tuple[int, int]]:
    """(address, bytes) of each block of host memory and of the padding after it, in stream order.

    For reading, the padding has address 0: the store skips those bytes. Raises CorruptCheckpoint if a block has fewer
    bytes than its size.
    """
    skip = _padding().data_ptr() if writes else 0
    ranges = []
    for block, size in zip(blocks, sizes, strict=True):
        ranges.append((address_in(block, 0, size), size))
        if size % BLOCK_ALIGNMENT:
            ranges.append((skip, BLOCK_ALIGNMENT - size % BLOCK_ALIGNMENT))
    return ranges


class Lander:
    """Hands each chunk to the writers when its copy from a device has arrived, in a thread of its own.

    Made in save(): at the end of a process Python starts no more threads.
    """

    def __init__(self, slot: SlotWrite, timeout_s: float) -> None:
        self.failures: list[BaseException] = []
        self._slot = slot
        self._timeout_s = timeout_s
        self._arrivals: queue.SimpleQueue[tuple[int, list[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._land, name="pccheck-land", daemon=True)
        self._thread.start()

    def expect(self, index: int, events: list[Any]) -> None:
        """Chunk `index` is complete once `events` (of `DeviceStreams.mark`) have happened."""
        self._arrivals.put((index, events))

    def finish(self) -> None:
        """Wait until all expected chunks are handed over."""
        self._arrivals.put(None)
        self._thread.join(self._timeout_s)

    def _land(self) -> None:
        try:
            while (arrival := self._arrivals.get(timeout=self._timeout_s)) is not None:
                index, events = arrival
                for _, event in events:
                    event.synchronize()
                self._slot.put(index)
        except BaseException as error:  # handed to the copying thread, which raises it
            self.failures.append(error)


def copy_through_pool(
    slot: SlotWrite,
    layout: Layout,
    blocks: Sequence[torch.Tensor],
    meta: torch.Tensor,
    pool_memory: torch.Tensor,
    streams: DeviceStreams,
    fence: CopyFence,
    lander: Lander,
    timeout_s: float,
) -> None:
    """Copy a state on CUDA devices (host blocks may be among them) chunk by chunk into the pinned pool.

    Copies go on side streams. The fence opens, for the devices, as soon as the last copy is issued: with a pool as
    large as the state that is long before it has run.
    """
    try:
        buffers = stream_buffers(layout, blocks, meta, lambda number: fence.check.block_copied(number, streams))
        fill_chunks(slot, buffers, layout.stream_bytes + meta.numel(), pool_memory, streams, lander, timeout_s)
        copied = streams.mark()
        fence.open(copied)
        lander.finish()
        if lander.failures:
            raise lander.failures[0]
        for _, event in copied:
            event.synchronize()
        fence.settle()
    except BaseException:
        # The writers must not get a buffer back that a copy is still running into.
        streams.synchronize()
        lander.finish()
        slot.release()
        raise


def fill_chunks(
    slot: SlotWrite,
    buffers: Iterator[torch.Tensor],
    stream_bytes: int,
    pool_memory: torch.Tensor,
    streams: DeviceStreams,
    lander: Lander,
    timeout_s: float,
) -> None:
    """Issue the copies of a stream's `buffers` (uint8 tensors that are not empty) into chunks of the pool.

    Ends early if the lander has failed.
    """
    buffer, position = next(buffers), 0
    remaining = stream_bytes
    while remaining and not lander.failures:
        address, index, length = slot.acquire(timeout_s)
        target = pool_memory[address - pool_memory.data_ptr() :][:length]
        filled = 0
        while filled < length:
            count = min(length - filled, buffer.numel() - position)
            streams.copy(target[filled : filled + count], buffer[position : position + count])
            filled, position = filled + count, position + count
            if position == buffer.numel() and remaining > filled:
                buffer, position = next(buffers), 0
        lander.expect(index, streams.mark())
        remaining -= length


def stream_buffers(
    layout: Layout, blocks: Sequence[torch.Tensor], meta: torch.Tensor, taken: Callable[[int], None] | None = None
) -> Iterator[torch.Tensor]:
    """What a stream consists of, in order: uint8 tensors, of blocks, of the padding after them, and of the layout.

    `taken` is called with the number of each block when the buffer after it is asked for.
    """
    for number, (block, size) in enumerate(zip(blocks, layout.block_bytes, strict=True)):
        yield block
        if taken is not None:
            taken(number)
        if size % BLOCK_ALIGNMENT:
            yield _padding()[: BLOCK_ALIGNMENT - size % BLOCK_ALIGNMENT]
    yield meta
