"""One process's part in a run: its part of the model, its checkpointer, and whom it waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from lastgood.checkpointers.base import Checkpointer
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.services.shadow_usage import ShadowMeters, shadow_options
from lastgood.workloads.base import Workload

__all__ = ["Alone", "Part", "make_checkpointer"]


class Part(Protocol):
    """One process's part in a run."""

    def parallelise(self, workload: Workload) -> None:
        """Make a workload that was just built this process's part of it."""

    def checkpointer(self, checkpoints: Path) -> Checkpointer:
        """The system, as this process uses it."""

    def common_step(self, checkpointer: Checkpointer) -> int | None:
        """The step to restore; None: the checkpointer's newest."""

    def check(self, state: dict[str, Any]) -> None:
        """Refuse a state that the system would not give back. Called once, outside the measurement."""

    def settle(self) -> None:
        """Make alike on all processes what the next step would make alike anyway. Outside the measurement."""

    def shadow_meters(self, checkpoints: Path) -> ShadowMeters:
        """What the run's shadows have used until now, as far as this process is the one to tell."""

    def writer(self, reader: Checkpointer, checkpoints: Path) -> Checkpointer:
        """What to train on with behind a restore by `reader`."""

    def meet(self) -> None:
        """Wait for the other processes."""


class Alone:
    """The part of a process that trains alone."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec

    def parallelise(self, workload: Workload) -> None:
        """It has all of it."""

    def checkpointer(self, checkpoints: Path) -> Checkpointer:
        """The system of the spec."""
        return make_checkpointer(self._spec, checkpoints)

    def common_step(self, checkpointer: Checkpointer) -> int | None:
        """Its own newest."""

    def check(self, state: dict[str, Any]) -> None:
        """Any state will do."""

    def settle(self) -> None:
        """There is nobody to differ from."""

    def shadow_meters(self, checkpoints: Path) -> ShadowMeters:
        """Of all shadows that it has."""
        return ShadowMeters.read(checkpoints, self._spec.shadows)

    def writer(self, reader: Checkpointer, checkpoints: Path) -> Checkpointer:
        """The one that restored."""
        del checkpoints
        return reader

    def meet(self) -> None:
        """There is nobody to wait for."""


def make_checkpointer(spec: RunSpec, checkpoints: Path) -> Checkpointer:
    """The system of `spec` in folder `checkpoints`; it keeps all its events."""
    kind = checkpointer_class(spec.system)
    where = shadow_options(checkpoints) if spec.shadows else {}
    checkpointer = kind(checkpoints, kind.Options.model_validate({**spec.knobs(), **where}))
    checkpointer.events_kept = None
    return checkpointer
