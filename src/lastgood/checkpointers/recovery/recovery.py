"""Which checkpoint of a slot directory to go on from, and how it is read back into a training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lastgood.checkpointers.ranks.parts import parts_of
from lastgood.checkpointers.ranks.reshard import FromRanks
from lastgood.checkpointers.ranks.sharing import join_sharing
from lastgood.checkpointers.recovery.in_place import InPlace
from lastgood.checkpointers.slots.contents import named_tensors, read_layout
from lastgood.checkpointers.slots.live_tensors import LiveTensors
from lastgood.errors import (
    CorruptCheckpoint,
    MismatchError,
    NoCheckpoint,
    NoGoodCheckpoint,
    StorageError,
    WaitTimeout,
)
from lastgood.storage import SlotInfo, SlotState, SlotStore, SlotView, Verdict, VerdictBook
from lastgood.storage.objects.reachable import Reachable

__all__ = ["Recovery"]

_log = logging.getLogger("lastgood")


@dataclass(frozen=True)
class _Candidate:
    """A checkpoint that may be restored."""

    key: tuple[int, int]
    """Incarnation and step."""
    view: SlotView
    look: Callable[[], SlotInfo]
    sequence: int
    bad: Verdict | None

    @property
    def step(self) -> int:
        return self.key[1]


def _itself(info: SlotInfo) -> SlotInfo:
    return info


@dataclass(frozen=True)
class Recovery:
    """Chooses among the checkpoints of one directory (and of its job's place) and reads one.

    Needs no lock; works beside an open store.
    """

    directory: Path
    threads: int
    world: tuple[int, int]
    """(rank, number of ranks) of the training that restores."""
    place: Reachable | None = None
    """What the place that the job sends checkpoints to has, beside the directory."""

    def latest(self, store: SlotStore | None, *, of_all_ranks: bool = False) -> int | None:
        """Step of the newest complete checkpoint that was not judged bad (and is one of all ranks), or None."""
        view = self._view(store)
        if view is None:
            return None
        found = view.committed()
        if of_all_ranks and store is not None:
            found = store.everywhere()
        elif of_all_ranks:
            commit = view.global_commit()
            known = (-1, -1) if commit is None else (commit.incarnation, commit.step)
            found = [info for info in found if (info.incarnation, info.step) <= known]
        book = view.book()
        return next((info.step for info in found if not book.is_bad(info.sequence)), None)

    def read(
        self, store: SlotView, info: SlotInfo, state: Mapping[str, Any], *, together: bool = False
    ) -> Callable[[], None]:
        """Read one checkpoint of this directory, or of the job's place; what is returned loads it into `state`.

        With `together`, all ranks do this now, each from its disk or the place: what several fetch, one does.

        Raises CorruptCheckpoint, StorageError, WaitTimeout; live tensors may then hold parts of it. MismatchError.
        """
        what = f"{info.record.job_id.hex()}/{info.incarnation}-{info.step}"
        reading: InPlace | FromRanks | None = None
        self._check_world(info)
        with store.hold(info):
            try:
                reading = self._reading(store, info, state)
            finally:
                fetches = store.remote and isinstance(reading, FromRanks)
                sharing = join_sharing(what, self.world, takes_part=fetches) if together else None
            if isinstance(reading, FromRanks):
                reading.read(self.threads, sharing)
            else:
                reading.read(self.threads)
        return reading.load

    def restore(
        self,
        store: SlotView | None,
        state: Mapping[str, Any],
        step: int | None,
        *,
        good_only: bool = True,
        max_failed_restarts: int | None = None,
    ) -> SlotInfo:
        """Read the newest checkpoint into `state` that is good, did not fail too often, and whose checksums hold.

        With a `step`, only its checkpoints count, whatever was judged. What cannot be read is passed over with a
        warning; live tensors may then hold parts of it, until an older one is read over them. Raises NoCheckpoint,
        NoGoodCheckpoint, CorruptCheckpoint, MismatchError.
        """
        view = self._view(store)
        if view is None and self.place is None:
            raise NoCheckpoint(f"{self.directory}: there is no such directory")
        known = [] if view is None else view.committed()
        if store is None and view is not None:
            _tell_damage(view)  # an open store has told it
        book = VerdictBook(self.directory, kept=False) if view is None else view.book()
        candidates = self._candidates(view, known, book)
        refused: list[str] = []
        passed: set[tuple[int, int]] = set()
        unread: list[str] = []
        touched = False
        for number, candidate in enumerate(candidates):
            if (step is not None and candidate.step != step) or candidate.key in passed:
                continue
            if step is None and good_only and candidate.bad is not None:
                refused.append(f"step {candidate.step} is judged bad ({candidate.bad.reason or 'no reason'})")
                passed.add(candidate.key)
                continue
            failed = book.failed_restarts(candidate.sequence, candidate.step)
            if step is None and max_failed_restarts is not None and failed >= max_failed_restarts:
                refused.append(f"{failed} restarts from step {candidate.step} failed")
                passed.add(candidate.key)
                _log.warning("%s: %s; taking the checkpoint before it", self.directory, refused[-1])
                continue
            try:
                info = candidate.look()
                self._check_world(info)
                with candidate.view.hold(info):
                    reading = self._reading(candidate.view, info, state)
                    touched |= reading.touches_live
                    reading.read(self.threads)
            except (CorruptCheckpoint, StorageError, WaitTimeout) as error:
                following = candidates[number + 1 : number + 2]
                again = [one.view.directory for one in following if one.key == candidate.key]
                _log.warning("%s; trying %s", error, f"its copy in {again[0]}" if again else "the checkpoint before it")
                unread.append(str(error))
                continue
            reading.load()
            return info
        if unread:
            mixed = "; the state in memory holds parts of it now, make it again" if touched else ""
            why = "; ".join([*unread, *refused])
            raise CorruptCheckpoint(f"{self.directory}: no checkpoint can be read: {why}{mixed}")
        if refused:
            raise NoGoodCheckpoint(
                f"{self.directory}: {'; '.join(refused)}; name a step, restore with good_only=False, or move the "
                "directory away to begin again"
            )
        if step is None and view is not None:
            self._refuse_damage(view)
        asked = "complete checkpoint" if step is None else f"complete checkpoint of step {step}"
        steps = [one for _, one in dict.fromkeys(candidate.key for candidate in candidates)]
        raise NoCheckpoint(f"{self.directory}: no {asked}; committed steps: {steps or 'none'}")

    def _candidates(self, view: SlotView | None, known: Sequence[SlotInfo], book: VerdictBook) -> list[_Candidate]:
        """What may be restored, newest first; of one that is on the disk and in the job's place, first that here."""
        found = [
            _Candidate(
                (info.incarnation, info.step),
                view,
                partial(_itself, info),
                info.sequence,
                book.verdicts[info.sequence] if book.is_bad(info.sequence) else None,
            )
            for info in known
            if view is not None
        ]
        place = self.place
        if place is not None and place.view is not None:
            for name in place.names:
                key, look = (name.incarnation, name.step), partial(place.view.look, name)
                found.append(_Candidate(key, place.view, look, -1, place.bad(book, name)))
            found.sort(key=lambda one: one.key, reverse=True)  # stable: what is on the disk stays first
        return found

    def _view(self, store: SlotView | None) -> SlotView | None:
        if store is not None:
            return store
        return SlotStore.peek(self.directory) if self.directory.is_dir() else None

    def _reading(self, view: SlotView, info: SlotInfo, state: Mapping[str, Any]) -> InPlace | FromRanks:
        """Straight from this rank's own part, if that is all that it wants; else from the parts of all ranks."""
        layout = read_layout(view, info)
        tensors = named_tensors(layout)
        live = LiveTensors(state, {tensor.part for tensor in tensors if tensor.shard is not None})
        if all(tensor.is_array or live.fits_in_place(tensor) for tensor in tensors):
            return InPlace(view, info, layout, live)
        return FromRanks(parts_of(view, info), state, self.world)

    def _check_world(self, info: SlotInfo) -> None:
        found = (info.record.rank, info.record.world_size)
        if found != self.world:
            raise MismatchError(
                f"{info.path}: the checkpoint of step {info.step} is that of rank {found[0]} of {found[1]}, and this "
                f"training is rank {self.world[0]} of {self.world[1]}; restore with as many ranks as wrote it, or "
                'give a new directory and this job with resume_from="..."'
            )

    def _refuse_damage(self, view: SlotView) -> None:
        """If nothing is complete, but something was: a training must not begin again without a message."""
        damaged = [
            f"{status.path.name}: {status.detail or 'found corrupt before'}"
            for status in view.statuses()
            # What an open store found corrupt still has a sound record, and is not among the committed.
            if status.state is SlotState.WHOLE or status.may_be_damaged
        ]
        if damaged:
            raise CorruptCheckpoint(
                f"{self.directory}: no complete checkpoint, and slots that are damaged: {'; '.join(damaged)}; bring "
                "a copy back, or move the directory away to begin again"
            )
        book = view.book()
        if book.restarts or book.reached >= 0:
            raise CorruptCheckpoint(
                f"{self.directory}: no slot holds a checkpoint, and training has gone on from one here (of step "
                f"{max(book.reached, *(one.step for one in book.restarts.values()), 0)} at most): they were emptied or "
                "removed; bring a copy back, or move the directory away to begin again"
            )


def _tell_damage(view: SlotView) -> None:
    """What was a checkpoint, perhaps the newest one, and is passed over."""
    for status in view.statuses():
        if status.may_be_damaged:
            _log.warning("%s: not a complete checkpoint: %s; trying others", status.path, status.detail)
