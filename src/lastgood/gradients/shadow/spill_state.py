"""Which spill a shadow is at: asked for, being copied bucket by bucket, being written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lastgood.gradients.layout.entries import Saved
from lastgood.gradients.shadow.holdings import ShadowHoldings

__all__ = ["SpillState"]


class SpillState:
    """A part of `ShadowState`, which changes it. Every spill that is asked for is decided once: begun, or refused."""

    def __init__(self) -> None:
        self.iteration: int | None = None
        """Being copied or written."""
        self.keep: Saved | None = None
        """The spill that must stay until this one is durable everywhere."""
        self.left: set[int] = set()
        """Buckets to be copied yet."""
        self._asked: dict[int, Saved | None] = {}
        self._decided = 0

    def begin_incarnation(self, at: int) -> None:
        """Nothing was asked for up to an iteration, and nothing counts any more that was."""
        self.end()
        self._asked.clear()
        self._decided = at

    def ask(self, iteration: int, keep: Saved | None) -> None:
        """To be spilled once it is applied. Again said, it changes nothing."""
        if iteration > self._decided:
            self._asked[iteration] = keep

    @property
    def open(self) -> tuple[int, ...]:
        """Not answered yet."""
        return (*self._asked, *(() if self.iteration is None else (self.iteration,)))

    @property
    def all_copied(self) -> int | None:
        """The iteration of which all buckets are copied."""
        return None if self.left else self.iteration

    def due(self, until: int) -> Iterator[int]:
        """Iterations to decide on now, oldest first: `begin` it, or do not."""
        for iteration in sorted(one for one in self._asked if one <= until):
            self._decided = iteration
            yield iteration
            del self._asked[iteration]

    def fence(self) -> None:
        """Nothing is begun any more; what is written already goes on."""
        self._asked.clear()
        if self.left:
            self.end()

    def why_not(self, iteration: int, held: ShadowHoldings) -> str | None:
        """Why a spill cannot begin now; None if it can."""
        if self.iteration is not None:
            return f"the spill of iteration {self.iteration} is still being written"
        if iteration not in held.known.saves or not held.known.sides_whole(iteration):
            return "it was not saved, or a side record of it is missing"
        if not held.producible(iteration):
            return "a bucket of it waits for a seed, or was seeded later"
        return None

    def begin(self, iteration: int, buckets: Iterable[int]) -> None:
        """Copy all of these."""
        self.iteration, self.keep, self.left = iteration, self._asked[iteration], set(buckets)

    def copied(self, iteration: int, bucket: int) -> None:
        """A bucket is copied, for a spill that may have failed since."""
        if iteration == self.iteration:
            self.left.discard(bucket)

    def end(self) -> None:
        """It is durable, or failed."""
        self.iteration = self.keep = None
        self.left.clear()
