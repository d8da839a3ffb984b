"""A training that is asked to end by SIGTERM ends at its step's end, with a checkpoint of that step, if there is time.

How long steps and writes take is measured; what does not fit is not begun, and what is in progress is drained as ever.
"""

from __future__ import annotations

import collections
import logging
import os
import signal
import time
from abc import abstractmethod

from lastgood.checkpointers.attach.process_end import Endable, step_is_over
from lastgood.checkpointers.events import CheckpointEvent, Outcome
from lastgood.errors import WaitTimeout

__all__ = ["EndsAtStep"]

_log = logging.getLogger("lastgood")

_STEPS = 8
"""Ends of steps that are kept, to know how long one takes."""
_FEWEST_STEPS = 4
_SPARE_S = 0.5
_MARGIN = 1.5
"""A write may take so many times as long as the longest of the last ones."""


class EndsAtStep(Endable):
    """What a checkpointer has for the last step of a training that was asked to end."""

    events: list[CheckpointEvent]
    interval_steps: int | None
    _process: int
    _signal: int | None = None
    _why: str = ""
    """What the next save is asked for by."""

    @abstractmethod
    def save(self, step: int) -> None:
        """As a checkpointer's."""

    @abstractmethod
    def _ends_itself(self) -> bool:
        """Whether this training, by itself, can be given one more checkpoint."""

    def _begin_steps(self) -> None:
        self._ends_s: collections.deque[float] = collections.deque(maxlen=_STEPS)
        self._signal = self._end_by = None

    def _ends_at_step(self, number: int) -> float | None:
        """Seconds until which a step's end is waited for, which then ends the training; None: end now."""
        writes = [
            event.finished_s - event.requested_s
            for event in self.events
            if event.outcome is Outcome.DURABLE and event.finished_s is not None
        ]
        ends: list[float] = list(getattr(self, "_ends_s", ()))
        if os.getpid() != self._process or not self._ends_itself() or not writes or len(ends) < _FEWEST_STEPS:
            return None
        now, step_s = time.monotonic(), (ends[-1] - ends[0]) / (len(ends) - 1)
        patience_s = self.exit_drain_s() - _MARGIN * max(writes[-3:]) - _SPARE_S
        # Steps do not end any more, as in an evaluation: what would come is not known.
        stands = now - ends[-1] > 5 * step_s + _SPARE_S
        if stands or patience_s < 2 * step_s:
            return None
        self._signal, self._end_by = number, now + self.exit_drain_s()
        return patience_s

    def _ends_now(self) -> None:
        """The end of a step is waited for no more."""
        self._signal = None

    def _step_over(self, step: int) -> None:
        """Called at the end of each step. Raises SystemExit if the training was asked to end."""
        self._ends_s.append(time.monotonic())
        if self._signal is None:
            self._end_by = None  # whoever caught the end of the training goes on with it
            return
        number, self._signal = self._signal, None
        step_is_over()
        if not self.events or self.events[-1].step != step:
            self._why = signal.Signals(number).name
            self.save(step)
            self._why = ""
        try:
            self.drain(self._granted_s())
        except WaitTimeout as error:
            _log.error("%s: %s; older checkpoints stay", self.name, error)
        _log.warning(
            "%s: %s: the training ends after step %d, whose checkpoint is %s",
            self.name,
            signal.Signals(number).name,
            step,
            self.events[-1].outcome,
        )
        raise SystemExit(128 + number)
