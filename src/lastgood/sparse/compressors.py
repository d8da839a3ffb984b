"""Compressors: which part of a gradient is sent now, and what stays behind (StellaTrain, SIGCOMM'24, section 3.2)."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt

from lastgood import _native
from lastgood._lazy import torch
from lastgood.errors import ConfigError, MismatchError
from lastgood.sparse.blocks import BLOCK_WIDTH, MAX_ELEMENTS, SparseGradient

__all__ = ["COMPRESSORS", "Compressor", "ValueType", "keep_count", "make_compressor", "most_places"]

ValueType = Literal["float32", "float16", "bfloat16"]

_VALUE_TYPES: Final = ("float32", "float16", "bfloat16")
_SLACK: Final = 4
"""A threshold may let through a quarter more places than were asked for, and aims at the middle."""


def keep_count(elements: int, ratio: float, nodes: int) -> int:
    """How many elements each of `nodes` nodes sends if the share `ratio` is left out: max(1, floor((1 - r) n / nodes)).

    `ratio` counts as the decimal number that it is written as: of 1000 elements 0.9 leaves 100, not 99.
    """
    if not 0 <= ratio < 1 or elements < 1 or nodes < 1:
        raise ValueError(f"compression {ratio} of {elements} elements on {nodes} nodes")
    return max(1, int((1 - Fraction(repr(float(ratio)))) * elements / nodes))


def most_places(places: int, wanted: int) -> int:
    """The most places that a threshold chooses if `wanted` of `places` are asked for."""
    return min(places, wanted + -(-wanted // _SLACK))


@dataclass(frozen=True)
class _Order:
    """What native code is asked to choose: see native/src/sparse/compress.hpp."""

    choice: Literal["heaviest", "threshold", "given", "all"]
    wanted: int
    middle: int
    most: int
    threshold: int | None = None
    indices: npt.NDArray[np.uint32] | None = None


@dataclass(frozen=True)
class _Chosen:
    """What came of it: `held` if the threshold that was given chose, else `least` is the lightest choice's weight."""

    held: bool
    count: int
    least: int


class Compressor(ABC):
    """Chooses what is sent of one parameter's gradient; the parameter has `elements` elements.

    What it keeps from call to call is in `state_dict`; the residual is the caller's. Choices depend on magnitudes and
    that state alone: not on threads, and not on where an element lies, except between equal ones, where the first goes.
    One call at a time.
    """

    name: ClassVar[str]
    width: ClassVar[int] = 1
    variant = ""
    """Instruction set of the native code: one of `_native.step_variants()`, or the fastest."""
    sample = 0
    """Least number of places that a first bound is made of; 0 for a good one. No choice depends on it."""

    def __init__(
        self, elements: int, *, seed: int = 0, values: ValueType = "float32", threads: int | None = None
    ) -> None:
        if not 0 < elements <= MAX_ELEMENTS:
            raise ValueError(f"a parameter of {elements} elements: a compressor takes 1 to {MAX_ELEMENTS}")
        if values not in _VALUE_TYPES:
            raise ConfigError(f"values of type {values!r}: choose {', '.join(_VALUE_TYPES)}")
        self.elements = elements
        self.seed = seed
        self.threads = max(1, threads or torch.get_num_threads())
        self.reads = 0
        """How many tensors as long as the gradient the last call has read: itself, the residual, their sum."""
        self._values: ValueType = values
        self._values_type: torch.dtype = getattr(torch, values)

    @property
    def places(self) -> int:
        """How many elements or blocks there are to choose from."""
        return -(-self.elements // self.width)

    def compress(
        self, gradient: torch.Tensor, residual: torch.Tensor | None, count: int, *, into: torch.Tensor | None = None
    ) -> SparseGradient:
        """Choose about `count` elements of gradient + residual; the rest is the new residual, written in place.

        Args:
            gradient: flat, contiguous, on the CPU: float32, float16 or bfloat16.
            residual: float32 of the same length. To the bit, what is sent and the new residual add up to the gradient
                and the old residual, element by element (a zero may change its sign). If the gradient is not finite,
                nothing is sent, the result is marked, and the residual stays as it is. So does each element whose sum
                overflows, but then the others take up the finite gradient. None: what is not sent is lost.
            count: as `keep_count` gives it. Compressors of blocks choose as many blocks as hold so many elements.
            into: where the new residual goes instead; what is in it counts only if the result is finite. It saves
                a read of the gradient, which otherwise tells first whether the residual may be overwritten.
        """
        self._check(gradient, residual, into, count)
        order = self._order(min(self.places, -(-count // self.width)))
        indices = np.empty(order.most, np.uint32) if order.indices is None else order.indices
        values = torch.empty(order.most * self.width, dtype=self._values_type, device="cpu")
        target = residual if into is None else into
        finite, held, chosen, least, self.reads = _native.sparse_compress(
            order.choice,
            gradient=gradient.data_ptr(),
            gradient_type=_name(gradient.dtype),
            residual=0 if residual is None else residual.data_ptr(),
            target=0 if target is None else target.data_ptr(),
            elements=self.elements,
            width=self.width,
            value_type=self._values,
            wanted=order.wanted,
            middle=order.middle,
            most=order.most,
            threshold=order.threshold,
            indices=indices.__array_interface__["data"][0],  # `ctypes.data` takes three times as long
            values=values.data_ptr(),
            threads=self.threads,
            sample=self.sample,
            variant=self.variant,
        )
        if not finite:
            return SparseGradient(self.elements, self.width, indices[:0], values[:0], finite=False)
        self._learn(order, _Chosen(held, chosen, least))
        return SparseGradient(self.elements, self.width, indices[:chosen], values[: chosen * self.width])

    def give_back(self, sparse: SparseGradient, residual: torch.Tensor) -> None:
        """Return what `compress` took out of `residual` a moment ago: another rank's gradient was not finite."""
        end = self.elements // self.width * self.width
        rows, rest = residual[:end].view(-1, self.width), residual[end:]
        values = sparse.values.float().view(-1, self.width)
        complete = int(np.searchsorted(sparse.indices, len(rows)))
        rows.index_add_(0, torch.from_numpy(sparse.indices[:complete].astype(np.int64)), values[:complete])
        if complete < len(sparse.indices):
            rest += values[-1, : len(rest)]

    def state_dict(self) -> dict[str, Any]:
        """What a compressor of the same kind needs to choose as this one would have: plain values."""
        return {"compressor": self.name, "elements": self.elements}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Raises MismatchError for another kind of compressor, or another number of elements."""
        own = Compressor.state_dict(self)
        for key, value in own.items():
            if state.get(key) != value:
                raise MismatchError(f"a compressor's state has {key} {state.get(key)!r}, here it is {value!r}")

    @abstractmethod
    def _order(self, wanted: int) -> _Order:
        """What is to be chosen if `wanted` places are asked for."""

    def _learn(self, order: _Order, chosen: _Chosen) -> None:  # noqa: B027 - most learn nothing
        """What follows for the next call."""

    def _check(
        self, gradient: torch.Tensor, residual: torch.Tensor | None, into: torch.Tensor | None, count: int
    ) -> None:
        for name, tensor in (("gradient", gradient), ("residual", residual), ("into", into)):
            if tensor is None:
                continue
            if tensor.dim() != 1 or tensor.numel() != self.elements or not tensor.is_contiguous() or tensor.is_cuda:
                raise ValueError(
                    f"{name} of shape {tuple(tensor.shape)} on {tensor.device}: "
                    f"not {self.elements} contiguous elements on the CPU"
                )
            if _name(tensor.dtype) not in (_VALUE_TYPES if name == "gradient" else _VALUE_TYPES[:1]):
                raise ValueError(f"{name} of type {_name(tensor.dtype)}")
        if into is not None and residual is None:
            raise ValueError("a place for a new residual without an old one")
        if not 1 <= count <= self.elements:
            raise ValueError(f"{count} of {self.elements} elements")


class TopK(Compressor):
    """Exactly `count` elements, the largest by magnitude."""

    name = "topk"

    def _order(self, wanted: int) -> _Order:
        return _Order("heaviest", wanted, wanted, wanted)


class Threshold(Compressor):
    """All elements of at least a magnitude that follows the gradient: from `count` to `most_places` of them.

    If the threshold of the last call lets through fewer or more, it becomes that of the heaviest places, half-way
    between the two, which then go. It moves by a quarter of what the number chosen lies off that middle.
    """

    name = "threshold"

    def __init__(
        self, elements: int, *, seed: int = 0, values: ValueType = "float32", threads: int | None = None
    ) -> None:
        super().__init__(elements, seed=seed, values=values, threads=threads)
        self._threshold: float | None = None

    def _order(self, wanted: int) -> _Order:
        most = most_places(self.places, wanted)
        bits = None if self._threshold is None else int(np.float32(self._threshold).view(np.uint32))
        return _Order("threshold", wanted, (wanted + most) // 2, most, bits)

    def _learn(self, order: _Order, chosen: _Chosen) -> None:
        if chosen.held and self._threshold is not None:
            step = 1 + (chosen.count - order.middle) / (4 * order.middle)
            self._threshold = float(np.float32(self._threshold * step))
        else:
            self._threshold = float(np.uint32(chosen.least).view(np.float32))

    def state_dict(self) -> dict[str, Any]:
        """With the threshold, or None before the first call."""
        return {**super().state_dict(), "threshold": self._threshold}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with that threshold."""
        super().load_state_dict(state)
        threshold = state["threshold"]
        self._threshold = None if threshold is None else float(threshold)


class ThresholdBlocks(Threshold):
    """As `Threshold`, for blocks of 16 neighbours by their mean magnitude; the state's threshold is 16 times that."""

    name = "v16"
    width = BLOCK_WIDTH


class RandomK(Compressor):
    """`count` elements drawn at random, others in each call: by seed and number of the call."""

    name = "randomk"

    def __init__(
        self, elements: int, *, seed: int = 0, values: ValueType = "float32", threads: int | None = None
    ) -> None:
        super().__init__(elements, seed=seed, values=values, threads=threads)
        self._calls = 0

    def _order(self, wanted: int) -> _Order:
        indices = np.empty(wanted, np.uint32)
        _native.sparse_draw(self.places, wanted, self.seed % (1 << 64), self._calls, indices.ctypes.data)
        return _Order("given", wanted, wanted, wanted, indices=indices)

    def _learn(self, order: _Order, chosen: _Chosen) -> None:  # noqa: ARG002 - as the base has it
        self._calls += 1

    def state_dict(self) -> dict[str, Any]:
        """With the seed, and how many calls have drawn."""
        return {**super().state_dict(), "seed": self.seed, "calls": self._calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with that seed, from that call."""
        super().load_state_dict(state)
        self.seed, self._calls = int(state["seed"]), int(state["calls"])


class Everything(Compressor):
    """All elements, in blocks: what stays behind are rounding errors, if values are sent in 16 bits."""

    name = "none"
    width = BLOCK_WIDTH

    def _order(self, wanted: int) -> _Order:  # noqa: ARG002 - as the base has it
        return _Order("all", self.places, self.places, self.places)


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


COMPRESSORS: Final[Mapping[str, type[Compressor]]] = {
    kind.name: kind for kind in (TopK, Threshold, ThresholdBlocks, RandomK, Everything)
}


def make_compressor(
    name: str, elements: int, *, seed: int = 0, values: ValueType = "float32", threads: int | None = None
) -> Compressor:
    """A compressor of that name for a parameter of so many elements, on so many threads (as torch has, by default)."""
    if name not in COMPRESSORS:
        raise ConfigError(f"no compressor {name!r}; there are: {', '.join(COMPRESSORS)}")
    return COMPRESSORS[name](elements, seed=seed, values=values, threads=threads)
