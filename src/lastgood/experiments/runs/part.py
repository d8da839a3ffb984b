"""One process's part in a run: its part of the model, its checkpointer, and whom it waits for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

from lastgood.checkpointers.base import Checkpointer
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.services.registry import begin_meters, trainer_options
from lastgood.experiments.services.service import Meter
from lastgood.workloads.base import Workload

__all__ = ["Part", "make_checkpointer"]

T = TypeVar("T")


class Part:
    """One process's part in a run: this is that of a process that trains alone."""

    rank = 0
    """Among the processes that train together; the first one decides."""

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

    def follow(self, decided: T) -> T:
        """What the first process decided, on all of them."""
        return decided

    def gather(self, value: T) -> list[T]:
        """Each process's value, by rank, on all of them."""
        return [value]

    def processes_to_watch(self, folder: Path) -> frozenset[int] | None:
        """Processes that with their children are all of the run on this machine; None if another process looks at it.

        `folder` is the run's own.
        """
        del folder
        return frozenset({os.getppid()})  # the parent of trainer, restorer and services


def make_checkpointer(spec: RunSpec, checkpoints: Path) -> Checkpointer:
    """The system of `spec` in folder `checkpoints`; it keeps all its events."""
    kind = checkpointer_class(spec.system)
    options = {**spec.system_options, **trainer_options(spec, checkpoints)}
    checkpointer = kind(checkpoints, kind.Options.model_validate(options))
    checkpointer.events_kept = None
    return checkpointer
