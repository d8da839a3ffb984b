"""Keeps saves and optimizer steps apart: in the middle of a step the state is one that training never has.

A step in progress is known from its pre-hook on, by the frame that called the hook, until its post-hook. If the frame
is on no thread's stack any more and the post-hook never came, the step was ended by an exception, and what it left is
half updated, until a step of that optimizer ends in order.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from lastgood.errors import CheckpointError, WaitTimeout

__all__ = ["UpdateSteps"]

_LOOK_S = 0.05
"""Between two looks at a step that another thread is in: one that ends by an exception tells nobody."""


@dataclass
class _Step:
    optimizer: Any
    frames: list[FrameType]
    """That of the step, and those of steps of the same optimizer inside it: a class that builds on another one calls
    that one's step. Empty once the step is known to be over."""


class UpdateSteps:
    """The optimizer steps that run now, and the save that runs now. Safe to use from threads and signal handlers."""

    def __init__(self) -> None:
        # Of a kind that one thread may take twice: a signal handler runs between any two of a thread's instructions.
        self._changed = threading.Condition(threading.RLock())
        self._steps: dict[int, _Step] = {}
        """By the optimizer's id."""
        self._saving: int | None = None
        """The thread that is inside a save."""

    def begin(self, optimizer: Any, frame: FrameType, timeout_s: float) -> None:
        """Called before a step: it begins once another thread's save has its copies, and lasts no longer than `frame`.

        Raises WaitTimeout.
        """
        me = threading.get_ident()
        with self._changed:
            if not self._changed.wait_for(lambda: self._saving in (None, me), timeout_s):
                raise WaitTimeout(f"waited {timeout_s:.0f} s in optimizer.step() for a save in another thread")
            outer = self._steps.get(id(optimizer))
            frames = [] if outer is None else _those_here(outer.frames)
            self._steps[id(optimizer)] = _Step(optimizer, [*frames, frame])

    def end(self, optimizer: Any) -> None:
        """Called after a step that ended in order."""
        with self._changed:
            step = self._steps.pop(id(optimizer), None)
            if step is not None and len(step.frames) > 1 and (outer := _those_here(step.frames)[:-1]):
                self._steps[id(optimizer)] = _Step(optimizer, outer)
            self._changed.notify_all()

    @contextlib.contextmanager
    def kept_out(self, timeout_s: float, optimizers: Callable[[], Sequence[Any]] = list) -> Iterator[None]:
        """While inside, no step of another thread begins. Waits for those that run in other threads.

        `optimizers` returns those that training still has: what a step of another one has left is forgotten.

        Raises CheckpointError in a step of this thread (a signal handler, a hook), inside another save of this thread,
        or after a step that an exception has ended; WaitTimeout.
        """
        me = threading.get_ident()
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if self._saving == me:
                raise CheckpointError(
                    "a save was asked for inside another save of the same thread (a signal handler?); set a flag "
                    "there, and save when the loop's step is finished"
                )
            while self._saving is not None or self._runs(me, optimizers):
                left = deadline - time.monotonic()
                if left <= 0:
                    what = "another save" if self._saving is not None else "optimizer.step()"
                    raise WaitTimeout(f"waited {timeout_s:.0f} s for {what} in another thread to end")
                self._changed.wait(min(left, _LOOK_S))
            self._saving = me
        try:
            yield
        finally:
            with self._changed:
                self._saving = None
                self._changed.notify_all()

    def _runs(self, me: int, optimizers: Callable[[], Sequence[Any]]) -> bool:
        """Whether another thread is in a step. Raises CheckpointError if this one is, or if a step was broken off."""
        running = False
        for key, step in list(self._steps.items()):
            threads = _threads_in(step)
            if not threads and not any(step.optimizer is one for one in optimizers()):
                del self._steps[key]
                continue
            kind = type(step.optimizer).__name__
            if me in threads:
                raise CheckpointError(
                    f"a save was asked for inside {kind}.step() (by a signal handler or a hook?), where part of the "
                    "weights is updated and part is not; set a flag there, and save when the step is finished"
                )
            if not threads:
                step.frames = []  # they hold what the step held
                raise CheckpointError(
                    f"the last {kind}.step() was ended by an exception, so part of the weights may be updated and part "
                    "not; saves work again after the next complete step"
                )
            running = True
        return running


def _threads_in(step: _Step) -> set[int]:
    """The threads that have the step's frame on their stack."""
    return {thread for thread, top in sys._current_frames().items() if step.frames and _is_below(step.frames[0], top)}


def _those_here(frames: Sequence[FrameType]) -> list[FrameType]:
    """Those of `frames` that this thread is in."""
    return [frame for frame in frames if _is_below(frame, sys._getframe())]


def _is_below(frame: FrameType, top: FrameType | None) -> bool:
    while top is not None and top is not frame:
        top = top.f_back
    return top is not None
