"""One process's part in a run: its part of the model, its checkpointer, and whom it waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lastgood.checkpointers.base import Checkpointer
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.services.registry import begin_meters, trainer_options
from lastgood.experiments.services.service import Meter
from lastgood.workloads.base import Workload

__all__ = ["Part", "make_checkpointer"]


class Part:
    """One process's part in a run: this is that of a process that trains alone."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec

    def parallelise(self, workload: Workload) -> None:
        """Make a workload that was just built this process's part of it."""

    def checkpointer(self, checkpoints: Path) -> Checkpointer:
        """The system, as this process uses it."""
        return make_checkpointer(self._spec, checkpoints)

    def common_step(self, checkpointer: Checkpointer) -> int | None:
        """The step to restore; None: the checkpointer's newest."""

    def check(self, state: dict[str, Any]) -> None:
        """Refuse a state that the system would not give back. Called once, outside the measurement."""

    def share_buffers(self) -> None:
        """Make the same on all processes what the next step would make the same anyway. Outside the measurement."""

    def begin_meters(self, checkpoints: Path) -> Meter:
        """Begin to count what the run's services use, if this process is the one to report it."""
        return begin_meters(self._spec, checkpoints)

    def writer(self, reader: Checkpointer, checkpoints: Path) -> Checkpointer:
        """What to train on with after a restore by `reader`."""
        del checkpoints
        return reader

    def barrier(self) -> None:
        """Wait for the other processes."""


def make_checkpointer(spec: RunSpec, checkpoints: Path) -> Checkpointer:
    """The system of `spec` in folder `checkpoints`; it keeps all its events."""
    kind = checkpointer_class(spec.system)
    options = {**spec.system_options, **trainer_options(spec, checkpoints)}
    checkpointer = kind(checkpoints, kind.Options.model_validate(options))
    checkpointer.events_kept = None
    return checkpointer
