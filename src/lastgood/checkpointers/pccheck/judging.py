"""Judges the checkpoints of one job: by its user, and by its losses (the rule of `loss_watch`)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lastgood.checkpointers.agreement.job import JobOfRanks
from lastgood.checkpointers.pccheck.flight import Flights
from lastgood.checkpointers.pccheck.loss_watch import STAYS, Judgement, LossWatch
from lastgood.errors import StorageError
from lastgood.storage import SlotInfo, SlotStore, Verdict

__all__ = ["DOUBTED_CHECKPOINTS", "DOUBTED_STEPS", "Judging"]

_log = logging.getLogger("lastgood")

DOUBTED_CHECKPOINTS = 8
DOUBTED_STEPS = 2 * STAYS
"""Spikes of the loss count no more once the newest good checkpoint is so many checkpoints, and so many steps, back."""


class Judging:
    """Verdicts on the checkpoints of `directory`, durable ones and those in `flights`.

    Store and job come with each call, so that nothing here keeps a checkpointer that was dropped.
    """

    def __init__(self, directory: Path, spike: float | None, flights: Flights) -> None:
        self._directory, self._flights = directory, flights
        self._watch = LossWatch(spike)
        self._judged_by = 0
        """The newest iteration whose loss was looked at and has judged; a thread of a flight asks meanwhile."""
        self._fallen_back = 1
        """Checkpoints newer than the newest good one, as they were told last."""

    def observe(self, store: SlotStore, job: JobOfRanks | None, step: int, loss: Any) -> None:
        """Take the loss of iteration `step`, and judge what it and those before it speak of."""
        self.follow(store, job, self._watch.observe(step, loss))

    def finish(self, store: SlotStore, job: JobOfRanks | None) -> None:
        """Wait for losses that are still on their way from a device, and judge by them."""
        self.follow(store, job, self._watch.finish())

    def follow(self, store: SlotStore, job: JobOfRanks | None, found: Iterable[Judgement]) -> None:
        """Judge the checkpoints that losses speak of."""
        judged = [self._follow(store, job, one) for one in found]
        self._judged_by = self._watch.looked_at
        if any(judged):
            # Only now: of the checkpoints that one loss speaks of, the later one may be durable and not judged before.
            self.tell_fall_back(store)

    def _follow(self, store: SlotStore, job: JobOfRanks | None, one: Judgement) -> int:
        """Returns the step that was judged bad; 0 if none was."""
        try:
            if one.ok:
                self._take_back(store, job, one)
            elif one.certain or not self._doubts_enough(store, one):
                return one.step if self._judge(store, job, one.step, False, one.reason) else 0
        except StorageError as error:
            # Training goes on; the verdict holds in memory, and is written with the next one.
            _log.error("%s", error)
        return 0

    def judge(self, store: SlotStore, job: JobOfRanks | None, step: int, ok: bool, reason: str) -> bool:
        """Judge the newest checkpoint of `step`; returns whether there is one. Raises StorageError."""
        known = self._judge(store, job, step, ok, reason)
        if known:
            self.tell_fall_back(store, step)
        return known

    def _judge(self, store: SlotStore, job: JobOfRanks | None, step: int, ok: bool, reason: str) -> bool:
        known = self.find(store, step)
        if known is None:
            return False
        sequence, incarnation = known
        try:
            store.judge(sequence, Verdict(step, ok, reason))
        finally:
            if job is not None:
                job.judge((incarnation, step), ok, reason)
        if not ok:
            _log.warning(
                "%s: the checkpoint of step %d is judged bad: %s", self._directory, step, reason or "no reason"
            )
        return True

    def tell_fall_back(self, store: SlotStore, judged: int = 0) -> None:
        """Say how far a restart would go back, again whenever that is twice as far.

        If losses are watched, checkpoints after the newest one that was looked at (and after step `judged`) are no part
        of it: whether they are good is not known yet, and one that seems good would begin the count again.
        """
        known = self._judged_by
        complete = [info for info in store.everywhere() if not known or info.step <= max(known, judged)]
        good, newer = _newest_good(store, complete)
        if newer == 0:
            self._fallen_back = 1
        elif newer >= 2 * self._fallen_back:
            self._fallen_back = newer
            _log.warning(
                "%s: a restart would begin at %s: the %d checkpoints after it, up to step %d, are judged bad",
                self._directory,
                "nothing" if good is None else f"step {good.step}",
                newer,
                complete[0].step,
            )

    def find(self, store: SlotStore, step: int) -> tuple[int, int] | None:
        """Sequence and incarnation of the newest checkpoint of `step`, durable or in progress."""
        in_flight = self._flights.sequence_of(step)
        found = [] if in_flight is None else [(in_flight, store.incarnation)]
        found += [(info.sequence, info.incarnation) for info in store.committed() if info.step == step]
        return max(found, default=None)

    def _take_back(self, store: SlotStore, job: JobOfRanks | None, judgement: Judgement) -> None:
        """Take back what the loss said of a checkpoint; what anybody else said of it stands."""
        known = self.find(store, judgement.step)
        if known is None:
            return
        sequence, incarnation = known
        try:
            taken = store.take_back(sequence, judgement.reason)
        finally:
            if job is not None:
                job.take_back((incarnation, judgement.step), judgement.reason)
        if taken:
            _log.warning(
                "%s: the checkpoint of step %d is good again: losses have stayed at that level",
                self._directory,
                judgement.step,
            )

    def _doubts_enough(self, store: SlotStore, judgement: Judgement) -> bool:
        """Whether spikes have spoken against so many checkpoints that they are no spikes. Says so."""
        # Whether this one and later ones are good is not known yet.
        good, newer = _newest_good(store, [info for info in store.everywhere() if info.step < judgement.step])
        steps = judgement.step - (0 if good is None else good.step)
        if newer <= DOUBTED_CHECKPOINTS or steps <= DOUBTED_STEPS or self.find(store, judgement.step) is None:
            return False
        _log.warning(
            "%s: the checkpoint of step %d is not judged, though %s: the newest good one is %s, and spikes spoke "
            "against the %d after it already",
            self._directory,
            judgement.step,
            judgement.reason,
            "none" if good is None else f"that of step {good.step}",
            newer,
        )
        return True


def _newest_good(store: SlotStore, complete: Sequence[SlotInfo]) -> tuple[SlotInfo | None, int]:
    """The newest one of `complete` (newest first) that was not judged bad, and how many were begun after it."""
    book = store.book()
    good = next((info for info in complete if not book.is_bad(info.sequence)), None)
    if not complete:
        return None, 0
    oldest = complete[-1].sequence - 1 if good is None else good.sequence
    return good, complete[0].sequence - oldest
