"""When training uses the network, and when a checkpoint may (Gemini, SOSP'23, section 5).

Training says when its communication begins and ends; between those marks lie the *gaps*. An optimizer's update ends an
iteration, and with it the gap that it falls into. Gaps are known by their number within the iteration.
"""

from __future__ import annotations

import math
import queue
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lastgood.errors import CheckpointError, WaitTimeout

__all__ = ["Iteration", "Traffic"]

_KEPT = 10_000
"""So many of the newest gaps and iterations are remembered."""
_PAUSE_S = 0.05
"""Training has paused if a gap lasts this much longer than twice the longest known one."""


@dataclass(frozen=True)
class Iteration:
    """What the network did between two updates."""

    gaps_s: tuple[float, ...]
    """Idle timespans in their order, in seconds."""
    busy_s: float
    """Seconds in which training communicated."""
    moved_bytes: int
    """Bytes of checkpoints that were sent meanwhile."""


class Traffic:
    """The marks of training's communication, and what was learned from them. Any thread may call any method.

    The first `profile_steps` whole iterations without checkpoint traffic are the profile. `clock` gives seconds; tests
    bring their own.
    """

    def __init__(self, profile_steps: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._profile_steps = profile_steps
        self._clock = clock
        self._change = threading.Condition()
        self._depth = 0
        self._hurry = 0
        self._cancelled = False
        self._since = clock()
        self._iterations = 0
        self._gaps: list[float] = []
        self._busy_s = 0.0
        self._moved = 0
        self._gap_moved = 0
        self._alone: list[Iteration] = []
        self._beside: deque[Iteration] = deque(maxlen=_KEPT)
        self._moved_per_gap: deque[int] = deque(maxlen=_KEPT)
        self._expected: tuple[float, ...] = ()
        self._device_ends: queue.SimpleQueue[Any] | None = None

    # -- marks -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Training's communication begins; parts of it may overlap."""
        with self._change:
            if self._depth == 0:
                self._end_gap()
                self._since = self._clock()
            self._depth += 1
            self._change.notify_all()

    def end(self) -> None:
        """A communication that `begin` announced is over."""
        with self._change:
            if self._depth == 0:
                raise RuntimeError("Traffic.end() without begin()")
            self._depth -= 1
            if self._depth == 0:
                self._end_busy()
            self._change.notify_all()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Around a communication that blocks: ``with traffic.busy(): dist.all_reduce(...)``."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def end_after(self, event: Any) -> None:
        """As `end`, once `event` (a CUDA event, already recorded) has happened; waited for in a thread of its own."""
        with self._change:
            if self._device_ends is None:
                self._device_ends = queue.SimpleQueue()
                threading.Thread(
                    target=self._await_device, args=(self._device_ends,), name="gemini-traffic", daemon=True
                ).start()
            self._device_ends.put(event)

    def update(self) -> None:
        """An optimizer is about to update: an iteration ends here."""
        with self._change:
            if self._depth:
                self._end_busy()
            else:
                self._end_gap()
                self._since = self._clock()
            if self._iterations:  # the first began somewhere in the middle
                self._note(Iteration(tuple(self._gaps), self._busy_s, self._moved))
            self._iterations += 1
            self._gaps, self._busy_s, self._moved = [], 0.0, 0
            self._change.notify_all()

    def cancel(self) -> None:
        """Make all waits for a gap fail, now and later."""
        with self._change:
            self._cancelled = True
            self._change.notify_all()

    def close(self) -> None:
        """End the thread that waits for devices, if there is one."""
        with self._change:
            if self._device_ends is not None:
                self._device_ends.put(None)
                self._device_ends = None

    # -- for the sender --------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether training communicates now."""
        return self._depth > 0

    def moved(self, nbytes: int) -> None:
        """Note that `nbytes` of a checkpoint were sent."""
        with self._change:
            self._moved += nbytes
            self._gap_moved += nbytes

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """Training waits for the checkpoint meanwhile: every idle moment is good for sending."""
        with self._change:
            self._hurry += 1
            self._change.notify_all()
        try:
            yield
        finally:
            with self._change:
                self._hurry -= 1

    def wait_for_gap(self, least_s: float, gamma: float, timeout_s: float) -> float:
        """Wait until training is idle for at least `least_s` more seconds, by the profile; return for how long.

        Of each profiled gap the part `gamma` is used. The result is infinite if nothing is known to wait for: no
        profile yet, no communication in it, training waits itself or has paused (a gap far longer than any known one),
        or no gap is ever long enough for `least_s` (then the last one of an iteration is taken as endless, as the
        paper's Algorithm 2 does).

        Raises WaitTimeout if training stays busy, or in short gaps, for `timeout_s`; CheckpointError after `cancel`.
        """
        deadline = self._clock() + timeout_s
        with self._change:
            while True:
                if self._cancelled:
                    raise CheckpointError("given up while waiting for a pause in the training's communication")
                now = self._clock()
                span_s = -math.inf if self._depth else self._span(now, least_s, gamma)
                if span_s >= least_s:
                    return span_s
                if now >= deadline:
                    raise WaitTimeout(
                        f"waited {timeout_s:.0f} s for a pause in the training's communication; "
                        f"{self._depth} of its marks are open (is end() called for each begin()?)"
                    )
                wake_s = deadline - now
                if self._depth == 0:
                    wake_s = min(wake_s, self._since + self._pause_s() - now)
                self._change.wait(max(wake_s, 1e-4))

    # -- what was learned ------------------------------------------------------------------------------------------

    @property
    def profile(self) -> tuple[float, ...]:
        """The mean length of each gap of an iteration, in seconds, over the profiled iterations; () before any.

        Buckets that overlap now and then make the number of gaps differ; iterations with the commonest one count.
        """
        return self._expected

    def facts(self) -> dict[str, Any]:
        """What a run record should say: bytes per idle gap, and training's communication alone and beside a checkpoint.

        Times are seconds per iteration; None if there was no such iteration.
        """
        with self._change:
            moved = sorted([*self._moved_per_gap, *([self._gap_moved] if self._gap_moved else [])])
            return {
                "bytes_per_idle_gap": {
                    "gaps": len(moved),
                    "median": statistics.median(moved) if moved else None,
                    "max": moved[-1] if moved else None,
                },
                "communication_s": {
                    "without_checkpoint_traffic": _median_busy_s(self._alone),
                    "with_checkpoint_traffic": _median_busy_s(self._beside),
                    "iterations_without": len(self._alone),
                    "iterations_with": len(self._beside),
                },
                "profiled_gaps_s": list(self._expected),
            }

    # -- below, the caller holds the lock --------------------------------------------------------------------------

    def _end_gap(self) -> None:
        self._gaps.append(self._clock() - self._since)
        if self._gap_moved:
            self._moved_per_gap.append(self._gap_moved)
            self._gap_moved = 0

    def _end_busy(self) -> None:
        now = self._clock()
        self._busy_s += now - self._since
        self._since = now

    def _note(self, iteration: Iteration) -> None:
        if iteration.moved_bytes:
            self._beside.append(iteration)
        elif len(self._alone) < self._profile_steps:
            self._alone.append(iteration)
            count, _ = Counter(len(known.gaps_s) for known in self._alone).most_common(1)[0]
            alike = [known.gaps_s for known in self._alone if len(known.gaps_s) == count]
            self._expected = tuple(statistics.fmean(lengths) for lengths in zip(*alike, strict=True))

    def _span(self, now: float, least_s: float, gamma: float) -> float:
        """For how long the gap that is open now may still be used."""
        if self._hurry or not any(known.busy_s for known in self._alone):
            return math.inf
        elapsed = now - self._since
        if elapsed >= self._pause_s():
            return math.inf
        number = len(self._gaps)
        if gamma * max(self._expected) < least_s and number == len(self._expected) - 1:
            return math.inf
        if number >= len(self._expected):
            return 0.0
        return gamma * self._expected[number] - elapsed

    def _pause_s(self) -> float:
        return 2 * max(self._expected, default=0.0) + _PAUSE_S

    # -- the thread that waits for devices -------------------------------------------------------------------------

    def _await_device(self, ends: queue.SimpleQueue[Any]) -> None:
        while (event := ends.get()) is not None:
            try:
                event.synchronize()
            finally:
                self.end()


def _median_busy_s(iterations: list[Iteration] | deque[Iteration]) -> float | None:
    return statistics.median(iteration.busy_s for iteration in iterations) if iterations else None
