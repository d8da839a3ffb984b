"""Compressors: which part of a gradient is sent now, and what stays behind (StellaTrain, SIGCOMM'24, section 3.2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt

from lastgood._lazy import torch
from lastgood.errors import ConfigError, MismatchError
from lastgood.sparse import plain
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


class Compressor(ABC):
    """Chooses what is sent of one parameter's gradient; the parameter has `elements` elements.

    What it keeps from call to call is in `state_dict`; the residual is the caller's. Choices depend on magnitudes and
    that state alone: not on threads, and not on where an element lies, except between equal ones, where the first goes.
    """

    name: ClassVar[str]
    width: ClassVar[int] = 1

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
        self._dtype: torch.dtype = getattr(torch, values)

    @property
    def places(self) -> int:
        """How many elements or blocks there are to choose from."""
        return -(-self.elements // self.width)

    def compress(
        self, gradient: torch.Tensor, residual: torch.Tensor, count: int, *, into: torch.Tensor | None = None
    ) -> SparseGradient:
        """Choose about `count` elements of gradient + residual; the rest is the new residual, written in place.

        Args:
            gradient: flat, contiguous, on the CPU: float32, float16 or bfloat16.
            residual: float32 of the same length. To the bit, what is sent and the new residual add up to the gradient
                and the old residual, element by element (a zero may change its sign). Not changed if their sum is
                not finite: then nothing is sent, and the result says so.
            count: as `keep_count` gives it. Compressors of blocks choose as many blocks as hold so many elements.
            into: where the new residual goes instead; what is in it counts only if the result is finite. One read
                of the gradient is saved, which otherwise tells whether `residual` may be overwritten.
        """
        self._check(gradient, residual, count)
        target = residual
        if into is not None:
            self._check(gradient, into, count)
            target = into
        total = plain.accumulate(gradient, residual)
        if not plain.finite(total):
            return self._nothing()
        indices = self._choose(total, min(self.places, -(-count // self.width)))
        chosen = plain.chosen_values(total, indices, self.width)
        sent = plain.narrow(chosen, self._dtype)
        target.copy_(torch.from_numpy(total))
        self._put(target, indices, torch.from_numpy(chosen) - sent.float())
        return SparseGradient(self.elements, self.width, indices, sent)

    def give_back(self, sparse: SparseGradient, residual: torch.Tensor) -> None:
        """Return what `compress` took out of `residual` a moment ago: another rank's gradient was not finite."""
        if not len(sparse.indices):
            return
        self._put(residual, sparse.indices, self._take(residual, sparse.indices) + sparse.values.float())

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
    def _choose(self, total: npt.NDArray[np.float32], wanted: int) -> npt.NDArray[np.uint32]:
        """The places that are sent, ascending, and what follows from it for the next call."""

    def _check(self, gradient: torch.Tensor, residual: torch.Tensor, count: int) -> None:
        for name, tensor in (("gradient", gradient), ("residual", residual)):
            if tensor.dim() != 1 or tensor.numel() != self.elements or not tensor.is_contiguous() or tensor.is_cuda:
                raise ValueError(
                    f"{name} of shape {tuple(tensor.shape)} on {tensor.device}: "
                    f"not {self.elements} contiguous elements on the CPU"
                )
        if residual.dtype != torch.float32 or str(gradient.dtype).removeprefix("torch.") not in _VALUE_TYPES:
            raise ValueError(f"a gradient of {gradient.dtype} with a residual of {residual.dtype}")
        if not 1 <= count <= self.elements:
            raise ValueError(f"{count} of {self.elements} elements")

    def _nothing(self) -> SparseGradient:
        values = torch.empty(0, dtype=self._dtype, device="cpu")
        return SparseGradient(self.elements, self.width, np.empty(0, np.uint32), values, finite=False)

    def _split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The complete blocks of a flat tensor, a row each, and what comes after them."""
        end = self.elements // self.width * self.width
        return tensor[:end].view(-1, self.width), tensor[end:]

    def _take(self, tensor: torch.Tensor, indices: npt.NDArray[np.uint32]) -> torch.Tensor:
        values = plain.chosen_values(tensor.numpy(), indices, self.width)
        return torch.from_numpy(values)

    def _put(self, tensor: torch.Tensor, indices: npt.NDArray[np.uint32], values: torch.Tensor) -> None:
        rows, rest = self._split(tensor)
        given = values.view(-1, self.width)
        complete = indices < len(rows)
        rows[torch.from_numpy(indices[complete].astype(np.int64))] = given[torch.from_numpy(complete)]
        if not complete.all():
            rest.copy_(given[-1, : len(rest)])


class TopK(Compressor):
    """Exactly `count` elements, the largest by magnitude."""

    name = "topk"

    def _choose(self, total: npt.NDArray[np.float32], wanted: int) -> npt.NDArray[np.uint32]:
        return plain.top(plain.scores(total, self.width), wanted)


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

    def _choose(self, total: npt.NDArray[np.float32], wanted: int) -> npt.NDArray[np.uint32]:
        weights = plain.scores(total, self.width)
        most = most_places(self.places, wanted)
        middle = (wanted + most) // 2
        if self._threshold is not None:
            indices = np.flatnonzero(weights >= np.float32(self._threshold).view(np.uint32))
            if wanted <= len(indices) <= most:
                step = 1 + (len(indices) - middle) / (4 * middle)
                self._threshold = float(np.float32(self._threshold * step))
                return indices.astype(np.uint32)
        found = plain.top(weights, middle)
        self._threshold = float(weights[found].min().view(np.float32))
        return found

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

    def _choose(self, total: npt.NDArray[np.float32], wanted: int) -> npt.NDArray[np.uint32]:  # noqa: ARG002
        self._calls += 1
        return plain.draw(self.places, wanted, self.seed, self._calls - 1)

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

    def _choose(self, total: npt.NDArray[np.float32], wanted: int) -> npt.NDArray[np.uint32]:  # noqa: ARG002
        return np.arange(self.places, dtype=np.uint32)


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
