"""Steps of one incarnation of a training, as far as they have come: buckets, used map, and what became of them. Pure.

Steps count from 0 in each incarnation of the training, as the conversation counts; iterations count updates of the job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lastgood.mirror.conversation.places import Buckets

__all__ = ["OpenStep", "Steps"]


@dataclass
class OpenStep:
    """What has come of a step."""

    buckets: set[int] = field(default_factory=set)
    absent: frozenset[int] | None = None
    """Trainable parameters that no rank used; None: not known."""

    def lacks(self, buckets: int, used: bool) -> str:
        """What is missing, in words; "" if nothing is."""
        missing = buckets - len(self.buckets)
        if missing:
            return f"{missing} of its {buckets} buckets"
        return "the map of used parameters" if used and self.absent is None else ""


class Steps:
    """In order: a step is finished before the next one.

    Args:
        wants_used: whether the map of used parameters comes in a step.
    """

    def __init__(self, wants_used: Callable[[int], bool]) -> None:
        self._wants_used = wants_used
        self._maps: list[Buckets] = []
        self._open: dict[int, OpenStep] = {}
        self.following = 0
        """The first step that is not finished."""

    def learn(self, buckets: Buckets) -> None:
        """From its step on gradients come in these buckets."""
        self._maps.append(buckets)

    def buckets(self, step: int) -> tuple[tuple[int, ...], ...]:
        """The buckets of a step; () if they are not known."""
        found: tuple[tuple[int, ...], ...] = ()
        for one in self._maps:
            if one.step <= step:
                found = one.buckets
        return found

    def bucket_came(self, step: int, bucket: int) -> None:
        """All gradients of a bucket of the wire are there."""
        if step >= self.following:
            self._open.setdefault(step, OpenStep()).buckets.add(bucket)

    def used_came(self, step: int, absent: frozenset[int]) -> None:
        """Which trainable parameters no rank used."""
        if step >= self.following:
            self._open.setdefault(step, OpenStep()).absent = absent

    def open_buckets(self) -> list[tuple[int, frozenset[int]]]:
        """Steps that are not finished, in order, with the buckets that have come."""
        return [(step, frozenset(self._open[step].buckets)) for step in sorted(self._open)]

    def lacks(self, step: int) -> str:
        """What a step still lacks, in words; "" if nothing."""
        count = len(self.buckets(step))
        if not count:
            return "its buckets, which are not known"
        return self._open.get(step, OpenStep()).lacks(count, self._wants_used(step))

    def next_finished(self) -> tuple[int, frozenset[int]] | None:
        """The next step in order, if it is complete: it is finished then. With the parameters that nobody used."""
        step = self.following
        if self.lacks(step):
            return None
        self.following = step + 1
        found = self._open.pop(step)
        return step, found.absent or frozenset()

    def skip_to(self, step: int) -> None:
        """All before this step is over, finished or not."""
        self.following = max(self.following, step)
        self._open = {one: kept for one, kept in self._open.items() if one >= self.following}
