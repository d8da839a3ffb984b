"""Parts of a batch, whose gradients are added up."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from lastgood._lazy import torch
from lastgood.errors import DataError

__all__ = ["part", "samples_of", "split"]


def split(batch: Any, parts: int) -> list[tuple[Any, float]]:
    """`batch` in `parts` parts along the first dimension of its tensors, each with its share of the samples.

    Parts differ by one sample at most; a batch of fewer samples than `parts` has one part for each. Tensors lie in
    mappings, lists and tuples, also in each other; scalars and all else go into each part. Raises DataError if tensors
    have different numbers of samples, or there is none to be split.
    """
    if parts == 1:
        return [(batch, 1.0)]
    size = samples_of(batch, f"split into {parts} parts")
    if not size:
        return [(batch, 1.0)]
    count = min(parts, size)
    ends = [size * number // count for number in range(count + 1)]
    return [(part(batch, begin, end), (end - begin) / size) for begin, end in itertools.pairwise(ends)]


def samples_of(batch: Any, done: str = "cut") -> int:
    """The size of the first dimension of its tensors, without scalars.

    Raises DataError, which says what cannot be `done` with it, if they differ in that, or there is none.
    """
    sizes = {tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()}
    if len(sizes) != 1:
        found = "no tensor" if not sizes else f"tensors of {sorted(sizes)} samples"
        raise DataError(f"a batch of type {type(batch).__name__} cannot be {done}: it holds {found}")
    (size,) = sizes
    return size


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def part(value: Any, begin: int, end: int) -> Any:
    """Samples `begin` to `end` of each tensor of a batch; all else as it is."""
    if isinstance(value, torch.Tensor):
        return value[begin:end] if value.dim() else value
    if isinstance(value, Mapping):
        kind: Any = type(value)
        parts = {key: part(item, begin, end) for key, item in value.items()}
        return parts if kind is dict else kind(parts)  # transformers' BatchEncoding takes a mapping
    if isinstance(value, (list, tuple)):
        items = [part(item, begin, end) for item in value]
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*items)
        return type(value)(items)
    return value
