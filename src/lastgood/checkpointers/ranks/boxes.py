"""Which parts of a tensor lie where, when it was cut one way and is wanted another: plain arithmetic, no torch.

A part of a tensor is described by runs (`lastgood.state.shards`): for each dimension the ranges of global indices that
it covers, which lie one after another in the part.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Generic, TypeVar

import numpy as np

from lastgood.state.shards import Runs

__all__ = ["Overlap", "Source", "cover", "full_runs", "overlaps", "row_elements", "row_offsets"]

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Overlap:
    """A box that two parts share: where it begins in each of them, and its shape; indices count in the parts."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Source(Generic[Key]):
    """A part that can be read."""

    key: Key
    runs: Runs


def full_runs(shape: Sequence[int]) -> Runs:
    """The runs of a part that is the whole."""
    return tuple(((0, size),) if size else () for size in shape)


def overlaps(source: Runs, target: Runs) -> list[Overlap]:
    """What two parts of one tensor share. Of tensors without dimensions, both parts are the one element.

    Raises ValueError if they have other numbers of dimensions.
    """
    shared = [_shared(first, second) for first, second in zip(source, target, strict=True)]
    return [
        Overlap(tuple(run[0] for run in box), tuple(run[1] for run in box), tuple(run[2] for run in box))
        for box in product(*shared)
    ]


def cover(
    target: Runs, sources: Sequence[Source[Key]], turn: int = 0, own: Key | None = None
) -> list[tuple[Key, Overlap]]:
    """Which boxes of which sources make up the target, each element exactly once.

    Sources that hold the same part are copies: of those `own` is read if it is one of them, else the one whose `turn`
    it is, so that ranks with other numbers read other copies.
    Raises ValueError, saying how many elements, if sources do not hold all of the target or overlap in other ways.
    """
    copies: dict[Runs, list[Source[Key]]] = {}
    for source in sources:
        copies.setdefault(source.runs, []).append(source)
    found: list[tuple[Key, Overlap]] = []
    for runs, alike in copies.items():
        first = next((source for source in alike if source.key == own), alike[turn % len(alike)])
        found += [(first.key, overlap) for overlap in overlaps(runs, target)]
    wanted = math.prod(sum(length for _, length in dimension) for dimension in target)
    given = sum(math.prod(overlap.shape) for _, overlap in found)
    if given != wanted:
        raise ValueError(f"the parts hold {given} of {wanted} elements")
    if any(_meet(first, second) for first, second in _neighbours(copies)):
        raise ValueError("parts overlap and others are missing")
    return found


def row_elements(overlap: Overlap, source_stride: Sequence[int], target_stride: Sequence[int]) -> tuple[int, int]:
    """The rows of a box that are contiguous in both parts: elements of each, and how many dimensions they lie in.

    These are the first ones; the others lie inside of rows.
    """
    row, outer = 1, len(overlap.shape)
    while outer and (overlap.shape[outer - 1] == 1 or source_stride[outer - 1] == target_stride[outer - 1] == row):
        row *= overlap.shape[outer - 1]
        outer -= 1
    return row, outer


def row_offsets(
    overlap: Overlap, source_stride: Sequence[int], target_stride: Sequence[int]
) -> tuple[int, np.ndarray, np.ndarray]:
    """A box as rows that are contiguous in both parts: elements of a row, and where each begins in source and target.

    Strides and offsets are in elements; rows come in the order of the box. Takes 16 bytes for each row.
    """
    row, outer = row_elements(overlap, source_stride, target_stride)
    begins = []
    for start, stride in ((overlap.source, source_stride), (overlap.target, target_stride)):
        offsets = np.array([sum(first * step for first, step in zip(start, stride, strict=True))], dtype=np.int64)
        for axis in range(outer):
            steps = np.arange(overlap.shape[axis], dtype=np.int64) * stride[axis]
            offsets = (offsets[:, None] + steps[None, :]).reshape(-1)
        begins.append(offsets)
    return row, begins[0], begins[1]


def _shared(source: Sequence[tuple[int, int]], target: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Ranges in both: where each begins in the source's part and the target's, and its length.

    Runs come in ascending order, so that one pass over both finds them.
    """
    found = []
    first = second = source_at = target_at = 0
    while first < len(source) and second < len(target):
        (source_start, source_length), (target_start, target_length) = source[first], target[second]
        begin = max(source_start, target_start)
        end = min(source_start + source_length, target_start + target_length)
        if begin < end:
            found.append((source_at + begin - source_start, target_at + begin - target_start, end - begin))
        if source_start + source_length <= target_start + target_length:
            first, source_at = first + 1, source_at + source_length
        else:
            second, target_at = second + 1, target_at + target_length
    return found


def _neighbours(parts: Iterable[Runs]) -> Iterator[tuple[Runs, Runs]]:
    """Pairs of parts that may share elements: those whose extents in the first dimension do."""
    active: list[Runs] = []
    for part in sorted(part for part in parts if all(part)):
        active = [other for other in active if not part or sum(other[0][-1]) > part[0][0][0]]
        for other in active:
            yield other, part
        active.append(part)


def _meet(first: Runs, second: Runs) -> bool:
    """Whether two parts share elements. The boxes of one part never do: its runs share no index."""
    return all(_shared(one, other) for one, other in zip(first, second, strict=True))
