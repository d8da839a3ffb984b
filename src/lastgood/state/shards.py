"""Tensors that are spread over ranks (torch's DTensor): the part that lies here, and its place in the whole.

The place of a part is a list of *runs* for each dimension: ``[start, length]`` ranges of global indices, which lie one
after another in the local part. Most parts have one run in each dimension, a box; only `_StridedShard` can make more.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lastgood._lazy import torch
from lastgood.errors import StateError

__all__ = [
    "MAX_BOXES",
    "Placement",
    "Runs",
    "Shard",
    "describe_shard",
    "is_sharded",
    "local_part",
    "runs_of",
    "same_place",
    "wrap",
]

MAX_BOXES = 1 << 16
"""Of one part: the product of the numbers of its runs."""
_MAX_NUMBER = 1 << 62
_PLACEMENTS = {"S": 2, "Z": 3, "R": 1}
"""How many items a placement of each kind has in a layout."""

Placement = tuple[Any, ...]
"""``("S", dim)`` is torch's Shard, ``("Z", dim, split_factor)`` its _StridedShard, ``("R",)`` Replicate."""
Runs = tuple[tuple[tuple[int, int], ...], ...]
"""For each dimension the (start, length) ranges that a local part covers, in order; none if it is empty."""


@dataclass(frozen=True)
class Shard:
    """What a rank knows of a tensor that is spread over a mesh of ranks."""

    shape: tuple[int, ...]
    """Of the whole."""
    stride: tuple[int, ...]
    """Of the whole, in elements."""
    mesh_shape: tuple[int, ...]
    mesh_names: tuple[str, ...] | None
    placements: tuple[Placement, ...]
    """One for each dimension of the mesh."""
    runs: Runs
    """What the local part covers."""

    def node(self) -> list[Any]:
        """For a layout."""
        names = None if self.mesh_names is None else list(self.mesh_names)
        runs = [[list(run) for run in dimension] for dimension in self.runs]
        placements = [list(placement) for placement in self.placements]
        return [list(self.shape), list(self.stride), list(self.mesh_shape), names, placements, runs]

    @classmethod
    def from_node(cls, fields: Sequence[Any], local_shape: Sequence[int]) -> Shard:
        """Read what `node` gave. Raises ValueError or TypeError for what cannot be.

        The runs of a dimension come in ascending order and share no index.
        """
        shape, stride, mesh_shape, names, placements, runs = fields
        found = cls(
            tuple(shape),
            tuple(stride),
            tuple(mesh_shape),
            None if names is None else tuple(names),
            tuple(tuple(placement) for placement in placements),
            tuple(tuple((start, length) for start, length in dimension) for dimension in runs),
        )
        numbers = (*found.shape, *found.stride, *found.mesh_shape, *(n for d in found.runs for run in d for n in run))
        if not all(type(number) is int and 0 <= number <= _MAX_NUMBER for number in numbers):
            raise ValueError(f"sizes and places must be integers that are not negative: {fields!r:.200}")
        if len(found.runs) != len(found.shape) or len(found.stride) != len(found.shape):
            raise ValueError(f"{len(found.shape)} dimensions, {len(found.runs)} of them with runs")
        if math.prod(max(1, size) for size in found.shape) > _MAX_NUMBER:
            raise ValueError(f"a tensor of sizes {found.shape}")
        for size, dimension in zip(found.shape, found.runs, strict=True):
            reached = 0
            for start, length in dimension:
                if start < reached or not length or start + length > size:
                    raise ValueError(
                        f"runs {dimension!r:.80} of a dimension of {size} are empty, out of order or outside of it"
                    )
                reached = start + length
        if math.prod(map(len, found.runs)) > MAX_BOXES:
            raise ValueError(f"a part of more than {MAX_BOXES} boxes")
        found._check_spread()
        if not _fits(found.runs, local_shape):
            raise ValueError(f"a local part of shape {tuple(local_shape)} does not cover {found.runs!r:.200}")
        return found

    def _check_spread(self) -> None:
        """Mesh, names and placements belong together."""
        names = self.mesh_names
        if names is not None and (len(names) != len(self.mesh_shape) or not all(type(name) is str for name in names)):
            raise ValueError(f"names {names!r:.80} of a mesh of {self.mesh_shape}")
        if len(self.placements) != len(self.mesh_shape):
            raise ValueError(f"{len(self.placements)} placements on a mesh of {len(self.mesh_shape)} dimensions")
        for placement in self.placements:
            length = _PLACEMENTS.get(placement[0]) if placement and type(placement[0]) is str else None
            numbers = placement[1:]
            if len(placement) != length or not all(type(number) is int for number in numbers):
                raise ValueError(f"placement {placement!r:.80} is unknown")
            if (numbers and not 0 <= numbers[0] < len(self.shape)) or (len(numbers) > 1 and numbers[1] < 1):
                raise ValueError(f"placement {placement!r:.80} of a tensor of {len(self.shape)} dimensions")


def is_sharded(value: Any) -> bool:
    """Whether `value` is a DTensor. Imports nothing: if its module is not loaded, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that lies on this rank, as it lies in memory; any other tensor itself. No communication."""
    if not is_sharded(tensor):
        return tensor
    # to_local() may hand out another object for a parameter; the memory and its version counter are this one's.
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local.detach()


def describe_shard(tensor: Any, path: str) -> Shard:
    """Where the local part of a DTensor lies in the whole; computed on this rank alone, by torch's rules.

    Raises StateError, naming `path`, for a pending reduction (Partial), placements of unknown kinds or order, and a
    local part whose shape is not what the placements say.
    """
    mesh, spec = tensor.device_mesh, tensor._spec
    placements = tuple(_placement(placement, path) for placement in tensor.placements)
    order = getattr(spec, "shard_order", None)
    if order is not None and order != type(spec).compute_default_shard_order(tensor.placements):
        raise StateError(
            f"{path}: shards in an order of their own ({order}) are not supported; redistribute() it to Replicate, and "
            "from there to its placements, which gives the usual order"
        )
    coordinate = mesh.get_coordinate()
    shape = tuple(tensor.shape)
    runs = runs_of(shape, tuple(mesh.shape), None if coordinate is None else tuple(coordinate), placements)
    local = tensor._local_tensor
    if not _fits(runs, local.shape):
        raise StateError(
            f"{path}: the local part has shape {tuple(local.shape)}, and {placements} of {shape} on a mesh of "
            f"{tuple(mesh.shape)} gives {tuple(sum(length for _, length in runs_) for runs_ in runs)} here; make it "
            "with distribute_tensor or fully_shard"
        )
    if math.prod(map(len, runs)) > MAX_BOXES:
        raise StateError(f"{path}: its part here is made of more than {MAX_BOXES} boxes; spread it in another way")
    names = mesh.mesh_dim_names
    return Shard(
        shape, tuple(tensor.stride()), tuple(mesh.shape), None if names is None else tuple(names), placements, runs
    )


@lru_cache(maxsize=65536)
def runs_of(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...] | None,
    placements: tuple[Placement, ...],
) -> Runs:
    """The runs of the part at `coordinate` of a mesh; None for a rank outside of it, which holds nothing.

    Placements apply from the first dimension of the mesh to the last, each as torch.chunk cuts: pieces of
    ceil(size / count), the last ones shorter or empty. A strided one cuts into `split_factor` pieces first, and takes
    its part of each.
    """
    if coordinate is None:
        return tuple(() for _ in shape)
    runs: list[tuple[tuple[int, int], ...]] = [((0, size),) if size else () for size in shape]
    for count, place, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if placement[0] == "R":
            continue
        dimension = placement[1]
        pieces = placement[2] if placement[0] == "Z" else 1
        size = sum(length for _, length in runs[dimension])
        taken: list[tuple[int, int]] = []
        for piece in range(pieces):
            first, last = _chunk(size, pieces, piece)
            begin, end = _chunk(last - first, count, place)
            taken += _cut(runs[dimension], first + begin, first + end)
        runs[dimension] = _joined(taken)
    return tuple(runs)


def same_place(first: Any, second: Any) -> bool:
    """Whether two DTensors are spread in the same way over the same mesh."""
    return bool(
        first.device_mesh == second.device_mesh
        and first.placements == second.placements
        and first.shape == second.shape
        and first.stride() == second.stride()
    )


def wrap(local: torch.Tensor, like: Any) -> torch.Tensor:
    """A DTensor over `local`, spread as `like` is. No communication, no copy."""
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def _placement(placement: Any, path: str) -> Placement:
    kind = type(placement).__name__
    if kind == "Shard":
        return ("S", int(placement.dim))
    if kind == "_StridedShard":
        return ("Z", int(placement.dim), int(placement.split_factor))
    if kind == "Replicate":
        return ("R",)
    raise StateError(
        f"{path}: a DTensor with placement {placement} has no bytes of its own: a sum over ranks is still to be made; "
        "redistribute() it to Replicate or Shard first"
        if kind == "Partial"
        else f"{path}: a DTensor with placement {placement} of unknown kind {kind} cannot be stored"
    )


def _chunk(size: int, count: int, number: int) -> tuple[int, int]:
    """Begin and end of one of `count` pieces, as torch.chunk cuts."""
    step = -(-size // count)
    return min(size, number * step), min(size, (number + 1) * step)


def _cut(runs: Sequence[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """What lies between two positions of runs that lie one after another."""
    taken, position = [], 0
    for start, length in runs:
        first, last = max(begin, position), min(end, position + length)
        if first < last:
            taken.append((start + first - position, last - first))
        position += length
    return taken


def _joined(runs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return tuple(joined)


def _fits(runs: Runs, local_shape: Sequence[int]) -> bool:
    sizes = tuple(sum(length for _, length in dimension) for dimension in runs)
    # A rank outside of the mesh has an empty tensor of one dimension, whatever the whole has.
    return sizes == tuple(local_shape) or (0 in local_shape and (math.prod(sizes) == 0 or not sizes))
