"""How a process with an attached checkpointer ends: in bounded time, saves in progress made durable if that fits.

Python runs exit handlers after an uncaught exception, after Ctrl-C and after sys.exit, but not when SIGTERM ends the
process by default. So SIGTERM is turned into SystemExit, if nobody else has taken it, and so is SIGUSR1, by which
schedulers announce an end.

That takes the main thread, which runs Python's handlers between two instructions. While it sits in a collective whose
other ranks are gone, or in another long call into native code, it never comes to one. So a native handler in front of
Python's wakes a thread beside it (native/src/process/end_watch.hpp). If the main thread has not come to its handler
after `PATIENCE_S`, what is in progress is made durable from another thread of Python, and then the process ends as by
SIGTERM's default action; also if that thread gets nowhere (a call that keeps the interpreter's lock), in the end.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from lastgood import _native
from lastgood.errors import WaitTimeout

__all__ = ["EXIT_DRAIN_S", "PATIENCE_S", "Endable", "Ending", "ends_by_error", "step_is_over"]

_log = logging.getLogger("lastgood")

EXIT_DRAIN_S = 25.0
"""Preempted cloud machines are given 30 seconds."""
_ABANDON_S = 2.0
"""For checkpoints that an ending process has given up to let go of their files."""
PATIENCE_S = 2.0
"""How long the main thread has, after SIGTERM, to come to its handler; at most half of what the whole end may take."""


class Endable(ABC):
    """What ends with its process."""

    name: ClassVar[str]
    _exiting = False
    _end_by: float | None = None
    """By `time.monotonic()`: the end of a process that was asked to end, and may finish its step before."""
    _close_s: float
    """How long `close` may wait for what is no checkpoint of the training any more (an archive)."""

    @abstractmethod
    def drain(self, timeout_s: float) -> None:
        """Wait for what is in progress. Raises WaitTimeout."""

    @abstractmethod
    def close(self) -> None:
        """Give back threads, files and hooks."""

    def _abandon(self) -> None:  # noqa: B027 - most systems end with their threads
        """Make what is in progress fail soon, so that `close` does not wait for it."""

    def end(self) -> None:
        """Drain for a bounded time, give up what is not durable by then, and close. Called at exit; never raises."""
        self._exiting = True
        granted_s = self._granted_s()
        deadline = time.monotonic() + granted_s
        try:
            try:
                self.drain(granted_s)
            except WaitTimeout as error:
                _log.error("%s: %s; given up at exit, older checkpoints stay", self.name, error)
                self._abandon()
            self._close_s = max(_ABANDON_S, deadline - time.monotonic())
            self.close()
        except Exception as error:  # nothing may keep a process from ending
            _log.error("%s: closing at exit failed: %s", self.name, error)

    def end_beside(self, timeout_s: float) -> None:
        """Make durable what is in progress, at SIGTERM, in a thread beside that of the training, which is stuck.

        The process ends then, whatever it does. Never raises.
        """
        self._exiting = True
        try:
            self._drain_beside(timeout_s)
        except Exception as error:  # nothing may keep a process from ending
            _log.error("%s: %s; given up at exit, older checkpoints stay", self.name, error)

    def exit_drain_s(self) -> float:
        """How long an ending process waits for what is in progress."""
        return EXIT_DRAIN_S

    def _granted_s(self) -> float:
        """What is left of that."""
        return self.exit_drain_s() if self._end_by is None else max(0.0, self._end_by - time.monotonic())

    def _ends_at_step(self, number: int) -> float | None:
        """Seconds until which the end of a step is waited for, at which the training ends; None: it ends now."""
        del number
        return None

    def _ends_now(self, number: int) -> None:  # noqa: B027 - most never wait for a step
        """The end of a step is waited for no more."""

    def _drain_beside(self, timeout_s: float) -> None:
        """Wait until what is in progress is as safe as it can be made without the training's thread."""
        self.drain(timeout_s)


class Ending:
    """Ends a checkpointer at interpreter exit, and lets SIGTERM lead there. Forgets it at `cancel`."""

    def __init__(self, checkpointer: Endable) -> None:
        alive = self.checkpointer = weakref.ref(checkpointer)
        owner = os.getpid()

        def at_exit() -> None:
            found = alive()
            # A forked child has the object, but not its threads.
            if found is not None and os.getpid() == owner:
                found.end()

        self._at_exit: Callable[[], None] | None = at_exit
        atexit.register(at_exit)
        _live.add(self)
        _take_signals()
        # One that is dropped without close() must not keep SIGTERM.
        weakref.finalize(checkpointer, self.cancel).atexit = False

    def cancel(self) -> None:
        """Undo all of it. Safe to call twice."""
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
            self._at_exit = None
            _live.discard(self)
            _give_back_signals()
            _set_limits()


def ends_by_error(*, exiting: bool) -> bool:
    """Whether an error is on its way up to the caller, or (while `exiting`) may have ended the program.

    Ctrl-C and SIGTERM are no errors of the training. A program that catches its error and exits shows no trace of it,
    so any other exit without `close` counts as one.
    """
    if exiting:
        return not (_asked or issubclass(getattr(sys, "last_type", None) or object, KeyboardInterrupt))
    kind = sys.exc_info()[0]
    return kind is not None and issubclass(kind, Exception)


_asked: list[int] = []
"""Signals that asked this process to end."""
_live: set[Ending] = set()


def _in_main_thread() -> bool:
    """Only there may Python set signal handlers."""
    return threading.current_thread() is threading.main_thread()


def _take_signals() -> None:
    if (
        _in_main_thread()
        and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
        and not _caught_natively(signal.SIGUSR1)
    ):
        signal.signal(signal.SIGUSR1, _leave)
    if _in_main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave)
    if _in_main_thread() and signal.getsignal(signal.SIGTERM) is _leave:
        descriptor = _native.end_watch_begin()
        if _reader[1:] != [os.getpid()]:  # none yet, or that of the process that forked this one
            thread = threading.Thread(target=_end_beside, args=(descriptor,), name="lastgood-sigterm", daemon=True)
            thread.start()
            _reader[:] = [thread, os.getpid()]
        _set_limits()


def _caught_natively(number: int) -> bool:
    """Whether a handler is there that Python does not know: faulthandler's prints stacks at SIGUSR1, for instance."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
        return bool(int(caught, 16) >> (number - 1) & 1)
    except (OSError, ValueError, IndexError):
        return False


_reader: list[Any] = []
"""The thread that `_end_beside` runs in, and its process."""


def _set_limits() -> None:
    """The longest time that any checkpointer may take counts for the process."""
    if not _reader:
        return
    limit_s = max((one.exit_drain_s() for one in _living()), default=0.0)
    _native.end_watch_limits(min(PATIENCE_S, limit_s / 2), limit_s)


def _living() -> list[Endable]:
    return [one for one in (ending.checkpointer() for ending in list(_live)) if one is not None]


def _give_back_signals() -> None:
    if not _live and _in_main_thread() and signal.getsignal(signal.SIGUSR1) is _leave:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    if not _live and _in_main_thread() and signal.getsignal(signal.SIGTERM) is _leave:
        _native.end_watch_stop()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_beside(descriptor: int) -> None:
    """In a thread: once the main thread has not answered SIGTERM, make durable what is in progress."""
    while True:
        os.read(descriptor, 8)
        try:
            _asked.append(signal.SIGTERM)
            found = _living()
            limit_s = max((one.exit_drain_s() for one in found), default=0.0)
            left_s = limit_s - min(PATIENCE_S, limit_s / 2)
            _log.warning(
                "SIGTERM, and the main thread is inside a native call (a collective whose other ranks are gone?): what "
                "is in progress has %.3g s to become durable, then this process ends",
                left_s,
            )
            deadline = time.monotonic() + left_s
            threads = [threading.Thread(target=one.end_beside, args=(left_s,), daemon=True) for one in found]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        finally:
            _native.end_watch_done()


def _leave(number: int, frame: Any) -> None:
    del frame
    _native.end_watch_answered()
    if not _live:
        # The last one was dropped in another thread, which may set no handler: this is as if it had.
        _native.end_watch_stop()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    _asked.append(number)
    if not _awaited and len(living := _living()) == 1:
        patience_s = living[0]._ends_at_step(number)
        if patience_s is not None:
            again = threading.Timer(patience_s, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            _awaited.append(again)
            return
    step_is_over()
    for one in _living():
        one._ends_now(number)
    raise SystemExit(128 + number)


_awaited: list[threading.Timer] = []
"""What sends the signal again, while the end of a step is waited for."""


def step_is_over() -> None:
    """Wait for the end of a step no more."""
    while _awaited:
        _awaited.pop().cancel()
