"""Batches of other sizes than the data has: cut, and joined, along the first dimension of their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lastgood._lazy import torch
from lastgood.errors import DataError
from lastgood.sparse.split import part, samples_of

__all__ = ["Portions", "join_batches"]


class Portions:
    """Portions of given sizes, from an iterator of batches: what is left of one batch goes first in the next portion.

    Nothing is left out and nothing comes twice: the place in the data is a batch and the samples used of it.
    """

    def __init__(self) -> None:
        self._batch: Any = None
        """The newest that was drawn."""
        self._used = 0
        """Samples of it."""

    def take(self, data: Iterator[Any], samples: int | None) -> Any:
        """The next `samples` samples; None: what is left of a batch, or a complete one.

        Raises StopIteration when `data` ends before, and keeps what is left then; DataError for batches that cannot be
        cut.
        """
        left = 0 if self._batch is None else samples_of(self._batch) - self._used
        if samples is None:
            if not left:
                self._batch = next(data)
                self._used = samples_of(self._batch)
                return self._batch
            samples = left
        pieces, found = [], 0
        if left:
            found = min(left, samples)
            pieces.append(part(self._batch, self._used, self._used + found))
        batch, used = self._batch, self._used + found
        while found < samples:
            try:
                batch = next(data)
            except StopIteration:
                if len(pieces) > 1 or (pieces and not left):
                    self._batch, self._used = join_batches(pieces), 0
                raise
            used = min(samples_of(batch), samples - found)
            pieces.append(part(batch, 0, used))
            found += used
        self._batch, self._used = batch, used
        return pieces[0] if len(pieces) == 1 else join_batches(pieces)

    def state_dict(self) -> dict[str, Any]:
        """The batch that is in use, complete, so that a checkpoint's layout does not change with what is left."""
        return {"batch": self._batch, "used": self._used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._batch, self._used = state["batch"], int(state["used"])


def join_batches(batches: Sequence[Any]) -> Any:
    """One batch with the samples of all, which are made in the same way. Scalars are those of the first.

    Raises DataError for batches that differ in more than their sizes.
    """
    first = batches[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(batches)) if first.dim() else first
    if isinstance(first, Mapping):
        if any(one.keys() != first.keys() for one in batches):
            raise DataError("batches of the data have other keys than the ones before them")
        joined = {key: join_batches([one[key] for one in batches]) for key in first}
        kind: Any = type(first)
        return joined if kind is dict else kind(joined)
    if isinstance(first, (list, tuple)):
        if any(len(one) != len(first) for one in batches):
            raise DataError("batches of the data have other lengths than the ones before them")
        items = [join_batches(list(some)) for some in zip(*batches, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return first
