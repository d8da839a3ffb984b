"""Something that is done with every M-th checkpoint of a training, in its background."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from lastgood.errors import ConfigError, LastgoodError, WaitTimeout
from lastgood.storage import SlotInfo, SlotView

__all__ = ["WAIT_S", "Follower", "FollowerCounts"]

_log = logging.getLogger("lastgood")

WAIT_S = 600.0
"""For what is due to be done, if no other time is given."""
_NICENESS = 10


@dataclass
class FollowerCounts:
    """What became of the checkpoints that were due."""

    done: int = 0
    replaced: int = 0
    """Not followed: a newer one was due while this one still waited."""
    failed: int = 0
    """Also those whose slot was reused before they were read, and checkpoints of another job."""


class Follower(ABC):
    """Follows the checkpoints of a store, in one thread of low priority, which exists only while there is work for it.

    Checkpoints are counted by their sequence, which goes on over all incarnations of a job: one is due as soon as
    `every` have been begun since the last that was due. So if some saves fail or are superseded, the next durable
    one is taken.

    At most one checkpoint waits; a newer one takes its place. A waiting one does not keep its slot: if training needs
    that first, it is lost to the follower, and counted. Whatever fails is counted, logged once per kind, and never
    raised into the training. The thread ends with its process, so call `close` (or `drain`) first.

    Args:
        place: what it writes to, for messages.
        every: at least 1, or ConfigError is raised.
        last_due: sequence of the last checkpoint that was due before.
    """

    name: ClassVar[str]
    """Of its thread."""
    done_word: ClassVar[str]
    """What has become of a checkpoint that was followed, as in "archived"."""
    advice: ClassVar[str]
    """What to do if it is too slow."""

    def __init__(self, place: object, every: int, last_due: int = 0) -> None:
        if every < 1:
            raise ConfigError(f"{place}: takes every M-th checkpoint, M at least 1: {every}")
        self.place = place
        self.every = every
        self.counts = FollowerCounts()
        self._last_due = last_due
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        """Set once nobody waits for it any more: what is being done is given up."""
        self._waiting: tuple[SlotView, SlotInfo] | None = None
        self._current: SlotInfo | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._kinds_logged: set[str] = set()

    def _aside(self) -> Callable[[], None] | None:
        """Something else to do while no checkpoint waits; what it raises is logged. Called with `_changed` held."""
        return None

    @abstractmethod
    def _follow(self, view: SlotView, info: SlotInfo) -> None:
        """Do it, in the thread; the slot stays as long as it holds it (`SlotView.hold`). What it raises is counted."""

    def _is_ours(self, info: SlotInfo) -> bool:
        """Whether this checkpoint is one to be counted at all. Called with `_changed` held."""
        del info
        return True

    def offer(self, view: SlotView, info: SlotInfo) -> bool:
        """Say that a checkpoint is durable; returns whether it was due. Returns at once, and never raises.

        `view` is the open store that holds it. May be called by several threads, and with older checkpoints after
        newer ones.
        """
        with self._changed:
            if not self._is_due(info):
                return False
            self._take(view, info)
            return True

    def drain(self, timeout_s: float = WAIT_S) -> None:
        """Wait until nothing waits and nothing is being done. Raises WaitTimeout, naming the steps."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._thread is None, timeout_s):
                left = [self._current, None if self._waiting is None else self._waiting[1]]
                steps = [info.step for info in left if info is not None]
                raise WaitTimeout(f"{self.place}: waited {timeout_s:.0f} s for steps {steps} to be {self.done_word}")

    def close(self, timeout_s: float = WAIT_S) -> None:
        """Take no more, and finish what is due. Safe to call twice; before the store's close.

        Raises WaitTimeout if that takes longer; it may be called again.
        """
        with self._changed:
            self._closed = True
        self.drain(timeout_s)

    # -- for subclasses ----------------------------------------------------------------------------------------------

    def _is_due(self, info: SlotInfo) -> bool:
        return not self._closed and self._is_ours(info) and info.sequence >= self._last_due + self.every

    def _take(self, view: SlotView, info: SlotInfo) -> None:
        """It is due, and waits for the thread. Called with `_changed` held."""
        self._last_due = max(self._last_due, info.sequence)
        if self._waiting is not None:
            self.counts.replaced += 1
            self._log_once(
                "replaced",
                f"the checkpoint of step {self._waiting[1].step} was not {self.done_word}, since that of step "
                f"{info.step} was due before its turn had come; {self.advice}",
            )
        self._waiting = (view, info)
        try:
            self._begin()
        except RuntimeError as error:
            self._waiting = None
            self._fail(info, error)

    def _begin(self) -> None:
        """The thread, if there is none. Raises RuntimeError: no more threads, or the interpreter is ending."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            thread.start()
            self._thread = thread

    def _sleep(self, seconds: float) -> None:
        """For the thread. Raises WaitTimeout once it is given up."""
        self._stopped.wait(max(0.0, seconds))
        self._go_on()

    def _go_on(self) -> None:
        """Raises WaitTimeout if nobody waits any more for what the thread does."""
        if self._stopped.is_set():
            raise WaitTimeout(f"{self.place}: given up, since the training has ended")

    def _fail(self, info: SlotInfo, error: Exception) -> None:
        """Called with `_changed` held."""
        self.counts.failed += 1
        cause = error.__cause__ if isinstance(error, LastgoodError) else error
        kind = f"{type(error).__name__} {getattr(cause, 'errno', None)}"
        self._log_once(
            kind, f"the checkpoint of step {info.step} was not {self.done_word}: {type(error).__name__}: {error}"
        )

    def _log_once(self, kind: str, message: str) -> None:
        if kind not in self._kinds_logged:
            self._kinds_logged.add(kind)
            _log.error("%s: %s", self.place, message)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, own)))
        while True:
            with self._changed:
                aside = self._aside() if self._waiting is None else None
                if self._waiting is not None:
                    (view, info), self._waiting = self._waiting, None
                    self._current = info
                elif aside is None:
                    self._current = self._thread = None
                    self._changed.notify_all()
                    return
            if aside is not None:
                try:
                    aside()
                except Exception as error:
                    with self._changed:
                        self._log_once(f"aside {type(error).__name__}", f"{type(error).__name__}: {error}")
                continue
            try:
                self._follow(view, info)
            except Exception as error:  # this thread has no caller: counts and log carry the failure
                with self._changed:
                    self._fail(info, error)
            else:
                with self._changed:
                    self.counts.done += 1
