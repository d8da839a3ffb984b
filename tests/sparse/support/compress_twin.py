"""Compressors in plain numpy and torch, place by place: what the native ones are held to, to the bit."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from lastgood.sparse.blocks import BLOCK_WIDTH, SparseGradient
from lastgood.sparse.compressors import COMPRESSORS, most_places

__all__ = ["Twin"]

Bits = npt.NDArray[np.uint32]

_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_INFINITY: Final = np.uint32(0x7F800000)
_LARGEST_HALF: Final = 65504
_ROUNDS: Final = 6


class Twin:
    """As the compressor of that name, with the same state."""

    def __init__(self, name: str, elements: int, *, seed: int = 0, values: str = "float32") -> None:
        self.name, self.elements, self.seed = name, elements, seed
        self.width = COMPRESSORS[name].width
        self.places = -(-elements // self.width)
        self.threshold: float | None = None
        self.calls = 0
        self._dtype = getattr(torch, values)

    def compress(self, gradient: torch.Tensor, residual: torch.Tensor | None, count: int) -> SparseGradient:
        total = accumulate(gradient, residual)
        bad = torch.from_numpy(~np.isfinite(total))
        if bad.any():
            if residual is not None and torch.isfinite(gradient).all():
                residual.copy_(torch.where(bad, residual, torch.from_numpy(total)))
            nothing = torch.empty(0, dtype=self._dtype)
            return SparseGradient(self.elements, self.width, np.empty(0, np.uint32), nothing, finite=False)
        indices = self._choose(total, min(self.places, -(-count // self.width)))
        chosen = chosen_values(total, indices, self.width)
        sent = narrow(chosen, self._dtype)
        if residual is not None:
            rests = torch.zeros(self.places, self.width)
            rests.view(-1)[: self.elements] = torch.from_numpy(total)
            rests[torch.from_numpy(indices.astype(np.int64))] = (torch.from_numpy(chosen) - sent.float()).view(
                -1, self.width
            )
            residual.copy_(rests.view(-1)[: self.elements])
        return SparseGradient(self.elements, self.width, indices, sent)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"compressor": self.name, "elements": self.elements}
        if self.name in ("threshold", "v16"):
            state["threshold"] = self.threshold
        if self.name == "randomk":
            state.update(seed=self.seed, calls=self.calls)
        return state

    def _choose(self, total: npt.NDArray[np.float32], wanted: int) -> Bits:
        if self.name == "none":
            return np.arange(self.places, dtype=np.uint32)
        if self.name == "randomk":
            self.calls += 1
            return draw(self.places, wanted, self.seed, self.calls - 1)
        weights = scores(total, self.width)
        return top(weights, wanted) if self.name == "topk" else self._by_threshold(weights, wanted)

    def _by_threshold(self, weights: Bits, wanted: int) -> Bits:
        most = most_places(self.places, wanted)
        middle = (wanted + most) // 2
        if self.threshold is not None:
            indices = np.flatnonzero(weights >= np.float32(self.threshold).view(np.uint32))
            if wanted <= len(indices) <= most:
                step = 1 + (len(indices) - middle) / (4 * middle)
                self.threshold = float(np.float32(self.threshold * step))
                return indices.astype(np.uint32)
        found = top(weights, middle)
        self.threshold = float(weights[found].min().view(np.float32))
        return found


def accumulate(gradient: torch.Tensor, residual: torch.Tensor | None) -> npt.NDArray[np.float32]:
    """Gradient + residual, rounded to float32."""
    total: npt.NDArray[np.float32] = (gradient.float() if residual is None else gradient.float() + residual).numpy()
    return total


def scores(values: npt.NDArray[np.float32], width: int) -> Bits:
    """How much each place weighs, as the bits of a float32 that is not negative, which order as the numbers do.

    An element weighs its magnitude. A block weighs the sum of its magnitudes, by halves: lanes 0 to 7 and 8 to 15 are
    added, then 0 to 3 and 4 to 7 of that, and so on. A last block of c elements weighs its sum times 16 / c (rounded
    to float32), so that it counts by its mean.
    """
    if width == 1:
        return values.view(np.uint32) & _MAGNITUDE
    sums = _padded(np.abs(values)).reshape(-1, width)
    with np.errstate(over="ignore"):
        while sums.shape[1] > 1:
            half = sums.shape[1] // 2
            sums = sums[:, :half] + sums[:, half:]
        short = len(values) % width
        if short:
            sums[-1] *= np.float32(width / short)
    return np.ascontiguousarray(sums).reshape(-1).view(np.uint32)


def top(weights: Bits, count: int) -> Bits:
    """The `count` heaviest places, ascending; of equal ones the first."""
    least = np.partition(weights, len(weights) - count)[len(weights) - count]
    above = np.flatnonzero(weights > least)
    equal = np.flatnonzero(weights == least)[: count - len(above)]
    return np.sort(np.concatenate((above, equal))).astype(np.uint32)


def draw(places: int, count: int, seed: int, call: int) -> Bits:
    """`count` different places of `places`, ascending: the first of a permutation that `seed` and `call` make.

    A Feistel network permutes the numbers below a power of two; those beyond the last place go through it again.
    """
    bits = max(2, (places - 1).bit_length())
    left_bits = bits // 2
    right_bits = bits - left_bits
    keys = _keys(seed, call, places)
    found = np.arange(count, dtype=np.uint32)
    walking = np.arange(count)
    while len(walking):
        left, right = found[walking] >> np.uint32(right_bits), found[walking] & np.uint32((1 << right_bits) - 1)
        for number, key in enumerate(keys):
            if number % 2 == 0:
                left ^= _mixed(right, key) >> np.uint32(32 - left_bits)
            else:
                right ^= _mixed(left, key) >> np.uint32(32 - right_bits)
        found[walking] = left << np.uint32(right_bits) | right
        walking = walking[found[walking] >= places]
    return np.sort(found)


def narrow(values: npt.NDArray[np.float32], dtype: torch.dtype) -> torch.Tensor:
    """Rounded to the nearest, and never to infinity: what is left over is exact in float32 also beyond the largest."""
    wide = torch.from_numpy(values)
    if dtype == torch.float32:
        return wide
    found = wide.to(dtype)
    beyond = torch.isinf(found)
    if beyond.any():
        bits = values[beyond.numpy()].view(np.uint32)
        if dtype == torch.bfloat16:
            nearest = (bits & np.uint32(0xFFFF0000)).view(np.float32)
        else:
            # A multiple of the value's own last bit, so that the subtraction loses nothing.
            last_bit = np.clip((bits >> np.uint32(23) & np.uint32(0xFF)).astype(np.int64) - 150, 0, 16)
            magnitude = (_LARGEST_HALF >> last_bit << last_bit).astype(np.float32)
            nearest = np.copysign(magnitude, bits.view(np.float32))
        found[beyond] = torch.from_numpy(nearest).to(dtype)
    return found


def chosen_values(values: npt.NDArray[np.float32], indices: Bits, width: int) -> npt.NDArray[np.float32]:
    """The values of chosen places, a copy, with zeros beyond the end."""
    if width == 1:
        return values[indices]
    return _padded(values).reshape(-1, width)[indices].reshape(-1)


def _padded(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.pad(values, (0, -len(values) % BLOCK_WIDTH))


def _keys(seed: int, call: int, places: int) -> list[int]:
    """A 32-bit key for each round."""
    state = (seed * 0x9E3779B97F4A7C15 + call * 0xD1342543DE82EF95 + places) & (1 << 64) - 1
    found = []
    for _ in range(_ROUNDS):
        state = (state + 0x9E3779B97F4A7C15) & (1 << 64) - 1
        mixed = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & (1 << 64) - 1
        mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & (1 << 64) - 1
        found.append(mixed >> 32)
    return found


def _mixed(values: Bits, key: int) -> Bits:
    mixed = (values ^ np.uint32(key)) * np.uint32(0x9E3779B1)
    mixed = (mixed ^ mixed >> np.uint32(15)) * np.uint32(0x85EBCA77)
    return mixed ^ mixed >> np.uint32(16)
