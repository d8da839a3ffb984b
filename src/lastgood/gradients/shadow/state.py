"""What a shadow decides: which iteration its buckets may be brought to, what is torn, what can be given back.

No input, output, clock, thread or torch: messages and events go in, `take` gives what is to be said and done at the
border (`Tell`, `Window`, `Open`, `DropSide`), `next_work` what is to be done in memory, one bucket at a time.

What it promises, whatever the order of its inputs: a bucket is brought from one iteration to the next only if rank 0
said that all shadows hold that one; each bucket holds its value after one iteration and the gradients of those that
follow, so that at least one saved iteration stays producible while the next is coming; nothing of a fenced
incarnation is ever applied, unless a restore asks for exactly that iteration.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from lastgood.errors import CheckpointError, MismatchError
from lastgood.gradients.layout.entries import Saved
from lastgood.gradients.protocol.messages import Absent, Applied, Complete, Diverged, Have, Seeded, Spilled, Step, Torn
from lastgood.gradients.shadow.actions import Apply, Check, Commit, Copy, DropSide, Open, Output, Tell, Window, Work
from lastgood.gradients.shadow.bucket import BucketState
from lastgood.gradients.shadow.holdings import ShadowHoldings
from lastgood.gradients.shadow.spill_state import SpillState
from lastgood.gradients.shadow.torn import Senders, find_torn, why_torn

__all__ = ["ShadowState"]


class ShadowState:
    """One shadow, from its start on. Not safe for several threads: the caller holds a lock.

    Args:
        slots: gradients of how many iterations each bucket can hold; at least 2.
    """

    def __init__(self, slots: int) -> None:
        self.held = ShadowHoldings(slots)
        self.job: str | None = None
        self.incarnation = 0
        self.layout: str | None = None
        self.declared = False
        """Whether the trainers of this incarnation have declared their layout: before that nothing is received."""
        self.promised: int | None = None
        """The newest step that was ever complete on all shadows, in whichever incarnation, held still or not."""
        self.last_complete: Complete | None = None
        """The last one of this incarnation."""
        self._seeds: dict[int, Seeded] = {}
        self._senders = Senders()
        self._holding: dict[int, int] = {}
        self._have: int | None = None
        self._applied: int | None = None
        self._restoring: int | None = None
        self._goal = 0
        self.spill = SpillState()
        self._out: deque[Output] = deque()
        self._ready: deque[int] = deque()
        self._dirty = False

    # -- outputs ---------------------------------------------------------------------------------------------------

    def take(self) -> list[Output]:
        """What is to be said and done since the last call, in order."""
        out = list(self._out)
        self._out.clear()
        return out

    def next_work(self) -> Work | None:
        """The next thing to do in memory; its bucket is busy until `done` or `failed`."""
        while True:
            while self._ready:
                number = self._ready.popleft()
                work = self._work_of(number)
                if work is not None:
                    self._start(work)
                    return work
            if not self._dirty:
                return None
            self._dirty = False
            self._retarget()
            self._ready.extend(self.held.buckets)

    # -- incarnations ----------------------------------------------------------------------------------------------

    def fence(self, job: str, incarnation: int) -> None:
        """Begin an incarnation: what is incomplete is given up, and nothing is applied until a restore or Declare.

        Raises MismatchError for another job, or an incarnation that is not newer.
        """
        if self.job not in (None, job):
            raise MismatchError(
                f"this shadow keeps the state of job {self.job}, and job {job} asks for it; start a shadow of its own, "
                "or stop this one and start it again (with another folder for spills)"
            )
        if incarnation <= self.incarnation:
            raise MismatchError(
                f"incarnation {incarnation} is not newer than this shadow's, {self.incarnation}; ask for its status"
            )
        self.job, self.incarnation, self.declared = job, incarnation, False
        self._senders.fence()
        self.held.known.newest_side.clear()
        self._restoring = None
        self._ready.clear()  # what may be applied is another thing from here on
        self.spill.fence()
        for bucket in self.held.buckets.values():
            bucket.checks.clear()
        self._settle()

    def declare(
        self, layout: str, buckets: Sequence[int], side_ranks: Iterable[int], ranks: int, adopt: int | None
    ) -> bool:
        """The incarnation's layout. Says whether the state is kept; if not, the caller sets all memory up again.

        The caller's receiver begins again either way: no gradients are held after this.
        """
        kept = self.keeps(layout, adopt)
        if kept:
            assert adopt is not None
            for bucket in self.held.buckets.values():
                # Skipped steps may have been applied after it; they changed nothing, and their numbers come again.
                bucket.at, bucket.floor = adopt, min(bucket.floor, adopt)
                bucket.received.clear()
                bucket.torn = bucket.landing = None
                bucket.landed = bucket.windowed = bucket.opened = False
            self._drop_sides(self.held.known.keep_until(adopt))
        else:
            self.held.buckets = {number: BucketState() for number in buckets}
            self._drop_sides(self.held.known.keep_until(-1))
        self.layout, self.declared = layout, True
        self.held.known.side_ranks, self.held.known.ranks = frozenset(side_ranks), ranks
        self._senders.begin(ranks)
        self.held.completed = adopt if kept and adopt is not None else 0
        self.spill.begin_incarnation(self.held.completed)
        self.last_complete = None
        self._seeds.clear()
        self.held.known.given_up.clear()
        self._holding.clear()
        self._have = self._applied = self._restoring = None
        self._ready.clear()
        for number, bucket in self.held.buckets.items():
            self._out.append(Window(number, adopt + 1) if kept and adopt is not None else Open(number))
            bucket.busy = False
        self._settle()
        return kept

    def keeps(self, layout: str, adopt: int | None) -> bool:
        """Whether a declaration of this layout would keep the state that is here."""
        return adopt is not None and layout == self.layout and self.held.stands_at(adopt)

    def greet(self) -> None:
        """Rank 0 has (again) connected: tell it how things stand."""
        self._have = self._applied = None
        # Before any word of what is held: they count as not saved here, and what was said of them may not have come.
        self._out.extend(map(Tell, self._unsaved()))
        self._settle()
        wanting = self.held.unseeded
        if wanting and self.declared:
            self._torn(self.held.completed, wanting, "they have no value")

    def news(self) -> list[Torn | Complete]:
        """What another rank than 0 may have missed while it was away: saves that lack side records, rank 0's word."""
        return [*self._unsaved(), *([] if self.last_complete is None else [self.last_complete])]

    def _unsaved(self) -> list[Torn]:
        why = "a side record of it is lost"
        return [Torn(iteration=iteration, buckets=(), why=why) for iteration in sorted(self.held.known.given_up)]

    def restore_to(self, saved: Saved) -> None:
        """Bring everything to a saved iteration, after a fence. Raises CheckpointError if that cannot be."""
        if self.declared:
            raise CheckpointError("training goes on in this incarnation; a restore fences first")
        if saved not in self.held.restorable():
            held = ", ".join(f"{one.iteration} of incarnation {one.epoch}" for one in self.held.restorable()) or "none"
            raise CheckpointError(
                f"iteration {saved.iteration} of incarnation {saved.epoch} cannot be given back from this shadow's "
                f"memory; what can: {held}"
            )
        self._restoring = saved.iteration
        self._settle()

    def restored(self, saved: Saved) -> bool:
        """Whether all buckets stand at that iteration now."""
        return self.held.stands_at(saved.iteration) and self.held.known.saves.get(saved.iteration) == saved

    def replaced(self, saved: Saved, layout: str, buckets: Sequence[int], side_ranks: Iterable[int]) -> None:
        """All is now what a spill of this iteration held: values and side records. Only before Declare."""
        self.layout, self.held.known.side_ranks = layout, frozenset(side_ranks)
        at = saved.iteration
        self.held.buckets = {number: BucketState(at=at, floor=at, opened=False) for number in buckets}
        self._drop_sides(one for one in self.held.known.become(saved) if one != at)
        self._restoring = None
        self._ready.clear()
        self._settle()

    def emptied(self) -> None:
        """All values are lost, and seeds that have landed. Only before Declare."""
        self.held.buckets = {}
        self._ready.clear()
        self._settle()

    def saved_at(self, iteration: int) -> Saved:
        """A saved iteration. Raises CheckpointError if it is none (any more)."""
        if iteration not in self.held.known.saves:
            raise CheckpointError(f"iteration {iteration} is not held as a saved one")
        return self.held.known.saves[iteration]

    def is_landing(self, bucket: int, iteration: int) -> bool:
        """Whether a seed that began is still wanted."""
        found = self.held.buckets.get(bucket)
        return found is not None and found.landing == iteration and not found.landed

    # -- from trainers ---------------------------------------------------------------------------------------------

    def step(self, message: Step) -> None:
        """What an iteration needs beside gradients. Raises CheckpointError if far too many are open."""
        new = message.iteration > self.held.lowest()
        if new:
            self.held.known.add_step(message, self.incarnation)
            self._lose_void(message.iteration)
            self._give_up(self.held.known.late())
        if message.spill:
            self.spill.ask(message.iteration, message.keep)
        if new or message.spill:
            self._settle()

    def absent(self, rank: int, message: Absent) -> None:
        """Which of its own parameters a rank left alone. Raises CheckpointError if far too many are open."""
        if message.iteration > self.held.lowest():
            self.held.known.add_absent(rank, message)
            self._lose_void(message.iteration)
            self._settle()

    def _lose_void(self, iteration: int) -> None:
        if iteration in self.held.known.void:
            for bucket in self.held.buckets.values():
                bucket.received.discard(iteration)

    def side(self, rank: int, iteration: int) -> bool:
        """A side record has arrived completely. Says whether it is to be kept."""
        wanted = self.held.known.add_side(rank, iteration, self.held.oldest())
        self._give_up(self.held.known.late())
        self._settle()
        return wanted

    def side_refused(self, rank: int, iteration: int, why: str) -> None:
        """A side record could not be kept: that iteration cannot be given back.

        Unless it is held: after a broken connection a rank sends its newest ones again.
        """
        if self.held.known.lacks_side(rank, iteration, self.held.oldest()):
            self._give_up([(iteration, f"rank {rank}: {why}")])
            self._settle()

    def complete(self, message: Complete) -> None:
        """All shadows (but lost ones) hold everything up to this iteration."""
        if message.iteration >= self.held.completed and message != self.last_complete:
            self.last_complete, self.held.completed = message, message.iteration
            for iteration, saved in self.held.known.saves.items():
                if iteration <= message.iteration and message.promises(iteration):
                    self.promised = max(saved.step, self.promised or 0)
            self._out.append(Tell(message, everyone=True))
            self._settle()

    def check(self, bucket: int, iteration: int, checksum: int) -> None:
        """A checksum to compare once the bucket stands at that iteration."""
        found = self.held.buckets.get(bucket)
        if found is None:
            raise CheckpointError(f"bucket {bucket} is not this shadow's")
        if found.at is None or found.floor <= iteration:
            found.checks = {iteration: checksum}
        self._settle()

    def seed_begun(self, bucket: int, iteration: int) -> None:
        """A seed arrives. Raises CheckpointError if an earlier one of this bucket is not in its place yet."""
        found = self.held.buckets.get(bucket)
        if found is None:
            raise CheckpointError(f"bucket {bucket} is not this shadow's")
        if found.landing is not None:
            raise CheckpointError(f"bucket {bucket} still has the seed of iteration {found.landing}; try again later")
        if found.at is not None and iteration < found.at and not found.busy:
            # It is beyond the seed: what followed the seed is applied and gone.
            self._lose(found)
        found.landing, found.landed, found.windowed = iteration, False, False
        self._settle()

    def window_set(self, bucket: int, held: Collection[int] | None) -> None:
        """The receiver obeyed a Window that asks, and holds all of these iterations; None: it forgot what follows."""
        found = self.held.buckets[bucket]
        if held is not None:
            found.received = set(held) - self.held.known.void
        elif found.landing is not None:
            following = found.landing + 1
            found.landing, found.landed, found.windowed, found.opened = None, False, False, True
            self._torn(following, [bucket], "newer gradients had overwritten it before its seed began")
        self._settle()

    def seed_landed(self, bucket: int) -> None:
        """All bytes of the seed are here."""
        found = self.held.buckets[bucket]
        iteration = found.landing
        if iteration is None:
            return
        found.landed = True
        # Said before what can be made with it: rank 0 must know then that nothing older can.
        seeded = self._seeds[bucket] = Seeded(bucket=bucket, iteration=iteration, whole=self.held.waiting == 0)
        self._out.append(Tell(seeded, everyone=True))
        self._settle()

    def seed_failed(self, bucket: int) -> None:
        """The seed will not come complete; the bucket waits for another one."""
        found = self.held.buckets[bucket]
        if found.landing is not None and not found.landed:
            if found.windowed:
                found.received.clear()
            found.landing, found.windowed, found.opened = None, False, False
            self._settle()

    # -- from the receiver -----------------------------------------------------------------------------------------

    def received(self, bucket: int, iteration: int) -> None:
        """All gradients of a bucket and iteration are held."""
        found = self.held.buckets[bucket]
        if (found.opened and not found.windowed) or iteration in self.held.known.void:
            return
        base = found.landing if found.windowed and found.landing is not None else found.at
        if iteration in found.received or (base is not None and iteration <= base):
            return
        found.received.add(iteration)
        count = self._holding[iteration] = self._holding.get(iteration, 0) + 1
        # In the steady state only the last bucket of an iteration changes what can be said.
        if count >= len(self.held.buckets) or self.held.waiting or iteration <= self.held.completed:
            self._settle()

    def ended(self, rank: int, iteration: int) -> None:
        """A rank sends nothing more for this iteration, nor for older ones."""
        self._senders.ended(rank, iteration)
        self._settle()

    def connected(self, rank: int) -> None:
        """A data connection of this rank begins."""
        self._senders.connected(rank)

    def gone(self, rank: int) -> None:
        """The last data connection of this rank ended: it never sends again what it has not sent."""
        self._senders.gone(rank)
        self._settle()

    # -- from memory -----------------------------------------------------------------------------------------------

    def done(self, work: Work) -> None:
        """Work is done as it should be."""
        bucket = self.held.buckets[work.bucket]
        bucket.busy = False
        if isinstance(work, Apply):
            bucket.at = work.iteration
            bucket.received.discard(work.iteration)
            if not bucket.exhausted:
                self._out.append(Window(work.bucket, work.iteration + 1))
        elif isinstance(work, Commit):
            if not bucket.windowed:
                self._out.append(Window(work.bucket, work.iteration + 1))
            bucket.at = bucket.floor = work.iteration
            bucket.received = {one for one in bucket.received if one > work.iteration}
            bucket.torn = bucket.landing = None
            bucket.landed = bucket.windowed = bucket.opened = False
        elif isinstance(work, Copy):
            self.spill.copied(work.iteration, work.bucket)
        self._settle()

    def failed(self, work: Work, why: str) -> None:
        """Work failed: what the bucket holds now is not known."""
        bucket = self.held.buckets[work.bucket]
        if isinstance(work, Check):
            self._lose(bucket)
            self._out.append(Tell(Diverged(iteration=work.iteration, bucket=work.bucket), everyone=True))
        elif isinstance(work, Copy):
            bucket.busy = False
            self.spill_over(work.iteration, why)
        else:
            self._lose(bucket)
            self._torn(work.iteration, [work.bucket], why)
        self._settle()

    def spill_over(self, iteration: int, error: str | None = None) -> None:
        """The spill is durable, or failed."""
        if self.spill.iteration == iteration:
            self.spill.end()
            self._out.append(Tell(Spilled(iteration=iteration, error=error), everyone=True))
            self._settle()

    @property
    def seeds(self) -> tuple[Seeded, ...]:
        """The newest of each bucket that came complete in this incarnation."""
        return tuple(self._seeds.values())

    # -- inside ----------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """After every change: what is torn, what can be said, what can be forgotten."""
        self._dirty = True
        self._tear()
        for number, bucket in self.held.buckets.items():
            self._follow_seed(number, bucket)
        self._end_spill_if_hopeless()
        if self.declared:
            have = self.held.newest()
            if have is not None and have != self._have:
                self._have = have
                self._out.append(Tell(Have(iteration=have)))
            applied = self.held.applied
            if applied != self._applied and all(bucket.at is not None for bucket in self.held.buckets.values()):
                self._applied = applied
                self._out.append(Tell(Applied(iteration=applied), everyone=True))
        self._forget()

    def _tear(self) -> None:
        if not self.declared:
            return
        over = self._senders.over(self.held.known, self.held.slots)
        for iteration, numbers in find_torn(self.held.buckets, self.held.known, self.held.completed, over).items():
            self._torn(iteration, numbers, why_torn(iteration, self.held.known, self.held.completed))

    def _torn(self, iteration: int, numbers: Sequence[int], why: str) -> None:
        self._out.append(Tell(Torn(iteration=iteration, buckets=tuple(numbers), why=why[:10_000]), everyone=True))

    def _follow_seed(self, number: int, bucket: BucketState) -> None:
        """Once nothing held is in the way, a torn bucket's slots are free for what follows its seed."""
        if bucket.busy or not bucket.exhausted or not self.declared:
            return
        if bucket.landing is not None:
            if not bucket.windowed:
                bucket.windowed = True
                bucket.received.clear()
                self._out.append(Window(number, bucket.landing + 1, ask=True))
        elif not bucket.opened:
            bucket.opened = True
            bucket.received.clear()
            self._out.append(Open(number))

    def _lose(self, bucket: BucketState) -> None:
        bucket.at, bucket.torn, bucket.busy = None, None, False
        bucket.floor = 0
        bucket.checks.clear()
        bucket.received.clear()
        bucket.opened = bucket.windowed = False  # `_follow_seed` sees to its slots

    def _give_up(self, late: Iterable[tuple[int, str]]) -> None:
        for iteration, why in late:
            if iteration not in self.held.known.given_up:
                if self.held.known.give_up(iteration):
                    self._out.append(DropSide(iteration))
                self._torn(iteration, [], why)

    def _drop_sides(self, iterations: Iterable[int]) -> None:
        self._out.extend(DropSide(iteration) for iteration in iterations)

    def _forget(self) -> None:
        lowest = self.held.lowest()
        self._drop_sides(self.held.known.forget(self.held.oldest(), lowest))
        for iteration in [one for one in self._holding if one <= lowest]:
            del self._holding[iteration]

    # -- how far -----------------------------------------------------------------------------------------------------

    @property
    def _complete_everywhere(self) -> int:
        """Up to which iteration all shadows hold everything, as far as it counts now."""
        if self.declared:
            return self.held.completed
        return -1 if self._restoring is None else self._restoring

    def _retarget(self) -> None:
        self._goal = self.held.target() if self.declared else self._complete_everywhere
        for iteration in self.spill.due(self._goal):  # one that a seed has jumped over is answered too
            why = self.spill.why_not(iteration, self.held)
            if why is None:
                self.spill.begin(iteration, self.held.buckets)
            else:
                self._out.append(Tell(Spilled(iteration=iteration, error=why), everyone=True))

    def _end_spill_if_hopeless(self) -> None:
        iteration = self.spill.iteration
        if iteration is not None:
            missed = [one for one in self.spill.left if self.held.buckets[one].base_for(iteration) is None]
            if missed:
                self.spill_over(iteration, f"bucket {min(missed)} was lost, or seeded later, before it was copied")

    def _work_of(self, number: int) -> Work | None:
        bucket = self.held.buckets.get(number)
        if bucket is None or bucket.busy:
            return None
        spilling = self.spill.iteration if number in self.spill.left else None
        return bucket.next_work(number, self._goal, self._complete_everywhere, self.held.known.steps, spilling)

    def _start(self, work: Work) -> None:
        bucket = self.held.buckets[work.bucket]
        bucket.busy = True
        if isinstance(work, Apply) and work.step.rule is not None:
            bucket.floor = work.iteration  # its old value is lost from here on
