"""What a training says of its checkpoints: that they are bad, by itself or by losses, and what they are worth."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from lastgood._lazy import torch
from lastgood.checkpointers.agreement.job import JobOfRanks
from lastgood.checkpointers.pccheck.judging import Judging
from lastgood.checkpointers.pccheck.options import PCcheckOptions
from lastgood.errors import ConfigError, StorageError
from lastgood.storage import SlotStore
from lastgood.storage.verdicts import Measured

__all__ = ["Rates"]

_log = logging.getLogger("lastgood")


class Rates(ABC):
    """What PCcheck has for verdicts and metrics."""

    name: ClassVar[str]
    options: PCcheckOptions
    _judging: Judging
    _job: JobOfRanks | None
    _unmeasured = 0
    """Checkpoints that became durable since a metric came last."""

    @abstractmethod
    def _opened(self) -> SlotStore:
        """The store. Raises CheckpointError if it is not open."""

    def verdict(self, step: int, ok: bool, reason: str = "") -> bool:
        """Judge the checkpoint of `step`, durable or still in progress; returns whether there is one.

        `restore` passes a bad one over, and retention never drops the newest good one. A later verdict replaces an
        earlier one. `reason` is kept on the disk with it. Needs `attach` or `start`. Raises StorageError.
        """
        return self._judging.judge(self._opened(), self._job, step, ok, reason)

    def _observe_loss(self, step: int, loss: Any) -> None:
        self._judging.observe(self._opened(), self._job, step, loss)

    def metric(self, step: int, **values: float) -> bool:
        """Say what the checkpoint of `step` is worth, as ``metric(step, loss=0.31)``; returns whether it is there.

        `keep_best` of those with the best value of `best_metric` stay, beside the newest ones. Other values are left
        out. It may come later, after an evaluation, as long as the checkpoint is there. A tensor of one element is
        taken as well, and waited for. NaN and infinity are never the best. Of several ranks, all give the same value.
        Needs `attach` or `start`. Raises ConfigError without `keep_best`, or without a value for `best_metric`.
        """
        wanted = self.options.best_metric
        if not self.options.keep_best:
            raise ConfigError(
                f"{self.name}: metric() is of use if the best checkpoints are kept; give keep_best=3 for three of them"
            )
        if wanted not in values:
            raise ConfigError(
                f"{self.name}: metric() was given {', '.join(sorted(values)) or 'nothing'}, and the best checkpoints "
                f'are those of {wanted}; give {wanted}=..., or make the checkpointer with best_metric="..."'
            )
        store, value = self._opened(), _number(values[wanted])
        self._unmeasured = 0
        found = self._judging.find(store, step)
        if found is None:
            return False
        if math.isfinite(value):
            try:
                store.measure(found[0], Measured(step, wanted, value))
            except StorageError as error:
                # Training goes on; it holds in memory, and is written with the next one.
                _log.error("%s", error)
        return True

    def best(self) -> list[int]:
        """Steps of the checkpoints that are kept for their metric, the best first. Needs `attach` or `start`."""
        return [info.step for info in self._opened().best()]

    def _tell_unmeasured(self) -> None:
        """A checkpoint became durable. Called in its thread."""
        if not self.options.keep_best:
            return
        self._unmeasured += 1
        patience = 2 * (self.options.keep + self.options.keep_best)
        if self._unmeasured in (patience, 16 * patience):
            _log.warning(
                "%s: keep_best=%d, and no metric came for the last %d checkpoints, so that only the newest are kept; "
                "call metric(step, %s=...) after each evaluation",
                self.name,
                self.options.keep_best,
                self._unmeasured,
                self.options.best_metric,
            )


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)
