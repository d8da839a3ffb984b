"""The figures by name: which runs each needs, its panels, and what makes its CSV files and pictures. Needs no torch.

Plans, commands and the workflow ask here, so a figure is one entry. docs/adding-a-figure.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lastgood.errors import ConfigError
from lastgood.experiments.config.schema import Config
from lastgood.experiments.config.sections import CheckmateSection, NodesSection
from lastgood.experiments.figures.axes import CONCURRENCY, MEMORY, PERSIST, THREADS, THROUGHPUT, FigureAxes
from lastgood.experiments.plan.cells import (
    plan_checkmate,
    plan_dcp,
    plan_goodput,
    plan_nodes,
    plan_persist,
    plan_remote,
    plan_sweep,
    plan_throughput,
    why_no_remote,
)
from lastgood.experiments.plan.flowcheck import plan_flowcheck
from lastgood.experiments.plan.stellatrain import plan_stellatrain
from lastgood.experiments.plan.variants import BLOB, Variant, concurrency_variants, memory_variants, threads_variants
from lastgood.experiments.records.base import Spec
from lastgood.experiments.records.dcp import DCP_PANEL
from lastgood.experiments.records.kinds import (
    DCP,
    FLOWCHECK,
    GOODPUT,
    REMOTE,
    RUN,
    STELLATRAIN,
    MeasurementKind,
    load_function,
)
from lastgood.experiments.records.optimizer import OPTIMIZER_PANEL
from lastgood.experiments.records.remote import WAYS
from lastgood.experiments.systems.over_ranks import why_no_deepspeed

__all__ = ["CollectedFigure", "FigureKind", "figure_kind", "figure_names"]


class CollectedFigure(Protocol):
    """What a figure's `collect` gives."""

    @property
    def warnings(self) -> list[str]:
        """For the person who asked."""

    def write(self, out_tidy: Path, out_wide: Path) -> None:
        """Write both CSV files, each complete or not at all."""

    @property
    def summary(self) -> str:
        """How many runs it holds, in a few words."""


@dataclass(frozen=True)
class FigureKind:
    """One figure. `collect` and `draw` are ``module:function``, imported only when they are called."""

    plan: Callable[[Config], Sequence[Spec]]
    """Its runs in execution order; each belongs to the panel that it names."""
    panels: Callable[[Config], list[str]]
    """Names of its panels, the models that it shows."""
    draw: str
    """``(tidy CSV, stem of the pictures, *, width, partial) -> paths of the pictures``"""
    axes: FigureAxes | None = None
    """What `tables.runs` puts into columns; None for a figure that shows no runs."""
    shows: MeasurementKind = RUN
    """The measurements in its tables, whose `collect` makes its CSV files."""
    collect: str | None = None
    """In place of that, ``(figure, panel, record paths, ceilings path, *, partial, expected, reference)``."""
    always: Callable[[Config], bool] = lambda _: True
    """Whether `all`, `paper`, `report` and `claims` have it; by its own name it can be asked for in any case."""
    lacks: Callable[[Config], str | None] = lambda _: None
    """Why this machine can make no run of it, with what to do; None if it can. Such a figure has no panels."""
    hosts: Callable[[Config], NodesSection | CheckmateSection | None] = lambda _: None
    """The section that says where its runs over several ranks go."""

    def collector(self) -> Callable[..., CollectedFigure]:
        """The function that makes the CSV files."""
        return load_function(self.collect or self.shows.collect)

    def drawer(self) -> Callable[..., list[Path]]:
        """The function that makes the pictures."""
        return load_function(self.draw)


def _over_nodes(figure: str) -> FigureKind:
    """Figure 8 over several nodes. Without a hostfile it needs root and makes a testbed, which nobody gets unasked."""

    def lacks(config: Config) -> str | None:
        return why_no_deepspeed(getattr(config, figure).parallel)

    return FigureKind(
        lambda config: plan_nodes(config, getattr(config, figure), figure),
        lambda config: [] if lacks(config) else [getattr(config, figure).model],
        "lastgood.experiments.plots.throughput:plot_throughput",
        THROUGHPUT,
        always=lambda config: getattr(config, figure).hostfile is not None,
        lacks=lacks,
        hosts=lambda config: getattr(config, figure),
    )


def _sweep(figure: str, variants: Callable[[Config], list[Variant]], axes: FigureAxes) -> FigureKind:
    """PCcheck with several values of one option, at several intervals."""
    return FigureKind(
        lambda config: plan_sweep(config, getattr(config, figure), variants(config)),
        lambda config: [getattr(config, figure).model],
        "lastgood.experiments.plots.sweep:plot_sweep",
        axes,
    )


_FIGURES = {
    "fig8": FigureKind(
        plan_throughput,
        lambda config: config.models,
        "lastgood.experiments.plots.throughput:plot_throughput",
        THROUGHPUT,
    ),
    "fig9": FigureKind(
        plan_goodput,
        lambda config: config.models,
        "lastgood.experiments.plots.goodput:plot_goodput",
        shows=GOODPUT,
    ),
    "fig11": FigureKind(plan_persist, lambda _: [BLOB], "lastgood.experiments.plots.persist:plot_persist", PERSIST),
    "fig12": _sweep("fig12", concurrency_variants, CONCURRENCY),
    "fig13": _sweep("fig13", threads_variants, THREADS),
    "fig14": _sweep("fig14", memory_variants, MEMORY),
    "fig8e": _over_nodes("fig8e"),
    "fig8f": _over_nodes("fig8f"),
    "checkmate": FigureKind(
        plan_checkmate,
        lambda config: [*config.checkmate.models, OPTIMIZER_PANEL],
        "lastgood.experiments.plots.checkmate:plot_checkmate",
        THROUGHPUT,
        collect="lastgood.experiments.tables.checkmate:collect_checkmate_files",
        always=lambda config: config.checkmate.hostfile is not None,
        hosts=lambda config: config.checkmate,
    ),
    # No paper has it, so `paper` and `report` have it only if it is asked for by name.
    "dcp": FigureKind(
        plan_dcp,
        lambda _: [DCP_PANEL],
        "lastgood.experiments.plots.dcp:plot_dcp",
        shows=DCP,
        always=lambda _: False,
    ),
    # Parts of it need root and a testbed, which nobody gets unasked.
    "flowcheck": FigureKind(
        plan_flowcheck,
        lambda config: config.flowcheck.parts,
        "lastgood.experiments.plots.flowcheck:plot_flowcheck",
        shows=FLOWCHECK,
        always=lambda _: False,
    ),
    "remote": FigureKind(
        plan_remote,
        lambda _: [] if why_no_remote() else list(WAYS),
        "lastgood.experiments.plots.remote:plot_remote",
        shows=REMOTE,
        always=lambda _: False,
        lacks=lambda _: why_no_remote(),
    ),
    # Its links need root and a testbed, which nobody gets unasked.
    "stellatrain": FigureKind(
        plan_stellatrain,
        lambda config: config.stellatrain.parts,
        "lastgood.experiments.plots.stellatrain:plot_stellatrain",
        shows=STELLATRAIN,
        always=lambda _: False,
    ),
}


def figure_names() -> list[str]:
    """Every figure, in the order in which a workflow makes them."""
    return list(_FIGURES)


def figure_kind(name: str) -> FigureKind:
    """The figure `name`. Raises ConfigError, naming the known figures, if there is none."""
    if name not in _FIGURES:
        raise ConfigError(f"unknown figure {name!r}; known: {', '.join(_FIGURES)}")
    return _FIGURES[name]
