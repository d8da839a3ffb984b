"""How long a shadow's update takes: what is timed, and its record. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from lastgood.experiments.records.base import MachineLabel, Record, Scale, SpecWithoutWorkload
from lastgood.models import FrozenModel

__all__ = ["OPTIMIZER_METHOD", "OPTIMIZER_PANEL", "OptimizerPoint", "OptimizerRecord", "OptimizerSpec"]

OPTIMIZER_METHOD = 1
"""Version of how updates are timed, part of every run's identity."""
OPTIMIZER_PANEL = "optimizer"
"""The panel of Checkmate's figure that shows these records."""
_Count = Annotated[int, Field(ge=1, le=64)]


class OptimizerSpec(SpecWithoutWorkload):
    """One run: complete updates of a model's shape at every number of threads and of shadows."""

    NOT_IN_CELL: ClassVar[Mapping[str, Any]] = {"repetition": True}

    spec_version: Literal[1] = 1
    method: int = Field(default=OPTIMIZER_METHOD, ge=1)
    machine: MachineLabel
    scale: Scale
    model: str = Field(pattern=r"^[A-Za-z0-9_]{1,40}$")
    """A shape of `lastgood shadow bench`."""
    optimizer: Literal["sgd", "adam", "adamw"]
    threads: tuple[_Count, ...] = Field(min_length=1, max_length=64)
    shadows: tuple[_Count, ...] = Field(min_length=1, max_length=64)
    updates: int = Field(ge=1, le=100_000)
    """Timed at each point."""
    repetition: int = Field(ge=0)

    @property
    def panel(self) -> str:
        """One panel beside those of a figure's models."""
        return OPTIMIZER_PANEL

    def record_path(self) -> PurePosixPath:
        """Where the record lies, below the results folder."""
        cell = f"t{self.threads[-1]}-m{self.shadows[-1]}-c{self.cell_hash}"
        name = f"r{self.repetition}.json"
        return PurePosixPath(self.machine, self.scale, OPTIMIZER_PANEL, self.model, self.optimizer, cell, name)

    def title(self) -> str:
        """A short name for logs."""
        return f"updates of {self.model} by {self.optimizer} r{self.repetition}"


class OptimizerPoint(FrozenModel):
    """One number of threads and of shadows."""

    threads: int = Field(ge=1)
    shadows: int = Field(ge=1)
    update_s: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(min_length=1)
    """Of each timed update, the seconds of the shadow that takes longest."""


class OptimizerRecord(Record[OptimizerSpec]):
    """One run, complete."""

    NAME: ClassVar[str] = "a record of updates"

    parameters: int
    points: list[OptimizerPoint]

    def summary(self) -> str:
        """How many points it has."""
        return f"{len(self.points)} points, {self.wall_s:.0f} s in all"
