"""The figures by name: which runs each needs, its panels, and what makes its CSV files and pictures. Needs no torch.

Plans, commands and the workflow ask here, so a figure is one entry. docs/adding-a-figure.md shows how to add one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from lastgood.errors import ConfigError
from lastgood.experiments.config.schema import Config
from lastgood.experiments.figures.axes import CONCURRENCY, MEMORY, PERSIST, THREADS, THROUGHPUT, FigureAxes
from lastgood.experiments.plan.cells import (
    goodput_modelled_s,
    modelled_s,
    optimizer_modelled_s,
    plan_checkmate,
    plan_concurrency,
    plan_goodput,
    plan_memory,
    plan_nodes,
    plan_persist,
    plan_threads,
    plan_throughput,
)
from lastgood.experiments.plan.grid import Prediction
from lastgood.experiments.plan.variants import BLOB
from lastgood.experiments.records.goodput import GoodputSpec
from lastgood.experiments.records.optimizer import OPTIMIZER_PANEL, OptimizerSpec
from lastgood.experiments.records.spec import RunSpec, Scale
from lastgood.experiments.systems.over_ranks import why_no_deepspeed

__all__ = [
    "CollectedFigure",
    "FigureKind",
    "PlannedSpec",
    "RecordKind",
    "figure_kind",
    "figure_names",
    "load_function",
    "record_kind",
]


class PlannedSpec(Protocol):
    """What a plan holds: a `RunSpec`, or another description of a measurement that owns its record's path."""

    @property
    def scale(self) -> Scale:
        """Of which configuration it is."""

    @property
    def workload(self) -> str:
        """The model, which is also the panel."""

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
    def cell_hash(self) -> str:
        """Over all that its repetitions share."""

    def title(self) -> str:
        """A short name for logs."""

    def canonical_json(self) -> str:
        """All of it, in one line."""

    def record_path(self) -> PurePosixPath:
        """Below the results folder; ends in ``rREPETITION.json``."""


class CollectedFigure(Protocol):
    """What a figure's `collect` gives."""

    @property
    def warnings(self) -> list[str]:
        """For the person who asked."""

    def write(self, out_tidy: Path, out_wide: Path) -> None:
        """Write both CSV files, each whole or not at all."""

    def summary(self) -> str:
        """How many runs it holds, in a few words."""


@dataclass(frozen=True)
class FigureKind:
    """One figure. `collect` and `draw` are ``module:function``, imported only when they are called."""

    plan: Callable[[Config], Sequence[PlannedSpec]]
    """Its runs in execution order; a run belongs to the panel of its `workload`."""
    panels: Callable[[Config], list[str]]
    """Names of its panels, the models that it shows."""
    collect: str
    """``(figure, panel, record paths, ceilings path, *, partial, expected, reference) -> CollectedFigure``"""
    draw: str
    """``(tidy CSV, stem of the pictures, *, width, partial) -> paths of the pictures``"""
    axes: FigureAxes | None = None
    """What `collect_files` puts into columns; None for a figure with a `collect` of its own."""
    always: Callable[[Config], bool] = lambda _: True
    """Whether `all`, `paper`, `report` and `claims` have it; by its own name it can be asked for in any case."""
    lacks: Callable[[Config], str | None] = lambda _: None
    """Why this machine can make no run of it, with what to do; None if it can. Such a figure has no panels."""

    def collector(self) -> Callable[..., CollectedFigure]:
        """The function that makes the CSV files."""
        collect: Callable[..., CollectedFigure] = load_function(self.collect)
        return collect

    def drawer(self) -> Callable[..., list[Path]]:
        """The function that makes the pictures."""
        draw: Callable[..., list[Path]] = load_function(self.draw)
        return draw


@dataclass(frozen=True)
class RecordKind:
    """How runs of one kind are read and predicted."""

    load: str
    """``module:function`` from a record's path to an object with `spec` and `wall_s`; raises LastgoodError."""
    modelled_s: Callable[[Any, Prediction], float]
    """Seconds that a run takes, by the grid's model."""


def _from_runs(
    plan: Callable[[Config], Sequence[PlannedSpec]], panels: Callable[[Config], list[str]], axes: FigureAxes, draw: str
) -> FigureKind:
    """A figure whose records are runs: they all make their CSV files in one way."""
    return FigureKind(plan, panels, "lastgood.experiments.tables.runs:collect_files", draw, axes)


def _over_nodes(figure: str) -> FigureKind:
    """Figure 8 over several nodes. Without a hostfile it needs root and makes a testbed, which nobody gets unasked."""

    def lacks(config: Config) -> str | None:
        return why_no_deepspeed(getattr(config, figure).parallel)

    return FigureKind(
        lambda config: plan_nodes(config, getattr(config, figure), figure),
        lambda config: [] if lacks(config) else [getattr(config, figure).model],
        "lastgood.experiments.tables.runs:collect_files",
        "lastgood.experiments.plots.throughput:plot_throughput",
        THROUGHPUT,
        lambda config: getattr(config, figure).hostfile is not None,
        lacks,
    )


_FIGURES = {
    "fig8": _from_runs(
        plan_throughput,
        lambda config: config.models,
        THROUGHPUT,
        "lastgood.experiments.plots.throughput:plot_throughput",
    ),
    "fig9": FigureKind(
        plan_goodput,
        lambda config: config.models,
        "lastgood.experiments.tables.goodput:collect_goodput_files",
        "lastgood.experiments.plots.goodput:plot_goodput",
    ),
    "fig11": _from_runs(plan_persist, lambda _: [BLOB], PERSIST, "lastgood.experiments.plots.persist:plot_persist"),
    "fig12": _from_runs(
        plan_concurrency,
        lambda config: [config.fig12.model],
        CONCURRENCY,
        "lastgood.experiments.plots.sweep:plot_sweep",
    ),
    "fig13": _from_runs(
        plan_threads, lambda config: [config.fig13.model], THREADS, "lastgood.experiments.plots.sweep:plot_sweep"
    ),
    "fig14": _from_runs(
        plan_memory, lambda config: [config.fig14.model], MEMORY, "lastgood.experiments.plots.sweep:plot_sweep"
    ),
    "fig8e": _over_nodes("fig8e"),
    "fig8f": _over_nodes("fig8f"),
    "checkmate": FigureKind(
        plan_checkmate,
        lambda config: [*config.checkmate.models, OPTIMIZER_PANEL],
        "lastgood.experiments.tables.checkmate:collect_checkmate_files",
        "lastgood.experiments.plots.checkmate:plot_checkmate",
        THROUGHPUT,
        lambda config: config.checkmate.hostfile is not None,
    ),
}

_RECORDS: dict[type, RecordKind] = {
    RunSpec: RecordKind(load="lastgood.experiments.records.run:load_record", modelled_s=modelled_s),
    GoodputSpec: RecordKind(
        load="lastgood.experiments.records.goodput:load_goodput_record", modelled_s=goodput_modelled_s
    ),
    OptimizerSpec: RecordKind(
        load="lastgood.experiments.records.optimizer:load_optimizer_record", modelled_s=optimizer_modelled_s
    ),
}
"""By the class of what was planned."""


def figure_names() -> list[str]:
    """Every figure, in the order in which a workflow makes them."""
    return list(_FIGURES)


def figure_kind(name: str) -> FigureKind:
    """The figure `name`. Raises ConfigError, naming the known figures, if there is none."""
    if name not in _FIGURES:
        raise ConfigError(f"unknown figure {name!r}; known: {', '.join(_FIGURES)}")
    return _FIGURES[name]


def record_kind(spec: PlannedSpec) -> RecordKind:
    """How the run of `spec` is read and predicted."""
    return _RECORDS[type(spec)]


def load_function(target: str) -> Any:
    """The object that ``module:name`` stands for."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
