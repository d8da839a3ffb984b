"""Sections of a side record. A module's section is described once, as long as the same tensors lie at the same places.

Flattening takes about 30 µs a tensor, in the training's thread, and a checkpoint after every step pays for it in every
step. Comparing what is there with what was there takes a small part of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any

from lastgood._lazy import torch
from lastgood.gradients.trainer.parameters import TrackedParameters
from lastgood.state import flatten
from lastgood.state.layout import BLOCK_ALIGNMENT
from lastgood.state.shards import local_part

__all__ = ["LENGTH_BYTES", "ModuleSection", "Section", "place_of"]

LENGTH_BYTES = 8


@dataclass(frozen=True)
class Section:
    """Some parts of a state, flattened: what describes them, and the live memory of their tensors."""

    head: bytes
    """Length of the layout, and the layout."""
    placed: tuple[tuple[int, torch.Tensor], ...]
    """Offset in the stream, and bytes: of each block, and of the padding between two blocks."""
    stream_bytes: int
    devices: frozenset[torch.device]
    """Those that memory must be copied from, but for the CPU."""

    @classmethod
    def of(cls, parts: Mapping[str, Any]) -> Section:
        """Flatten them. Raises StateError for what cannot be stored."""
        flat = flatten(parts)
        text = flat.layout.to_json()
        placed: list[tuple[int, torch.Tensor]] = []
        for offset, block in zip(flat.layout.block_offsets(), flat.blocks, strict=True):
            placed.append((offset, block))
            if block.numel() % BLOCK_ALIGNMENT:
                end = offset + block.numel()
                pad = torch.zeros(-block.numel() % BLOCK_ALIGNMENT, dtype=torch.uint8, device=block.device)
                placed.append((end, pad))
        devices = frozenset(block.device for block in flat.blocks if block.is_cuda)
        head = len(text).to_bytes(LENGTH_BYTES, "little") + text
        return cls(head, tuple(placed), flat.layout.stream_bytes, devices)

    @property
    def nbytes(self) -> int:
        """Of the complete section."""
        return len(self.head) + self.stream_bytes


@dataclass(frozen=True)
class _Known:
    """A section, and what must still be as it was for it to be true."""

    section: Section
    names: list[str]
    entries: list[torch.Tensor]
    """All of the state_dict, the live objects."""
    kept: list[torch.Tensor]
    """Those of them that are in the section."""
    seen: list[tuple[Any, ...]]
    """Where and how those lay."""

    def holds(self, entries: Mapping[str, Any]) -> bool:
        return (
            list(entries) == self.names
            and all(map(is_, entries.values(), self.entries))
            and list(map(_seen, self.kept)) == self.seen
        )


class ModuleSection:
    """What gradients do not carry of one module: its state_dict without the parameters that the optimizer updates."""

    def __init__(self, name: str, module: torch.nn.Module, tracked: TrackedParameters) -> None:
        self.module = module
        self._name = name
        self._tracked = tracked
        self._known: _Known | None = None

    def take(self) -> Section:
        """The section as it is now. Raises StateError for what cannot be stored."""
        live = self.module.state_dict(keep_vars=True)
        if self._known is not None and self._known.holds(live):
            return self._known.section
        places = {place_of(local_part(parameter)) for parameter in self._tracked.parameters}
        kept = {
            key: value
            for key, value in self.module.state_dict().items()
            if not (isinstance(value, torch.Tensor) and place_of(local_part(value)) in places)
        }
        section = Section.of({self._name: kept})
        self._known = self._remembered(section, live, kept)
        return section

    def _remembered(self, section: Section, live: Mapping[str, Any], kept: Mapping[str, Any]) -> _Known | None:
        """None if the live objects do not tell whether the section is still true, or if it holds copies of them."""
        if not kept.keys() <= live.keys():
            return None
        tensors = []
        for key, entry in live.items():
            if key not in kept:
                # By its place it is updated; another tensor over that place may be left there when the parameter moves.
                if id(entry) not in self._tracked.index_of:
                    return None
            elif (
                isinstance(entry, torch.Tensor)
                and _seen(entry) == _seen(kept[key])
                and not (entry.is_conj() or entry.is_neg())
            ):
                tensors.append(entry)
            else:
                return None
        return _Known(section, list(live), list(live.values()), tensors, list(map(_seen, tensors)))


def place_of(tensor: torch.Tensor) -> tuple[int, int, Any]:
    """What tells two tensors with elements apart that do not share memory."""
    # Tensors without elements all lie at address 0, and hold nothing that could be lost.
    return (tensor.data_ptr(), tensor.nbytes, tensor.device if tensor.numel() else None)


def _seen(tensor: Any) -> tuple[Any, ...]:
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if isinstance(tensor, torch.Tensor) else ()
