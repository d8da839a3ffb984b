"""A training that is asked to end (a signal, a deadline) ends at its step's end, with a checkpoint of that step.

How long steps and writes take is measured; what does not fit is not begun, and what is in progress is drained as ever.
"""

from __future__ import annotations

import collections
import logging
import os
import signal
import time
from abc import abstractmethod
from typing import TYPE_CHECKING

from lastgood.checkpointers.attach.agreed_end import POLL_S, STEPS_TO_AGREE, AgreedEnd, Estimate, LastStep, agreed_end
from lastgood.checkpointers.attach.deadline import DEADLINE, monotonic_end
from lastgood.checkpointers.attach.process_end import Endable, step_is_over
from lastgood.checkpointers.events import CheckpointEvent, Outcome
from lastgood.errors import WaitTimeout
from lastgood.world import world_of_torch

if TYPE_CHECKING:
    from lastgood.checkpointers.attach.attachment import Attachment

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
    deadline: float | str | None
    _attachment: Attachment | None
    _process: int
    _asked: str = ""
    """What asked this process to end: the name of a signal, or ``deadline``."""
    _unfit: str = ""
    """Why no step's end is waited for."""
    _why: str = ""
    """What the next save is asked for by."""
    _agreed: AgreedEnd | None = None
    _deadline_at: float | None = None
    """By `time.monotonic()`."""

    @abstractmethod
    def save(self, step: int) -> None:
        """As a checkpointer's."""

    @abstractmethod
    def _world(self) -> tuple[int, int]:
        """(rank, number of ranks)."""

    def _saves_itself(self) -> bool:
        """Whether this training can be given one more checkpoint: one that saves by hand says itself when."""
        return self._attachment is not None and self.interval_steps != 0

    def _begin_deadline(self) -> None:
        """A training is to be attached. Raises ConfigError for a deadline that it cannot keep."""
        world = self._world()
        together = world[1] == 1 or world_of_torch() == world
        self._deadline_at = monotonic_end(self.name, self.deadline, together=together)

    def _begin_steps(self) -> None:
        """The training is attached."""
        self._ends_s: collections.deque[float] = collections.deque(maxlen=_STEPS)
        self._asked, self._end_by = "", None
        self._agreed = agreed_end(self._world(), self._estimate) if self._saves_itself() else None

    def _end_steps(self) -> None:
        """The training is attached no longer."""
        if self._agreed is not None:
            self._agreed.ended.set()
            self._agreed = None

    # -- what is measured ------------------------------------------------------------------------------------------

    def _measured(self) -> tuple[float, float] | None:
        """Seconds of a step, and of a write with its margin; None: not known."""
        writes = [
            event.finished_s - event.requested_s
            for event in self.events
            if event.outcome is Outcome.DURABLE and event.finished_s is not None
        ]
        ends = list(self._ends_s)
        if not writes or len(ends) < _FEWEST_STEPS:
            return None
        step_s = (ends[-1] - ends[0]) / (len(ends) - 1)
        # Steps do not end any more, as in an evaluation: what would come is not known.
        stands = time.monotonic() - ends[-1] > 5 * step_s + _SPARE_S
        return None if stands else (step_s, _MARGIN * max(writes[-3:]) + _SPARE_S)

    def _estimate(self) -> Estimate:
        """For the other ranks; called in a thread."""
        step_s, write_s = self._measured() or (None, None)
        return Estimate(step_s, write_s, None if self._end_by is None else self._granted_s())

    # -- who asks --------------------------------------------------------------------------------------------------

    def _ends_at_step(self, number: int) -> float | None:
        """Seconds until which a step's end is waited for, which then ends the training; None: end now."""
        self._unfit = ""
        if os.getpid() != self._process or not self._saves_itself():
            return None
        if self._world()[1] > 1 and self._agreed is None:
            self._unfit = "without torch.distributed, ranks cannot agree on a last step"
            return None
        if self._agreed is not None and self._agreed.lost:
            self._unfit = f"ranks cannot agree on a last step: {self._agreed.lost}"
            return None
        measured = self._measured()
        if measured is None:
            self._unfit = "how long steps and writes take is not known"
            return None
        step_s, write_s = measured
        patience_s = self.exit_drain_s() - write_s
        if patience_s < self._needed_s(step_s):
            self._unfit = (
                f"steps of {step_s:.3g} s and writes of {write_s:.3g} s do not fit into {self.exit_drain_s():g} s "
                "(exit_drain_s)"
            )
            return None
        self._asked, self._end_by = signal.Signals(number).name, time.monotonic() + self.exit_drain_s()
        if self._agreed is not None:
            self._agreed.ask(self._asked)
        return patience_s

    def _needed_s(self, step_s: float) -> float:
        """For steps to end, and for ranks to agree on one."""
        return 2 * step_s if self._agreed is None else STEPS_TO_AGREE * step_s + 3 * POLL_S

    def _ends_now(self, number: int) -> None:
        """The end of a step is waited for no more. Called in the handler of signals."""
        if self._asked:
            self._unfit = "the step did not end in time"
        self._asked = ""
        self._note_unsaved(signal.Signals(number).name)

    def _ask_by_deadline(self) -> None:
        if self._deadline_at is None or self._asked or not self._saves_itself():
            return
        step_s, write_s = self._measured() or (0.0, self.exit_drain_s())
        if self._deadline_at - time.monotonic() > write_s + self._needed_s(step_s):
            return
        self._asked, self._end_by = DEADLINE, self._deadline_at
        self._deadline_at = None  # whoever catches the end goes on, and is not asked again
        if self._agreed is not None:
            self._agreed.ask(DEADLINE)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _step_over(self, step: int) -> None:
        """Called at the end of each step. Raises SystemExit if the training was asked to end."""
        self._ends_s.append(time.monotonic())
        self._ask_by_deadline()
        if self._agreed is not None:
            agreed = self._agreed.step_over(step)
            if agreed is None and self._asked == DEADLINE and self._granted_s() == 0:
                agreed = LastStep(DEADLINE, saves=False, left_s=0.0)  # the others do not answer
            if agreed is not None and (agreed.saves or self._asked):
                self._end_after(step, agreed)
        elif self._asked:
            self._end_after(step, LastStep(self._asked, saves=True, left_s=self._granted_s()))
        if not self._asked:
            self._end_by = None  # whoever caught the end of the training goes on with it

    def _end_after(self, step: int, how: LastStep) -> None:
        step_is_over()
        if self._end_by is None:  # others were asked
            self._end_by = time.monotonic() + how.left_s
        self._asked = ""
        if not how.saves:
            self._unfit = "a checkpoint of all ranks did not fit into the time that was left"
            self._note_unsaved(how.why)
        elif not self.events or self.events[-1].step != step:
            self._why = how.why
            self.save(step)
            self._why = ""
        try:
            self.drain(self._granted_s())
        except WaitTimeout as error:
            _log.error("%s: %s; older checkpoints stay", self.name, error)
        last = self.events[-1] if self.events else None
        _log.warning(
            "%s: %s: the training ends after step %d, whose checkpoint is %s",
            self.name,
            how.why,
            step,
            "none" if last is None or last.step != step else last.outcome,
        )
        raise SystemExit(128 + getattr(signal, how.why, signal.SIGTERM))

    def _note_unsaved(self, why: str) -> None:
        """Say in an event that the state of the present step is not saved, if it is not."""
        attachment = self._attachment
        if not self._unfit or attachment is None or os.getpid() != self._process:
            return
        step, now_s = attachment.progress.step, time.perf_counter()
        if self.events and self.events[-1].step == step:
            return
        what = f"no checkpoint of this step: {self._unfit}; those in progress are finished"
        self.events.append(CheckpointEvent(step, now_s, None, now_s, Outcome.SKIPPED, error=what, why=why))
