"""Clocks of a training step: on the CPU the process's own, on CUDA events in the stream, read after the last step."""

from __future__ import annotations

import statistics
import time
from typing import Any

from lastgood._lazy import torch

__all__ = ["StepClock"]


class StepClock:
    """Marks the start, the update and the end of each step without stopping the device.

    Use: `begin()`; for each step `step_started()`, `update_reached()`, `step_ended()`; then `end()`, which waits for
    the device. All results are in seconds.
    """

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._marks: list[tuple[Any, Any, Any]] = []
        self._open: list[Any] = []
        self._begin_s = 0.0
        self._begin_mark: Any = 0.0
        self.elapsed_s = 0.0

    def begin(self) -> None:
        """Start the measurement, with the device idle."""
        self._synchronize()
        self._begin_s = time.perf_counter()
        self._begin_mark = self._mark()

    def step_started(self) -> None:
        """A step begins."""
        self._open = [self._mark()]

    def update_reached(self) -> None:
        """Forward and backward passes are issued; the optimizer comes next."""
        self._open.append(self._mark())

    def step_ended(self) -> None:
        """The step is over, its save included."""
        start, update = self._open
        self._marks.append((start, update, self._mark()))

    def end(self) -> None:
        """Stop the measurement, with the device idle again."""
        self._synchronize()
        self.elapsed_s = time.perf_counter() - self._begin_s

    def step_s(self) -> list[float]:
        """Duration of every step."""
        return [self._between(start, end) for start, _, end in self._marks]

    def spans(self) -> list[tuple[float, float, float]]:
        """Start, update and end of every step, in `time.perf_counter()` seconds; after `end`."""
        if not self._cuda:
            return list(self._marks)
        return [
            (
                self._begin_s + self._between(self._begin_mark, start),
                self._begin_s + self._between(self._begin_mark, update),
                self._begin_s + self._between(self._begin_mark, end),
            )
            for start, update, end in self._marks
        ]

    def hide_s(self) -> float:
        """Median time from a step's start to its update: what a copy that began with the step can hide behind."""
        return statistics.median(self._between(start, update) for start, update, _ in self._marks)

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) / 1e3 if self._cuda else float(second - first)

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
