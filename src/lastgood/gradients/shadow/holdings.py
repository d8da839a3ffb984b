"""What a shadow's buckets and iterations amount to: how far it can be brought, and what it can give back."""

from __future__ import annotations

from lastgood.gradients.layout.entries import Saved
from lastgood.gradients.shadow.bucket import BucketState
from lastgood.gradients.shadow.iterations import Iterations

__all__ = ["ShadowHoldings"]


class ShadowHoldings:
    """One shadow's buckets and iterations, and what follows from them. `ShadowState` changes them; this only looks.

    Args:
        slots: gradients of how many iterations each bucket can hold.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.completed = 0
        """All shadows hold everything up to this iteration."""
        self.buckets: dict[int, BucketState] = {}
        self.known = Iterations()

    @property
    def waiting(self) -> int:
        """Buckets that wait for a seed, or have one on its way."""
        return len(self.unlanded)

    @property
    def whole(self) -> bool:
        """No bucket waits for a seed, and there is an iteration that all can be brought to."""
        return bool(self.buckets) and self.waiting == 0 and self.newest() is not None

    @property
    def have(self) -> int:
        """The newest iteration that this shadow can be brought to; 0 if none."""
        return self.newest() or 0

    @property
    def unseeded(self) -> list[int]:
        """Buckets that wait for a seed, none of which is on its way."""
        return [number for number, bucket in self.buckets.items() if bucket.wants_seed]

    @property
    def unlanded(self) -> list[int]:
        """Those, and the ones whose seed is still arriving: its connection may have broken, unnoticed so far."""
        return [
            number
            for number, bucket in self.buckets.items()
            if bucket.wants_seed or (bucket.landing is not None and not bucket.landed)
        ]

    @property
    def applied(self) -> int:
        """The iteration that all buckets have applied; 0 if one has no value."""
        return min((bucket.at or 0 for bucket in self.buckets.values()), default=0)

    @property
    def positions(self) -> dict[int, int | None]:
        """Where each bucket stands."""
        return {number: bucket.at for number, bucket in self.buckets.items()}

    @property
    def bases(self) -> dict[int, int]:
        """Behind which iteration each bucket's slots begin: where it stands, or the seed that it is to stand at."""
        return {
            number: (bucket.landing if bucket.windowed else bucket.at) or 0 for number, bucket in self.buckets.items()
        }

    def restorable(self) -> list[Saved]:
        """Saved iterations that all buckets can be brought to and whose side records are here, oldest first."""
        return [
            saved
            for iteration, saved in sorted(self.known.saves.items())
            if self.known.sides_whole(iteration) and self.producible(iteration)
        ]

    def producible(self, iteration: int) -> bool:
        """Whether all buckets can be brought to it."""
        bases = [bucket.base_for(iteration) for bucket in self.buckets.values()]
        if not bases or None in bases:
            return False
        lowest = min(base for base in bases if base is not None)
        steps = self.known.steps
        # The difference of two iterations is what a message says; how many steps are known is not.
        return iteration - lowest <= len(steps) and all(one in steps for one in range(lowest + 1, iteration + 1))

    def stands_at(self, iteration: int) -> bool:
        """Whether all buckets stand at it now."""
        return bool(self.buckets) and all(
            not bucket.busy and bucket.at is not None and bucket.floor <= iteration <= bucket.at
            for bucket in self.buckets.values()
        )

    def newest(self) -> int | None:
        """The newest iteration that can be produced, before whatever is torn, and before any side record still to come.

        What is complete counts without them: it is said already that it was held, or that it is not promised.
        """
        newest = min((bucket.end for bucket in self.buckets.values()), default=-1)
        if newest < 0:
            return None
        low = min(bucket.landing or 0 if bucket.at is None else bucket.at for bucket in self.buckets.values())
        known = self.known
        for iteration in known.saves:
            if max(low, self.completed + 1) <= iteration <= newest and not known.sides_whole(iteration):
                newest = iteration - 1
        # No others can be produced: the update that leads to an iteration is known, or the bucket that is the furthest
        # behind stands there, or has a seed of it. So what is walked over is what is held, however far apart it lies.
        held = {low, *known.steps, *(bucket.landing for bucket in self.buckets.values() if bucket.landing is not None)}
        for iteration in sorted((one for one in held if low <= one <= newest), reverse=True):
            if self.producible(iteration):
                return iteration
        return None

    def target(self) -> int:
        """The iteration that buckets may be brought to while training goes on."""
        newest = self.newest()
        if newest is None or newest < self.completed:
            return self.completed  # it is not waited for, or catches up: nothing can be given back meanwhile
        good = [saved.iteration for saved in self.restorable() if saved.iteration <= self.completed]
        if not good:
            return self.completed
        # What can be given back is not overwritten by an update that nobody saved, while there is room for more.
        target = good[-1]
        steps = self.known.steps
        while target < self.completed and target + 1 in steps and steps[target + 1].rule is None:
            target += 1
        return target if self.completed < target + self.slots else self.completed

    def oldest(self) -> int:
        """No older iteration can ever be given back."""
        return min(
            (
                bucket.floor if bucket.at is not None else self.completed - self.slots
                for bucket in self.buckets.values()
            ),
            default=0,
        )

    def lowest(self) -> int:
        """All buckets are after this iteration, or wait for the seed of a later one."""
        return min(
            (bucket.at if bucket.at is not None else self.completed - self.slots for bucket in self.buckets.values()),
            default=0,
        )
