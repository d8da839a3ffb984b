"""How blocks of a state become the chunks of a slot's stream, from host memory and from CUDA devices."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lastgood._lazy import lazy_module
from lastgood.checkpointers.base import DEFAULT_TIMEOUT_S
from lastgood.checkpointers.snapshot import CopyFence, copy_bytes
from lastgood.state import Layout
from lastgood.state.layout import BLOCK_ALIGNMENT

if TYPE_CHECKING:
    import torch

    from lastgood.storage import SlotWrite
else:
    torch = lazy_module("torch")

__all__ = ["copy_through_pool", "host_ranges", "padding_block", "pinned_pool_memory"]

_PAGE = 4096


def padding_block() -> torch.Tensor:
    """Zeros to write between blocks."""
    return torch.zeros(BLOCK_ALIGNMENT, dtype=torch.uint8)


def host_ranges(
    blocks: Sequence[torch.Tensor], sizes: Sequence[int], padding: torch.Tensor | None
) -> list[tuple[int, int]]:
    """(address, bytes) of each block of host memory and of the padding behind it, in stream order.

    For writing, the caller keeps `padding` (from `padding_block`) alive as long as the blocks; None, for reading, gives
    address 0, where the store skips bytes.
    """
    skip = 0 if padding is None else padding.data_ptr()
    ranges = []
    for block, size in zip(blocks, sizes, strict=True):
        ranges.append((block.data_ptr(), size))
        if size % BLOCK_ALIGNMENT:
            ranges.append((skip, BLOCK_ALIGNMENT - size % BLOCK_ALIGNMENT))
    return ranges


def pinned_pool_memory(size: int) -> tuple[torch.Tensor, int]:
    """Page-locked host memory, and the first page-aligned address in it with `size` bytes behind it."""
    memory = torch.empty(size + _PAGE, dtype=torch.uint8, pin_memory=True)
    return memory, -(-memory.data_ptr() // _PAGE) * _PAGE


def copy_through_pool(
    slot: SlotWrite,
    layout: Layout,
    blocks: Sequence[torch.Tensor],
    meta: torch.Tensor,
    pool_memory: torch.Tensor,
    ready: Any,
    fence: CopyFence,
) -> None:
    """Copy a state on CUDA devices (host blocks may be among them) chunk by chunk into the pinned pool.

    Copies go on a side stream, after `ready`. The fence opens, for the device, as soon as the last copy is issued: with
    a pool as large as the state that is long before it has run. A second thread hands each chunk to the writers when
    its copy has arrived.
    """
    stream = torch.cuda.Stream()
    stream.wait_event(ready)
    arrivals: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
    failures: list[BaseException] = []

    def land() -> None:
        try:
            while (arrival := arrivals.get(timeout=DEFAULT_TIMEOUT_S)) is not None:
                index, event = arrival
                event.synchronize()
                slot.put(index)
        except BaseException as error:  # handed to the copying thread, which raises it
            failures.append(error)

    lander = threading.Thread(target=land, name="pccheck-land")
    lander.start()
    pieces = _pieces(layout, blocks, meta)
    piece, position = next(pieces), 0
    remaining = layout.stream_bytes + meta.numel()
    last = None
    try:
        with torch.cuda.stream(stream):
            while remaining and not failures:
                address, index, length = slot.acquire(DEFAULT_TIMEOUT_S)
                target = pool_memory[address - pool_memory.data_ptr() :][:length]
                filled = 0
                while filled < length:
                    count = min(length - filled, piece.numel() - position)
                    copy_bytes(target[filled : filled + count], piece[position : position + count])
                    filled, position = filled + count, position + count
                    if position == piece.numel() and remaining > filled:
                        piece, position = next(pieces), 0
                last = torch.cuda.Event()
                last.record(stream)
                arrivals.put((index, last))
                remaining -= length
        fence.open([last])
    except BaseException:
        # The writers must not get a buffer back that a copy is still running into.
        stream.synchronize()
        arrivals.put(None)
        lander.join(DEFAULT_TIMEOUT_S)
        slot.release()
        raise
    arrivals.put(None)
    lander.join(DEFAULT_TIMEOUT_S)
    if failures:
        slot.release()
        raise failures[0]


def _pieces(layout: Layout, blocks: Sequence[torch.Tensor], meta: torch.Tensor) -> Iterator[torch.Tensor]:
    padding = padding_block()
    for block, size in zip(blocks, layout.block_bytes, strict=True):
        yield block
        if size % BLOCK_ALIGNMENT:
            yield padding[: BLOCK_ALIGNMENT - size % BLOCK_ALIGNMENT]
    yield meta
