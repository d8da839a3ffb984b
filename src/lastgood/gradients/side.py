"""A rank's side record: all of its state that gradients do not carry, in one piece of bytes for every saved step.

That is the state without the parameters that the optimizer updates and without the optimizer's own tensors: buffers of
modules, random generators, schedules, scalers, data cursors, plain values, hyperparameters. A restore puts it together
with what shadows hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from lastgood._lazy import lazy_module
from lastgood.errors import CorruptCheckpoint, MismatchError
from lastgood.gradients.layout import GradientLayout
from lastgood.gradients.tracked import PARAMETER, Tracked
from lastgood.state import Layout, flatten, unflatten
from lastgood.state.layout import BLOCK_ALIGNMENT, MAX_LAYOUT_BYTES
from lastgood.state.shards import is_sharded, local_part, wrap

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

__all__ = ["Arrival", "SideRecords", "open_side", "restored_tree"]

_VERSION = 1
_LENGTH_BYTES = 8


class SideRecords:
    """Takes side records of one training."""

    def __init__(self, state: Mapping[str, Any], tracked: Tracked, layout: GradientLayout, rank: int) -> None:
        self._state = state
        self._tracked = tracked
        self.layout = {"version": _VERSION, "rank": rank, "gradients": layout.to_data()}
        """What does not change from step to step; goes with the first record of a connection."""

    def take(self) -> tuple[memoryview, Any]:
        """Copy what there is now: the record, and what to `synchronize` with before it is whole (None: it is).

        Raises StateError for what cannot be stored.
        """
        flat = flatten(reduced_state(self._state, self._tracked))
        text = flat.layout.to_json()
        size = _LENGTH_BYTES + len(text)
        devices = {block.device for block in flat.blocks if block.is_cuda}
        memory = torch.empty(size + flat.layout.stream_bytes, dtype=torch.uint8, pin_memory=bool(devices))
        view = memoryview(memory.numpy().data)
        view[:size] = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        placed = zip(flat.layout.block_offsets(), flat.blocks, strict=True)
        for device, run in groupby(placed, key=lambda one: one[1].device):
            offsets, blocks = zip(*run, strict=True)
            # From a device in one copy: there may be hundreds, and they follow each other in the stream.
            joined = blocks[0] if len(blocks) == 1 else _joined(blocks)
            begin = size + offsets[0]
            memory[begin : begin + joined.numel()].copy_(joined, non_blocking=device.type == "cuda")
        return view, Arrival(devices) if devices else None


class Arrival:
    """All that the current streams of these CUDA devices were given so far.

    The current device need not be among them: a training may name its device everywhere, and never set it.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._events = []
        for device in devices:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    def synchronize(self) -> None:
        """Return when it is done."""
        for event in self._events:
            event.synchronize()


def _joined(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Blocks one after another, each padded to the alignment that blocks have in a stream."""
    pad = torch.zeros(BLOCK_ALIGNMENT, dtype=torch.uint8, device=blocks[0].device)
    pieces = [piece for block in blocks for piece in (block, pad[: -block.numel() % BLOCK_ALIGNMENT])]
    return torch.cat(pieces[:-1])


def reduced_state(state: Mapping[str, Any], tracked: Tracked) -> dict[str, Any]:
    """The state without what gradients carry; plain containers in place of the modules and of the optimizer."""
    reduced = dict(state)
    places = {_place(local_part(parameter)) for parameter in tracked.parameters}
    for name, part in state.items():
        if isinstance(part, torch.nn.Module):
            reduced[name] = {key: value for key, value in part.state_dict().items() if not _is_updated(value, places)}
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in tracked.optimizer.param_groups
    ]
    reduced[tracked.part] = groups
    return reduced


def _is_updated(value: Any, places: set[tuple[int, int, Any]]) -> bool:
    return isinstance(value, torch.Tensor) and _place(local_part(value)) in places


def _place(tensor: torch.Tensor) -> tuple[int, int, Any]:
    # Tensors without elements all lie at address 0, and hold nothing that could be lost.
    return (tensor.data_ptr(), tensor.nbytes, tensor.device if tensor.numel() else None)


# -- back --------------------------------------------------------------------------------------------------------------


def open_side(record: bytearray, where: str) -> dict[str, Any]:
    """The reduced state that a side record holds. Raises CorruptCheckpoint, naming `where`."""
    size = int.from_bytes(record[:_LENGTH_BYTES], "little")
    if len(record) < _LENGTH_BYTES or size > min(len(record) - _LENGTH_BYTES, MAX_LAYOUT_BYTES):
        raise CorruptCheckpoint(f"{where}: a side record of {len(record)} bytes declares a layout of {size}")
    begin = _LENGTH_BYTES + size
    layout = Layout.from_json(bytes(record[_LENGTH_BYTES:begin]), where)
    if layout.stream_bytes != len(record) - begin:
        raise CorruptCheckpoint(
            f"{where}: a side record holds {len(record) - begin} bytes, and its layout needs {layout.stream_bytes}"
        )
    # A tensor of its own begins at an address that suits every dtype; the record's bytes behind the text do not.
    memory = torch.empty(layout.stream_bytes, dtype=torch.uint8)
    memoryview(memory.numpy().data)[:] = record[begin:]
    blocks = [memory[at : at + size] for at, size in zip(layout.block_offsets(), layout.block_bytes, strict=True)]
    return unflatten(layout, blocks, where)


def restored_tree(
    state: Mapping[str, Any],
    tracked: Tracked,
    side: Mapping[str, Any],
    tensors: Mapping[tuple[int, str], torch.Tensor],
    where: str,
) -> dict[str, Any]:
    """The whole state's tree, as `apply_tree` takes it.

    `tensors` are what shadows gave, by (parameter's index on this rank, key), shaped as this rank's own. Raises
    MismatchError where they do not fit the state.
    """
    tree = dict(side)
    by_place = {_place(local_part(parameter)): index for index, parameter in enumerate(tracked.parameters)}
    for name, part in state.items():
        if not isinstance(part, torch.nn.Module) or name not in side:
            continue
        entries = {}
        for key, value in part.state_dict().items():
            index = by_place.get(_place(local_part(value))) if isinstance(value, torch.Tensor) else None
            if index is not None:
                entries[key] = _as_live(value, tensors[index, PARAMETER])
            elif key in side[name]:
                entries[key] = side[name][key]
        # What the model lacks stays in, so that it is named.
        tree[name] = entries | {key: value for key, value in side[name].items() if key not in entries}
    tree[tracked.part] = _optimizer_tree(tracked, side.get(tracked.part), tensors, where)
    return tree


def _optimizer_tree(
    tracked: Tracked, groups: Any, tensors: Mapping[tuple[int, str], torch.Tensor], where: str
) -> dict[str, Any]:
    live = tracked.optimizer.param_groups
    if not isinstance(groups, list) or len(groups) != len(live):
        raise MismatchError(f"{where}: the checkpoint's optimizer has other groups than {tracked.part}'s {len(live)}")
    restored: dict[int, dict[str, Any]] = {}
    for (index, key), tensor in tensors.items():
        if key != PARAMETER:
            restored.setdefault(index, {})[key] = _as_live(tracked.parameters[index], tensor)
    first, numbered = 0, []
    for group, own in zip(groups, live, strict=True):
        count = len(own["params"])
        numbered.append({**group, "params": list(range(first, first + count))})
        first += count
    return {"state": restored, "param_groups": numbered}


def _as_live(live: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
    """Spread as the live tensor is, where it is, and where the restored one is its part."""
    if is_sharded(live) and restored.shape == local_part(live).shape:
        return wrap(restored, live)
    return restored
