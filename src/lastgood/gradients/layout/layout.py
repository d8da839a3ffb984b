"""Where every gradient belongs: parameters in buckets, buckets on shadows. Declared once, never recomputed elsewhere.

DDP rebuilds its own buckets after the first iteration, so these are not DDP's: a tap maps whatever was reduced into
byte ranges of them. The order is that in which backward passes usually finish, the reverse of the optimizer's, so that
neighbours in DDP's buckets are neighbours here and leave in one record.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from lastgood.errors import ConfigError, CorruptCheckpoint
from lastgood.units import MIB
from lastgood.wire.records import ITEM_BYTES, DType

__all__ = ["BUCKET_BYTES", "MAX_PARAMETERS", "Bucket", "GradientLayout", "Parameter", "plan_layout"]

BUCKET_BYTES = 25 * MIB
"""DDP's own size of a bucket."""
MAX_PARAMETERS = 1 << 20
_MAX_NAME = 1000
_MAX_DIMENSIONS = 64
_MAX_BYTES = 1 << 50


@dataclass(frozen=True)
class Parameter:
    """One parameter that an optimizer updates; its index is its place in the optimizer's groups, one after another."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    bucket: int
    offset: int
    """Bytes from the begin of its bucket."""

    @property
    def nbytes(self) -> int:
        """Bytes of its gradient, and of itself."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Bucket:
    """Whole parameters of one dtype, one after another without gaps."""

    dtype: DType
    nbytes: int
    parameters: tuple[int, ...]
    """Indices, in the order of their offsets."""


@dataclass(frozen=True)
class GradientLayout:
    """All parameters of one training, and the number of shadows that share their buckets.

    `optimizer` is what `optim.OptimizerSpec` writes; its groups name parameters by index.
    """

    parameters: tuple[Parameter, ...]
    buckets: tuple[Bucket, ...]
    optimizer: dict[str, Any]
    ranks: int
    shadows: int

    def buckets_of(self, shadow: int) -> list[int]:
        """Indices of the buckets that shadow number `shadow` owns: bucket index mod shadows."""
        return list(range(shadow, len(self.buckets), self.shadows))

    def shadow_of(self, bucket: int) -> int:
        """The shadow that owns a bucket."""
        return bucket % self.shadows

    def side_ranks_of(self, shadow: int) -> list[int]:
        """Ranks whose side records shadow number `shadow` keeps: rank mod shadows."""
        return list(range(shadow, self.ranks, self.shadows))

    def bytes_of(self, shadow: int) -> int:
        """Bytes of all parameters that shadow number `shadow` owns."""
        return sum(self.buckets[bucket].nbytes for bucket in self.buckets_of(shadow))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all that is declared, in hex."""
        return hashlib.sha256(json.dumps(self.to_data(), sort_keys=True).encode()).hexdigest()

    def to_data(self) -> dict[str, Any]:
        """As JSON carries it. Offsets and sizes follow from the order, so they are not written."""
        return {
            "parameters": [[item.name, list(item.shape), item.dtype.name] for item in self.parameters],
            "buckets": [list(bucket.parameters) for bucket in self.buckets],
            "optimizer": self.optimizer,
            "ranks": self.ranks,
            "shadows": self.shadows,
        }

    @classmethod
    def from_data(cls, data: Any, other: str) -> GradientLayout:
        """Read what `other` declared. Raises CorruptCheckpoint for what is no layout, before any memory is taken."""
        try:
            named = [_declared(item) for item in data["parameters"]]
            order = [[_whole(index, 0, len(named) - 1) for index in bucket] for bucket in data["buckets"]]
            ranks, shadows = _whole(data["ranks"], 1, 1 << 16), _whole(data["shadows"], 1, 1 << 12)
            optimizer = data["optimizer"]
            if not isinstance(optimizer, dict) or not 0 < len(named) <= MAX_PARAMETERS:
                raise ValueError("no optimizer, or no parameters, or too many")
            if sorted(index for bucket in order for index in bucket) != list(range(len(named))):
                raise ValueError("a parameter is in no bucket, or in two")
            layout = _placed(named, order, optimizer, ranks, shadows)
            if sum(bucket.nbytes for bucket in layout.buckets) > _MAX_BYTES:
                raise ValueError(f"more than {_MAX_BYTES} bytes")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptCheckpoint(f"{other} declared no layout of gradients: {error!r}") from error
        return layout


def plan_layout(
    parameters: Sequence[tuple[str, Sequence[int], str]],
    optimizer: dict[str, Any],
    *,
    ranks: int,
    shadows: int,
    bucket_bytes: int = BUCKET_BYTES,
    owners: Sequence[int] | None = None,
) -> GradientLayout:
    """Put parameters (name, shape, torch's name of the dtype), in the optimizer's order, into buckets.

    A bucket ends if the next parameter would make it larger than `bucket_bytes`, or is of another dtype or owner
    (if `owners` names one for each parameter). The limit is a shadow's equal part of all bytes, if that is less:
    so no shadow is left without a bucket, unless single parameters are larger than that. Raises ConfigError for dtypes
    that no record can carry, and if there are no parameters.
    """
    if not parameters:
        raise ConfigError("the optimizer has no parameters; there is nothing to shadow")
    for name, _, dtype in parameters:
        if dtype not in DType.__members__:
            known = ", ".join(DType.__members__)
            raise ConfigError(f"{name} is of dtype {dtype}; gradients can be shadowed as {known}")
    named = [(name, tuple(shape), DType[dtype]) for name, shape, dtype in parameters]
    sizes = [prod(shape) * ITEM_BYTES[dtype] for _, shape, dtype in named]
    limit = min(bucket_bytes, max(1, sum(sizes) // shadows))
    kinds = [(dtype, None if owners is None else owners[index]) for index, (_, _, dtype) in enumerate(named)]
    order: list[list[int]] = []
    filled = 0
    for index in reversed(range(len(named))):
        fits = order and kinds[order[-1][-1]] == kinds[index] and filled + sizes[index] <= limit
        if not fits:
            order.append([])
            filled = 0
        order[-1].append(index)
        filled += sizes[index]
    return _placed(named, order, optimizer, ranks, shadows)


def _placed(
    named: Sequence[tuple[str, tuple[int, ...], DType]],
    order: Iterable[Sequence[int]],
    optimizer: dict[str, Any],
    ranks: int,
    shadows: int,
) -> GradientLayout:
    placed: dict[int, Parameter] = {}
    buckets = []
    for number, indices in enumerate(order):
        offset = 0
        dtypes = {named[index][2] for index in indices}
        if len(dtypes) != 1:
            raise ValueError(f"bucket {number} holds {len(dtypes)} dtypes")
        for index in indices:
            name, shape, dtype = named[index]
            placed[index] = Parameter(name, shape, dtype, number, offset)
            offset += placed[index].nbytes
        buckets.append(Bucket(dtypes.pop(), offset, tuple(indices)))
    parameters = tuple(placed[index] for index in range(len(named)))
    return GradientLayout(parameters, tuple(buckets), optimizer, ranks, shadows)


def _declared(item: Any) -> tuple[str, tuple[int, ...], DType]:
    name, shape, dtype = item
    if not isinstance(name, str) or len(name) > _MAX_NAME or len(shape) > _MAX_DIMENSIONS:
        raise ValueError("a parameter without a name, or with too many dimensions")
    return name, tuple(_whole(size, 0, _MAX_BYTES) for size in shape), DType[dtype]


def _whole(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r} is not a whole number from {least} to {most}")
    return value
