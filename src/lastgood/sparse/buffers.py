"""A model's buffers (BatchNorm's statistics), of which all ranks get rank 0's in each iteration."""

from __future__ import annotations

from collections.abc import Sequence

from lastgood._lazy import torch
from lastgood.sparse.ranks import Ranks

__all__ = ["Buffers"]


class Buffers:
    """`tell` after the forward pass, `tell_again` after the backward pass, `hear` in the step, on all ranks.

    What the forward pass made of them goes while the backward pass runs. Activations that are computed once more in
    the backward pass count a batch again: then all go a second time, on each rank that sees its own change.
    """

    def __init__(self, ranks: Ranks, tensors: Sequence[torch.Tensor], timeout_s: float) -> None:
        self._ranks = ranks
        self._tensors = list(tensors)
        self._timeout_s = timeout_s
        self._versions: list[int] = []
        self._again = False
        self._told: list[tuple[int, str]] = []
        """Iterations and names under which rank 0 has told them, until all have heard."""

    def tell(self, iteration: int) -> None:
        """The forward pass is over."""
        name = self._name(iteration, f"buffers/{iteration}")
        self._ranks.tell_first(name, self._tensors)
        self._ranks.expect_first(name, self._tensors, self._timeout_s)
        self._versions = [one._version for one in self._tensors]

    def tell_again(self, iteration: int) -> None:
        """The backward pass is over."""
        self._again = self._versions != [one._version for one in self._tensors]
        if self._again:
            self._ranks.tell_first(self._name(iteration, f"buffers/{iteration}, again"), self._tensors)

    def hear(self, iteration: int) -> None:
        """Overwrite them with rank 0's. Raises WaitTimeout."""
        self._ranks.hear_first(f"buffers/{iteration}", self._tensors, self._timeout_s)
        if self._again:
            self._ranks.hear_first(f"buffers/{iteration}, again", self._tensors, self._timeout_s)

    def forget(self, iteration: int) -> None:
        """All ranks have heard what was told up to this iteration."""
        while self._told and self._told[0][0] <= iteration:
            self._ranks.forget_first(self._told.pop(0)[1], self._tensors)

    def _name(self, iteration: int, name: str) -> str:
        self._told.append((iteration, name))
        return name
