"""Gradients of the wire into a shadow's slots: what `_native.Receiver` is for trainers' connections."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lastgood._lazy import torch
from lastgood.errors import MismatchError, WaitTimeout
from lastgood.gradients.layout.layout import GradientLayout
from lastgood.gradients.shadow.memory import ShadowMemory
from lastgood.gradients.shadow.settings import ShadowSettings

__all__ = ["MirrorReceiver", "open_mirror_receiver"]


@dataclass(frozen=True)
class _Complete:
    bucket: int
    iteration: int
    kind: Literal["complete", "end", "closed"] = "complete"
    connection: int = 0
    rank: int = 0
    cause: str = ""


class _Window:
    """Iterations of one bucket that may be written now."""

    def __init__(self) -> None:
        self.first: int | None = None
        """None: it floats, and nothing has come."""
        self.floats = True
        self.held: dict[int, set[int]] = {}
        """Parameters that are there, by iteration."""


class MirrorReceiver:
    """See the module; the methods of a `GradientReceiver`, and `put`."""

    def __init__(self, layout: GradientLayout, memory: ShadowMemory, slots: int) -> None:
        self._layout = layout
        self._memory = memory
        self._slots = slots
        self._windows = {bucket: _Window() for bucket in memory.owned}
        self._change = threading.Condition()
        self._events: deque[_Complete] = deque()
        self._ended = False
        self._begun = 0
        """Incarnations that have begun here."""
        self._counters: defaultdict[str, float] = defaultdict(float)

    def put(self, iteration: int, index: int, gradient: torch.Tensor, timeout_s: float) -> None:
        """Write a parameter's gradient of an iteration, cast as DDP casts it; the bucket is held once all are there.

        Waits while the slot still holds a gradient that is not applied. Raises WaitTimeout; MismatchError if another
        incarnation begins meanwhile.
        """
        bucket = self._layout.parameters[index].bucket
        window = self._windows[bucket]
        deadline = time.monotonic() + timeout_s
        with self._change:
            begun = self._begun
            began = time.monotonic()
            while not self._has_room(window, iteration):
                if self._ended or time.monotonic() > deadline:
                    raise WaitTimeout(
                        f"waited {timeout_s:g} s for the optimizer to apply iteration {window.first} to bucket "
                        f"{bucket}, so that iteration {iteration} has room"
                    )
                self._change.wait(0.05)
                if self._begun != begun:
                    raise MismatchError(f"iteration {iteration} is of an incarnation that is over")
            self._counters["waited"] += time.monotonic() - began
            if window.first is not None and iteration < window.first:
                return  # it is applied already
            place = self._layout.buckets[bucket].parameters.index(index)
            target = self._memory.gradients(bucket, iteration)[place]
        target.view(-1).copy_(gradient)
        with self._change:
            held = window.held.setdefault(iteration, set())
            held.add(index)
            self._counters["bytes"] += gradient.nbytes
            if len(held) == len(self._layout.buckets[bucket].parameters):
                self._events.append(_Complete(bucket, iteration))
                self._change.notify_all()

    def _has_room(self, window: _Window, iteration: int) -> bool:
        if window.floats:
            first = iteration - self._slots + 1
            if window.first is None or first > window.first:
                window.first = first if window.first is not None else iteration
                self._forget(window)
            return True
        return window.first is not None and iteration < window.first + self._slots

    @staticmethod
    def _forget(window: _Window) -> None:
        first = window.first or 0
        window.held = {one: held for one, held in window.held.items() if one >= first}

    # -- as the shadow asks ----------------------------------------------------------------------------------------

    def add(self, fd: int, rank: int) -> int:
        """Raises MismatchError: gradients come from the mirror only."""
        del fd, rank
        raise MismatchError("this is a mirror node: it takes gradients from mirrored packets, and from nobody else")

    def set_first(self, bucket: int, first: int) -> bool:
        """See `GradientReceiver`."""
        with self._change:
            window = self._windows[bucket]
            if window.floats and window.first is not None and first < window.first:
                return False
            window.first, window.floats = first, False
            self._forget(window)
            self._change.notify_all()
            return True

    def reset(self, bucket: int) -> None:
        """See `GradientReceiver`."""
        with self._change:
            self._windows[bucket].floats = True
            self._change.notify_all()

    def begin(self, epoch: int, *, keep: bool) -> None:
        """See `GradientReceiver`."""
        del epoch
        with self._change:
            self._begun += 1
            for bucket, window in self._windows.items():
                if keep:
                    full = len(self._layout.buckets[bucket].parameters)
                    window.held = {one: held for one, held in window.held.items() if len(held) == full}
                else:
                    window.first, window.floats, window.held = None, True, {}
            self._events.clear()
            self._change.notify_all()

    def complete(self, bucket: int, iteration: int) -> bool:
        """See `GradientReceiver`."""
        with self._change:
            window = self._windows[bucket]
            if window.first is None or not window.first <= iteration < window.first + self._slots:
                return False
            return len(window.held.get(iteration, ())) == len(self._layout.buckets[bucket].parameters)

    def poll(self, timeout_s: float) -> Sequence[_Complete]:
        """See `GradientReceiver`."""
        with self._change:
            self._change.wait_for(lambda: bool(self._events) or self._ended, timeout_s)
            found = list(self._events)
            self._events.clear()
            return found

    def counters(self) -> Mapping[str, float]:
        """See `GradientReceiver`."""
        with self._change:
            return dict(self._counters)

    def refused(self) -> Mapping[str, int]:
        """Nothing is: nobody sends to it."""
        return {}

    def close(self, timeout_s: float) -> bool:
        """See `GradientReceiver`."""
        del timeout_s
        with self._change:
            self._ended = True
            self._change.notify_all()
        return True


def open_mirror_receiver(
    job: str, incarnation: int, layout: GradientLayout, memory: ShadowMemory, settings: ShadowSettings
) -> MirrorReceiver:
    """As `ShadowCore` wants it."""
    del job, incarnation
    return MirrorReceiver(layout, memory, settings.slots)
