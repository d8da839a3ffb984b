"""What tuning found: the rule that gives the interval, the table, the choice, and the file that keeps them.

PCcheck (ASPLOS'25) asks for an interval of f >= Tw / (N q t): with N checkpoints in progress at once, each may take N
intervals, and an interval may last q times as long as f iterations do without checkpoints.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lastgood.checkpointers.pccheck.options import PCcheckOptions
from lastgood.errors import ConfigError
from lastgood.files import check_regular, local_path, storage_errors, write_atomically
from lastgood.models import FrozenModel
from lastgood.text import parse_yaml, read_bytes
from lastgood.units import MIB, format_bytes, format_seconds

__all__ = [
    "TUNING_FILE",
    "TUNING_VERSION",
    "SlowdownCheck",
    "Tuning",
    "WritePoint",
    "choose",
    "read_tuning",
    "read_tuning_of",
    "shortest_interval",
    "write_tuning",
]

TUNING_FILE = "pccheck.yaml"
TUNING_VERSION = 1
_MAX_FILE_BYTES = MIB
_MAX_INTERVAL = 10**9
_SETTINGS = ("max_in_flight", "writer_threads", "chunk_bytes", "pool_bytes", "keep")
_MEASURED = ("machine", "measured_at", "direct_io", "iteration_s", "state_bytes", "slowdown")


def shortest_interval(worst_write_s: float, max_in_flight: int, slowdown: float, iteration_s: float) -> int:
    """The smallest whole number of steps f, at least 1, with N f q t >= Tw.

    Args:
        worst_write_s: Tw, seconds that the slowest write of one checkpoint took with N in progress.
        max_in_flight: N, at least 1.
        slowdown: q, above 1; 1.05 allows 5 %.
        iteration_s: t, seconds of one iteration without checkpoints.

    Raises ConfigError for terms outside of these, and where the interval would pass a thousand million steps.
    """
    for name, value, least in (
        ("worst_write_s", worst_write_s, 0.0),
        ("slowdown", slowdown, 1.0),
        ("iteration_s", iteration_s, 0.0),
    ):
        if not (math.isfinite(value) and value > least):
            raise ConfigError(f"{name} must be a number above {least:g}, not {value!r}")
    if max_in_flight < 1:
        raise ConfigError(f"max_in_flight must be at least 1, not {max_in_flight}")
    # Exact, so that the rule holds for the very numbers given and not only nearly.
    steps = math.ceil(Fraction(worst_write_s) / (max_in_flight * Fraction(slowdown) * Fraction(iteration_s)))
    if steps > _MAX_INTERVAL:
        raise ConfigError(
            f"a write of {format_seconds(worst_write_s)} and iterations of {iteration_s:.3g} s ask for an interval of "
            f"{steps} steps; is the iteration time in seconds, and the state size in bytes?"
        )
    return max(1, steps)


class WritePoint(FrozenModel):
    """One point of the disk's write curve."""

    max_in_flight: int
    """N: checkpoints written at once."""
    writer_threads: int
    """p: threads that wrote each."""
    chunk_bytes: int
    """b: what one write took."""
    stream_bytes: int
    """Bytes that each write really wrote, in the largest measurement of this point."""
    write_s: list[float]
    """Seconds from the start of each write until it was durable, for a complete checkpoint: scaled up in proportion if
    `stream_bytes` is less than that."""

    @property
    def worst_write_s(self) -> float:
        """Tw."""
        return max(self.write_s)

    @property
    def median_write_s(self) -> float:
        """The median, to be compared with the worst."""
        return statistics.median(self.write_s)

    def interval_steps(self, slowdown: float, iteration_s: float) -> int:
        """The shortest interval that the rule allows here."""
        return shortest_interval(self.worst_write_s, self.max_in_flight, slowdown, iteration_s)


class SlowdownCheck(FrozenModel):
    """A real training with real checkpoints every `interval_steps`, against the same training without."""

    interval_steps: int
    checkpoints: int
    """How many fell into the measurement."""
    plain_iteration_s: float
    """Seconds of one iteration without checkpoints, half of them measured before and half after."""
    iteration_s: float
    """Seconds of one iteration with checkpoints, saves and waits included."""
    predicted: float
    """Slowdown that the write curve alone predicts: waiting for a place, and nothing else."""

    @property
    def measured(self) -> float:
        """Slowdown as measured; below 1 it is noise."""
        return self.iteration_s / self.plain_iteration_s


class Tuning(FrozenModel):
    """Settings for PCcheck, and all that they were chosen from."""

    interval_steps: int
    """f: steps between checkpoints."""
    options: PCcheckOptions
    slowdown: float
    """q: what was allowed."""
    iteration_s: float
    """t."""
    state_bytes: int
    """S: bytes of one checkpoint, its meta data included."""
    curve: list[WritePoint]
    checks: list[SlowdownCheck] = Field(default_factory=list)
    not_tried: list[tuple[int, int, int]] = Field(default_factory=list)
    """(N, p, b) that the time did not suffice for, or memory or disk."""
    warnings: list[str] = Field(default_factory=list)
    machine: str
    measured_at: str
    """UTC, ISO 8601."""
    direct_io: bool
    """False if the file system has no direct I/O; then writes went through the page cache and were flushed."""

    @property
    def chosen(self) -> WritePoint:
        """The row of the curve that the options come from."""
        wanted = (self.options.max_in_flight, self.options.writer_threads, self.options.chunk_bytes)
        return next(p for p in self.curve if (p.max_in_flight, p.writer_threads, p.chunk_bytes) == wanted)

    @property
    def kept(self) -> bool | None:
        """Whether the measured slowdown is within what was allowed; None if it was not measured."""
        return self.checks[-1].measured <= self.slowdown if self.checks else None


def choose(curve: Sequence[WritePoint], slowdown: float, iteration_s: float) -> WritePoint:
    """The point with the shortest interval; among equals fewer checkpoints in flight, then fewer threads.

    Fewer in flight means less disk. What is left is decided by the smaller chunk, which means a smaller pool.
    """
    return min(
        curve,
        key=lambda p: (p.interval_steps(slowdown, iteration_s), p.max_in_flight, p.writer_threads, p.chunk_bytes),
    )


# -- the file ------------------------------------------------------------------------------------------------------


def write_tuning(path: Path, tuning: Tuning) -> None:
    """Write `tuning` as YAML, complete and durable or not at all. Raises StorageError, naming the path."""
    settings: dict[str, Any] = {"tuning_version": TUNING_VERSION, "interval_steps": tuning.interval_steps}
    settings.update({key: getattr(tuning.options, key) for key in _SETTINGS})
    measured: dict[str, Any] = {
        **{key: getattr(tuning, key) for key in _MEASURED},
        "worst_write_s": tuning.chosen.worst_write_s,
        "curve": [
            {
                **point.model_dump(exclude={"write_s"}),
                "writes": len(point.write_s),
                "least_write_s": round(min(point.write_s), 6),
                "median_write_s": round(point.median_write_s, 6),
                "worst_write_s": round(point.worst_write_s, 6),
                "interval_steps": point.interval_steps(tuning.slowdown, tuning.iteration_s),
            }
            for point in tuning.curve
        ],
        "checks": [{**check.model_dump(), "measured": check.measured} for check in tuning.checks],
        "not_tried": [list(key) for key in tuning.not_tried],
        "warnings": list(tuning.warnings),
    }
    text = (
        f"# PCcheck's settings for this folder, written by `lastgood tune`. States of {tuning.state_bytes} bytes "
        f"({format_bytes(tuning.state_bytes)}),\n"
        f"# iterations of {format_seconds(tuning.iteration_s)}, a slowdown of {tuning.slowdown:g} at most. "
        "Made again by the same command.\n"
        + yaml.safe_dump(settings, sort_keys=False)
        + "\n# What they were chosen from: for people, not read again. Times are seconds, not_tried holds N, p, b.\n"
        + yaml.safe_dump({"measured": measured}, sort_keys=False, default_flow_style=None, width=200)
    )
    with storage_errors(path, "writing the settings", len(text)):
        write_atomically(path, text.encode(), mode=None)


class _Settings(BaseModel):
    """The keys of the file that are not PCcheck's own options."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tuning_version: Literal[1]
    interval_steps: int = Field(ge=1, le=_MAX_INTERVAL)
    measured: dict[str, Any] = Field(default_factory=dict)


def read_tuning(path: Path | str) -> tuple[int, PCcheckOptions]:
    """The interval in steps and PCcheck's options, from a file that `write_tuning` wrote or a person edited.

    Options that are left out have PCcheck's defaults; the section `measured` is not looked at. Raises ConfigError,
    naming the file and the key, for anything that does not belong there.
    """
    path = Path(path)
    try:
        content = read_bytes(path, _MAX_FILE_BYTES)
    except ConfigError as error:
        raise ConfigError(f"{error}; `lastgood tune` makes such a file") from error
    values = parse_yaml(content, str(path), most_bytes=_MAX_FILE_BYTES)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds {type(values).__name__} where a mapping of keys to values is needed")
    own = {key: value for key, value in values.items() if key in _Settings.model_fields}
    others = {key: value for key, value in values.items() if key not in own}
    try:
        settings = _Settings.model_validate(own)
        return settings.interval_steps, PCcheckOptions.model_validate(others, strict=True)
    except ValidationError as error:
        known = [*_Settings.model_fields, *PCcheckOptions.model_fields]
        raise ConfigError("\n".join(_problem(path, detail, known) for detail in error.errors())) from None


def _problem(path: Path, detail: Any, known: Sequence[str]) -> str:
    key = ".".join(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        return f"{path}: {key}: unknown key; known: {', '.join(known)}"
    if detail["type"] == "missing":
        return f"{path}: {key}: is missing; `lastgood tune` writes it"
    message = detail["msg"]
    return f"{path}: {key}: {detail['input']!r}: {message[:1].lower()}{message[1:]}"


def read_tuning_of(directory: Path | str, config: Path | str | None) -> tuple[int, PCcheckOptions]:
    """As `read_tuning`, from `config`, or else from the file in a checkpoint directory."""
    if config is None:
        config = local_path(directory) / TUNING_FILE
        with contextlib.suppress(OSError):  # `read_tuning` says that it is not there
            check_regular(config, follow=True)
    return read_tuning(config)
