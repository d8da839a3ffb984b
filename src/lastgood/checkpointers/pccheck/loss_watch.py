"""The built-in check of a training's health: losses that are not finite, or that spike.

The rule. A loss is *high* if it is NaN or infinite; or if at least `MIN_LOSSES` ordinary ones are known and it lies
above the median of the last `WINDOW` of them by more than ``spike`` times their spread. The spread is the scaled median
absolute deviation (1.4826 x MAD, a standard deviation for normal noise), at least 5 % of the median's magnitude. What
is no higher than one of the last four that were not is not high, though the spread may have shrunk meanwhile. Losses
of exactly 0 say nothing about a scale and are no part of the window. High losses in a row are a *run*. A high loss is
bad, with two exceptions, since a spike is short and rare:

- A level that stays is the norm. Once `STAYS` of the last twice as many finite losses were high, the window is made of
  these from the first high one on, and what was judged by them is taken back. A loss that is not finite begins the
  count again. If fewer are high, noise carries the new level over and under the limit: the others enter the window, and
  the next exception takes these.
- What came often and went away by itself is how this loss is. A run is not bad as long as `HABIT` of the runs that
  ended within the last `HORIZON` losses were as long and, give or take a spread, as high (NaN counts as infinitely
  high).

The loss of iteration s is computed from the weights after s - 1 steps, and its update makes those after s. So a bad
loss of iteration s speaks against the checkpoints of step s - 1 and of step s.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

from lastgood._lazy import torch

__all__ = ["STAYS", "Judgement", "LossWatch"]

WINDOW = 64
MIN_LOSSES = 16
STAYS = 16
HABIT = 3
HORIZON = 1024
_MAD_TO_SIGMA = 1.4826
_LEAST_SPREAD = 0.05
_RECENT = 4
_MAX_PENDING = 256
"""Losses on their way from a device; the training waits for the oldest beyond these."""


@dataclass(frozen=True)
class Judgement:
    """What losses say of the checkpoint of `step`."""

    step: int
    ok: bool
    """False: they speak against it; True: they did, and that is taken back."""
    reason: str
    """Of the bad judgement, also if it is taken back."""
    certain: bool
    """Whether a loss was not finite: a spike is in doubt, this is not."""


class LossWatch:
    """Looks at losses in order. Never waits for a device: a loss there is looked at once it has arrived."""

    def __init__(self, spike: float | None) -> None:
        self._spike = spike
        self._ordinary: deque[float] = deque(maxlen=WINDOW)
        self._pending: deque[tuple[int, torch.Tensor, Any]] = deque()
        self._seen = 0
        self.looked_at = 0
        """The newest iteration whose loss was looked at."""
        self._latest: deque[tuple[int, float, bool]] = deque(maxlen=2 * STAYS)
        """The finite losses since the last that was not: iteration, loss, whether it was high."""
        self._run_length = 0
        self._run_height = -math.inf
        self._runs: deque[tuple[int, int, float]] = deque()
        """Runs that ended: when (a number of losses), how long and how high they were."""
        self._against: dict[int, dict[int, Judgement]] = {}
        """By step of a checkpoint, and by the iteration of the loss: what stands. Only what may yet be taken back."""

    def observe(self, step: int, loss: Any) -> list[Judgement]:
        """Take the loss of iteration `step` (a number or a tensor of one element); return what was judged so far."""
        if isinstance(loss, torch.Tensor) and loss.is_cuda:
            host = torch.empty((), dtype=loss.dtype, pin_memory=True, device="cpu")
            host.copy_(loss.detach().reshape(()), non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(loss.device))
            self._pending.append((step, host, event))
            return self._arrived(wait=False)
        return self._judge(step, float(loss.detach() if isinstance(loss, torch.Tensor) else loss))

    def finish(self) -> list[Judgement]:
        """Wait for the losses that are still on their way."""
        return self._arrived(wait=True)

    def _arrived(self, *, wait: bool) -> list[Judgement]:
        found = []
        while self._pending and (wait or len(self._pending) > _MAX_PENDING or self._pending[0][2].query()):
            step, host, event = self._pending.popleft()
            event.synchronize()
            found += self._judge(step, float(host))
        return found

    def _judge(self, step: int, loss: float) -> list[Judgement]:
        self._seen += 1
        self.looked_at = step
        finite = math.isfinite(loss)
        median, spread = self._scale()
        limit = math.inf if self._spike is None else max(median + self._spike * spread, self._recent_height())
        high = not (finite and loss <= limit)
        if finite:
            self._latest.append((step, loss, high))
        else:
            self._latest.clear()
        if not high:
            self._end_run()
            if loss != 0:
                self._ordinary.append(loss)
            return []
        self._run_length += 1
        self._run_height = max(self._run_height, loss if finite else math.inf)
        if sum(high for _, _, high in self._latest) >= STAYS:
            return self._take_as_norm()
        if self._is_habit(0.0 if math.isinf(spread) else spread):
            if finite:
                self._ordinary.append(loss)
            return []
        if not finite:
            return self._speak(step, f"the loss of iteration {step} is {loss}", certain=True)
        reason = (
            f"the loss of iteration {step} is {loss:.6g}, more than {self._spike:g} x {spread:.3g} above the median "
            f"{median:.6g} of the {len(self._ordinary)} before it"
        )
        return self._speak(step, reason, certain=False)

    def _scale(self) -> tuple[float, float]:
        """Median and spread of the ordinary losses; an infinite spread if too few are known."""
        if len(self._ordinary) < MIN_LOSSES:
            return 0.0, math.inf
        median = statistics.median(self._ordinary)
        deviation = statistics.median(abs(value - median) for value in self._ordinary)
        return median, max(_MAD_TO_SIGMA * deviation, _LEAST_SPREAD * abs(median))

    def _recent_height(self) -> float:
        low = (loss for _, loss, high in reversed(self._latest) if not high)
        return max(itertools.islice(low, _RECENT), default=-math.inf)

    def _end_run(self) -> None:
        if self._run_length:
            self._runs.append((self._seen, self._run_length, self._run_height))
        while self._runs and self._runs[0][0] < self._seen - HORIZON:
            self._runs.popleft()
        self._run_length, self._run_height = 0, -math.inf

    def _is_habit(self, spread: float) -> bool:
        alike = [
            when
            for when, length, height in self._runs
            if when >= self._seen - HORIZON and length >= self._run_length and height + spread >= self._run_height
        ]
        return len(alike) >= HABIT

    def _speak(self, iteration: int, reason: str, *, certain: bool) -> list[Judgement]:
        """Against both checkpoints that a bad loss tells of."""
        found = [Judgement(step, False, reason, certain) for step in (iteration - 1, iteration)]
        for one in found:
            self._against.setdefault(one.step, {})[iteration] = one
        while len(self._against) > 2 * STAYS:
            del self._against[next(iter(self._against))]
        return found

    def _take_as_norm(self) -> list[Judgement]:
        """What has been high for so long is the level now; take back what was judged by it."""
        while not self._latest[0][2]:
            self._latest.popleft()
        self._ordinary = deque((loss for _, loss, _ in self._latest if loss != 0), maxlen=WINDOW)
        iterations = [iteration for iteration, _, high in self._latest if high]
        self._latest.clear()
        self._run_length, self._run_height = 0, -math.inf
        found = []
        for step, reasons in self._against.items():
            taken = [reasons.pop(iteration) for iteration in iterations if iteration in reasons]
            if taken and not reasons:  # another loss, one that is not finite, may still speak against it
                found.append(Judgement(step, True, taken[-1].reason, False))
        self._against = {step: reasons for step, reasons in self._against.items() if reasons}
        return found
