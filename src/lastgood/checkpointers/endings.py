"""How a process with an attached checkpointer ends: in bounded time, with what is under way made durable if that fits.

Python runs exit handlers after an uncaught exception, after Ctrl-C and after sys.exit, but not when SIGTERM ends the
process by default. So SIGTERM is turned into SystemExit, where nobody else has taken it.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["EXIT_DRAIN_S", "Ending", "ends_by_error"]

EXIT_DRAIN_S = 25.0
"""Preempted cloud machines are given 30 seconds."""


class _Endable(Protocol):
    def end(self) -> None:
        """Drain for a bounded time, then close; must not raise."""


class Ending:
    """Ends a checkpointer at interpreter exit, and lets SIGTERM lead there. Forgets it at `cancel`."""

    def __init__(self, checkpointer: _Endable) -> None:
        alive = weakref.ref(checkpointer)
        owner = os.getpid()

        def at_exit() -> None:
            found = alive()
            # A forked child has the object, but not its threads.
            if found is not None and os.getpid() == owner:
                found.end()

        self._at_exit: Callable[[], None] | None = at_exit
        atexit.register(at_exit)
        _live.add(self)
        _take_sigterm()
        # One that is dropped without close() must not keep SIGTERM.
        weakref.finalize(checkpointer, self.cancel).atexit = False

    def cancel(self) -> None:
        """Undo all of it. Safe to call twice."""
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
            self._at_exit = None
            _live.discard(self)
            _give_back_sigterm()


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


def _take_sigterm() -> None:
    if _in_main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave)


def _give_back_sigterm() -> None:
    if not _live and _in_main_thread() and signal.getsignal(signal.SIGTERM) is _leave:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave(number: int, frame: Any) -> None:
    del frame
    if not _live:
        # The last one was dropped in another thread, which may set no handler: this is as if it had.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    _asked.append(number)
    raise SystemExit(128 + number)
