"""What every kind of measurement has: a spec that owns its record's path, and a record that is written once.

A kind adds its own fields, paths and words (spec.py and run.py, goodput.py, optimizer.py). Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import Field
from typing_extensions import Self

from lastgood.errors import LastgoodError
from lastgood.files import write_result
from lastgood.models import FrozenModel
from lastgood.text import read_model
from lastgood.units import MIB

__all__ = ["MOST_RECORD_BYTES", "MachineLabel", "Record", "Scale", "Spec", "SpecWithoutWorkload", "WhereRun"]

MOST_RECORD_BYTES = 64 * MIB
"""Of a file with any record; one with the timings of every step has a few."""
MachineLabel = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Scale = Literal["laptop", "gpu", "paper"]


class Spec(FrozenModel):
    """What one measurement is, all settings resolved. Specs of one *cell* differ in what `NOT_IN_CELL` names only."""

    CAME_LATER: ClassVar[tuple[str, ...]] = ()
    """Fields that are left out at their defaults: specs from before them keep their text and hash."""
    NOT_IN_CELL: ClassVar[Mapping[str, Any]]
    """What the hash leaves out, as pydantic's `exclude`."""

    if TYPE_CHECKING:  # fields of some kinds and properties of others, and pydantic lets no field replace a property

        @property
        def scale(self) -> Scale:
            """Of which configuration it is."""

        @property
        def workload(self) -> str | None:
            """What is trained; None if nothing is."""

        @property
        def repetition(self) -> int:
            """From 0."""

        @property
        def proof(self) -> bool:
            """Whether it proves its restore."""

        @property
        def data(self) -> str | None:
            """Path of a user's own data."""

    @property
    @abstractmethod
    def panel(self) -> str:
        """The panel of figures that shows it."""

    @property
    def over_ranks(self) -> bool:
        """Whether it needs several processes that train together, and so hosts for them."""
        return False

    @abstractmethod
    def record_path(self) -> PurePosixPath:
        """Where the record lies, below the results folder; ends in ``rREPETITION.json``."""

    @abstractmethod
    def title(self) -> str:
        """A short name for logs and progress bars."""

    def canonical_json(self) -> str:
        """One line of JSON with sorted keys: the argument of `lastgood run --spec`."""
        return self._json({})

    @property
    def cell_hash(self) -> str:
        """Eight hex digits over all that the repetitions of a cell share."""
        return hashlib.sha256(self._json(self.NOT_IN_CELL).encode()).hexdigest()[:8]

    def _json(self, exclude: Mapping[str, Any]) -> str:
        fields = type(self).model_fields
        later = {name: True for name in self.CAME_LATER if getattr(self, name) == fields[name].default}
        dump = self.model_dump(mode="json", exclude={**later, **exclude})
        return json.dumps(dump, sort_keys=True, separators=(",", ":"))


class SpecWithoutWorkload(Spec):
    """A measurement that trains none of the workloads, reads no data of a user's, and is asked for no proof.

    What is restored in it, if anything, is compared anyway.
    """

    @property
    def workload(self) -> None:
        """None."""
        return None

    @property
    def proof(self) -> bool:
        """Nothing beside the measurement itself."""
        return False

    @property
    def data(self) -> str | None:
        """It reads none."""
        return None


SpecT = TypeVar("SpecT", bound=Spec)


class WhereRun(FrozenModel):
    """The machine and the software of a run."""

    cpu: str
    cores: int
    memory_bytes: int
    gpu: str | None
    kernel: str
    scratch_path: str
    scratch_filesystem: str
    scratch_device: str
    versions: dict[str, str]
    git_revision: str | None
    git_dirty: bool | None
    slurm_job: str | None = None
    """Number of the Slurm job that this was measured in; None without Slurm."""
    slurm_node: str | None = None
    """Slurm's name for the node."""


class Record(FrozenModel, Generic[SpecT]):
    """One measurement, complete: one JSON file, written once, atomically, and never edited."""

    NAME: ClassVar[str]
    """For messages: ``a run record``."""

    record_version: Literal[1] = 1
    spec: SpecT
    started_at: str
    """UTC, ISO 8601."""
    wall_s: float
    """The whole command, from its lock to its record."""
    where: WhereRun

    @abstractmethod
    def summary(self) -> str:
        """The result in one line, for the person who waits for it."""

    def marks(self) -> list[str]:
        """What figures mark about it, one sentence each: a result, and not a failure of the measurement."""
        return []

    def write(self, path: Path) -> None:
        """Write atomically: a reader sees the complete record or none."""
        write_result(path, (self.model_dump_json(indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read and check one record. Raises LastgoodError, naming the file and the field, if it is not one."""
        return read_model(
            cls,
            path,
            f"{cls.NAME} of version 1",
            most_bytes=MOST_RECORD_BYTES,
            advice="remove it and run again",
            error=LastgoodError,
        )

    @classmethod
    def load_placed(cls, path: Path) -> Self:
        """Load a record and check that it lies where its spec says.

        Raises LastgoodError if it does not: the file was moved or edited, or is of another version of the settings.
        """
        record = cls.load(path)
        expected = record.spec.record_path()
        if path.absolute().parts[-len(expected.parts) :] != expected.parts:
            raise LastgoodError(
                f"{path}: this record's settings belong at .../{expected}; it was moved or edited, or the settings' "
                "hash changed; remove it and run again"
            )
        return record
