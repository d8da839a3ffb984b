"""A profile: how far the loss of a workload lags behind, by batch size and compression, as probes have measured it.

One JSON file, written in one step after each probe, so that a profiler that is killed goes on from it.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from lastgood.errors import ConfigError
from lastgood.files import write_result
from lastgood.models import FrozenModel
from lastgood.sparse.control.objective import GridSurface
from lastgood.text import parse_model, read_bytes

__all__ = ["Baseline", "Probe", "Profile", "Surface", "Wanted", "begin_profile", "read_profile", "write_profile"]

_MOST_BYTES = 16 << 20
_MOST_SAMPLES = 1 << 24


class Wanted(FrozenModel):
    """What a profile is of. A file of another one is not gone on with."""

    workload: str = Field(min_length=1, max_length=100)
    parameters: int = Field(ge=1, le=1 << 40)
    seed: int = Field(ge=0, lt=1 << 32)
    compressor: str = Field(min_length=1, max_length=40)
    staleness: int = Field(ge=0, le=1)
    part_samples: int = Field(ge=8, le=1 << 32)
    """Of the part of an epoch that each probe trains on."""
    repeats: int = Field(ge=1, le=100)
    """Of each probe, with other weights and other samples."""
    least_samples: int = Field(ge=1, le=_MOST_SAMPLES)
    most_samples: int = Field(ge=1, le=_MOST_SAMPLES)
    """Of the batch of all workers together."""
    least_compression: float = Field(ge=0, lt=1)
    most_compression: float = Field(ge=0, lt=1)
    nodes: int = Field(ge=1, le=64)
    mbit_per_s: float = Field(gt=0, le=1e7)
    """Of each node's link: where the profiler looks for the best setting."""
    lambda_: float = Field(ge=0, lt=1e6)
    g_scale: float = Field(ge=0, lt=1e6)

    @model_validator(mode="after")
    def _ranges(self) -> Wanted:
        if self.least_samples >= self.most_samples or self.least_compression >= self.most_compression:
            raise ValueError("the ranges of batch sizes and compression go from a lower to a higher value")
        if self.part_samples < 8 * self.most_samples:
            raise ValueError(
                f"a part of {self.part_samples} samples is less than 8 of the largest batches, {self.most_samples}"
            )
        return self


class Probe(FrozenModel):
    """One point that was tried."""

    samples: int = Field(ge=1, le=_MOST_SAMPLES)
    compression: float = Field(ge=0, lt=1)
    losses: tuple[float, ...] = Field(min_length=1, max_length=100)
    """After the part of an epoch, of each repetition."""
    lag: float
    """The mean of these less those of the baseline."""
    steps: int = Field(ge=1, le=1 << 32)
    step_s: float = Field(gt=0, le=86_400)
    """Seconds of a step in the mean, in this one process."""


class Baseline(FrozenModel):
    """The training without compression and staleness, with the smallest batch."""

    losses: tuple[float, ...] = Field(min_length=1, max_length=100)


class Surface(FrozenModel):
    """The lag as the Gaussian process sees it, on a grid: a row for each of `samples`."""

    samples: tuple[float, ...] = Field(min_length=1, max_length=1000)
    compressions: tuple[float, ...] = Field(min_length=1, max_length=1000)
    lags: tuple[tuple[float, ...], ...] = Field(min_length=1, max_length=1000)
    uncertainties: tuple[tuple[float, ...], ...] = Field(min_length=1, max_length=1000)
    """Standard deviations of these."""

    @model_validator(mode="after")
    def _grid(self) -> Surface:
        for rows in (self.lags, self.uncertainties):
            if len(rows) != len(self.samples) or any(len(row) != len(self.compressions) for row in rows):
                raise ValueError(f"not {len(self.samples)} rows of {len(self.compressions)} numbers")
        for axis in (self.samples, self.compressions):
            if any(one >= other for one, other in itertools.pairwise(axis)):
                raise ValueError("the axes do not ascend")
        return self

    def grid(self) -> GridSurface:
        """For the controller. Raises ConfigError."""
        return GridSurface(self.samples, self.compressions, self.lags)


class Profile(FrozenModel):
    """All of it."""

    profile_version: Literal[1]
    wanted: Wanted
    baseline: Baseline | None = None
    probes: tuple[Probe, ...] = Field(default=(), max_length=10_000)
    surface: Surface | None = None
    """Once there are enough probes."""


def read_profile(path: Path) -> Profile:
    """Raises ConfigError, naming the file and what is wrong."""
    return parse_model(Profile, read_bytes(path, _MOST_BYTES), str(path), most_bytes=_MOST_BYTES)


def write_profile(path: Path, profile: Profile) -> None:
    """In one step, durably. Raises StorageError."""
    write_result(path, (profile.model_dump_json(indent=1) + "\n").encode())


def begin_profile(path: Path, wanted: Wanted) -> Profile:
    """What the file holds so far, or a new profile. Raises ConfigError if it holds one of something else."""
    if not path.exists():
        return Profile(profile_version=1, wanted=wanted)
    found = read_profile(path)
    differences = [
        f"{name} is {value!r} there and {getattr(wanted, name)!r} here"
        for name, value in found.wanted.model_dump().items()
        if value != getattr(wanted, name)
    ]
    if differences:
        raise ConfigError(f"{path} holds another profile: {'; '.join(differences)}; name another file")
    return found
