"""The built-in check of a training's health: losses that are not finite, or that spike.

The rule. A loss is bad if it is NaN or infinite; or if at least `MIN_LOSSES` good ones are known and it lies above the
median of the last `WINDOW` good ones by more than ``spike`` times their spread, where the spread is the scaled median
absolute deviation (1.4826 x MAD, a standard deviation for normal noise), at least 5 % of the median's magnitude. A bad
loss does not enter the window.

The loss of iteration s is computed from the weights after s - 1 steps, and its update makes those after s. So a bad
loss of iteration s speaks against the checkpoints of step s - 1 and of step s.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lastgood._lazy import lazy_module

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

__all__ = ["BadLoss", "LossWatch"]

WINDOW = 64
MIN_LOSSES = 16
_MAD_TO_SIGMA = 1.4826
_LEAST_SPREAD = 0.05
_MAX_PENDING = 256
"""Losses on their way from a device; the training waits for the oldest beyond these."""


@dataclass(frozen=True)
class BadLoss:
    """A loss that the rule refused."""

    step: int
    reason: str


class LossWatch:
    """Looks at losses in order. Never waits for a device: a loss there is looked at once it has arrived."""

    def __init__(self, spike: float | None) -> None:
        self._spike = spike
        self._good: deque[float] = deque(maxlen=WINDOW)
        self._pending: deque[tuple[int, torch.Tensor, Any]] = deque()

    def observe(self, step: int, loss: Any) -> list[BadLoss]:
        """Take the loss of iteration `step` (a number or a tensor of one element); return what was found bad so far."""
        if isinstance(loss, torch.Tensor) and loss.is_cuda:
            host = torch.empty((), dtype=loss.dtype, pin_memory=True)
            host.copy_(loss.detach().reshape(()), non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(loss.device))
            self._pending.append((step, host, event))
            return self._arrived()
        return self._judge(step, float(loss.detach() if isinstance(loss, torch.Tensor) else loss))

    def finish(self) -> list[BadLoss]:
        """Wait for the losses that are still on their way."""
        found = []
        while self._pending:
            step, host, event = self._pending.popleft()
            event.synchronize()
            found += self._judge(step, float(host))
        return found

    def _arrived(self) -> list[BadLoss]:
        found = []
        while self._pending and (len(self._pending) > _MAX_PENDING or self._pending[0][2].query()):
            step, host, event = self._pending.popleft()
            event.synchronize()
            found += self._judge(step, float(host))
        return found

    def _judge(self, step: int, loss: float) -> list[BadLoss]:
        if not math.isfinite(loss):
            return [BadLoss(step, f"the loss of iteration {step} is {loss}")]
        if self._spike is not None and len(self._good) >= MIN_LOSSES:
            median = statistics.median(self._good)
            deviation = statistics.median(abs(value - median) for value in self._good)
            spread = max(_MAD_TO_SIGMA * deviation, _LEAST_SPREAD * abs(median))
            if loss - median > self._spike * spread:
                return [
                    BadLoss(
                        step,
                        f"the loss of iteration {step} is {loss:.6g}, more than {self._spike:g} x {spread:.3g} above "
                        f"the median {median:.6g} of the last {len(self._good)} good ones",
                    )
                ]
        self._good.append(loss)
        return []
