"""Reads a checkpoint into the memory that a training already has: no second copy of the state, no pages to fault in.

A block of a checkpoint goes straight into the live block that holds the same tensors in the same places, if these
are parameters, buffers, optimizer tensors or plain tensors. All others (an optimizer's moments in a fresh process) get
fresh memory, which the optimizer then keeps. Blocks on a CUDA device come through two page-locked windows, so that the
copy to the device runs beside the next read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from mmap import PAGESIZE
from typing import Any

from lastgood._lazy import torch
from lastgood.addresses import address_in
from lastgood.checkpointers.copies.chunks import host_ranges
from lastgood.checkpointers.copies.device_streams import DeviceStreams
from lastgood.checkpointers.copies.host import PinnedMemory
from lastgood.checkpointers.slots.contents import NamedTensor, named_tensors, read_timeout_s
from lastgood.checkpointers.slots.live_tensors import LiveTensors, keeps_its_tensors, parameter_beside
from lastgood.host_memory import fresh_memory
from lastgood.state import Layout, check_tree, load_tree, stateful_paths, unflatten
from lastgood.state.build import tensor_over
from lastgood.state.layout import Node
from lastgood.state.shards import wrap
from lastgood.storage import SlotInfo, SlotView
from lastgood.units import MIB

__all__ = ["InPlace"]

_WINDOW_BYTES = 64 * MIB


class InPlace:
    """One restore of one checkpoint into a live state. Make it (nothing is changed), then `read`, then `load`."""

    def __init__(self, view: SlotView, info: SlotInfo, layout: Layout, live: LiveTensors) -> None:
        self._view = view
        self._info = info
        self._layout = layout
        self._state = state = live.state
        self._where = f"{info.path}, step {info.step}"
        self.targets, self.touches_live = _choose_targets(layout, live)
        self._spread = [live.like(tensor) for tensor in named_tensors(layout) if tensor.shard is not None]
        # Shapes, dtypes and names are known without the data: what does not fit is refused before anything changes.
        tree = self._tree([_host_like(target) for target in self.targets])
        check_tree(state, tree, self._where, stateful_paths(layout))

    def read(self, threads: int) -> None:
        """Fill the targets. Raises CorruptCheckpoint, StorageError, WaitTimeout; live tensors then hold a mixture."""
        layout = self._layout
        if any(target.is_cuda for target in self.targets):
            _read_through_windows(self._view, self._info, layout, self.targets, threads)
            return
        ranges = host_ranges(self.targets, layout.block_bytes, writes=False)
        self._view.read_into(self._info, ranges, threads, timeout_s=read_timeout_s(layout.stream_bytes))

    def load(self) -> None:
        """Give the tree to the state's objects."""
        load_tree(self._state, self._tree(self.targets), self._where)

    def _tree(self, blocks: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The checkpoint's tree over `blocks`; tensors that are spread over ranks as the live ones are."""
        spread = iter(self._spread)

        def leaf(node: Node) -> torch.Tensor | None:
            if node[0] != "H":
                return None
            like = next(spread)
            # Always over the targets: DTensor.from_local would move host memory to the mesh's devices.
            local = tensor_over(self.targets, *node[1][1:])
            return local if like is None else wrap(local, like)

        return unflatten(self._layout, blocks, self._where, leaf)


def _host_like(target: torch.Tensor) -> torch.Tensor:
    """Host memory of the target's size that nothing is ever written to: it takes address space only."""
    return target if target.device.type == "cpu" else torch.empty(target.numel(), dtype=torch.uint8, device="cpu")


def _choose_targets(layout: Layout, own: LiveTensors) -> tuple[list[torch.Tensor], bool]:
    """For each block of the checkpoint the memory it is read into, and whether some of that is live."""
    live, state = own.flat, own.state
    ours = {name for name, part in state.items() if keeps_its_tensors(part)}
    places_of_live = _places(list(own.named.values()), len(live.blocks), ours)
    by_places = {
        (places, size): number
        for number, (places, size) in enumerate(zip(places_of_live, live.layout.block_bytes, strict=True))
        if places
    }
    tensors = named_tensors(layout)
    by_block = defaultdict(list)
    for tensor in tensors:
        by_block[tensor.block].append(tensor)
    targets, touches = [], False
    for number, places in enumerate(_places(tensors, len(layout.block_bytes), ours)):
        size = layout.block_bytes[number]
        found = by_places.get((places, size))
        if places and found is not None and _covered(by_block[number], size):
            targets.append(live.blocks[found])
            touches = True
        else:
            targets.append(_fresh(size, _device_of(places, state)))
    return targets, touches


def _places(tensors: Sequence[NamedTensor], blocks: int, ours: set[str]) -> list[frozenset[NamedTensor]]:
    """What lies in each block, whatever its number; empty if something in it is another part's."""
    found: dict[int, set[NamedTensor]] = defaultdict(set)
    spoilt = set()
    for tensor in tensors:
        if tensor.part not in ours or tensor.is_array:
            spoilt.add(tensor.block)
        found[tensor.block].add(replace(tensor, block=-1))
    return [frozenset() if number in spoilt else frozenset(found[number]) for number in range(blocks)]


def _covered(tensors: Sequence[NamedTensor], size: int) -> bool:
    """Whether the tensors of a block hold each of its bytes: what lies between them is not the state's to overwrite."""
    reached = 0
    for tensor in sorted(tensors, key=lambda one: one.offset):
        if tensor.offset > reached or tensor.nbytes != tensor.end - tensor.offset:
            return False
        reached = max(reached, tensor.end)
    return reached == size


def _device_of(tensors: frozenset[NamedTensor], state: Mapping[str, Any]) -> torch.device:
    """Where an optimizer will want tensors that it does not have yet: beside their parameter, if of its shape."""
    devices = set()
    for tensor in tensors:
        parameter = parameter_beside(state.get(tensor.part), tensor.part, tensor.name, tensor.whole_shape)
        devices.add(torch.device("cpu") if parameter is None else parameter.device)
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


def _fresh(size: int, device: torch.device) -> torch.Tensor:
    """Memory for a block that the training does not have yet."""
    return fresh_memory(size) if device.type == "cpu" else torch.empty(size, dtype=torch.uint8, device=device)


def _read_through_windows(
    view: SlotView, info: SlotInfo, layout: Layout, targets: Sequence[torch.Tensor], threads: int
) -> None:
    chunk = info.record.chunk_bytes
    # A window holds whole chunks, so that none is read twice, and no more than there is.
    size = min(max(1, _WINDOW_BYTES // chunk) * chunk, -(-layout.stream_bytes // PAGESIZE) * PAGESIZE)
    pinned = PinnedMemory(2 * size)
    windows = pinned.tensor[:size], pinned.tensor[size : 2 * size]
    streams = DeviceStreams(targets)
    offsets = layout.block_offsets()
    block = 0
    try:
        for number, begin in enumerate(range(0, layout.stream_bytes, size)):
            window, end = windows[number % 2], min(begin + size, layout.stream_bytes)
            if number >= 2:
                streams.synchronize()  # the copies out of this window, two rounds ago
            ranges = [(address_in(window, 0, end - begin), end - begin)]
            view.read_into(info, ranges, threads, offset=begin, timeout_s=read_timeout_s(size))
            while block < len(targets) and offsets[block] < end:
                target, start = targets[block], offsets[block]
                first, last = max(start, begin), min(start + target.numel(), end)
                if last > first:
                    streams.copy(target[first - start : last - start], window[first - begin : last - begin])
                if start + target.numel() > end:
                    break
                block += 1
    finally:
        streams.synchronize()
        pinned.release()
