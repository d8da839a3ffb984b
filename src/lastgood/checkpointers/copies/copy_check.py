"""Whether memory that is copied beside the training was changed before its copy ended.

torch counts what it changes itself, in every tensor. It does not see what is written through ``.data``, through numpy's
view of a tensor, or by native code. So a sample of each block's bytes is taken in save() and again when the block is
copied: all of a block of up to 64 KiB (less if there are many), of a larger one lines of 64 bytes at places that are
drawn again in each save. A sample is at most 4 MiB, or 256 bytes for each block.

Weights may be swapped for an evaluation and swapped back while they are copied. So the second sample is read from the
copy itself, if that is still at hand, and else from the training's memory as soon as a small group of blocks is copied.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar

from lastgood._lazy import torch
from lastgood.checkpointers.copies.device_streams import DeviceStreams, side_stream
from lastgood.errors import StateError
from lastgood.state import FlatState
from lastgood.state.flatten import changed_while_copied

__all__ = ["CopyCheck", "Sample"]

_LINE_BYTES = 64
_SAMPLE_BYTES = 4 << 20
_MOST_OF_A_BLOCK = 64 << 10
_LEAST_OF_A_BLOCK = 256
_GROUP_BYTES = 16 << 20
"""Blocks of so many bytes in all are copied, and then looked at again."""
_GROUP_BYTES_CUDA = 64 << 20
"""The same with CUDA devices, where each look launches kernels, and copies are faster."""


class Sample:
    """Some bytes of some blocks; where they are is fixed, and what they are is read by `take`."""

    def __init__(self, blocks: Sequence[torch.Tensor], share: int, drawn: random.Random) -> None:
        self._whole: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        self._lines: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for number, block in enumerate(blocks):
            size = block.numel()
            if size <= share:
                self._whole.setdefault(block.device, []).append((number, block))
                continue
            lines = share // _LINE_BYTES
            # Neither begin nor distance is a multiple of anything in the data.
            step = size // lines - drawn.randrange(size // lines // 8 + 1) if lines > 1 else _LINE_BYTES
            step = max(step, _LINE_BYTES)
            begin = drawn.randrange(size - (lines - 1) * step - _LINE_BYTES + 1)
            view = block.as_strided((lines, _LINE_BYTES), (step, 1), block.storage_offset() + begin)
            self._lines.setdefault(block.device, []).append((number, view))

    @property
    def devices(self) -> set[torch.device]:
        """Where the blocks are."""
        return {*self._whole, *self._lines}

    def take(self, device: torch.device, out: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """The bytes of now, on the device, in the order of its current stream; in the memory of `out` if given."""
        parts = [part for part in (self._whole.get(device), self._lines.get(device)) if part]
        memory: Sequence[torch.Tensor | None] = out or [None] * len(parts)
        return [torch.cat([view for _, view in part], out=target) for part, target in zip(parts, memory, strict=True)]

    def find(self, device: torch.device, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> int | None:
        """The first block whose bytes differ between two takes; waits for the device."""
        parts = [part for part in (self._whole.get(device), self._lines.get(device)) if part]
        for part, one, other in zip(parts, before, after, strict=True):
            if torch.equal(one, other):
                continue
            row = int((one != other).reshape(one.shape[0], -1).any(1).nonzero()[0])
            ends = accumulate(view.shape[0] for _, view in part)
            return next(number for (number, _), end in zip(part, ends, strict=True) if row < end)
        return None


class _Look:
    """Memory of a second take of a sample on a CUDA device, and of its comparison with the first.

    Asked for in save(): the driver may wait for running kernels before it gives memory or loads a kernel, and one of a
    collective that hangs never ends. `issue` asks for none.
    """

    _ready: ClassVar[set[torch.device]] = set()
    """Devices on which the kernels of `issue` are loaded."""

    def __init__(self, sample: Sample, device: torch.device, before: Sequence[torch.Tensor]) -> None:
        self._sample, self._device, self._before = sample, device, before
        side = side_stream(device)
        with torch.cuda.stream(side):
            self.after = [torch.empty_like(one) for one in before]
            self._unlike = [torch.empty(one.shape, dtype=torch.bool, device=device) for one in before]
            self._any = torch.empty(len(before), dtype=torch.bool, device=device)
        self._found = torch.empty(len(before), dtype=torch.bool, pin_memory=True, device="cpu")
        if device not in self._ready:
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                self.issue()
            side.synchronize()
            self._ready.add(device)

    def issue(self) -> None:
        """Take and compare, in the order of the current stream, which is the device's side stream."""
        self._sample.take(self._device, self.after)
        for index, (one, other) in enumerate(zip(self._before, self.after, strict=True)):
            torch.ne(one, other, out=self._unlike[index])
            torch.any(self._unlike[index], out=self._any[index])
        self._found.copy_(self._any, non_blocking=True)

    def found(self) -> bool:
        """Whether the two takes differ; once what was issued has run."""
        return bool(self._found.any())


class CopyCheck:
    """Made in save(), in the training's thread, where it reads its sample. Then `look`, and at last `settle`."""

    def __init__(self, flat: FlatState, numbers: Sequence[int]) -> None:
        on_device = any(flat.blocks[number].is_cuda for number in numbers)
        self.groups = _groups(numbers, flat.layout.block_bytes, _GROUP_BYTES_CUDA if on_device else _GROUP_BYTES)
        """Numbers of the blocks, in the order in which they are to be copied and looked at."""
        self._flat: FlatState | None = flat
        self._names = [[flat.names[number] for number in group] for group in self.groups]
        self.changed: tuple[int, StateError] | None = None
        """Number of the block that changed, and what to say of it."""
        self._lock = threading.RLock()  # a signal handler may come here as well
        share = max(_LEAST_OF_A_BLOCK, min(_MOST_OF_A_BLOCK, _SAMPLE_BYTES // max(1, len(numbers))))
        self._share = share - share % _LINE_BYTES
        self._seed = random.Random().getrandbits(64)  # not of the training's generator
        self._ended = {group[-1]: number for number, group in enumerate(self.groups)}
        self._samples = [self._sample(group, flat.blocks) for group in range(len(self.groups))]
        self._before = [{device: sample.take(device) for device in sample.devices} for sample in self._samples]
        self._looks = [
            {device: _Look(sample, device, before[device]) for device in sample.devices if device.type != "cpu"}
            for sample, before in zip(self._samples, self._before, strict=True)
        ]
        self._issued: list[tuple[int, torch.device]] = []
        """Groups, each on a device, at which a look was issued."""

    def block_copied(
        self, number: int, streams: DeviceStreams | None = None, copies: Sequence[torch.Tensor] | None = None
    ) -> None:
        """`look` at the group that ends with this block, if one does. Blocks are copied in order of their numbers."""
        group = self._ended.get(number)
        if group is not None:
            self.look(group, streams, copies)

    def look(
        self, group: int, streams: DeviceStreams | None = None, copies: Sequence[torch.Tensor] | None = None
    ) -> None:
        """Read the sample of a group again: after its copies, before an update may begin.

        With `copies` of all blocks, in host memory, it is read from these. On CUDA this is only issued, after the
        copies of `streams`.
        """
        if copies is not None:
            sample = self._sample(group, copies)
            (device,) = sample.devices
            self._note(group, sample.find(device, self._before[group][device], sample.take(device)))
            return
        sample, before = self._samples[group], self._before[group]
        for device in sample.devices:
            if device.type == "cpu":
                self._note(group, sample.find(device, before[device], sample.take(device)))
                continue
            assert streams is not None
            with streams.after(device, before[device]):
                self._looks[group][device].issue()
            self._issued.append((group, device))

    def look_at_versions(self) -> None:
        """See what torch has counted; before the first update at the latest, and only once.

        On return no other thread is looking: what changes from then on is not seen here.
        """
        with self._lock:
            flat, self._flat = self._flat, None
            if flat is None:
                return
            for number in (number for group in self.groups for number in group):
                try:
                    flat.check_versions(number)
                except StateError as error:
                    self._say(number, error)

    def settle(self) -> None:
        """Raise StateError if a block was changed. Everything that was issued has run."""
        self.look_at_versions()
        for group, device in self._issued:
            look = self._looks[group][device]
            if look.found():
                self._note(group, self._samples[group].find(device, self._before[group][device], look.after))
        self._issued = []
        if self.changed is not None:
            raise self.changed[1]

    def _sample(self, group: int, blocks: Sequence[torch.Tensor]) -> Sample:
        """The same places in each call, also for copies of the blocks."""
        drawn = random.Random(self._seed + group)
        return Sample([blocks[number] for number in self.groups[group]], self._share, drawn)

    def _note(self, group: int, index: int | None) -> None:
        if index is not None:
            self._say(self.groups[group][index], changed_while_copied(self._names[group][index]))

    def _say(self, number: int, why: StateError) -> None:
        if self.changed is None:
            self.changed = (number, why)


def _groups(numbers: Sequence[int], sizes: Sequence[int], group_bytes: int) -> list[list[int]]:
    groups: list[list[int]] = []
    filled = group_bytes
    for number in numbers:
        if filled >= group_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(number)
        filled += sizes[number]
    return groups
