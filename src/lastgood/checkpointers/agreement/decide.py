"""What the ranks of a job agree on, as functions of what they say. No I/O, no clock, no threads.

A checkpoint is named by its incarnation and its step, (incarnation, step): steps of a dead incarnation never join those
of a new one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from lastgood.errors import (
    CheckpointError,
    CorruptCheckpoint,
    LastgoodError,
    MismatchError,
    NoCheckpoint,
    NoGoodCheckpoint,
)

__all__ = ["Beginning", "Decided", "Fate", "Held", "Identity", "Report", "Tally", "Wanted", "begin", "failure_class"]

Identity = tuple[int, int]
"""Life of the job and finished steps."""

_MOST_NAMED = 8
"""Ranks named in one message."""
_MOST_DECIDED = 1024
_MOST_PENDING = 1024


class Fate(str, enum.Enum):
    """What became of a step's checkpoint, for all ranks alike."""

    GLOBAL = "global"
    """Every rank has committed it."""
    SUPERSEDED = "superseded"
    """A newer one was global first."""
    SKIPPED = "skipped"
    """Some rank did not begin it."""
    FAILED = "failed"
    """Some rank could not write it."""


@dataclass(frozen=True)
class Held:
    """A complete checkpoint of one rank; `reason` says why it is bad."""

    incarnation: int
    step: int
    bad: bool = False
    reason: str = ""
    restarts: int = 0

    @property
    def identity(self) -> Identity:
        """Its name in the job."""
        return self.incarnation, self.step


@dataclass(frozen=True)
class Wanted:
    """What a rank asks for; all must ask for the same."""

    restore: bool = True
    step: int | None = None
    good_only: bool = True
    max_failed_restarts: int | None = None

    def __str__(self) -> str:
        """For messages."""
        if not self.restore:
            return "nothing"
        what = "the newest checkpoint" if self.step is None else f"that of step {self.step}"
        return f"{what} (good_only={self.good_only}, max_failed_restarts={self.max_failed_restarts})"


@dataclass(frozen=True)
class Report:
    """What one rank has when it joins."""

    rank: int
    world_size: int
    host: str
    directory: str
    job_id: str | None
    """None: the directory holds nothing of any job."""
    highest: Identity = (0, 0)
    """Of all records that can be read, of unfinished checkpoints too."""
    held: tuple[Held, ...] = ()
    damaged: tuple[str, ...] = ()
    """Slots whose content cannot be told any more."""
    mark: Identity | None = None
    """The newest checkpoint that this rank knew all ranks to hold."""
    wanted: Wanted = Wanted()
    reached: int = -1
    """The highest step that this rank knew all ranks to hold, in any incarnation."""
    wrote: tuple[int, int] | None = None
    """Whose checkpoints the directory holds: rank, and number of ranks."""
    beside: str = ""
    """Why this rank must not begin in its job's directory: what lies there that is not of this layout."""

    def __str__(self) -> str:
        """For messages."""
        return f"rank {self.rank} on {self.host} ({self.directory})"


@dataclass(frozen=True)
class Beginning:
    """How a new incarnation begins."""

    job_id: str | None
    """None: all ranks are new, and the job still needs an id."""
    incarnation: int
    candidates: tuple[Identity, ...] = ()
    """What may be restored, best first; empty: the incarnation begins from nothing (or restores nothing)."""
    common: tuple[Identity, ...] = ()
    """What all ranks hold, newest first. All else is dropped."""
    bad: dict[Identity, str] = field(default_factory=dict)
    """Of the common ones, those that any rank judged bad, and why."""
    notes: tuple[str, ...] = ()
    """What a person should know."""
    reached: int = -1
    """The highest step that all ranks ever held, in any incarnation."""


def begin(reports: Sequence[Report]) -> Beginning:
    """Decide for all ranks how the job goes on. `reports` has one of each rank.

    Raises MismatchError (ranks of several jobs or worlds, a rank that is new or old among others), CorruptCheckpoint
    (nothing is common, and something was lost), NoGoodCheckpoint, NoCheckpoint (the step that was asked for is not
    everywhere).
    """
    reports = sorted(reports, key=lambda report: report.rank)
    first = reports[0]
    if [report.rank for report in reports] != list(range(first.world_size)):
        raise MismatchError(f"a job of {first.world_size} ranks cannot begin with {[r.rank for r in reports]}")
    for report in reports[1:]:
        if report.world_size != first.world_size:
            raise MismatchError(f"{report} says that there are {report.world_size} ranks, {first} {first.world_size}")
        if report.wanted != first.wanted:
            raise MismatchError(f"{report} asks for {report.wanted}, {first} for {first.wanted}; ask for one thing")
    for report in reports:
        if report.wrote is not None and report.wrote != (report.rank, report.world_size):
            theirs, ranks = report.wrote
            raise MismatchError(
                f"{report}: its directory is that of rank {theirs} of a job of {ranks} ranks, and this job has "
                f"{report.world_size}; start as many ranks as before, or give a new directory and this job's as "
                "resume_from, or move the directories of all ranks away to begin again"
            )
        if report.beside:
            raise MismatchError(f"{report}: {report.beside}")
    owners = {report.job_id: report for report in reports if report.job_id is not None}
    if len(owners) > 1:
        named = "; ".join(f"{report} belongs to job {job_id}" for job_id, report in owners.items())
        raise MismatchError(f"the ranks' directories are those of several jobs: {named}")
    job_id = next(iter(owners), None)
    incarnation = 1 + max(report.highest[0] for report in reports)
    common = _common(reports)
    notes: list[str] = []
    if not common:
        _refuse_loss(reports, notes)
    else:
        notes += _refuse_old(reports, common)
    bad = _bad(reports, common)
    candidates = _candidates(reports, common, bad, notes) if first.wanted.restore else []
    reached = max([*(report.reached for report in reports), *(step for _, step in common)])
    return Beginning(job_id, incarnation, tuple(candidates), tuple(common), bad, tuple(notes), reached)


def _common(reports: Sequence[Report]) -> list[Identity]:
    held = [{one.identity for one in report.held} for report in reports]
    return sorted(set.intersection(*held), reverse=True)


def _bad(reports: Sequence[Report], common: Sequence[Identity]) -> dict[Identity, str]:
    return {
        one.identity: f"rank {report.rank}: {one.reason or 'no reason'}"
        for report in reversed(reports)
        for one in report.held
        if one.bad and one.identity in common
    }


def _named(reports: Sequence[Report]) -> str:
    names = ", ".join(str(report) for report in reports[:_MOST_NAMED])
    return names + (f" and {len(reports) - _MOST_NAMED} more" if len(reports) > _MOST_NAMED else "")


def _refuse_loss(reports: Sequence[Report], notes: list[str]) -> None:
    """Nothing is common. Go on only if surely nothing ever was: a job must not begin again without a message."""
    holders = [report for report in reports if report.held]
    marked = [report for report in reports if report.mark is not None or report.reached >= 0]
    fresh = [report for report in reports if report.job_id is None]
    damaged = [report for report in reports if report.damaged]
    if fresh and (holders or marked or damaged):
        others = (holders or marked or damaged)[0]
        raise MismatchError(
            f"{_named(fresh)}: nothing is there, and {others} has checkpoints of this job, of which none can be "
            "restored without the others; bring back the missing directory (is its disk mounted?), or move those of "
            "all ranks away to begin again"
        )
    if marked or damaged:
        details = "; ".join(f"{report}: {', '.join(report.damaged)}" for report in damaged[:_MOST_NAMED])
        lacking = [report for report in reports if not report.held]
        raise CorruptCheckpoint(
            "no checkpoint is complete on all ranks"
            + (f"; damaged: {details}" if details else "")
            + (f"; nothing whole: {_named(lacking)}" if lacking else "")
            + "; bring back copies of one step, or move the directories of all ranks away to begin again"
        )
    if holders:
        notes.append(
            f"the job begins again: it ended before its first checkpoint was complete on all ranks ({_named(holders)} "
            "had committed)"
        )


def _refuse_old(reports: Sequence[Report], common: Sequence[Identity]) -> list[str]:
    """What all hold may be older than what all once held: by damage, which is told, or in an old copy, refused."""
    mark = max((report.mark for report in reports if report.mark is not None), default=None)
    if mark is None or common[0] >= mark:
        return []
    lacking = [report for report in reports if all(one.identity < mark for one in report.held)]
    for report in lacking:
        if report.highest < mark and not report.damaged and report.wanted.step is None:
            raise MismatchError(
                f"{report} holds nothing newer than step {report.highest[1]} of incarnation {report.highest[0]}, and "
                f"step {mark[1]} of incarnation {mark[0]} was complete on all ranks: this directory is an older copy; "
                "bring back the newest one, or name a step to go on from (resume_step)"
            )
    return [
        f"step {mark[1]} of incarnation {mark[0]} was complete on all ranks, and is not any more"
        + (f": {_named(lacking)}" if lacking else "")
        + f"; all go back to step {common[0][1]} of incarnation {common[0][0]}"
    ]


def _candidates(
    reports: Sequence[Report], common: Sequence[Identity], bad: dict[Identity, str], notes: list[str]
) -> list[Identity]:
    wanted = reports[0].wanted
    if wanted.step is not None:
        found = [identity for identity in common if identity[1] == wanted.step]
        if not found:
            lacking = [report for report in reports if all(one.step != wanted.step for one in report.held)]
            raise NoCheckpoint(
                f"no checkpoint of step {wanted.step} is complete on all ranks"
                + (f" (not on {_named(lacking)})" if 0 < len(lacking) < len(reports) else "")
                + f"; steps that are: {[step for _, step in common] or 'none'}"
            )
        return found
    counts: dict[Identity, int] = {}
    for report in reports:
        for one in report.held:
            counts[one.identity] = max(counts.get(one.identity, 0), one.restarts)
    refused, candidates = [], []
    for identity in common:
        if wanted.good_only and identity in bad:
            refused.append(f"step {identity[1]} is judged bad ({bad[identity]})")
        elif wanted.max_failed_restarts is not None and counts[identity] >= wanted.max_failed_restarts:
            refused.append(f"{counts[identity]} restarts from step {identity[1]} failed")
            notes.append(f"{refused[-1]}; taking the checkpoint before it")
        else:
            candidates.append(identity)
    if common and not candidates:
        raise NoGoodCheckpoint(
            f"{'; '.join(refused)}; name a step, restore with good_only=False, or move the directories of all ranks "
            "away to begin again"
        )
    return candidates


@dataclass(frozen=True)
class Decided:
    """A step's fate; `why` names the rank that decided it, if one did."""

    step: int
    fate: Fate
    why: str = ""
    chosen: bool = False
    """Whether rank 0 chose this one, which all ranks hold, to be followed on all of them (`JobOfRanks.begin`)."""


class Tally:
    """Counts one incarnation's commits: a step that all ranks committed is global, a newer global one ends all older.

    A rank's commit is final. So a step is global, or some rank never committed it: what is decided never changes.
    Only so many of the newest decisions are remembered; what is older than the newest global step is superseded.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.newest = -1
        """Newest global step."""
        self.decided: dict[int, Decided] = {}
        self._pending: dict[int, set[int]] = {}
        self._forgotten = -1
        """What was decided of steps below this one is not remembered."""

    def commit(self, rank: int, step: int) -> list[Decided]:
        """Rank `rank` has committed `step`. Returns what is decided by it, in the order in which it holds."""
        if step in self.decided:
            return []
        known = self.fate(step)
        if known is not None:
            return [self._decide(known)]
        ranks = self._pending.setdefault(step, set())
        ranks.add(rank)
        if len(ranks) < self.world_size:
            return self._bound()
        self.newest = step
        older = sorted(other for other in self._pending if other < step)
        return [
            self._decide(Decided(step, Fate.GLOBAL)),
            *(self._decide(Decided(other, Fate.SUPERSEDED)) for other in older),
        ]

    def void(self, step: int, fate: Fate, why: str) -> list[Decided]:
        """Some rank will never commit `step`."""
        if step in self.decided:
            return []
        return [self._decide(self.fate(step) or Decided(step, fate, why))]

    def fate(self, step: int) -> Decided | None:
        """What is decided of a step, if anything is."""
        if step in self.decided or step in self._pending:
            return self.decided.get(step)
        if step < self.newest:
            return Decided(step, Fate.SUPERSEDED)
        return Decided(step, Fate.FAILED, "it comes too late") if step < self._forgotten else None

    def waiting(self) -> tuple[int, list[int]] | None:
        """The oldest step that some ranks have committed, and the first few that have not."""
        if not self._pending:
            return None
        step = min(self._pending)
        return step, [rank for rank in range(self.world_size) if rank not in self._pending[step]][:_MOST_NAMED]

    def _bound(self) -> list[Decided]:
        if len(self._pending) <= _MOST_PENDING:
            return []
        return [self._decide(Decided(min(self._pending), Fate.FAILED, "too many checkpoints wait for other ranks"))]

    def _decide(self, decided: Decided) -> Decided:
        self._pending.pop(decided.step, None)
        self.decided[decided.step] = decided
        if len(self.decided) > _MOST_DECIDED:
            # The newest global step is never forgotten; what is below it, is superseded, and what is above, had failed.
            oldest = min(step for step in self.decided if step != self.newest)
            del self.decided[oldest]
            self._forgotten = max(self._forgotten, oldest + 1)
        return decided


def failure_class(name: object) -> type[LastgoodError]:
    """The class of a failure that another process named."""
    known = (MismatchError, CorruptCheckpoint, NoGoodCheckpoint, NoCheckpoint)
    return next((kind for kind in known if kind.__name__ == name), CheckpointError)
