"""What a rank of the suite is told, what comes of it, and the file beside a checkpoint. Needs no torch."""

from __future__ import annotations

import re
from typing import Final, Literal

from pydantic import Field

from lastgood.errors import ConfigError, NoCheckpoint
from lastgood.experiments.dcp.places import S3Access, SuitePlace
from lastgood.experiments.dcp.watch import ServerWatch
from lastgood.experiments.records.dcp import DcpIteration, DcpSpec
from lastgood.models import FrozenModel
from lastgood.text import parse_model
from lastgood.units import MIB

__all__ = [
    "DcpOrder",
    "DcpResult",
    "Saved",
    "check_suffix",
    "newest_saved",
    "saved_name",
    "suffixes_in",
    "write_saved",
]

_SUFFIX: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SAVED: Final = "lastgood-dcp.json"


class DcpOrder(FrozenModel):
    """What a rank is told. It stands on a command line, which every user of its host can read."""

    spec: DcpSpec
    place: str
    """A folder, absolute and the same on every host, or a URL."""
    access: S3Access | None = None
    """Of a URL."""
    watch: ServerWatch | None = None
    """The server that the command runs itself."""
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
    raw_read_bytes_per_s: list[float]
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


def saved_name(number: int) -> str:
    """Of one iteration's checkpoint, in the place of a suffix."""
    return f"iteration-{number}"


def write_saved(place: SuitePlace, saved: Saved) -> None:
    """Say what the newest checkpoint of a suffix is; it is complete."""
    place.write(_SAVED, (saved.model_dump_json(indent=1) + "\n").encode())


def newest_saved(place: SuitePlace, suffix: str) -> Saved:
    """The newest complete checkpoint of a suffix.

    Raises NoCheckpoint, which names the suffixes that are there, if there is none.
    """
    there = place.below(suffix)
    content = there.read(_SAVED, MIB)
    if content is None:
        known = suffixes_in(place)
        others = ", ".join(known[-10:]) if known else "none"
        raise NoCheckpoint(f"{there}: no checkpoint of `lastgood dcp save`; suffixes in {place}: {others}")
    what = f"{there}/{_SAVED}: not what a DCP checkpoint holds"
    return parse_model(Saved, content, what, most_bytes=MIB, error=NoCheckpoint)


def suffixes_in(place: SuitePlace) -> list[str]:
    """The suffixes with a complete checkpoint in `place`, the oldest first."""
    return place.holding(_SAVED)
