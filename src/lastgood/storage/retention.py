"""Which checkpoints of an open directory stay: what was judged, what was restarted from, what all ranks hold."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from lastgood.errors import CheckpointError
from lastgood.files import ReadableBy
from lastgood.storage import format as fmt
from lastgood.storage.global_commit import GlobalCommit, retained_sequences, write_global_commit
from lastgood.storage.reader import SlotInfo, SlotView
from lastgood.storage.verdicts import Measured, Verdict, VerdictBook

__all__ = ["Retention", "Slot"]


@dataclass
class Slot:
    """What the store knows of one slot file. `busy` says who uses it for writing, in words for messages."""

    number: int
    path: Path
    file_bytes: int = 0
    header_ok: bool = False
    info: SlotInfo | None = None
    busy: str = ""
    readers: int = 0
    damaged: bool = False


class Retention(SlotView, ABC):
    """The part of a slot store that knows which checkpoints must not be overwritten. Safe to use from several threads.

    All that is guarded is guarded by `_changed`, but for the files beside the slots.
    """

    job: fmt.Job
    incarnation: int
    """Which incarnation of the job writes here."""
    _book: VerdictBook

    def __init__(self, directory: Path | str, keep: int, readable_by: ReadableBy) -> None:
        super().__init__(directory)
        self.keep = keep
        self.readable_by = readable_by
        self._changed = threading.Condition()
        self._closed = False
        self._all: list[Slot] = []
        self._book_lock = threading.Lock()
        """Held while the book or the commit is written: a flush may take long, and saves must not wait for it."""
        self._everywhere: set[int] | None = None
        """Sequences of what all ranks of the job are known to hold; None for a job of one rank."""
        self._newest_noted = -1
        self._reached = -1
        """The highest step that an earlier incarnation of the job had a checkpoint of."""
        self.on_verdict: Callable[[Retention], None] | None = None
        """Called after each verdict, with this store; it must return at once, and never raise."""
        self._origin: int | None = None
        """Sequence of the checkpoint that this incarnation began at, until it has got further than any before it."""
        self.keep_best: tuple[int, str, bool] = (0, "", True)
        """How many of the best stay beside those, by which metric, and whether less is better."""

    @abstractmethod
    def newest_sequence(self) -> int:
        """Sequence of the newest durable checkpoint."""

    @abstractmethod
    def settle(self) -> None:
        """An older slot may have become free."""

    def committed(self) -> list[SlotInfo]:
        """The complete checkpoints, newest first; those found corrupt by this store are left out."""
        with self._changed:
            return self._committed()

    def _committed(self) -> list[SlotInfo]:
        found = [slot.info for slot in self._all if slot.info is not None and not slot.damaged]
        return sorted(found, key=lambda info: info.sequence, reverse=True)

    def _kept(self) -> set[int]:
        """Sequences of the checkpoints that stay: the newest good one first of all."""
        kept = retained_sequences(self._committed(), self._book.is_bad, self.keep, self._everywhere, self._origin)
        return kept.union(info.sequence for info in self.best())

    # -- the best --------------------------------------------------------------------------------------------------

    def best(self) -> list[SlotInfo]:
        """The good checkpoints that stay for their metric, the best first; of two that are equal, the newer one."""
        most, name, less = self.keep_best
        metrics = self._book.metrics
        found = [
            info
            for info in self.everywhere()
            if info.sequence in metrics and metrics[info.sequence].name == name and not self._book.is_bad(info.sequence)
        ]
        found.sort(key=lambda info: metrics[info.sequence].value * (1 if less else -1))  # stable: newest first
        return found[:most]

    def measure(self, sequence: int, measured: Measured) -> None:
        """Note the metric of a checkpoint, durable or still in progress. Raises StorageError; it holds in memory."""
        with self._writing_the_book():
            self._book.metrics = {**self._book.metrics, sequence: measured}
            whole, best = {info.sequence for info in self.committed()}, {info.sequence for info in self.best()}
            oldest = min(whole, default=-1)
            # What lost its place has no use for its metric any more; what is in progress may yet take one.
            self._book.measure(
                {
                    one: found
                    for one, found in self._book.metrics.items()
                    if one in best or (one not in whole and one > oldest)
                }
            )
        with self._changed:
            self._changed.notify_all()

    # -- judging ---------------------------------------------------------------------------------------------------

    def book(self) -> VerdictBook:
        """Verdicts and restart counts; changed only through this store."""
        return self._book

    def judge(self, sequence: int, verdict: Verdict) -> None:
        """Judge a checkpoint, durable or still in progress; a later verdict replaces it. Raises StorageError."""
        try:
            with self._writing_the_book():
                self._book.judge(sequence, verdict)
        finally:
            with self._changed:
                self._changed.notify_all()
            self._tell_verdict()

    def take_back(self, sequence: int, reason: str) -> bool:
        """Take a bad verdict back, if it is the one of that reason; returns whether it was. Raises StorageError."""
        try:
            with self._writing_the_book():
                return self._book.take_back(sequence, reason)
        finally:
            self._tell_verdict()

    def _tell_verdict(self) -> None:
        if self.on_verdict is not None:
            self.on_verdict(self)

    def count_restart(self, info: SlotInfo) -> int:
        """An incarnation begins at this checkpoint: how many did so before it and got no further. Raises StorageError.

        Until this incarnation has a checkpoint of a higher step than any before it, that one stays: what comes in
        between has failed already.
        """
        with self._changed:
            self._origin = info.sequence
        with self._writing_the_book():
            return self._book.count_restart(info.sequence, info.step, self._reached)

    def forget_restarts(self) -> None:
        """Training got on, or ended in order. Raises StorageError."""
        with self._changed:
            self._origin = None
            reached = max([self._reached, *(info.step for info in self.everywhere())])
        if self._book.restarts:
            with self._writing_the_book():
                self._book.forget_restarts(reached)

    def _got_on(self) -> bool:
        """Whether this incarnation has a higher step than all before it; of several ranks, one that all hold."""
        with self._changed:
            mine = [info for info in self.everywhere() if info.incarnation == self.incarnation]
            return any(info.step > self._reached for info in mine)

    # -- several ranks ---------------------------------------------------------------------------------------------

    def share(self, incarnation: int, everywhere: Collection[int], reached: int = -1) -> None:
        """From now on a checkpoint counts once `confirm` says that all ranks hold it; call it before the first `begin`.

        `everywhere` are the sequences of which that is known; all others are dropped. The store's incarnation has the
        number `incarnation`, and `reached` is the highest step that all ranks ever held; they agree on both. Until a
        newer checkpoint is confirmed, a confirmed one stays, and so do all newer ones. Raises StorageError.
        """
        known = [info for info in self.committed() if info.sequence in everywhere]
        if known:
            self._note(known[0])
        with self._changed:
            self.incarnation = incarnation
            self._everywhere = set(everywhere)
            self._reached = max([reached, *(info.step for info in known)])
            for slot in self._all:
                if slot.info is not None and slot.info.sequence not in everywhere:
                    slot.info = None
            self._changed.notify_all()

    def confirm(self, info: SlotInfo) -> None:
        """All ranks hold this checkpoint: note it durably; older ones may go. Raises StorageError; then they stay."""
        if info.sequence > self.newest_sequence():
            self._note(info)
        with self._changed:
            if self._everywhere is not None:
                self._everywhere = {*self._everywhere, info.sequence} & {one.sequence for one in self._committed()}
            self._changed.notify_all()
        self.settle()

    def drop(self, info: SlotInfo) -> None:
        """Other ranks do not hold this checkpoint and never will: its slot may be used again."""
        with self._changed:
            for slot in self._all:
                if slot.info == info:
                    slot.info = None
            self._changed.notify_all()

    def everywhere(self) -> list[SlotInfo]:
        """The complete checkpoints that count, newest first: all of a job of one rank, else those of all ranks."""
        with self._changed:
            whole = self._committed()
            return whole if self._everywhere is None else [one for one in whole if one.sequence in self._everywhere]

    def _note(self, info: SlotInfo) -> None:
        commit = GlobalCommit(info.incarnation, info.step, info.sequence)
        with self._writing_the_book():
            # Two threads may confirm two checkpoints in either order; at its opening the store may fall back.
            if self._everywhere is None or commit.sequence > self._newest_noted:
                write_global_commit(self.directory, self.job, commit, self.readable_by.file_mode)
                self._newest_noted = commit.sequence

    @contextlib.contextmanager
    def _writing_the_book(self) -> Iterator[None]:
        with self._book_lock:
            # Another process may have opened the directory since.
            if self._closed:
                raise CheckpointError(f"{self.directory}: the store is closed")
            yield
