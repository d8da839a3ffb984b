"""Reads boxes of stored tensors: the chunks that hold them, each checked, and no others.

Rows that are contiguous on both sides go from the chunk straight into host memory. Short rows, and rows for CUDA
devices, go through windows of host memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod

from lastgood._lazy import torch
from lastgood.addresses import address_in, row_addresses
from lastgood.checkpointers.ranks.boxes import Overlap, row_elements, row_offsets
from lastgood.checkpointers.ranks.sharing import Sharing
from lastgood.checkpointers.ranks.windows import Window, WindowBox, through_windows, windows_of
from lastgood.checkpointers.slots.contents import NamedTensor, check_dense, exact_dtype, read_timeout_s
from lastgood.errors import CorruptCheckpoint
from lastgood.state import Layout
from lastgood.state.layout_rules import dtype_named
from lastgood.storage import SlotInfo, SlotView
from lastgood.storage.objects.view import RemoteView
from lastgood.units import MIB

__all__ = ["BoxReader"]

_WINDOW_BYTES = 64 * MIB
_ROW_BYTES = 512
"""Shorter rows are copied by torch out of a window, which is quicker than one range for each."""
_MAX_ROWS = 1 << 16
"""Of one box that is read without a window: each takes a range of some 100 bytes in Python."""


class BoxReader:
    """Reads from one checkpoint of each of several ranks, whose slots the caller holds.

    Raises CorruptCheckpoint, StorageError and WaitTimeout wherever it reads.
    """

    def __init__(
        self,
        views: Sequence[SlotView],
        infos: Sequence[SlotInfo],
        layouts: Sequence[Layout],
        threads: int,
        sharing: Sharing | None = None,
    ) -> None:
        self._views = views
        self._infos = infos
        self._sizes = [layout.block_bytes for layout in layouts]
        self._blocks = [layout.block_offsets() for layout in layouts]
        self._threads = threads
        self._sharing = sharing
        self._rows: dict[int, list[tuple[int, int, int]]] = {}
        """By rank: offset in the stream, bytes, address."""
        self._keep: list[torch.Tensor] = []
        self._boxes: dict[int, list[WindowBox]] = {}
        """By rank: what goes through windows."""
        self.bytes_read = 0
        """Of streams, whole chunks counted as they are read."""

    def want(self, rank: int, tensor: NamedTensor, overlap: Overlap, target: torch.Tensor) -> None:
        """Read a box of a rank's tensor into `target`, in the next `finish`.

        Raises CorruptCheckpoint if the box is not inside both, or the tensor is not of the target's dtype.
        """
        _check_box(tensor, overlap, target)
        # Of an expanded tensor all elements along an axis are one.
        strides = list(zip(overlap.shape, tensor.stride, target.stride(), strict=True))
        shape = tuple(1 if source == ours == 0 else size for size, source, ours in strides)
        overlap = replace(overlap, shape=shape)
        repeated = any(size > 1 and source == 0 for size, (_, source, _) in zip(shape, strides, strict=True))
        if target.device.type == "cpu" and not repeated:
            row, outer = row_elements(overlap, tensor.stride, target.stride())
            rows, size = prod(shape[:outer]), row * tensor.itemsize
            if rows == 1 or (size >= _ROW_BYTES and rows <= _MAX_ROWS):
                _, begins, ends = row_offsets(overlap, tensor.stride, target.stride())
                first = self._begin_of(rank, tensor)
                sources = (begins * tensor.itemsize + first).tolist()
                addresses = row_addresses(target, dtype_named(tensor.dtype), ends, row)
                self._rows.setdefault(rank, []).extend(
                    (source, size, address) for source, address in zip(sources, addresses, strict=True)
                )
                self._keep.append(target)
                return
        self._through_window(rank, tensor, overlap, target)

    def finish(self) -> None:
        """Read what is wanted still."""
        if self._sharing is not None:
            self._read_together(self._sharing)
        for rank, rows in self._rows.items():
            # A row that is wanted twice (tied weights) is read in a second pass.
            while rows:
                taken, rows = _apart(rows)
                self._read_rows(rank, taken)
        self._rows.clear()
        self._keep.clear()
        boxes, self._boxes = self._boxes, {}
        windows = [window for rank, held in boxes.items() for window in windows_of(rank, held, _WINDOW_BYTES)]
        through_windows(windows, self._read_window)

    def _read_together(self, sharing: Sharing) -> None:
        """What other ranks read as well, in the first pass; all of them call this once."""
        self._sharing = None
        reads = []
        for rank, (view, info) in enumerate(zip(self._views, self._infos, strict=True)):
            assert isinstance(view, RemoteView), "only what is fetched is shared"
            taken, self._rows[rank] = _apart(self._rows.get(rank, []))
            reached = begin = taken[0][0] if taken else 0
            ranges: list[tuple[int, int]] = []
            for offset, nbytes, address in taken:
                ranges += [(0, offset - reached), (address, nbytes)]
                reached = offset + nbytes
            reads.append(view.begin_read(info, ranges, offset=begin))
        sharing.pass_on(reads, self._threads)
        for read in reads:
            read.finish(self._threads, read_timeout_s(read.info.stream_bytes))

    def blocks(self, rank: int, numbers: Collection[int]) -> list[torch.Tensor]:
        """Blocks of a rank in fresh memory; those that are not among `numbers` have no bytes."""
        offsets = self._blocks[rank]
        if any(not 0 <= number < len(offsets) for number in numbers):
            raise CorruptCheckpoint(f"{self._infos[rank].path}: blocks {sorted(numbers)[:8]} of {len(offsets)}")
        blocks = [
            torch.empty(size if number in numbers else 0, dtype=torch.uint8, device="cpu")
            for number, size in enumerate(self._sizes[rank])
        ]
        self._read_rows(
            rank,
            [
                (offsets[number], blocks[number].numel(), address_in(blocks[number], 0, blocks[number].numel()))
                for number in sorted(numbers)
            ],
        )
        return blocks

    def span(self, rank: int, tensor: NamedTensor, first: int, nbytes: int) -> torch.Tensor:
        """Bytes of a tensor's block from the byte `first` of the tensor on, in fresh memory."""
        self._check_inside(rank, tensor, first, nbytes)
        scratch = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._read_rows(rank, [(self._begin_of(rank, tensor) + first, nbytes, address_in(scratch, 0, nbytes))])
        return scratch

    def dense_bytes(self, rank: int, tensor: NamedTensor) -> bytes:
        """The elements of a rank's tensor or array, one after another. Raises as `check_dense`."""
        info = self._infos[rank]
        check_dense(tensor, sum(one.stream_bytes for one in self._infos), f"{info.path}: step {info.step}")
        span = self.span(rank, tensor, 0, tensor.end - tensor.offset)
        if not tensor.is_array:
            span = span.view(exact_dtype(tensor.itemsize)).as_strided(tensor.shape, tensor.stride).contiguous()
        return span.numpy().tobytes()

    def _begin_of(self, rank: int, tensor: NamedTensor) -> int:
        return self._blocks[rank][tensor.block] + tensor.offset

    def _read_rows(self, rank: int, rows: Sequence[tuple[int, int, int]]) -> None:
        """Read rows that are sorted and do not overlap; chunks between them are left out."""
        info = self._infos[rank]
        chunk = info.record.chunk_bytes
        at_once = self._views[rank].remote  # one after another, each part would wait for a network
        group: list[tuple[int, int]] = []
        begin = reached = 0
        for offset, nbytes, address in rows:
            if not nbytes:
                continue
            if group and offset // chunk > (reached - 1) // chunk + 1 and not at_once:
                self._read(rank, begin, reached, group)
                group = []
            if not group:
                begin = reached = offset
            if offset > reached:
                group.append((0, offset - reached))
            group.append((address, nbytes))
            reached = offset + nbytes
        if group:
            self._read(rank, begin, reached, group)

    def _read(self, rank: int, begin: int, end: int, ranges: Sequence[tuple[int, int]]) -> None:
        info = self._infos[rank]
        timeout_s = read_timeout_s(end - begin)
        self._views[rank].read_into(info, ranges, self._threads, offset=begin, timeout_s=timeout_s)
        chunk, reached = info.record.chunk_bytes, 0
        for address, nbytes in ranges:
            if address and nbytes:
                first, last = max(reached, begin // chunk), -(-(begin + nbytes) // chunk)
                self.bytes_read += max(0, min(last * chunk, info.stream_bytes) - first * chunk)
                reached = last
            begin += nbytes

    def _through_window(self, rank: int, tensor: NamedTensor, overlap: Overlap, target: torch.Tensor) -> None:
        reach = sum((size - 1) * step for size, step in zip(overlap.shape, tensor.stride, strict=True))
        nbytes = (reach + 1) * tensor.itemsize
        axis = max(range(len(overlap.shape)), key=lambda at: (overlap.shape[at] - 1) * tensor.stride[at], default=None)
        if nbytes > _WINDOW_BYTES and axis is not None and overlap.shape[axis] > 1:
            for half in _halves(overlap, axis):
                self._through_window(rank, tensor, half, target)
            return
        first = sum(begin * step for begin, step in zip(overlap.source, tensor.stride, strict=True)) * tensor.itemsize
        self._check_inside(rank, tensor, first, nbytes)
        part = target
        for at, (begin, size) in enumerate(zip(overlap.target, overlap.shape, strict=True)):
            part = part.narrow(at, begin, size)
        box = WindowBox(self._begin_of(rank, tensor) + first, nbytes, overlap.shape, tensor.stride, part)
        self._boxes.setdefault(rank, []).append(box)

    def _read_window(self, window: Window, memory: torch.Tensor) -> None:
        self._read_rows(window.rank, window.rows(memory))

    def _check_inside(self, rank: int, tensor: NamedTensor, first: int, nbytes: int) -> None:
        if not 0 <= first <= first + nbytes <= tensor.end - tensor.offset:
            raise CorruptCheckpoint(f"{self._infos[rank].path}: {tensor.name} has no {nbytes} bytes at byte {first}")


_Row = tuple[int, int, int]


def _apart(rows: list[_Row]) -> tuple[list[_Row], list[_Row]]:
    """Rows in order that do not overlap, and the others."""
    taken: list[_Row] = []
    left: list[_Row] = []
    reached = 0
    for row in sorted(rows):
        if row[0] >= reached:
            taken.append(row)
            reached = row[0] + row[1]
        else:
            left.append(row)
    return taken, left


def _check_box(tensor: NamedTensor, overlap: Overlap, target: torch.Tensor) -> None:
    """Raise CorruptCheckpoint unless a box lies inside a stored tensor and a target of its dtype."""
    if tensor.is_array or tensor.owner is not None or target.dtype != dtype_named(tensor.dtype):
        raise CorruptCheckpoint(f"{tensor.name}: stored as {tensor.dtype}, wanted as {target.dtype}")
    for begins, sizes in ((overlap.source, tensor.shape), (overlap.target, tuple(target.shape))):
        inside = len(begins) == len(sizes) == len(overlap.shape) and all(
            begin >= 0 and length >= 0 and begin + length <= size
            for begin, length, size in zip(begins, overlap.shape, sizes, strict=True)
        )
        if not inside:
            raise CorruptCheckpoint(f"{tensor.name}: {overlap} is outside of a tensor of {sizes}")


def _halves(overlap: Overlap, axis: int) -> list[Overlap]:
    middle = overlap.shape[axis] // 2
    halves = []
    for begin, size in ((0, middle), (middle, overlap.shape[axis] - middle)):
        moved = [
            tuple(first + begin if at == axis else first for at, first in enumerate(start))
            for start in (overlap.source, overlap.target)
        ]
        shape = tuple(size if at == axis else length for at, length in enumerate(overlap.shape))
        halves.append(Overlap(moved[0], moved[1], shape))
    return halves
