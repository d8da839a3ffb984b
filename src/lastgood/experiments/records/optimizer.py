"""How long a shadow's update takes: what is timed, and its record. Needs no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from lastgood.errors import LastgoodError
from lastgood.experiments.records.run import MOST_RECORD_BYTES, WhereRun
from lastgood.experiments.records.spec import Scale
from lastgood.files import write_result
from lastgood.text import read_model

__all__ = [
    "OPTIMIZER_METHOD",
    "OPTIMIZER_PANEL",
    "OptimizerPoint",
    "OptimizerRecord",
    "OptimizerSpec",
    "load_optimizer_record",
    "load_placed_optimizer_record",
]

OPTIMIZER_METHOD = 1
"""Version of how updates are timed, part of every run's identity."""
OPTIMIZER_PANEL = "optimizer"
"""The panel of Checkmate's figure that shows these records."""
_PATH_PARTS = 7
"""Parts of OptimizerSpec.record_path()."""
_Count = Annotated[int, Field(ge=1, le=64)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OptimizerSpec(_Part):
    """One run: whole updates of a model's shape at every number of threads and of shadows."""

    spec_version: Literal[1] = 1
    method: int = Field(default=OPTIMIZER_METHOD, ge=1)
    machine: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")
    scale: Scale
    model: str = Field(pattern=r"^[A-Za-z0-9_]{1,40}$")
    """A shape of `lastgood optbench`."""
    optimizer: Literal["sgd", "adam", "adamw"]
    threads: tuple[_Count, ...] = Field(min_length=1, max_length=64)
    shadows: tuple[_Count, ...] = Field(min_length=1, max_length=64)
    updates: int = Field(ge=1, le=100_000)
    """Timed at each point."""
    repetition: int = Field(ge=0)

    @property
    def workload(self) -> str:
        """The panel, not a model: a figure has one of these beside its models'."""
        return OPTIMIZER_PANEL

    @property
    def proof(self) -> bool:
        """Nothing is saved, so there is nothing to prove."""
        return False

    @property
    def data(self) -> str | None:
        """It reads none."""
        return None

    @property
    def cell_hash(self) -> str:
        """Eight hex digits over everything but the repetition."""
        text = json.dumps(self.model_dump(mode="json", exclude={"repetition"}), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def canonical_json(self) -> str:
        """One line of JSON with sorted keys: the argument of `lastgood optimizers run --spec`."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    def record_path(self) -> PurePosixPath:
        """Where the record lies, below the results folder."""
        cell = f"t{self.threads[-1]}-m{self.shadows[-1]}-c{self.cell_hash}"
        name = f"r{self.repetition}.json"
        return PurePosixPath(self.machine, self.scale, OPTIMIZER_PANEL, self.model, self.optimizer, cell, name)

    def title(self) -> str:
        """A short name for logs."""
        return f"updates of {self.model} by {self.optimizer} r{self.repetition}"


class OptimizerPoint(_Part):
    """One number of threads and of shadows."""

    threads: int = Field(ge=1)
    shadows: int = Field(ge=1)
    update_s: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(min_length=1)
    """Of each timed update, the seconds of the shadow that takes longest."""


class OptimizerRecord(_Part):
    """One run, whole."""

    record_version: Literal[1] = 1
    spec: OptimizerSpec
    started_at: str
    """UTC, ISO 8601."""
    wall_s: float
    where: WhereRun
    parameters: int
    points: list[OptimizerPoint]

    def write(self, path: Path) -> None:
        """Write atomically: a reader sees the whole record or none."""
        write_result(path, (self.model_dump_json(indent=1) + "\n").encode())


def load_optimizer_record(path: Path) -> OptimizerRecord:
    """Read and check one record. Raises LastgoodError, naming the file and the field, if it is not one."""
    return read_model(
        OptimizerRecord,
        path,
        "a record of updates of version 1",
        most_bytes=MOST_RECORD_BYTES,
        advice="remove it and run again",
        error=LastgoodError,
    )


def load_placed_optimizer_record(path: Path) -> OptimizerRecord:
    """Load a record and check that it lies where its spec says. Raises LastgoodError where it does not."""
    record = load_optimizer_record(path)
    expected = record.spec.record_path()
    if path.absolute().parts[-_PATH_PARTS:] != expected.parts:
        raise LastgoodError(
            f"{path}: this record's settings belong at .../{expected}; it was moved or edited; remove it and run again"
        )
    return record
