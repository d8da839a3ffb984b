"""The memory of a shadow: parameters and optimizer state of its buckets, and slots for gradients that arrive.

A bucket is replaced as a whole (a seed, or a spill that is read back): the new value is built beside the old one and
takes its place when all of it is there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from lastgood import _native
from lastgood._lazy import torch
from lastgood.errors import CheckpointError, ConfigError, CorruptCheckpoint
from lastgood.gradients.layout.entries import Entry
from lastgood.gradients.layout.layout import Bucket, GradientLayout
from lastgood.host_memory import fresh_memory
from lastgood.optim.dense import DenseOptimizer
from lastgood.optim.rule import UpdateRule
from lastgood.optim.spec import OptimizerSpec
from lastgood.units import format_bytes
from lastgood.wire.records import ITEM_BYTES

__all__ = ["BucketValue", "MemoryNeed", "ShadowMemory", "memory_need", "tensor_bytes"]

PARAMETER_KEY = "parameter"
_STATE_KEYS = frozenset(["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "step"])
_STATE_TENSORS = {"sgd": 1, "adam": 2, "adamw": 2}
_PER_PARAMETER = 256
"""Bytes beside a parameter's own: its step, padding to 64 bytes of each state tensor."""
_STATE_DTYPES = frozenset(["float32", "float64", "float16", "bfloat16"])
_MAX_SCALAR_BYTES = 8
_ALIGN_BYTES = 64


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a shadow takes for a layout, by use."""

    parameters: int
    optimizer: int
    gradients: int
    seeds: int
    """One bucket beside its old value."""
    spill: int
    """A copy of all, while it is being written; 0 without a folder for spills."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.optimizer + self.gradients + self.seeds + self.spill

    def __str__(self) -> str:
        parts = (
            ("parameters", self.parameters),
            ("optimizer state", self.optimizer),
            ("gradients", self.gradients),
            ("a seed", self.seeds),
            ("a spill's copy", self.spill),
        )
        return ", ".join(f"{format_bytes(nbytes)} for {name}" for name, nbytes in parts if nbytes)


def memory_need(layout: GradientLayout, shadow: int, slots: int, *, spills: bool) -> MemoryNeed:
    """What shadow number `shadow` needs for a layout. Raises CorruptCheckpoint if it names no optimizer of it."""
    spec = OptimizerSpec.from_data(layout.optimizer)
    named = sorted(index for group in spec.groups for index in group.parameters)
    if named != list(range(len(layout.parameters))):
        raise CorruptCheckpoint("the optimizer's groups do not name each parameter of the layout once")
    buckets = [layout.buckets[bucket] for bucket in layout.buckets_of(shadow)]
    parameters = sum(bucket.nbytes for bucket in buckets)
    optimizer = parameters * _copies(spec) + sum(len(bucket.parameters) for bucket in buckets) * _PER_PARAMETER
    seed = max((_seed_bytes(bucket, spec) for bucket in buckets), default=0)
    spill = parameters + optimizer if spills else 0
    return MemoryNeed(parameters, optimizer, parameters * slots, seed, spill)


class BucketValue:
    """One bucket's parameters and optimizer state.

    `entries` say what is to be read into `targets`; `finish` makes it usable.
    """

    def __init__(self, layout: GradientLayout, spec: OptimizerSpec, bucket: int, threads: int) -> None:
        declared = layout.buckets[bucket]
        dtype = getattr(torch, declared.dtype.name)
        item = ITEM_BYTES[declared.dtype]
        self.bucket = bucket
        self.indices = declared.parameters
        self.flat = fresh_memory(declared.nbytes).view(dtype)
        self.parameters = []
        for index in self.indices:
            parameter = layout.parameters[index]
            begin = parameter.offset // item
            self.parameters.append(self.flat[begin : begin + prod(parameter.shape)].view(parameter.shape))
        group_of = spec.group_of()
        groups = [group_of[index] for index in self.indices]
        self.optimizer = DenseOptimizer(spec, self.parameters, groups, threads, places=self.indices)
        self._arriving: dict[int, dict[str, torch.Tensor]] = {}

    # -- out -------------------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[tuple[Entry, torch.Tensor]]:
        """For each parameter, in the bucket's order: itself, then its optimizer state by sorted key."""
        for index, parameter, state in zip(self.indices, self.parameters, self.optimizer.state(), strict=True):
            yield _entry(index, PARAMETER_KEY, parameter), parameter
            for key in sorted(state):
                yield _entry(index, key, state[key]), state[key]

    def checksum(self) -> int:
        """CRC32C over all tensors, in that order (`messages.Verify`)."""
        checksum = 0
        for entry, tensor in self.tensors():
            if entry.nbytes:
                checksum = _native.crc32c(tensor_bytes(tensor), checksum)
        return checksum

    # -- in --------------------------------------------------------------------------------------------------------

    def targets(self, entries: Sequence[Entry], other: str) -> list[memoryview]:
        """Memory for each entry of a stream that holds all of this bucket. Raises CorruptCheckpoint if it is not.

        What it takes is bounded by the bucket's own size.
        """
        parameters = dict(zip(self.indices, self.parameters, strict=True))
        arriving: dict[int, dict[str, torch.Tensor]] = {index: {} for index in self.indices}
        views = []
        for entry in entries:
            parameter = parameters.get(entry.parameter)
            if parameter is None or entry.key in arriving[entry.parameter]:
                raise CorruptCheckpoint(
                    f"{other}: parameter {entry.parameter} is not of bucket {self.bucket}, or twice"
                )
            tensor = _target(entry, parameter)
            if tensor is None:
                raise CorruptCheckpoint(
                    f"{other}: {entry.key} of parameter {entry.parameter} as {entry.dtype} {entry.shape} of "
                    f"{entry.nbytes} bytes does not belong to {parameter.dtype} {tuple(parameter.shape)}"
                )
            arriving[entry.parameter][entry.key] = tensor
            views.append(tensor_bytes(tensor))
        missing = [index for index, held in arriving.items() if PARAMETER_KEY not in held]
        if missing:
            raise CorruptCheckpoint(f"{other}: the value of parameter {missing[0]} is missing")
        self._arriving = arriving
        return views

    def finish(self) -> None:
        """All targets are filled. Raises MismatchError if the state is not this optimizer's."""
        states = [
            {key: tensor for key, tensor in self._arriving[index].items() if key != PARAMETER_KEY}
            for index in self.indices
        ]
        self.optimizer.load_state(states)
        self._arriving = {}


class ShadowMemory:
    """All buckets of one shadow. For one thread at a time, but for the gradients' slots.

    Raises ConfigError if the layout needs more than `limit_bytes`, with the numbers, before anything is taken.
    """

    def __init__(
        self, layout: GradientLayout, shadow: int, *, slots: int, limit_bytes: int, threads: int, spills: bool
    ) -> None:
        self.need = memory_need(layout, shadow, slots, spills=spills)
        if self.need.total > limit_bytes:
            raise ConfigError(
                f"shadow {shadow} needs {format_bytes(self.need.total)} for this layout ({self.need}) and may take "
                f"{format_bytes(limit_bytes)}; use more shadows, fewer gradient slots, or a machine with more memory"
            )
        self.layout = layout
        self.owned = layout.buckets_of(shadow)
        self.spec = OptimizerSpec.from_data(layout.optimizer)
        self._threads = threads
        self._limit_bytes = limit_bytes
        self._values: dict[int, BucketValue] = {}
        self._landed: dict[int, BucketValue] = {}
        self._gradients = [_slot(layout, self.owned) for _ in range(slots)]

    # -- gradients -------------------------------------------------------------------------------------------------

    def slot_addresses(self) -> list[list[int]]:
        """Address of each owned bucket's memory, for each slot: iteration i lies in slot i mod slots."""
        return [[slot[bucket].data_ptr() for bucket in self.owned] for slot in self._gradients]

    def gradients(self, bucket: int, iteration: int) -> list[torch.Tensor]:
        """The memory of an iteration's gradients, shaped as the bucket's parameters, in their order."""
        declared = self.layout.buckets[bucket]
        dtype = getattr(torch, declared.dtype.name)
        flat = self._gradients[iteration % len(self._gradients)][bucket].view(dtype)
        found = []
        for index in declared.parameters:
            parameter = self.layout.parameters[index]
            begin = parameter.offset // dtype.itemsize
            found.append(flat[begin : begin + prod(parameter.shape)].view(parameter.shape))
        return found

    def apply(self, bucket: int, iteration: int, rule: dict[str, Any] | None, absent: Collection[int]) -> None:
        """Update one bucket with what lies in the iteration's slot.

        `rule` is what `UpdateRule` writes (None: nothing changes), `absent` the parameters that had no gradient. Raises
        CorruptCheckpoint, MismatchError.
        """
        if rule is None:
            return
        update = UpdateRule.from_data(rule)
        value = self._values[bucket]
        held = self.gradients(bucket, iteration)
        gradients = [None if index in absent else one for index, one in zip(value.indices, held, strict=True)]
        value.optimizer.step(gradients, update)

    # -- values ----------------------------------------------------------------------------------------------------

    def value(self, bucket: int) -> BucketValue:
        """A bucket's value."""
        return self._values[bucket]

    def new_value(self, bucket: int) -> BucketValue:
        """An empty value beside the old one. Raises CheckpointError if too many wait for their place already."""
        beside = sum(_seed_bytes(self.layout.buckets[one], self.spec) for one in (*self._landed, bucket))
        room = self._limit_bytes - self.need.total + self.need.seeds
        # A bucket without a value takes no more than was set aside for it.
        if bucket in self._values and beside > room:
            raise CheckpointError(
                f"no memory to keep {format_bytes(beside)} of seeds beside old values; try again when they are in place"
            )
        return BucketValue(self.layout, self.spec, bucket, self._threads)

    def keep(self, value: BucketValue) -> None:
        """A value has landed; it waits for its place."""
        self._landed[value.bucket] = value

    def commit(self, bucket: int) -> None:
        """Put what landed in the place of the bucket's value."""
        self._values[bucket] = self._landed.pop(bucket)

    def put(self, value: BucketValue) -> None:
        """Replace a bucket's value."""
        self._values[value.bucket] = value

    def forget(self, *, values: bool) -> None:
        """No landed value gets its place any more; with `values`, those in their places are of no use either."""
        self._landed.clear()
        if values:
            self._values.clear()


def _slot(layout: GradientLayout, owned: Sequence[int]) -> dict[int, torch.Tensor]:
    """Memory for the gradients of one iteration."""
    sizes = {bucket: layout.buckets[bucket].nbytes for bucket in owned}
    # One for all of them: the buckets of a small model are too small for huge pages.
    memory = fresh_memory(sum(-(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES for nbytes in sizes.values()))
    found, at = {}, 0
    for bucket, nbytes in sizes.items():
        found[bucket] = memory[at : at + nbytes]
        at += -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return found


def _copies(spec: OptimizerSpec) -> int:
    """Tensors of an optimizer's state for each parameter, of its size."""
    return _STATE_TENSORS[spec.kind] + any(group.amsgrad for group in spec.groups)


def _seed_bytes(bucket: Bucket, spec: OptimizerSpec) -> int:
    """Of a value that is being received: its optimizer state is copied into place once it is complete."""
    return bucket.nbytes * (1 + 2 * _copies(spec)) + len(bucket.parameters) * _PER_PARAMETER


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory."""
    view: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return view


def _entry(index: int, key: str, tensor: torch.Tensor) -> Entry:
    return Entry(
        parameter=index,
        key=key,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        nbytes=tensor.numel() * tensor.element_size(),
    )


def _target(entry: Entry, parameter: torch.Tensor) -> torch.Tensor | None:
    """Memory for one entry, or None if it cannot be of this parameter."""
    if entry.key == PARAMETER_KEY:
        tensor = parameter
    else:
        fits = entry.shape == tuple(parameter.shape)
        if entry.key == "step":
            fits = prod(entry.shape) == 1 and entry.nbytes <= _MAX_SCALAR_BYTES
        if not fits or entry.key not in _STATE_KEYS or entry.dtype not in _STATE_DTYPES:
            return None
        tensor = torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype), device="cpu")
    found = _entry(entry.parameter, entry.key, tensor)
    return tensor if found == entry else None
