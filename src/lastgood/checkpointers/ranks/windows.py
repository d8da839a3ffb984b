"""Boxes that cannot be read straight into their places go through windows of host memory.

There are two windows: while the boxes of one are copied to where they belong, a thread reads the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lastgood.addresses import address_in
from lastgood.checkpointers.copies.host import PinnedMemory, host_buffer
from lastgood.checkpointers.slots.contents import exact_dtype
from lastgood.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = ["Window", "WindowBox", "through_windows", "windows_of"]

_ALIGNMENT = 16
"""A window begins at a multiple of the largest element's size, so that elements in it lie as they do in the stream."""


@dataclass(frozen=True)
class WindowBox:
    """A box of a stored tensor, and where it goes."""

    begin: int
    """Of its first element in the stream, in bytes."""
    nbytes: int
    """Up to the end of its last element, with all that lies between."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In the stream, in elements."""
    target: torch.Tensor
    """Of this shape; its elements may be read as any dtype of their size."""

    def copy(self, window: torch.Tensor, begin: int) -> None:
        """Copy it out of a window that begins at byte `begin` of the stream. Returns when it is done, also on CUDA."""
        kind = exact_dtype(self.target.element_size())
        held = window[self.begin - begin : self.begin - begin + self.nbytes]
        if held.storage_offset() % kind.itemsize:
            held = held.clone()
        self.target.view(kind).copy_(held.view(kind).as_strided(self.shape, self.stride))


@dataclass(frozen=True)
class Window:
    """A stretch of one rank's stream, and the boxes in it."""

    rank: int
    begin: int
    end: int
    boxes: tuple[WindowBox, ...]

    def rows(self, memory: torch.Tensor) -> list[tuple[int, int, int]]:
        """What is to be read for it: offset in the stream, bytes, address in `memory`; sorted, without overlaps."""
        stretches: list[list[int]] = []
        for box in self.boxes:
            if stretches and box.begin <= stretches[-1][1]:
                stretches[-1][1] = max(stretches[-1][1], box.begin + box.nbytes)
            else:
                stretches.append([box.begin, box.begin + box.nbytes])
        return [
            (first, last - first, address_in(memory, first - self.begin, last - first)) for first, last in stretches
        ]


def windows_of(rank: int, boxes: Sequence[WindowBox], most_bytes: int) -> list[Window]:
    """Boxes of a rank in windows of at most `most_bytes` (or one box), in the order of the stream.

    Boxes that lie close together share a window, so that a chunk with many of them is read once.
    """
    found: list[Window] = []
    held: list[WindowBox] = []
    begin = end = 0
    for box in sorted(boxes, key=lambda box: box.begin):
        if held and max(end, box.begin + box.nbytes) - begin > most_bytes:
            found.append(Window(rank, begin, end, tuple(held)))
            held = []
        if not held:
            begin, end = box.begin - box.begin % _ALIGNMENT, 0
        held.append(box)
        end = max(end, box.begin + box.nbytes)
    if held:
        found.append(Window(rank, begin, end, tuple(held)))
    return found


def through_windows(windows: Sequence[Window], read: Callable[[Window, torch.Tensor], None]) -> None:
    """Call `read` for each window, with memory that it fills, and copy the boxes.

    `read` runs in a thread, one call at a time. Raises what it raises; nothing is read or copied afterwards.
    """
    if not windows:
        return
    size = max(window.end - window.begin for window in windows)
    on_device = any(box.target.is_cuda for window in windows for box in window.boxes)
    with (
        _memory(size, min(2, len(windows)), pinned=on_device) as memories,
        ThreadPoolExecutor(1, thread_name_prefix="lastgood-window") as thread,
    ):
        reading = thread.submit(read, windows[0], memories[0])
        for number, window in enumerate(windows):
            reading.result()
            if number + 1 < len(windows):
                reading = thread.submit(read, windows[number + 1], memories[(number + 1) % 2])
            for box in window.boxes:
                box.copy(memories[number % 2], window.begin)


@contextlib.contextmanager
def _memory(size: int, count: int, *, pinned: bool) -> Iterator[list[torch.Tensor]]:
    """Windows of `size` bytes; page-locked, if that is asked for and the driver has enough to give."""
    size = -(-size // _ALIGNMENT) * _ALIGNMENT
    locked = None
    if pinned:
        with contextlib.suppress(CheckpointError):
            locked = PinnedMemory(count * size)
    try:
        memory = host_buffer(count * size, pinned=False) if locked is None else locked.tensor
        yield [memory[number * size : (number + 1) * size] for number in range(count)]
    finally:
        if locked is not None:
            locked.release()
