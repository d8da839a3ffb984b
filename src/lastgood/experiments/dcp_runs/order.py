"""What a rank of the suite is told, what comes of it, and the file beside a checkpoint. Needs no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from lastgood.errors import ConfigError, NoCheckpoint
from lastgood.experiments.records.dcp import DcpIteration, DcpSpec
from lastgood.files import entries_of, write_result
from lastgood.models import FrozenModel
from lastgood.text import read_model
from lastgood.units import MIB

__all__ = [
    "DcpOrder",
    "DcpResult",
    "Saved",
    "check_suffix",
    "newest_saved",
    "saved_folder",
    "suffixes_in",
    "write_saved",
]

_SUFFIX: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SAVED: Final = "lastgood-dcp.json"


class DcpOrder(FrozenModel):
    """What a rank is told. It stands on a command line, which every user of its host can read."""

    spec: DcpSpec
    place: str
    """Absolute, and the same on every host."""
    suffix: str
    keep: bool = False
    """Whether the checkpoints of all iterations stay."""
    result: str | None = None
    """The file to which rank 0 writes its result; None: it returns it."""
    parent: int | None = None
    """Process to end with, if no launcher sees to that."""


class DcpResult(FrozenModel):
    """What rank 0 knows in the end."""

    suffix: str
    hosts: list[str]
    state_bytes: int
    setup_s: float
    raw_write_bytes_per_s: list[float]
    iterations: list[DcpIteration]


class Saved(FrozenModel):
    """Beside a checkpoint: what was saved, so that a load can build it again and be compared."""

    version: Literal[1] = 1
    spec: DcpSpec
    number: int = Field(ge=0)
    """Of the iteration."""
    digest: str = Field(pattern=r"^[0-9a-f]{16}$")


def check_suffix(suffix: str) -> str:
    """`suffix`, if it is the name of a checkpoint. Raises ConfigError."""
    if not _SUFFIX.fullmatch(suffix):
        raise ConfigError(
            f"--suffix {suffix!r}: a name of letters, digits, dots, lines and underscores, as `lastgood dcp save` "
            "printed it last"
        )
    return suffix


def saved_folder(folder: Path, number: int) -> Path:
    """Of one iteration, in the folder of a suffix."""
    return folder / f"iteration-{number}"


def write_saved(folder: Path, saved: Saved) -> None:
    """Say what the newest checkpoint in the folder of a suffix is; it is complete."""
    write_result(folder / _SAVED, (saved.model_dump_json(indent=1) + "\n").encode())


def newest_saved(folder: Path) -> Saved:
    """The newest complete checkpoint in the folder of a suffix.

    Raises NoCheckpoint, which names the suffixes that are there, if there is none.
    """
    if not (folder / _SAVED).is_file():
        known = suffixes_in(folder.parent)
        there = ", ".join(known[-10:]) if known else "none"
        raise NoCheckpoint(f"{folder}: no checkpoint of `lastgood dcp save`; suffixes in {folder.parent}: {there}")
    return read_model(Saved, folder / _SAVED, "what a DCP checkpoint holds", most_bytes=MIB, error=NoCheckpoint)


def suffixes_in(place: Path) -> list[str]:
    """The suffixes with a complete checkpoint in `place`, the oldest first."""
    if not place.is_dir():
        return []
    found = [entry / _SAVED for entry in entries_of(place) if (entry / _SAVED).is_file()]
    return [path.parent.name for path in sorted(found, key=lambda path: path.stat().st_mtime)]
