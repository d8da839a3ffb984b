"""What an experiment is: reads evaluation/<figure>/grid.yaml, where only data lies. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from lastgood.errors import ConfigError
from lastgood.experiments.config.sources import Sources, show_errors
from lastgood.experiments.config.yaml_file import load_yaml
from lastgood.experiments.machine.facts import checkout_root
from lastgood.experiments.records.base import Scale
from lastgood.models import FrozenModel

__all__ = ["Axes", "Grid", "Paper", "Prediction", "find_root", "load_grid"]

Seconds = Annotated[float, Field(ge=0)]


class Paper(FrozenModel):
    """Where the figure comes from."""

    system: str
    title: str
    venue: str
    section: str
    figure: str


class Axes(FrozenModel):
    """What is drawn against what."""

    x: str
    y: str
    series: str
    baseline: str


class Prediction(FrozenModel):
    """A model of how long a run takes, for one scale, while no record of its cell exists."""

    startup_s: Seconds = Field(description="imports and building the model")
    proof_s: Seconds = Field(description="the restore in a fresh process")
    persist_bytes_per_s: float = Field(gt=0, description="rate at which checkpoints reach the disk")
    copy_bytes_per_s: float = Field(gt=0, description="rate at which checkpoints leave the device")
    state_bytes_per_s: float | None = Field(
        default=None,
        gt=0,
        description="rate at which a state is built and, for a proof, read back; null if sizes differ little",
    )
    step_s: dict[str, Seconds] = Field(description="seconds of one step, by model")
    other_step_s: Seconds = Field(description="seconds of one step of a model that is not listed")


class Grid(FrozenModel):
    """One experiment."""

    title: str
    paper: Paper
    axes: Axes
    prediction: dict[Scale, Prediction]


def find_root(folder: Path | None = None) -> Path:
    """The folder that holds evaluation/ and config/: `folder` or one of its parents, else the package's own checkout.

    Raises ConfigError if there is none.
    """
    start = (folder or Path.cwd()).absolute()
    for candidate in (start, *start.parents):
        if (candidate / "Snakefile").is_file() and (candidate / "evaluation").is_dir():
            return candidate
    root = checkout_root()
    if root is None:
        raise ConfigError(f"{start}: neither this folder nor one above it is a checkout of Lastgood; change to one")
    return root


def load_grid(root: Path, figure: str) -> Grid:
    """Read evaluation/<figure>/grid.yaml below `root`. Raises ConfigError, naming the known figures, if it is none."""
    path = root / "evaluation" / figure / "grid.yaml"
    if not path.is_file():
        known = sorted(found.parent.name for found in root.glob("evaluation/*/grid.yaml"))
        raise ConfigError(f"{root / 'evaluation'}: no figure {figure!r}; known: {', '.join(known) or 'none'}")
    values = load_yaml(path)
    try:
        return Grid.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(show_errors(error, Grid, Sources([(path, values)], {})))) from None
