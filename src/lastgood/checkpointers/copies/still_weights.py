"""Weights that nothing changes (frozen ones, LoRA's base): they need no copy inside save().

No optimizer in the state updates them, and other code that does (averaged weights) does so in most steps. So a weight
that was the same at the last two looks, by torch's count of changes and by a sample of its bytes, is copied beside the
training as parameters are, and watched as they are. One that changes under its copy fails that checkpoint, and is
copied inside save() from then on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lastgood._lazy import torch
from lastgood.checkpointers.copies.copy_check import Sample
from lastgood.state import FlatState

__all__ = ["StillBlocks", "StillWeights"]

_Key = tuple[Any, ...]
"""Device, address and length of a block; in a look, also the versions of all its views."""
_WORTH_BYTES = 1 << 20
"""A smaller block is copied inside save() in no time."""
_SHARE_BYTES = 4096
"""Of each block's bytes in a sample."""


@dataclass(frozen=True)
class StillBlocks:
    """What one save need not copy at once."""

    numbers: tuple[int, ...] = ()
    places: dict[int, _Key] = field(default_factory=dict)
    restless: set[_Key] = field(default_factory=set)

    def distrust(self) -> None:
        """One of them changed under its copy: none is taken for still again."""
        self.restless.update(self.places[number] for number in self.numbers)


@dataclass
class _Look:
    """What the weights were at one moment."""

    rows: dict[_Key, tuple[Any, int]]
    """Device, and place in its sample."""
    samples: dict[Any, torch.Tensor]
    """On the host, one row for each block."""
    events: list[Any]
    """After which samples from CUDA devices have arrived."""

    def arrived(self) -> bool:
        return all(event.query() for event in self.events)

    def bytes_of(self, key: _Key) -> torch.Tensor | None:
        found = self.rows.get(key)
        return None if found is None else self.samples[found[0]][found[1]]


class StillWeights:
    """Of one training. Its first look comes at the start; used in the training's thread."""

    def __init__(self) -> None:
        self._seed = random.Random().random()  # not the training's generator; the same places in every look
        self._looks: list[_Look] = []
        self._restless: set[_Key] = set()

    def find(self, flat: FlatState) -> StillBlocks:
        """Look at the weights of `flat`, and say which have stayed as they were. Waits for no device."""
        place = {number: _place(flat.blocks[number]) for number in sorted(flat.weights)}
        place = {
            number: where
            for number, where in place.items()
            if flat.layout.block_bytes[number] >= _WORTH_BYTES and where not in self._restless
        }
        if not place:
            self._looks = []
            return StillBlocks()
        keys = {
            number: (*where, *(version for _, _, version in flat.watched[number])) for number, where in place.items()
        }
        self._looks = [*self._looks[-2:], self._look(flat, keys)]
        # What a device is still to send is compared at the next save.
        arrived = [look for look in self._looks if look.arrived()][-2:]
        numbers = tuple(number for number, key in keys.items() if len(arrived) == 2 and _alike(arrived, key))
        return StillBlocks(numbers, place, self._restless)

    def _look(self, flat: FlatState, keys: dict[int, _Key]) -> _Look:
        rows: dict[_Key, tuple[Any, int]] = {}
        samples: dict[Any, torch.Tensor] = {}
        events = []
        for device in {flat.blocks[number].device for number in keys}:
            mine = [number for number in keys if flat.blocks[number].device == device]
            rows |= {keys[number]: (device, row) for row, number in enumerate(mine)}
            sample = Sample([flat.blocks[number] for number in mine], _SHARE_BYTES, random.Random(self._seed))
            (taken,) = sample.take(device)
            taken = taken.reshape(len(mine), -1)
            if device.type == "cuda":
                arriving = torch.empty(taken.shape, dtype=torch.uint8, pin_memory=True, device="cpu")
                arriving.copy_(taken, non_blocking=True)
                with torch.cuda.device(device):
                    event = torch.cuda.Event()
                    event.record(torch.cuda.current_stream(device))
                events.append(event)
                taken = arriving
            samples[device] = taken
        return _Look(rows, samples, events)


def _place(block: torch.Tensor) -> _Key:
    return (str(block.device), block.data_ptr(), block.numel())


def _alike(looks: Sequence[_Look], key: _Key) -> bool:
    before, after = (look.bytes_of(key) for look in looks)
    return before is not None and after is not None and torch.equal(before, after)
