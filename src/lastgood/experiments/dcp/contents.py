"""What lies in the tensors of the suite: numbers that follow from a seed and an element's place, and digests of them.

Both see an element by its place in the complete tensor, so they are the same for any number of ranks and any way to
spread a tensor over them, and no rank needs more memory than its shards and a few megabytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from lastgood._lazy import torch
from lastgood.errors import StateError
from lastgood.units import MIB

__all__ = ["Digest", "Piece", "digest_of", "fill", "nbytes_of", "pieces_of"]

_ELEMENTS: Final = MIB
"""Worked on at a time, at most: a few tensors of eight bytes each."""
_LARGE: Final = 0.02
_ODD: Final = (-7046029254386353131, -4417276706812531889, -8663945395140668459)
"""Large odd numbers as signed 64 bits (Steele et al. 2014; Wang): products wrap around."""
_BITS: Final[Mapping[int, str]] = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


@dataclass(frozen=True)
class Piece:
    """A part of one tensor that this rank holds."""

    name: str
    local: torch.Tensor
    shape: tuple[int, ...]
    """Of the complete tensor."""
    offsets: tuple[int, ...]
    """Of the part in it, by dimension."""
    replica: int
    """Number of this copy, from 0, if several ranks hold the same part of a tensor that is spread."""
    spread: bool
    """Whether other ranks hold other parts."""


@dataclass(frozen=True)
class Digest:
    """Sums of 64 bits. Add `spread` over the ranks of one replica; `same` is equal on all ranks."""

    spread: int
    same: int
    replica: int


def pieces_of(state: Mapping[str, Any], prefix: str = "") -> Iterator[Piece]:
    """Every tensor in `state`, or this rank's part of it. Raises StateError for a tensor of a kind it does not know."""
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from pieces_of(value, f"{name}.")
        elif isinstance(value, torch.Tensor):
            yield from _pieces(name, value)
        elif hasattr(value, "local_shards"):
            # FSDP1's, which is no torch.Tensor.
            for shard in value.local_shards():
                offsets = tuple(shard.metadata.shard_offsets)
                yield Piece(name, shard.tensor.detach(), tuple(value.size()), offsets, 0, True)


def nbytes_of(state: Mapping[str, Any]) -> int:
    """Bytes of all tensors in `state` that this rank holds."""
    return sum(piece.local.numel() * piece.local.element_size() for piece in pieces_of(state))


def fill(state: Mapping[str, Any], seed: int) -> None:
    """Write into every tensor of `state`, in place: floats from -0.02 to 0.02, or integers below 1,000."""
    with torch.no_grad():
        for piece in pieces_of(state):
            salt = _salt(piece.name, seed)
            for part, places in _parts(piece):
                bits = _mixed(places, salt)
                if part.is_floating_point():
                    unit = ((bits >> 40) & 0xFFFFFF).to(torch.float32) / float(1 << 24)
                    part.copy_((unit * (2 * _LARGE) - _LARGE).to(part.dtype))
                else:
                    part.copy_(((bits >> 40) & 0xFFFF) % 1000)


def digest_of(state: Mapping[str, Any]) -> Digest:
    """The digest of this rank's part of `state`: of names, places and bits of all elements.

    Adding up makes it the same in any order and for any number of ranks; it finds accidents, and no forgery.
    """
    spread = same = 0
    replica = 0
    for piece in pieces_of(state):
        total = 0
        salt = _salt(f"{piece.name} {piece.local.dtype} {piece.shape}", 0)
        for part, places in _parts(piece):
            bits = part.contiguous().view(_whole_dtype(part)).to(torch.int64)
            total += int(_mixed(_mixed(places, salt) ^ bits, salt).sum())
        if piece.spread:
            spread += total
            replica = piece.replica
        else:
            same += total
    return Digest(spread % (1 << 64), same % (1 << 64), replica)


def _pieces(name: str, value: torch.Tensor) -> Iterator[Piece]:
    from torch.distributed.tensor import DTensor

    if not isinstance(value, DTensor):
        yield Piece(name, value.detach(), tuple(value.shape), (0,) * value.dim(), 0, False)
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        raise StateError(f"{name}: this rank is not in the mesh that the tensor is spread over")
    replica = 0
    for place, size, number in zip(value.placements, value.device_mesh.shape, coordinate, strict=True):
        if place.is_partial():
            raise StateError(f"{name}: is a partial sum, which cannot be saved")
        if place.is_replicate():
            replica = replica * size + number
    yield Piece(name, value.to_local().detach(), tuple(value.shape), tuple(offsets), replica, True)


def _parts(piece: Piece) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The piece in parts of bounded size, and the place of each element in the complete tensor, row by row."""
    local = piece.local if piece.local.dim() else piece.local.reshape(1)
    shape, offsets = piece.shape or (1,), piece.offsets or (0,)
    if local.numel() == 0:
        return
    rows = max(1, _ELEMENTS // max(1, local[0].numel()))
    for first in range(0, local.shape[0], rows):
        part = local[first : first + rows]
        places = torch.zeros((), dtype=torch.int64, device=local.device)
        stride = 1
        for dimension in reversed(range(len(shape))):
            start = offsets[dimension] + (first if dimension == 0 else 0)
            line = torch.arange(start, start + part.shape[dimension], dtype=torch.int64, device=local.device)
            places = places + (line * stride).view(-1, *(1,) * (len(shape) - 1 - dimension))
            stride *= shape[dimension]
        yield part, places


def _whole_dtype(tensor: torch.Tensor) -> torch.dtype:
    found: torch.dtype = getattr(torch, _BITS[tensor.element_size()])
    return found


def _salt(name: str, seed: int) -> int:
    number = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")
    return number - (1 << 63)


def _mixed(numbers: torch.Tensor, salt: int) -> torch.Tensor:
    """Each number becomes another one, all bits of which depend on all of its own (SplitMix64; Steele et al. 2014)."""
    mixed = numbers * _ODD[0] + salt
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * _ODD[1]
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * _ODD[2]
    return mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)
