"""A training with DistributedDataParallel as the collectives that it runs, in order: what traffic is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lastgood.errors import ConfigError
from lastgood.units import MIB

__all__ = ["Collective", "DdpLife", "seeded_life"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Collective:
    """One collective call. `parts` has what each rank brings, or, of a broadcast, what the root brings."""

    kind: Literal["allgather", "broadcast", "allreduce"]
    content: str
    """``count``, ``sizes``, ``parameters``, ``buffers``, ``gradient``, ``bucket-order`` or ``bucket-sizes``."""
    parts: tuple[Array, ...]
    step: int | None = None
    bucket: int | None = None


@dataclass(frozen=True)
class DdpLife:
    """From the start of a training to its end. All arrays are C-contiguous, of one dtype for parameters."""

    names: tuple[str, ...]
    weights: tuple[Array, ...]
    gradients: tuple[tuple[tuple[Array, ...], ...], ...]
    """By step, rank and parameter, already divided by the number of ranks."""
    buffers: tuple[tuple[Array, ...], ...] = ()
    """Rank 0's buffers before each step's forward, of one dtype; empty if there are none."""
    first_cap_bytes: int = MIB
    cap_bytes: int = 25 * MIB

    def __post_init__(self) -> None:
        if not self.gradients or len(self.ranks_of_steps()) != 1 or len(self.names) != len(self.weights):
            raise ConfigError("a life has steps, as many gradients in each, and a name for each parameter")
        if self.buffers and len(self.buffers) != len(self.gradients):
            raise ConfigError("a life has its buffers before each step")

    def ranks_of_steps(self) -> set[int]:
        """How many ranks there are; one number if the life is right."""
        return {len(step) for step in self.gradients}

    @property
    def ranks(self) -> int:
        """How many ranks train."""
        return len(self.gradients[0])

    def buckets(self) -> tuple[tuple[int, ...], ...]:
        """The rebuilt buckets: parameters in the order of their gradients (last one first), closed at the caps."""
        buckets: list[tuple[int, ...]] = []
        bucket: list[int] = []
        nbytes = 0
        for number in reversed(range(len(self.weights))):
            bucket.append(number)
            nbytes += self.weights[number].nbytes
            if nbytes >= (self.cap_bytes if buckets else self.first_cap_bytes):
                buckets.append(tuple(bucket))
                bucket, nbytes = [], 0
        if bucket:
            buckets.append(tuple(bucket))
        return tuple(buckets)

    def step_buckets(self, step: int) -> tuple[tuple[int, ...], ...]:
        """The buckets of a step: in the first one there is one, in the order of the module."""
        return self.buckets() if step else (tuple(range(len(self.weights))),)

    def collectives(self) -> Iterator[Collective]:
        """Everything that the ranks do together, in order."""
        yield Collective("allgather", "count", tuple(np.array([len(self.weights)], "<i8") for _ in range(self.ranks)))
        sizes = [number for weight in self.weights for number in (*weight.shape, *_strides(weight.shape))]
        yield Collective("broadcast", "sizes", (np.array(sizes, "<i8"),))
        yield Collective("broadcast", "parameters", (_flat(self.weights),))
        if self.buffers:
            yield Collective("broadcast", "parameters", (_flat(self.buffers[0]),))
        for step, gradients in enumerate(self.gradients):
            if step == 1:
                buckets = self.buckets()
                order = [number for bucket in buckets for number in bucket]
                yield Collective("broadcast", "bucket-order", (np.array([*order, len(buckets)], "<i4"),), step)
                yield Collective("broadcast", "bucket-sizes", (np.array([len(one) for one in buckets], "<i4"),), step)
            if self.buffers:
                yield Collective("broadcast", "buffers", (_flat(self.buffers[step]),), step)
            for number, bucket in enumerate(self.step_buckets(step)):
                parts = tuple(_flat([rank[parameter] for parameter in bucket]) for rank in gradients)
                yield Collective("allreduce", "gradient", parts, step, number)


def seeded_life(
    seed: int,
    *,
    ranks: int,
    steps: int,
    shapes: Sequence[tuple[int, ...]],
    dtype: str = "float32",
    first_cap_bytes: int = MIB,
    cap_bytes: int = 25 * MIB,
) -> DdpLife:
    """A life with random weights and gradients: the same for the same arguments."""
    if ranks < 2 or steps < 1 or not shapes:
        raise ConfigError("a life has at least 2 ranks, 1 step and 1 parameter")
    random = np.random.default_rng(seed)

    def some(shape: tuple[int, ...], scale: float) -> Array:
        return (random.standard_normal(shape, np.float32) * np.float32(scale)).astype(dtype)

    weights = tuple(some(shape, 0.1) for shape in shapes)
    gradients = tuple(tuple(tuple(some(shape, 0.01) for shape in shapes) for _ in range(ranks)) for _ in range(steps))
    names = tuple(f"p{number}" for number in range(len(shapes)))
    return DdpLife(names, weights, gradients, first_cap_bytes=first_cap_bytes, cap_bytes=cap_bytes)


def _flat(arrays: Sequence[Array]) -> Array:
    return np.concatenate([array.reshape(-1) for array in arrays])


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape)))
