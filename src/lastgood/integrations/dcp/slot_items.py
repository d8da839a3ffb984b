"""One rank's items of a DCP plan in one slot file: device or host memory, pool, direct I/O, with a checksum per chunk.

`RankStream` holds the items one after another, byte items first, then a layout that names them (`lastgood inspect`
shows it). A tensor is resolved when its turn comes, so that never more than a group of them is held beside the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from lastgood.addresses import address_in
from lastgood.checkpointers.copies.chunks import Lander, fill_chunks
from lastgood.checkpointers.copies.device_streams import DeviceStreams
from lastgood.checkpointers.copies.host import KeptPool
from lastgood.errors import StateError
from lastgood.files import ReadableBy
from lastgood.integrations.dcp.byte_items import check_readable
from lastgood.state import Layout
from lastgood.state.layout import BLOCK_ALIGNMENT
from lastgood.storage import files
from lastgood.storage import format as fmt
from lastgood.storage.standalone_slot import ROOT, StandaloneSlot
from lastgood.units import MIB

__all__ = ["CHUNK_BYTES", "TRANSFORM", "Place", "RankStream", "SlotOptions", "write_slot_file"]

TRANSFORM = "lastgood.slot"
"""Stands in DCP's metadata beside each item, so that torch's own reader refuses what it cannot read."""
CHUNK_BYTES = 4 * MIB
_pool = KeptPool()
_GROUP_BYTES = 32 * MIB
"""Host tensors that are handed over at once."""


@dataclass(frozen=True)
class SlotOptions:
    """How a slot file is written."""

    writer_threads: int
    pool_bytes: int
    timeout_s: float
    readable_by: ReadableBy
    allow: tuple[tuple[str, str], ...]
    """Names, (module, name), that byte items may hold beside plain values."""


@dataclass(frozen=True)
class Place:
    """Where an item lies: what a rank tells rank 0."""

    info: _StorageInfo
    """For DCP's metadata."""
    sums: tuple[int, int] | None = None
    """Bytes and CRC32C of the file, if it has no checksums of its own."""


@dataclass(frozen=True)
class _Item:
    """One item that has bytes, and what it is planned as."""

    write: WriteItem
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    content: torch.Tensor | None = None
    """Of a byte item."""


class RankStream:
    """All items of a rank's plan as one stream: the items that have bytes, each at a whole block, then the layout.

    Raises StateError for what has no plain bytes, or is not what the plan says.
    """

    def __init__(self, plan: SavePlan, planner: SavePlanner, options: SlotOptions) -> None:
        ordered = sorted(plan.items, key=lambda one: one.type != WriteItemType.BYTE_IO)
        self._planner = planner
        self.items = [_planned(item, planner, options) for item in ordered]
        self.held = [item for item in self.items if item.nbytes]
        """Those that have bytes."""
        self.layout = _layout(self.held)
        self.meta = torch.frombuffer(bytearray(self.layout.to_json()), dtype=torch.uint8)
        self.on_device = torch.cuda.is_available() and any(_on_device(item, planner) for item in self.held)
        self.nbytes = self.layout.stream_bytes + self.meta.numel()

    def buffers(self, seen: Callable[[torch.Tensor], object] | None = None) -> Iterator[torch.Tensor]:
        """Its bytes, tensor after tensor, wherever they lie. `seen` is called with each tensor before it is read."""
        for item in self.held:
            tensor = _tensor(item, self._planner)
            if seen is not None:
                seen(tensor)
            yield _bytes_of(tensor)
            if item.nbytes % BLOCK_ALIGNMENT:
                yield _PADDING[: BLOCK_ALIGNMENT - item.nbytes % BLOCK_ALIGNMENT]
        yield self.meta

    def results(self, file: str) -> list[WriteResult]:
        """Where each item lies in a stream of that name."""
        offsets = dict(zip(map(id, self.held), self.layout.block_offsets(), strict=True))
        return [
            WriteResult(
                item.write.index,
                item.nbytes,
                Place(_StorageInfo(file, offsets.get(id(item), 0), item.nbytes, transform_descriptors=[TRANSFORM])),
            )
            for item in self.items
        ]


def write_slot_file(
    path: Path, plan: SavePlan, planner: SavePlanner, job: fmt.Job, options: SlotOptions
) -> list[WriteResult]:
    """Write all items of a plan into the file `path`, which appears when it is durable; says where each lies.

    Raises StateError as `RankStream`; CheckpointError.
    """
    stream = RankStream(plan, planner, options)
    chunks = min(options.pool_bytes // CHUNK_BYTES, -(-stream.nbytes // CHUNK_BYTES))
    chunks = max(chunks, options.writer_threads + 1)
    with _pool.use(chunks, CHUNK_BYTES, pinned=stream.on_device) as (pool, pinned):
        slot = StandaloneSlot(
            path,
            job=job,
            step=0,
            stream_bytes=stream.nbytes,
            pool=pool,
            writer_threads=options.writer_threads,
            direct_io=files.direct_io_works(path.parent),
            mode=options.readable_by.file_mode,
        )
        try:
            if pinned is None:
                _copy_from_host(slot, stream, options.timeout_s)
            else:
                _copy_from_devices(slot, stream, pinned.tensor, options.timeout_s)
            layout = stream.layout
            slot.write.commit(layout.stream_bytes, stream.meta.numel(), layout.digest(), options.timeout_s)
            slot.publish()
        except BaseException:
            slot.discard()
            raise
    return stream.results(path.name)


def _planned(item: WriteItem, planner: SavePlanner, options: SlotOptions) -> _Item:
    if item.type == WriteItemType.BYTE_IO:
        stream = planner.resolve_data(item)
        if isinstance(stream, torch.Tensor):
            raise StateError(f"{item.index.fqn}: planned as bytes, and the planner gave a tensor")
        # Not its buffer: Python 3.13 complains if both go in a circle of an error's frames, the stream first.
        content = stream.getvalue()
        check_readable(content, item.index.fqn, options.allow)
        held = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else None
        return _Item(item, torch.uint8, (len(content),), len(content), held)
    data = item.tensor_data
    if data is None:
        raise StateError(f"{item.index.fqn}: planned as a tensor without a description")
    dtype, shape = data.properties.dtype, tuple(data.chunk.sizes)
    if data.properties.layout is not torch.strided or str(dtype).startswith("torch.q"):
        raise StateError(
            f"{item.index.fqn}: a tensor of {data.properties.layout} and {dtype} has no plain bytes; save it with "
            'layout="dcp"'
        )
    return _Item(item, dtype, shape, prod(shape) * dtype.itemsize)


def _layout(items: Sequence[_Item]) -> Layout:
    """One block for each item, in order."""
    nodes = []
    for block, item in enumerate(items):
        index = item.write.index
        place = "" if not index.offset or not any(index.offset) else f"@{','.join(map(str, index.offset))}"
        strides = [prod(item.shape[axis + 1 :]) for axis in range(len(item.shape))]
        dtype = str(item.dtype).removeprefix("torch.")
        nodes.append([["s", f"{index.fqn}{place}"], ["T", block, 0, dtype, list(item.shape), strides]])
    tree = ["d", [[["s", ROOT], ["d", nodes]]]]
    return Layout(tree, tuple(item.nbytes for item in items), 0)


def _tensor(item: _Item, planner: SavePlanner) -> torch.Tensor:
    """The tensor itself, wherever it lies. Raises StateError if it is not what the plan says."""
    if item.content is not None:
        return item.content
    found = planner.resolve_data(item.write)
    if not isinstance(found, torch.Tensor) or found.dtype != item.dtype or tuple(found.shape) != item.shape:
        given = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise StateError(
            f"{item.write.index.fqn}: planned as {item.dtype} {item.shape}, and the planner gave {given}; a planner "
            "that changes tensors must state that in its plan"
        )
    if found.device.type not in ("cpu", "cuda") or type(found.detach()) not in (torch.Tensor, torch.nn.Parameter):
        raise StateError(
            f"{item.write.index.fqn}: a {type(found).__name__} on {found.device} has no plain bytes here; save it with "
            'layout="dcp"'
        )
    return found.detach().resolve_conj().resolve_neg().contiguous()


def _on_device(item: _Item, planner: SavePlanner) -> bool:
    found = None if item.content is not None else planner.resolve_data(item.write)
    return isinstance(found, torch.Tensor) and found.is_cuda


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


_PADDING = torch.zeros(BLOCK_ALIGNMENT, dtype=torch.uint8, device="cpu")


def _copy_from_host(slot: StandaloneSlot, stream: RankStream, timeout_s: float) -> None:
    ranges: list[tuple[int, int]] = []
    keep: list[torch.Tensor] = []
    waiting = 0
    for buffer in stream.buffers():
        keep.append(buffer)
        ranges.append((address_in(buffer, 0, buffer.numel()), buffer.numel()))
        waiting += buffer.numel()
        if waiting >= _GROUP_BYTES:
            slot.write.copy_host(ranges, timeout_s)
            ranges, keep, waiting = [], [], 0
    if ranges:
        slot.write.copy_host(ranges, timeout_s)


def _copy_from_devices(slot: StandaloneSlot, stream: RankStream, pool_memory: torch.Tensor, timeout_s: float) -> None:
    streams = DeviceStreams([])

    def seen(tensor: torch.Tensor) -> None:
        if tensor.is_cuda:
            streams.follow(tensor.device)  # after what made it

    lander = Lander(slot.write, timeout_s)
    try:
        fill_chunks(slot.write, stream.buffers(seen), stream.nbytes, pool_memory, streams, lander, timeout_s)
        lander.finish()
        if lander.failures:
            raise lander.failures[0]
    except BaseException:
        # The writers must not get a buffer back that a copy is still running into.
        streams.synchronize()
        lander.finish()
        slot.write.release()
        raise
