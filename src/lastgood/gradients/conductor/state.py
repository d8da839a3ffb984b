"""All that rank 0 decides about shadows: what is complete, who is not waited for, what must be seeded.

Pure: no I/O, clocks, threads or torch. `Conductor` feeds it with what shadows say and with the time, and does what it
asks for. The other ranks keep one too, for the buckets that they seed, and only follow what rank 0 found complete.

A shadow is *waited for* while it is connected, all of its buckets are seeded, and it does not lag for too long.
Nothing is complete before every shadow that is waited for holds it. One that is away or wants a seed is waited for as
long as the others have room to hold what they may not apply yet; then they go on without it, and nothing can be given
back from memory until it has caught up. What a torn shadow had before the tear it still has: with all others it is
complete. And the newest iteration is left open for as long as a seed of just that one may come: it may be the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

from lastgood.gradients.protocol.messages import MAX_SPOILED, Complete

__all__ = ["ConductorState", "ShadowView"]


@dataclass
class ShadowView:
    """One shadow, as far as it has said."""

    connected: bool = False
    slots: int = 2
    have: int | None = None
    """None: it has said nothing since it was away."""
    sound: bool = True
    """Nothing that it has said since speaks against `have`, though it may want seeds of later iterations."""
    wants: dict[int, int] = field(default_factory=dict)
    """Buckets without a state, or with one that is not the trainer's, and the oldest iteration of a seed that helps."""
    on_the_way: dict[int, int] = field(default_factory=dict)
    """Iterations of seeds that are sent and not yet answered, by bucket."""
    tries: dict[int, int] = field(default_factory=dict)
    """How often a bucket was torn again after its seed."""
    floor: int = 0
    """The newest of its seeds: no older iteration can be made of its buckets."""
    spoiled: set[int] = field(default_factory=set)
    """Iterations that it cannot give back, since a side record is missing permanently."""
    given_up: bool = False
    """It lagged for too long; until it has caught up."""

    @property
    def whole(self) -> bool:
        """Whether it can be brought to the iteration that it says it has."""
        return self.connected and not self.wants and self.have is not None and self.have >= self.floor


class ConductorState:
    """What is known of all shadows. `base` is the iteration that everything begins with."""

    def __init__(self, shadows: int, base: int) -> None:
        self.shadows = [ShadowView() for _ in range(shadows)]
        self.complete = base
        self.closed = base
        """The newest iteration whose update is done in the training."""
        self.lost: tuple[int, ...] = ()
        self._kept_from = 0
        """Of no save before this iteration it is known that all shadows held it."""
        self._spoiled: tuple[int, ...] = ()
        """Those from there on that were complete without all of their side records."""
        self._told: Complete | None = None

    # -- what happens ----------------------------------------------------------------------------------------------

    def connected(self, shadow: int, wants: Iterable[int], slots: int, seeds: Iterable[tuple[int, int]] = ()) -> None:
        """A control connection is open; `wants` are the shadow's buckets that have no state.

        `seeds` are those that it has taken: who sent one may have heard of that, and others not.
        """
        known = self.shadows[shadow]
        known.connected, known.slots, known.have, known.sound = True, max(1, slots), None, True
        known.on_the_way = {}
        for bucket, iteration in seeds:
            self.seeded(shadow, bucket, iteration)
        for bucket in wants:
            known.wants.setdefault(bucket, 0)

    def disconnected(self, shadow: int) -> None:
        """Its control connection is gone, and what was on its way with it."""
        known = self.shadows[shadow]
        known.connected, known.have, known.on_the_way = False, None, {}

    def close_iteration(self, iteration: int) -> None:
        """The training has done this iteration's update, or has skipped it."""
        self.closed = max(self.closed, iteration)

    def have(self, shadow: int, iteration: int) -> None:
        """It can be brought to this iteration; what is torn in it is so after that."""
        known = self.shadows[shadow]
        known.have = max(known.have, iteration) if known.have is not None and known.sound else iteration
        known.sound = True
        if known.whole and known.have >= self.complete:
            known.given_up = False
        if known.have >= known.floor + known.slots:
            known.tries.clear()

    def torn(self, shadow: int, iteration: int, buckets: Iterable[int]) -> None:
        """Bytes of these buckets are permanently missing from `iteration` on; of none: a side record of `iteration`."""
        known = self.shadows[shadow]
        torn = set(buckets)
        if not torn:
            known.spoiled.add(iteration)
        elif known.have is not None and iteration <= known.have:
            known.sound = False
        for bucket in torn:
            seed = known.on_the_way.get(bucket)
            if seed is not None and seed >= iteration:
                continue  # said before the seed that is on its way had arrived
            if seed is not None or bucket not in known.wants:  # what is said again tells nothing of a seed
                known.tries[bucket] = known.tries.get(bucket, -1) + 1
            known.on_the_way.pop(bucket, None)
            known.wants.setdefault(bucket, 0)

    def diverged(self, shadow: int, bucket: int) -> None:
        """A bucket of it is not the trainer's."""
        known = self.shadows[shadow]
        known.sound = False
        if bucket not in known.on_the_way:
            known.wants.setdefault(bucket, 0)

    def distrust(self, buckets: Callable[[int], Iterable[int]], iteration: int) -> None:
        """An iteration's update used other gradients than were sent: `buckets(shadow)` must be seeded after it."""
        for number, known in enumerate(self.shadows):
            known.on_the_way = {}
            known.wants |= dict.fromkeys(buckets(number), iteration)

    def seeding(self, shadow: int, bucket: int, iteration: int) -> None:
        """A seed is on its way."""
        known = self.shadows[shadow]
        known.on_the_way[bucket] = iteration
        if known.have is not None and iteration < known.have:
            known.sound = False  # it takes the place of a value that is further

    def seed_refused(self, shadow: int) -> None:
        """It takes none of the seeds that are on their way now; they must come again."""
        self.shadows[shadow].on_the_way = {}

    def seeded(self, shadow: int, bucket: int, iteration: int) -> None:
        """A seed has arrived completely. One that is not waited for any more (a newer one is) does not count."""
        known = self.shadows[shadow]
        known.floor = max(known.floor, iteration)
        if known.on_the_way.get(bucket) in (None, iteration):
            known.on_the_way.pop(bucket, None)
            if iteration >= known.wants.get(bucket, 0):
                known.wants.pop(bucket, None)

    def give_up(self, shadow: int) -> None:
        """It lagged for too long."""
        self.shadows[shadow].given_up = True

    def follow(self, iteration: int, lost: Iterable[int]) -> bool:
        """What rank 0 has found complete; False if that is no news (each shadow passes it on)."""
        news = iteration > self.complete or (iteration == self.complete and tuple(lost) != self.lost)
        if news:
            self.complete, self.lost = iteration, tuple(lost)
        return news

    # -- what follows ----------------------------------------------------------------------------------------------

    @property
    def floor(self) -> int:
        """No iteration before this one can be given back, even if all shadows held it."""
        return max(known.floor for known in self.shadows)

    def lags(self, shadow: int) -> bool:
        """Whether the others wait for this shadow, and it lacks what the training has closed."""
        known = self.shadows[shadow]
        if self.closed <= self.complete or known.given_up:
            return False
        # One whose slots are full waits for what is not complete elsewhere.
        wanted = min(self.closed, self.complete + known.slots)
        return not known.whole or (known.have or 0) < wanted

    def decide(self) -> Complete | None:
        """What is complete now; None if that was said already. Called by rank 0 only."""
        waited = [known for known in self.shadows if known.whole and not known.given_up]
        limit = min((known.have or 0 for known in waited), default=self.closed)
        away = tuple(
            number
            for number, known in enumerate(self.shadows)
            if known.given_up or not known.whole or (known.have or 0) < self.complete
        )
        # The others hold this many iterations that they have not applied, and one that is arriving.
        room = min((known.slots for known in self.shadows if known.connected), default=1) - 1
        full = self.closed - self.complete >= room
        held = self._unspoiled(min(self._held_by_all(), self.closed), False) if away else self.complete
        if held > self.complete:
            self._complete(held, ())
            return self._news()
        if away and all(not self.shadows[number].given_up for number in away):
            if not full:
                return None
            if room > 1:
                limit = min(limit, self.closed - 1)  # a seed of the newest one may be on its way
        limit = self._unspoiled(min(limit, self.closed), full)
        if limit > self.complete:
            # Who is not waited for may hold it all the same, but nobody may rely on that.
            self._complete(limit, away or self._spoilers(limit))
        elif not away and self.complete >= self.floor and not self._spoilers(self.complete):
            self.lost = ()
        return self._news()

    def _held_by_all(self) -> int:
        """The newest iteration that all shadows can be brought to, torn ones as well; -1 where that is not known."""
        if not all(known.have is not None and known.sound and not known.given_up for known in self.shadows):
            return -1
        return min(known.have or 0 for known in self.shadows)

    def _complete(self, iteration: int, lost: tuple[int, ...]) -> None:
        self.complete, self.lost = iteration, lost
        if lost:
            self._kept_from = iteration + 1
        spoiled = {*self._spoiled, *(one for known in self.shadows for one in known.spoiled if one <= iteration)}
        self._kept_from = max([self._kept_from, *(one + 1 for one in sorted(spoiled)[:-MAX_SPOILED])])
        self._spoiled = tuple(sorted(one for one in spoiled if one >= max(self._kept_from, self.floor)))
        for known in self.shadows:
            known.spoiled = {one for one in known.spoiled if one >= iteration}

    def _news(self) -> Complete | None:
        if self._told is not None and (self._told.iteration, self._told.lost) == (self.complete, self.lost):
            return None
        floor = max(self._kept_from, self.floor)
        self._told = Complete(iteration=self.complete, lost=self.lost, floor=floor, spoiled=self._spoiled)
        return self._told

    def _spoilers(self, iteration: int) -> tuple[int, ...]:
        return tuple(number for number, known in enumerate(self.shadows) if iteration in known.spoiled)

    def _unspoiled(self, limit: int, full: bool) -> int:
        """The newest iteration up to `limit` that can be given back; `limit` where there is none, and no more room.

        Each shadow alone would keep what it can still give back itself, which need not be the same on all of them.
        """
        for iteration in range(limit, max(self.complete, self.floor - 1), -1):
            if not self._spoilers(iteration):
                return iteration
        return limit if full else min(limit, self.complete)

    def wanted_seeds(self, owned: Callable[[int], bool]) -> list[tuple[int, int]]:
        """(shadow, bucket) of those seeds that this rank must send and that are not on their way, in turn by shadow."""
        queues = [
            [
                bucket
                for bucket in sorted(known.wants)
                if known.connected and bucket not in known.on_the_way and owned(bucket)
            ]
            for known in self.shadows
        ]
        turns = zip_longest(*queues)
        return [(shadow, bucket) for turn in turns for shadow, bucket in enumerate(turn) if bucket is not None]

    def torn_often(self) -> bool:
        """Whether a seed that is on its way was outrun by the training before: then the training should wait for it."""
        return any(known.tries.get(bucket, 0) >= 2 for known in self.shadows for bucket in known.on_the_way)
