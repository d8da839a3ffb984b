"""What PCcheck of one rank needs of its job: a common beginning, and for each of its checkpoints a common end."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lastgood.checkpointers.agreement.address import Address, find_address
from lastgood.checkpointers.agreement.coordinator import Coordinator
from lastgood.checkpointers.agreement.decide import Decided, Fate, Identity, Report, Wanted
from lastgood.checkpointers.agreement.holdings import on_disk, with_place
from lastgood.checkpointers.agreement.member import Member, Offer
from lastgood.errors import (
    CheckpointError,
    CorruptCheckpoint,
    LastgoodError,
    MismatchError,
    StorageError,
    WaitTimeout,
)
from lastgood.storage import SlotInfo, SlotStore, SlotView, Verdict
from lastgood.storage.objects.reachable import Reachable

__all__ = ["JobOfRanks", "Settings"]

_log = logging.getLogger("lastgood")

_LEAST_LINGER_S = 2.0
_MOST_REMEMBERED = 1024
_SLICE_S = 0.5
_READ_S = 600.0
"""For the slowest rank to read its part, beyond what it takes to join."""


@dataclass(frozen=True)
class Settings:
    """How ranks find each other and how long they wait; see PCcheckOptions."""

    rank: int
    world_size: int
    control: str | None
    join_timeout_s: float
    agreement_timeout_s: float


class Flights(Protocol):
    """What the checkpointer tells of its checkpoints that are still being written."""

    def sequence_of(self, step: int) -> int | None:
        """Of the one of `step`, if it is in progress."""

    def give_up(self, step: int) -> None:
        """It must not commit any more."""


class JobOfRanks:
    """One rank among several, from the join to the end of the process's part in the job.

    A checkpoint that is durable here `landed`; it counts once all ranks have it. All fates and verdicts are applied to
    the store by one thread, in the order in which they came; nothing is done in the training's thread.
    """

    def __init__(self, directory: Path, settings: Settings, flights: Flights) -> None:
        self.directory = directory
        self._settings = settings
        self._flights = flights
        self._silence_s = settings.agreement_timeout_s / 2
        self._changed = threading.Condition()
        self._store: SlotStore | None = None
        self._member: Member | None = None
        self._coordinator: Coordinator | None = None
        self._fates: dict[int, Decided] = {}
        self._landed: dict[int, SlotInfo] = {}
        self._settled: dict[int, Decided] = {}
        self._early: dict[Identity, tuple[bool, str]] = {}
        """Verdicts on checkpoints that this rank has yet to begin."""
        self._own: dict[Identity, str] = {}
        """What this rank itself has against checkpoints: it stands when another takes its own verdict back."""
        self._last_step = -1
        self._on_disk: set[Identity] = set()
        """What the disk held when the ranks joined."""
        self._place: Reachable | None = None
        self._work: queue.SimpleQueue[Callable[[SlotStore], None] | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None

    # -- the beginning ---------------------------------------------------------------------------------------------

    def begin(
        self,
        make_store: Callable[[bytes], SlotStore],
        read: Callable[[SlotView, SlotInfo], Callable[[], None]],
        wanted: Wanted,
        beside: Callable[[], str] = str,
        choose: Callable[[SlotInfo], bool] | None = None,
        look: Callable[[bytes | None], Reachable | None] | None = None,
    ) -> tuple[SlotStore, SlotInfo | None]:
        """Join, open the store under the job's id, and read what all ranks can read; returns what was restored.

        `read` reads a checkpoint and returns what loads it, which is called once all ranks have read theirs; `beside`
        says what in the job's directory is against this rank's beginning there; `look` is told the job whose
        checkpoints the disk holds, and says which ones the job's place has. All ranks raise that, and why one cannot
        look. Raises WaitTimeout (naming ranks that did not come), what `decide.begin` raises, and what opening a store
        does.
        """
        store: SlotStore | None = None
        try:
            # The address first: all ranks take part in finding it, also one whose directory cannot be read.
            address, listener = find_address(self._settings.control, self._settings.rank, self._settings.join_timeout_s)
            if listener is not None:
                self._coordinator = Coordinator(
                    listener,
                    address.token,
                    self._settings.world_size,
                    self._silence_s,
                    None if choose is None else lambda step: self._chooses(step, choose),
                )
            try:
                report = self._report(wanted, beside(), look)
            except LastgoodError as error:
                with contextlib.suppress(LastgoodError):  # all others raise it, instead of waiting for this rank
                    self._join(address, self._without_content(wanted, f"{type(error).__name__}: {error}"))
                raise
            member, offer = self._join(address, report)
            store = make_store(offer.job_id)
            self._check_unchanged(store)
            while True:
                info, load, why = None, None, None
                try:
                    if offer.choice is not None:
                        info, load = self._read(store, offer.choice, read)
                except (CorruptCheckpoint, StorageError, WaitTimeout) as error:
                    why = str(error)
                member.answer(offer, why)
                # A rank that is lost meanwhile ends the wait at once; others need the time to read their state.
                following = member.wait_for_offer(offer.number, self._settings.join_timeout_s + _READ_S)
                if following is None:
                    break
                _log.warning("%s: step %s cannot be read on all ranks", self.directory, offer.choice)
                offer = following
            self._share(store, offer)
            self._store = store
            self._worker = threading.Thread(target=self._apply_all, args=(store,), name="lastgood-agree", daemon=True)
            self._worker.start()
            if load is not None:
                load()
        except BaseException as error:
            self.close(0.0, why=f"{type(error).__name__}: {error}")
            if store is not None:
                store.close()
            raise
        return store, info

    def _chooses(self, step: int, choose: Callable[[SlotInfo], bool]) -> bool:
        """On rank 0, in the coordinator's thread: a checkpoint that has left its slot meanwhile is not chosen."""
        with self._changed:
            info = self._landed.get(step)
        return info is not None and choose(info)

    def _join(self, address: Address, report: Report) -> tuple[Member, Offer]:
        member = self._member = Member(address, report, self._silence_s, self._heard_fate, self._heard_verdict)
        offer = member.wait_for_offer(0, self._settings.join_timeout_s)
        assert offer is not None, "no incarnation begins without an offer"
        return member, offer

    def _without_content(self, wanted: Wanted, beside: str) -> Report:
        """The report of a rank whose directory holds nothing, or cannot be looked at."""
        return Report(
            self._settings.rank,
            self._settings.world_size,
            socket.gethostname(),
            str(self.directory.absolute()),
            None,
            wanted=wanted,
            beside=beside,
        )

    def _report(self, wanted: Wanted, beside: str, look: Callable[[bytes | None], Reachable | None] | None) -> Report:
        report, book = on_disk(self._without_content(wanted, beside), self.directory)
        self._on_disk = {one.identity for one in report.held}
        self._place = (
            None if look is None else look(bytes.fromhex(report.job_id) if report.held and report.job_id else None)
        )
        return report if self._place is None else with_place(report, self._place, book)

    def _check_unchanged(self, store: SlotStore) -> None:
        if {(info.incarnation, info.step) for info in store.committed()} != self._on_disk:
            raise CheckpointError(f"{self.directory}: another process wrote here while the ranks joined; begin again")

    def _read(
        self, store: SlotStore, identity: Identity, read: Callable[[SlotView, SlotInfo], Callable[[], None]]
    ) -> tuple[SlotInfo, Callable[[], None]]:
        """Read a checkpoint from the disk; from the job's place, if the disk does not have it, or not complete.

        Raises CorruptCheckpoint, StorageError, WaitTimeout, MismatchError.
        """
        errors: list[CheckpointError] = []
        for info in store.committed():
            if (info.incarnation, info.step) == identity:
                try:
                    return info, read(store, info)
                except (CorruptCheckpoint, MismatchError, StorageError, WaitTimeout) as error:
                    errors.append(error)
        place = self._place
        name = None if place is None else place.name_of(identity)
        if place is not None and place.view is not None and name is not None:
            for earlier in errors:
                _log.warning("%s; trying its copy in %s", earlier, place.place)
            try:
                info = place.view.look(name)
                return info, read(place.view, info)
            except (CorruptCheckpoint, MismatchError, StorageError, WaitTimeout) as error:
                errors.append(error)
        if len(errors) == 1 or (errors and isinstance(errors[0], MismatchError)):
            raise errors[0]
        why = "; ".join(map(str, errors)) or "it is not there any more"
        raise CorruptCheckpoint(f"{self.directory}: step {identity[1]}: {why}")

    def _share(self, store: SlotStore, offer: Offer) -> None:
        """What all ranks hold stays; of that, what could not be read is no longer among it."""
        common = set(offer.common)
        sequences = [info.sequence for info in store.committed() if (info.incarnation, info.step) in common]
        book = store.book()
        for info in store.committed():
            why = offer.bad.get((info.incarnation, info.step))
            if why is not None and not book.is_bad(info.sequence):
                store.judge(info.sequence, Verdict(info.step, False, why))
        store.share(offer.incarnation, sequences, offer.reached)

    # -- a checkpoint ----------------------------------------------------------------------------------------------

    def admit(self, step: int) -> Decided | None:
        """A save of `step` begins: returns what another rank has decided against it already.

        Raises CheckpointError if the job has saved this step, or a later one, in this incarnation.
        """
        with self._changed:
            if step <= self._last_step:
                raise CheckpointError(
                    f"step {step} does not come after step {self._last_step}, the last saved in this incarnation: "
                    "ranks tell checkpoints by their steps"
                )
            self._last_step = step
        return self.decided_against(step)

    def decided_against(self, step: int) -> Decided | None:
        """What ended the checkpoint of `step` for all ranks, if something did."""
        with self._changed:
            decided = self._fates.get(step)
        return decided if decided is not None and decided.fate is not Fate.GLOBAL else None

    def refuse(self, step: int, fate: Fate, why: str) -> None:
        """This rank will never commit `step`: nor will the job."""
        member = self._member
        with self._changed:
            if step in self._landed or member is None:
                return
        member.void(step, fate, why)

    def begun(self, step: int, sequence: int) -> None:
        """A save has got its slot: verdicts that came before it are due."""
        store = self._store
        with self._changed:
            found = None if store is None else self._early.pop((store.incarnation, step), None)
        if found is not None:
            self._work.put(lambda store: self._judge(store, sequence, step, *found))

    def landed(self, info: SlotInfo, timeout_s: float) -> Decided:
        """This rank's part is durable; wait until all parts are, or never will be. Called by a thread of its own.

        Raises CheckpointError, naming rank and host, once the ranks have been out of touch for the agreement's timeout,
        and WaitTimeout at the latest after `timeout_s`. The slot stays until its fate is known.
        """
        step = info.step
        with self._changed:
            self._landed[step] = info
        member = self._member
        if member is None:
            raise CheckpointError(f"{self.directory}: this rank has left the job")
        member.committed(step)
        self._work.put(lambda store: self._settle(store, step))
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: step in self._settled, _SLICE_S):
                    return self._settled.pop(step)
            if self._member is None:
                raise CheckpointError(f"{self.directory}: this rank has left the job, before all had the checkpoint")
            why, for_s = member.trouble()
            if why and for_s > self._settings.agreement_timeout_s:
                raise CheckpointError(f"written here, but not known to be complete on all ranks: {why}")
            if time.monotonic() > deadline:
                why = f"waited {timeout_s:.0f} s for all ranks to commit step {step}: {member.waiting}"
                # All are there, and some rank never saved this step: nobody need keep it.
                member.void(step, Fate.FAILED, why)
                raise WaitTimeout(why)

    def trouble(self) -> str:
        """Why no checkpoint can become global now, or ""."""
        return "" if self._member is None else self._member.trouble()[0]

    def judge(self, identity: Identity, ok: bool, reason: str) -> None:
        """Tell all ranks a verdict."""
        with self._changed:
            self._own.pop(identity, None)
            if not ok:
                self._own[identity] = reason
                while len(self._own) > _MOST_REMEMBERED:
                    del self._own[next(iter(self._own))]
        if self._member is not None:
            self._member.judge(identity, ok, reason)

    def take_back(self, identity: Identity, reason: str) -> None:
        """Tell all ranks that this one's bad verdict for `reason` holds no more; those of other ranks do."""
        with self._changed:
            if self._own.get(identity) == reason:
                del self._own[identity]
        if self._member is not None:
            self._member.judge(identity, True, reason, taken_back=True)

    # -- what is heard, in the member's thread ---------------------------------------------------------------------

    def _heard_fate(self, decided: Decided) -> None:
        with self._changed:
            self._fates.setdefault(decided.step, decided)
            while len(self._fates) > _MOST_REMEMBERED:
                del self._fates[min(self._fates)]
        self._work.put(lambda store: self._settle(store, decided.step))

    def _heard_verdict(self, identity: Identity, ok: bool, reason: str, taken_back: bool) -> None:
        with self._changed:
            own = self._own.get(identity) if taken_back else None
            if ok and not taken_back:
                self._own.pop(identity, None)  # a person's: it overrides
        if own is not None:
            # Whoever heard only the other rank's verdict, and takes that back now, must hear this one.
            if self._member is not None:
                self._member.judge(identity, False, own)
            return
        self._work.put(lambda store: self._take_verdict(store, identity, ok, reason, taken_back))

    # -- and applied, in the worker's ------------------------------------------------------------------------------

    def _apply_all(self, store: SlotStore) -> None:
        while (work := self._work.get()) is not None:
            try:
                work(store)
            except LastgoodError as error:
                _log.error("%s: %s", self.directory, error)
            except Exception:
                _log.exception("%s: what the ranks agreed on could not be applied", self.directory)

    def _settle(self, store: SlotStore, step: int) -> None:
        with self._changed:
            decided, info = self._fates.get(step), self._landed.get(step)
        if decided is None:
            return
        if info is None:
            if decided.fate is not Fate.GLOBAL:
                self._flights.give_up(step)
            return
        if decided.fate is Fate.GLOBAL:
            try:
                store.confirm(info)
            except StorageError as error:
                # All ranks hold it; but as long as this rank has not noted that, nothing older may go.
                decided = Decided(step, Fate.FAILED, f"complete on all ranks, but that could not be noted: {error}")
        else:
            store.drop(info)
        with self._changed:
            self._landed.pop(step, None)
            self._settled[step] = decided
            while len(self._settled) > _MOST_REMEMBERED:
                del self._settled[min(self._settled)]
            self._changed.notify_all()

    def _take_verdict(self, store: SlotStore, identity: Identity, ok: bool, reason: str, taken_back: bool) -> None:
        incarnation, step = identity
        found = [info.sequence for info in store.committed() if (info.incarnation, info.step) == identity]
        under_way = self._flights.sequence_of(step) if incarnation == store.incarnation else None
        if under_way is not None:
            found.append(under_way)
        if found and taken_back:
            store.take_back(max(found), reason)
        elif found:
            self._judge(store, max(found), step, ok, reason)
        elif taken_back:
            with self._changed:
                if self._early.get(identity) == (False, reason):
                    del self._early[identity]
        elif incarnation == store.incarnation:
            with self._changed:
                self._early[identity] = (ok, reason)
                while len(self._early) > _MOST_REMEMBERED:
                    del self._early[next(iter(self._early))]

    def _judge(self, store: SlotStore, sequence: int, step: int, ok: bool, reason: str) -> None:
        known = store.book().verdicts.get(sequence)
        if known is None or known.ok != ok:
            store.judge(sequence, Verdict(step, ok, reason))
            if not ok:
                _log.warning("%s: another rank judges the checkpoint of step %d bad: %s", self.directory, step, reason)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float, why: str = "") -> None:
        """Leave the job. Rank 0 serves until the others have left, at most `timeout_s`. Safe to call twice."""
        member, self._member = self._member, None
        coordinator, self._coordinator = self._coordinator, None
        if member is not None:
            member.close(_LEAST_LINGER_S, why)
        worker, self._worker = self._worker, None
        if worker is not None:
            self._work.put(None)
            worker.join(_LEAST_LINGER_S)
        if coordinator is not None:
            try:
                coordinator.close(max(_LEAST_LINGER_S, min(timeout_s, self._settings.agreement_timeout_s)))
            except WaitTimeout as error:
                _log.warning("%s", error)
