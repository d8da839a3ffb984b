"""How an incarnation's saves go: what is said when they fail again and again, and when the training had better end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lastgood.checkpointers.events import CheckpointEvent, Outcome
from lastgood.errors import CheckpointError
from lastgood.units import format_seconds

__all__ = ["SaveHealth", "SaveStatus"]

_log = logging.getLogger("lastgood")


@dataclass(frozen=True)
class SaveStatus:
    """What a crash would cost now, and why."""

    newest_step: int | None
    """Step of the newest checkpoint that became durable in this incarnation; None: there is none."""
    unsaved_s: float
    """Seconds since it did; since `start` if there is none. So much training would be lost."""
    failed_in_row: int
    """Saves that failed since then."""
    last_error: str
    """Why the last of them did; empty: none failed."""

    def __str__(self) -> str:
        """For messages."""
        age = format_seconds(self.unsaved_s)
        if self.newest_step is None:
            return f"none is durable since this incarnation began, {age} ago"
        return f"the newest durable one is that of step {self.newest_step}, {age} old"


class SaveHealth:
    """Looks at the events of one checkpointer. Safe to use from several threads.

    Args:
        name: of the system, for messages.
        max_unsaved_s: how old the newest durable checkpoint may become; None: as old as it likes.
    """

    def __init__(self, name: str, max_unsaved_s: float | None) -> None:
        self._name = name
        self._max_unsaved_s = max_unsaved_s
        self._lock = threading.RLock()  # a signal handler that saves may come in between
        self._since_s = time.perf_counter()
        self._newest_step: int | None = None
        self._failed = 0
        self._error = ""
        self._kinds: set[str] = set()

    def begin(self) -> None:
        """An incarnation begins now."""
        with self._lock:
            self._since_s, self._newest_step = time.perf_counter(), None
            self._failed, self._error = 0, ""
            self._kinds.clear()

    def status(self, events: Sequence[CheckpointEvent]) -> SaveStatus:
        """How things are. `events` are the newest ones."""
        with self._lock:
            for event in reversed(events):
                if event.outcome is Outcome.DURABLE and event.finished_s is not None:
                    if event.finished_s > self._since_s:
                        self._since_s, self._newest_step = event.finished_s, event.step
                        self._failed, self._error = 0, ""
                    break
            return SaveStatus(self._newest_step, time.perf_counter() - self._since_s, self._failed, self._error)

    def failed(self, event: CheckpointEvent, kind: str, events: Sequence[CheckpointEvent]) -> None:
        """A save failed: log it the first time, at the 2nd, 4th, 8th and so on in a row, and if its kind is new."""
        with self._lock:
            self.status(events)
            self._failed += 1
            self._error = event.error or ""
            told = kind not in self._kinds or self._failed & (self._failed - 1) == 0
            self._kinds.add(kind)
            failed, status = self._failed, self.status(events)
        if told:
            row = "" if failed == 1 else f"; {failed} saves in a row have failed"
            _log.warning(
                "%s: the checkpoint of step %d failed, older ones stay: %s%s; %s",
                self._name,
                event.step,
                event.error,
                row,
                status,
            )

    def check(self, step: int, events: Sequence[CheckpointEvent]) -> None:
        """Raise CheckpointError if too much training would be lost."""
        if self._max_unsaved_s is None:
            return
        status = self.status(events)
        if status.unsaved_s > self._max_unsaved_s:
            why = f"; the last save failed: {status.last_error}" if status.last_error else ""
            raise CheckpointError(
                f"{self._name}: the training ends at step {step}: {status}, and max_unsaved_s allows "
                f"{self._max_unsaved_s:g} s{why}"
            )
