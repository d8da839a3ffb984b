"""A rank's side record: all of its state that gradients do not carry, as one run of bytes for every saved step.

That is the state without the parameters that the optimizer updates and without the optimizer's own tensors: buffers of
modules, random generators, schedules, scalers, data cursors, plain values, hyperparameters. A restore puts it together
with what shadows hold.

A record is sections one after another, each a length of 8 bytes, as many bytes of layout, and the layout's stream. Each
is a mapping of parts of the state; together they are all of it. Version 1 had one section.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from lastgood._lazy import torch
from lastgood.errors import CorruptCheckpoint, MismatchError
from lastgood.gradients.layout.layout import GradientLayout
from lastgood.gradients.trainer.parameters import PARAMETER, TrackedParameters
from lastgood.gradients.trainer.record_sections import LENGTH_BYTES, ModuleSection, Section, place_of
from lastgood.state import Layout, unflatten
from lastgood.state.layout import MAX_LAYOUT_BYTES
from lastgood.state.shards import is_sharded, local_part, wrap

__all__ = ["SIDE_VERSIONS", "Arrival", "SideRecords", "open_side", "record_of", "restored_tree", "side_layout"]

SIDE_VERSIONS = (1, 2)
"""That `open_side` reads; the last one is written."""


def side_layout(layout: GradientLayout, rank: int) -> dict[str, Any]:
    """`Side.layout` of a rank's records."""
    return {"version": SIDE_VERSIONS[-1], "rank": rank, "gradients": layout.to_data()}


class SideRecords:
    """Takes side records of one training."""

    def __init__(self, state: Mapping[str, Any], tracked: TrackedParameters, layout: GradientLayout, rank: int) -> None:
        self._state = state
        self._tracked = tracked
        self._modules: dict[str, ModuleSection] = {}
        self.layout = side_layout(layout, rank)
        """What does not change from step to step; goes with the first record of a connection."""

    def take(self) -> tuple[memoryview, Any]:
        """Copy what there is now: the record, and what to `synchronize` with before it is complete (None: it is).

        Raises StateError for what cannot be stored.
        """
        return record_of(self._sections())

    def _sections(self) -> list[Section]:
        plain: dict[str, Any] = {}
        sections = []
        for name, part in self._state.items():
            if isinstance(part, torch.nn.Module):
                known = self._modules.get(name)
                if known is None or known.module is not part:
                    known = self._modules[name] = ModuleSection(name, part, self._tracked)
                sections.append(known.take())
            elif name == self._tracked.part:
                plain[name] = [
                    {key: value for key, value in group.items() if key != "params"}
                    for group in self._tracked.optimizer.param_groups
                ]
            else:
                plain[name] = part
        return [Section.of(plain), *sections]


def record_of(sections: Sequence[Section]) -> tuple[memoryview, Any]:
    """Copy sections into one record: the record, and what to `synchronize` with before it is complete (None: it is)."""
    devices = {device for section in sections for device in section.devices}
    memory = torch.empty(
        sum(section.nbytes for section in sections), dtype=torch.uint8, pin_memory=bool(devices), device="cpu"
    )
    view = memoryview(memory.numpy().data)
    at = 0
    for section in sections:
        head = len(section.head)
        view[at : at + head] = section.head
        _copy_stream(section, memory[at + head : at + section.nbytes])
        at += section.nbytes
    return view, Arrival(devices) if devices else None


def _copy_stream(section: Section, memory: torch.Tensor) -> None:
    """Copy all blocks to where they lie in the stream, those of a device in one go: there may be hundreds."""
    for device, run in groupby(section.placed, key=lambda one: one[1].device):
        begins, blocks = zip(*run, strict=True)
        begin, end = begins[0], begins[-1] + blocks[-1].numel()
        if device.type == "cpu":
            torch.cat(blocks, out=memory[begin:end])
        else:
            memory[begin:end].copy_(blocks[0] if len(blocks) == 1 else torch.cat(blocks), non_blocking=True)


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


# -- back --------------------------------------------------------------------------------------------------------------


def open_side(record: bytearray, where: str) -> dict[str, Any]:
    """The reduced state that a side record holds. Raises CorruptCheckpoint, naming `where`."""
    found: dict[str, Any] = {}
    at = 0
    while at < len(record):
        parts, at = _open_section(record, at, where)
        if twice := found.keys() & parts.keys():
            raise CorruptCheckpoint(f"{where}: a side record holds {', '.join(sorted(map(str, twice)))} twice")
        found |= parts
    if not found:
        raise CorruptCheckpoint(f"{where}: a side record of {len(record)} bytes holds no part of a state")
    return found


def _open_section(record: bytearray, at: int, where: str) -> tuple[dict[str, Any], int]:
    """The parts in the section that begins at byte `at`, and where it ends."""
    begin = at + LENGTH_BYTES
    size = int.from_bytes(record[at:begin], "little")
    if len(record) < begin or size > min(len(record) - begin, MAX_LAYOUT_BYTES):
        raise CorruptCheckpoint(f"{where}: a side record of {len(record)} bytes declares a layout of {size} at {at}")
    begin += size
    layout = Layout.from_json(bytes(record[begin - size : begin]), where, len(record))
    end = begin + layout.stream_bytes
    if end > len(record):
        raise CorruptCheckpoint(
            f"{where}: a side record holds {len(record) - begin} bytes after byte {begin}, and its layout needs "
            f"{layout.stream_bytes}"
        )
    # A tensor of its own begins at an address that suits every dtype; the record's bytes after the text do not.
    memory = torch.empty(layout.stream_bytes, dtype=torch.uint8, device="cpu")
    memoryview(memory.numpy().data)[:] = record[begin:end]
    blocks = [memory[at : at + size] for at, size in zip(layout.block_offsets(), layout.block_bytes, strict=True)]
    return unflatten(layout, blocks, where), end


def restored_tree(
    state: Mapping[str, Any],
    tracked: TrackedParameters,
    side: Mapping[str, Any],
    tensors: Mapping[tuple[int, str], torch.Tensor],
    where: str,
) -> dict[str, Any]:
    """The whole state's tree, as `apply_tree` takes it.

    `tensors` are what shadows gave, by (parameter's index on this rank, key), shaped as this rank's own. Raises
    MismatchError if they do not fit the state.
    """
    tree = dict(side)
    by_place = {place_of(local_part(parameter)): index for index, parameter in enumerate(tracked.parameters)}
    for name, part in state.items():
        if not isinstance(part, torch.nn.Module) or not isinstance(side.get(name), Mapping):
            continue  # what is of another kind is refused when trees are compared
        entries = {}
        for key, value in part.state_dict().items():
            index = by_place.get(place_of(local_part(value))) if isinstance(value, torch.Tensor) else None
            if index is not None:
                entries[key] = _as_live(value, tensors[index, PARAMETER])
            elif key in side[name]:
                entries[key] = side[name][key]
        # What the model lacks stays in, so that it is named.
        tree[name] = entries | {key: value for key, value in side[name].items() if key not in entries}
    tree[tracked.part] = _optimizer_tree(tracked, side.get(tracked.part), tensors, where)
    return tree


def _optimizer_tree(
    tracked: TrackedParameters, groups: Any, tensors: Mapping[tuple[int, str], torch.Tensor], where: str
) -> dict[str, Any]:
    live = tracked.optimizer.param_groups
    of_groups = isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups)
    if not of_groups or len(groups) != len(live):
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
