"""Measures a training for CheckFreq's policy and says when to save: what `checkfreq_profiler` computes with.

On the CPU a clock is read at the end of each iteration and at each update; on CUDA events are recorded into the current
stream at those places, and read once the device has come past them, so that nothing ever waits for it.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lastgood._lazy import torch
from lastgood.checkpointers.checkfreq.policy import IntervalTuner, Profile, Window
from lastgood.checkpointers.events import CheckpointEvent, Outcome

__all__ = ["PLAIN_ITERATIONS", "WARM_UP_ITERATIONS", "BudgetKeeper"]

WARM_UP_ITERATIONS = 3
"""Not looked at: kernels are chosen, memory is taken, optimizers make their moments."""
PLAIN_ITERATIONS = 20
"""Timed before the first checkpoint."""
_REST = 3
"""Iterations without a checkpoint between those of the profile."""
_REST_MOST = 1000
_ROOMS_KEPT = 64


@dataclass
class _Open:
    """A checkpoint and the iterations since its save, while they are not all known."""

    event: CheckpointEvent
    affected_s: list[float] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)
    under_way: bool = True
    unread: int = 0
    over: bool = False
    """The next save has begun."""

    def add(self, duration_s: float) -> None:
        """Its next iteration; one that began with the checkpoint in progress is affected by it."""
        (self.affected_s if self.under_way else self.plain_s).append(duration_s)
        self.under_way = self.event.outcome is Outcome.PENDING


class BudgetKeeper:
    """Says at the end of each iteration whether to save, so that checkpoints cost at most `budget` of the training.

    `device` is the CUDA device that trains, None for the CPU. `clock` is used there; it gives seconds, as the times of
    events do.
    """

    def __init__(
        self, budget: float, device: torch.device | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.tuner = IntervalTuner(budget)
        self._device = device
        self._clock = clock
        self._iterations = 0
        self._since_save: int | None = None
        self._rested = 0
        self._failures = 0
        self._begun: Any = None
        """The mark at which the present iteration began."""
        self._updated: Any = None
        self._opens: deque[_Open] = deque()
        self._unread: deque[tuple[Any, Any, Any, _Open | None]] = deque()
        """Begin, first update and end of iterations, and the window that each belongs to."""
        self._rooms_s: deque[float] = deque(maxlen=_ROOMS_KEPT)

    def update_reached(self) -> None:
        """An optimizer is about to change the weights; the first one of an iteration counts."""
        if self._begun is not None and self._updated is None:
            self._updated = self._mark()

    def save_begun(self, event: CheckpointEvent) -> None:
        """A save begins; the iteration that follows it is the first of its window."""
        if self._opens:
            self._opens[-1].over = True
        self._opens.append(_Open(event))
        self._since_save = 0
        self._rested = 0

    def step_finished(self) -> bool:
        """An iteration is finished: whether to save now."""
        mark = self._mark()
        if self._begun is not None:
            current = self._opens[-1] if self._opens else None
            self._iterations += 1
            if current is not None:
                current.unread += 1
            if self._iterations > WARM_UP_ITERATIONS or current is not None:
                self._unread.append((self._begun, self._updated, mark, current))
        self._begun, self._updated = mark, None
        if self._since_save is not None:
            self._since_save += 1
        self._read()
        self._close_windows()
        return self._due()

    def facts(self) -> dict[str, Any]:
        """The interval, what it was computed from, what was seen since, and every change."""
        tuner = self.tuner
        chosen = tuner.changes[-1] if tuner.changes else None
        return {
            "overhead_budget": tuner.budget,
            "interval_steps": tuner.interval,
            "inputs": None if chosen is None else _as_facts(chosen.profile),
            "expected_overhead": None if chosen is None else chosen.profile.overhead(chosen.interval),
            "seen_overhead": tuner.seen_overhead,
            "changes": [
                {"step": one.step, "interval_steps": one.interval, "why": one.why, "inputs": _as_facts(one.profile)}
                for one in tuner.changes
            ],
        }

    def _due(self) -> bool:
        if self._since_save is None:
            return self._iterations >= WARM_UP_ITERATIONS + PLAIN_ITERATIONS
        if self.tuner.interval is not None:
            return self._since_save >= self.tuner.interval
        if self._opens and self._opens[-1].event.outcome is Outcome.PENDING:
            return False
        self._rested += 1
        # While a disk is full a profile cannot be had; it is tried again, less and less often.
        return self._rested >= min(_REST_MOST, _REST << min(self._failures, 20))

    def _read(self) -> None:
        """Take in the iterations that the device is through with."""
        while self._unread and self._reached(self._unread[0][1]) and self._reached(self._unread[0][2]):
            begun, updated, ended, window = self._unread.popleft()
            duration_s = self._between(begun, ended)
            if window is None:
                self.tuner.plain_iterations((duration_s,))
            else:
                window.unread -= 1
                window.add(duration_s)
            if updated is not None and (window is None or not window.under_way):
                self._rooms_s.append(max(0.0, self._between(begun, updated)))

    def _close_windows(self) -> None:
        while self._opens and self._opens[0].over and not self._opens[0].unread:
            event = self._opens[0].event
            if event.outcome is Outcome.PENDING:
                return
            whole = self._opens.popleft()
            if event.outcome is not Outcome.DURABLE or event.copied_s is None or event.finished_s is None:
                self._failures += 1
                continue
            self._failures = 0
            waited_s = sum(end - begin for name, begin, end in event.phases if name == "wait")
            if self._rooms_s:
                self.tuner.room_s = statistics.median(self._rooms_s)
            self.tuner.observe(
                Window(
                    step=event.step,
                    affected_s=tuple(whole.affected_s),
                    plain_s=tuple(whole.plain_s),
                    snapshot_s=event.copied_s - event.requested_s - waited_s,
                    persist_s=event.finished_s - event.copied_s,
                    waited_s=waited_s,
                )
            )

    def _mark(self) -> Any:
        if self._device is None:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _reached(self, mark: Any) -> bool:
        return self._device is None or mark is None or bool(mark.query())

    def _between(self, first: Any, second: Any) -> float:
        return float(second - first) if self._device is None else float(first.elapsed_time(second)) / 1e3


def _as_facts(profile: Profile) -> dict[str, float | None]:
    names = ("iteration_s", "room_s", "snapshot_s", "persist_s", "stall_s", "cost_s")
    return {name: getattr(profile, name) for name in names}
