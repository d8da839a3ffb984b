"""Which runs a figure needs, in the order in which they are made, and how long they will take. Needs no torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lastgood.checkpointers.registry import why_unavailable
from lastgood.errors import ConfigError, LastgoodError
from lastgood.experiments.config.schema import Config
from lastgood.experiments.config.sections import CheckmateSection, NodesSection
from lastgood.experiments.figures.registry import figure_kind, figure_names
from lastgood.experiments.plan.cells import in_batches, plan_simple
from lastgood.experiments.plan.grid import Grid, load_grid
from lastgood.experiments.records.base import Record, Spec
from lastgood.experiments.records.kinds import kind_of_spec

__all__ = [
    "SIMPLE",
    "Panel",
    "PlannedRun",
    "Target",
    "WorkflowPlan",
    "grids_of_records",
    "has_record",
    "left_out",
    "load_prediction_grid",
    "plan_figure",
    "plan_names",
    "plan_target",
    "plan_workflow",
    "predict_runs",
    "workflow_seconds",
]

SIMPLE = "test_simple"
"""The smoke test: not a figure, planned like one."""
_OF_ALL_FIGURES = ("all", "paper", "report", "claims")
"""Targets of the workflow that need every figure which nobody has to ask for by name."""
Panel = tuple[str, str]
"""Figure and name."""


# -- which runs, in which order ------------------------------------------------------------------------------------


def plan_names() -> list[str]:
    """Everything that can be planned."""
    return [*figure_names(), SIMPLE]


def plan_figure(config: Config, figure: str) -> Sequence[Spec]:
    """The runs of `figure` in execution order. Raises ConfigError, naming the known figures, for an unknown one."""
    if figure == SIMPLE:
        return plan_simple(config)
    if figure not in figure_names():
        raise ConfigError(f"unknown figure {figure!r}; known: {', '.join(plan_names())}")
    return figure_kind(figure).plan(config)


def left_out(config: Config) -> dict[str, str]:
    """Systems that this machine lacks, and why: no figure has runs of them; and figures that have no runs at all.

    Who plans must show this.
    """
    found = why_unavailable([*config.systems, *(config.fig11.systems or [])])
    reasons = {figure: figure_kind(figure).lacks(config) for figure in figure_names()}
    return {**found, **{figure: reason for figure, reason in reasons.items() if reason is not None}}


@dataclass(frozen=True)
class WorkflowPlan:
    """All that the workflow needs: record files and what makes them, in order. Figures may share records."""

    specs: dict[str, Spec]
    """Record file (below the results folder) to its run, in execution order."""
    records: dict[tuple[str, str], list[str]]
    """Figure and model to their record files."""

    priorities: dict[str, int]
    """Record file to Snakemake's priority: the earlier in the plan, the higher; always above 0."""
    hosts: dict[str, NodesSection | CheckmateSection]
    """Record file of a run over several ranks to the section of the configuration that names its hosts."""


def plan_workflow(config: Config) -> WorkflowPlan:
    """Plan all figures. The smoke test is none of them: it is measured again whenever it is asked for."""
    specs: dict[str, Spec] = {}
    records: dict[tuple[str, str], list[str]] = {}
    hosts: dict[str, NodesSection | CheckmateSection] = {}
    for figure in figure_names():
        section = figure_kind(figure).hosts(config)
        for spec in plan_figure(config, figure):
            record = str(Path(config.results_dir, spec.record_path()))
            known = specs.get(record)
            # A run that two figures share proves its restore if one of them asks for it.
            specs[record] = known if known is not None and known.proof else spec
            records.setdefault((figure, spec.panel), []).append(record)
            if spec.over_ranks and section is not None:
                hosts.setdefault(record, section)
    specs = {str(Path(config.results_dir, spec.record_path())): spec for spec in in_batches(specs.values(), config)}
    priorities = {record: len(specs) - place for place, record in enumerate(specs)}
    return WorkflowPlan(specs, records, priorities, hosts)


@dataclass(frozen=True)
class Target:
    """What a target of the workflow measures."""

    specs: list[Spec]
    """Each run once, in execution order."""
    panels: list[list[Panel]]
    """Of each run, the panels of this target that show it: one at least. The first one's figure predicts its time."""


def plan_target(config: Config, name: str) -> Target:
    """The runs of a figure, of one of its panels (``fig8_vgg16``), of all figures (``all``, ``paper``) or of SIMPLE.

    Raises ConfigError, naming what is known, for anything else.
    """
    if name in _OF_ALL_FIGURES:
        plan = plan_workflow(config)
        shown: dict[str, list[Panel]] = {}
        for panel, records in plan.records.items():
            if figure_kind(panel[0]).always(config):
                for record in records:
                    shown.setdefault(record, []).append(panel)
        records = [record for record in plan.specs if record in shown]
        return Target([plan.specs[record] for record in records], [shown[record] for record in records])
    figure, model = _figure_of_target(config, name)
    specs = [spec for spec in plan_figure(config, figure) if model in (None, spec.panel)]
    return Target(specs, [[(figure, spec.panel)] for spec in specs])


def _figure_of_target(config: Config, name: str) -> tuple[str, str | None]:
    """A figure and one of its panels; None for all of them."""
    if name in plan_names():
        return name, None
    figure = next((one for one in figure_names() if name.startswith(f"{one}_")), None)
    if figure is None:
        known = ", ".join([*plan_names(), *_OF_ALL_FIGURES])
        raise ConfigError(f"unknown figure {name!r}; known: {known}, and panels, as fig8_vgg16")
    model = name.removeprefix(f"{figure}_")
    panels = figure_kind(figure).panels(config)
    if model not in panels:
        has = ", ".join(f"{figure}_{one}" for one in panels) or "none"
        raise ConfigError(f"{figure} has no panel {model!r} in this configuration; it has: {has}")
    return figure, model


def has_record(path: Path, spec: Spec) -> bool:
    """Whether a complete record of exactly this run lies at `path`, whatever time it bears."""
    try:
        return path.exists() and bool(kind_of_spec(spec).record.load(path).spec == spec)
    except LastgoodError:
        return False  # what is there instead, the run replaces


# -- how long they take --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedRun:
    """One run of a plan: whether its record is there, and how long it takes or took."""

    spec: Spec
    record: Path
    done: bool
    seconds: float
    source: Literal["records", "model"]
    """Whether `seconds` comes from records of the same cell or from the grid's model."""


def predict_runs(specs: Iterable[Spec], results_dir: Path, grid: Grid | Sequence[Grid]) -> list[PlannedRun]:
    """Say for each run whether it is done and how many seconds it takes. `grid`: one for all runs, or each one's.

    Records of its cell predict a run; else the grid's model does, corrected by how far it was from the records that
    are there: of the same workload, or of all if there are none.
    """
    found = []
    errors: dict[str, list[tuple[float, float]]] = {}
    specs = list(specs)
    grids = [grid] * len(specs) if isinstance(grid, Grid) else grid
    for spec, own in zip(specs, grids, strict=True):
        path = results_dir / spec.record_path()
        cell = _records_of_cell(spec, path.parent)
        alike = [record.wall_s for record in cell if record.spec.proof == spec.proof]
        walls = alike or [record.wall_s for record in cell]
        done = any(record.spec.repetition == spec.repetition for record in cell)
        modelled_s = kind_of_spec(spec).function("modelled_s")(spec, own.prediction[spec.scale])
        if alike and modelled_s > 0:
            errors.setdefault(spec.panel, []).append((statistics.median(alike), modelled_s))
        seconds = statistics.median(walls) if walls else modelled_s
        found.append(PlannedRun(spec, path, done, seconds, "records" if walls else "model"))
    known = [pair for pairs in errors.values() for pair in pairs]

    def corrected(run: PlannedRun) -> PlannedRun:
        pairs = errors.get(run.spec.panel, known)
        if run.source == "records" or not pairs:
            return run
        taken, modelled = map(sum, zip(*pairs, strict=True))
        return replace(run, seconds=run.seconds * taken / modelled)

    return [corrected(run) for run in found]


_BESIDE_A_RUN_S = 1.7
"""From one record to the next run's begin: Snakemake's choice, a process, the machine's turn (2 cores, 64 runs)."""
_CEILINGS_S = 20.0
_PANEL_S = 5.0
"""Collecting and drawing one."""


def workflow_seconds(runs: Sequence[PlannedRun], panels_of_runs: Sequence[Sequence[Panel]], results_dir: Path) -> float:
    """How long `snakemake` takes for what is left of a target: runs, and what is done before, between and after them.

    `panels_of_runs` are those of its `Target`.
    """
    left = [run for run in runs if not run.done]
    panels = {panel for run, shown in zip(runs, panels_of_runs, strict=True) if not run.done for panel in shown}
    machines = {run.spec.record_path().parts[0] for run in left}
    ceilings = sum(not (results_dir / machine / "ceilings.json").exists() for machine in machines)
    between = _BESIDE_A_RUN_S * len(left) + _PANEL_S * len(panels) + _CEILINGS_S * ceilings
    return sum(run.seconds for run in left) + between


def load_prediction_grid(root: Path, figure: str) -> Grid:
    """The grid that predicts `figure`: the smoke test is a cell of figure 8's kind."""
    return load_grid(root, "fig8" if figure == SIMPLE else figure)


def grids_of_records(root: Path, config: Config, plan: WorkflowPlan, asked: Iterable[Panel]) -> dict[str, Grid]:
    """What predicts each record of `plan`: the grid of the first figure that shows it, of those in `asked` if one does.

    By the look at this machine that `lastgood plan` has kept, if there is one.
    """
    from lastgood.experiments.runs.probe import kept_probe, with_probe_of_kind

    asked = set(asked)
    figures: dict[str, str] = {}
    for panel in sorted(plan.records, key=lambda panel: panel not in asked):  # the plan's order else
        for record in plan.records[panel]:
            figures.setdefault(record, panel[0])
    grids = {figure: load_prediction_grid(root, figure) for figure in dict.fromkeys(figures.values())}
    specs = [plan.specs[record] for record in figures]
    found = kept_probe(config, specs)
    if found is not None:
        grids = with_probe_of_kind(grids, figures.values(), specs, found, config.scale)
    return {record: grids[figure] for record, figure in figures.items()}


def _records_of_cell(spec: Spec, folder: Path) -> list[Record[Any]]:
    kind = kind_of_spec(spec)
    records = []
    for path in sorted(folder.glob("r*.json")):
        try:
            record = kind.record.load(path)
        except LastgoodError:
            continue  # `lastgood run` replaces it, and the aggregation names it
        if record.spec.cell_hash == spec.cell_hash:
            records.append(record)
    return records
