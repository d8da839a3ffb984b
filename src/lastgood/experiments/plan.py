"""Which runs a figure needs, in the order in which they are made, and how long they will take. Needs no torch."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import ConfigError, LastgoodError
from lastgood.experiments.config import BASELINE, Config
from lastgood.experiments.grid import Grid, Prediction, load_grid
from lastgood.experiments.machine import machine_label
from lastgood.experiments.record import RunRecord, load_record
from lastgood.experiments.spec import RunSpec
from lastgood.workloads.registry import workload_options_class

__all__ = [
    "SIMPLE",
    "PlannedRun",
    "WorkflowPlan",
    "figure_names",
    "load_prediction_grid",
    "plan_figure",
    "plan_workflow",
    "predict_minutes",
    "predict_runs",
]

SIMPLE = "test_simple"
"""The smoke test: not a figure, planned like one."""


# -- which runs, in which order ------------------------------------------------------------------------------------


def figure_names() -> list[str]:
    """Everything that can be planned."""
    return list(_PLANS)


def plan_figure(config: Config, figure: str) -> list[RunSpec]:
    """The runs of `figure` in execution order. Raises ConfigError, naming the known figures, for an unknown one."""
    if figure not in _PLANS:
        raise ConfigError(f"unknown figure {figure!r}; known: {', '.join(_PLANS)}")
    return _PLANS[figure](config)


def _plan_throughput(config: Config) -> list[RunSpec]:
    """Batch after batch. A batch is one repetition of a workload: `none` once and every system at every interval.

    Its order is shuffled, so that a drift of the machine (heat, a filling disk) favours no system; the seed makes it
    the same at each call. Repetitions are the outer loop: what is there after half the time is a whole figure.
    """
    specs: list[RunSpec] = []
    for repetition in range(config.repetitions):
        for model in config.models:
            batch = [
                _spec(config, model, system, interval, repetition)
                for system in config.systems
                for interval in ([0] if system == BASELINE else config.intervals)
            ]
            random.Random(f"{config.seed}/{model}/{repetition}").shuffle(batch)
            specs += batch
    return specs


def _plan_simple(config: Config) -> list[RunSpec]:
    simple = config.simple
    spec = _spec(config, simple.model, simple.system, simple.interval, 0)
    steps = _whole_intervals(max(simple.iterations, config.min_checkpoints * simple.interval), simple.interval)
    return [spec.model_copy(update={"measured_steps": steps, "proof": True})]


_PLANS: dict[str, Callable[[Config], list[RunSpec]]] = {"fig8": _plan_throughput, SIMPLE: _plan_simple}


def _spec(config: Config, model: str, system: str, interval: int, repetition: int) -> RunSpec:
    return RunSpec(
        machine=config.machine or machine_label(),
        scale=config.scale,
        workload=model,
        workload_options=config.workload_options(model).model_dump(mode="json"),
        system=system,
        system_options=config.system_options(system).model_dump(mode="json"),
        method=checkpointer_class(system).METHOD,
        interval_steps=interval,
        warmup_steps=config.warmup_iterations,
        measured_steps=_whole_intervals(max(config.iterations, config.min_checkpoints * interval), interval),
        proof=system != BASELINE and (config.proof == "every" or repetition == 0),
        device=config.device,
        threads=config.thread_count,
        seed=config.seed + repetition,
        repetition=repetition,
        data=config.data.of_workload(model),
    )


def _whole_intervals(steps: int, interval: int) -> int:
    """Round up to whole intervals: steps behind the last checkpoint would dilute what the checkpoints cost."""
    return -(-steps // interval) * interval if interval else steps


@dataclass(frozen=True)
class WorkflowPlan:
    """All that the workflow needs: record files and what makes them, in order. Figures may share records."""

    specs: dict[str, RunSpec]
    """Record file (below the results folder) to its run, in execution order."""
    records: dict[tuple[str, str], list[str]]
    """Figure and model to their record files."""

    priorities: dict[str, int]
    """Record file to Snakemake's priority: the earlier in the plan, the higher; always above 0."""


def plan_workflow(config: Config) -> WorkflowPlan:
    """Plan all figures. The smoke test is none of them: it is measured anew whenever it is asked for."""
    specs: dict[str, RunSpec] = {}
    records: dict[tuple[str, str], list[str]] = {}
    for figure in (name for name in figure_names() if name != SIMPLE):
        for spec in plan_figure(config, figure):
            record = str(Path(config.results_dir, spec.record_path()))
            known = specs.get(record)
            # A run that two figures share proves its restore if one of them asks for it.
            specs[record] = known if known is not None and known.proof else spec
            records.setdefault((figure, spec.workload), []).append(record)
    priorities = {record: len(specs) - place for place, record in enumerate(specs)}
    return WorkflowPlan(specs, records, priorities)


# -- how long they take --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedRun:
    """One run of a plan: whether its record is there, and how long it takes or took."""

    spec: RunSpec
    record: Path
    done: bool
    seconds: float
    source: Literal["records", "model"]
    """Whether `seconds` comes from records of the same cell or from the grid's model."""


def predict_runs(specs: Iterable[RunSpec], results_dir: Path, grid: Grid) -> list[PlannedRun]:
    """Say for each run whether it is done and how many seconds it takes."""
    found = []
    for spec in specs:
        path = results_dir / spec.record_path()
        cell = _records_of_cell(spec, path.parent)
        alike = [record.wall_s for record in cell if record.spec.proof == spec.proof]
        walls = alike or [record.wall_s for record in cell]
        done = any(record.spec.repetition == spec.repetition for record in cell)
        seconds = statistics.median(walls) if walls else _modelled_s(spec, grid.prediction[spec.scale])
        found.append(PlannedRun(spec, path, done, seconds, "records" if walls else "model"))
    return found


def predict_minutes(specs: Iterable[RunSpec], results_dir: Path, grid: Grid) -> float:
    """Minutes that the runs without a record will take."""
    return sum(run.seconds for run in predict_runs(specs, results_dir, grid) if not run.done) / 60


def load_prediction_grid(root: Path, figure: str) -> Grid:
    """The grid that predicts `figure`: the smoke test is a cell of figure 8's kind."""
    return load_grid(root, "fig8" if figure == SIMPLE else figure)


def _records_of_cell(spec: RunSpec, folder: Path) -> list[RunRecord]:
    records = []
    for path in sorted(folder.glob("r*.json")):
        try:
            record = load_record(path)
        except LastgoodError:
            continue  # `lastgood run` replaces it, and the aggregation names it
        if record.spec.cell_hash == spec.cell_hash:
            records.append(record)
    return records


def _modelled_s(spec: RunSpec, prediction: Prediction) -> float:
    """Start-up, steps, the copy and the write of every checkpoint one after the other, proof: an upper estimate."""
    steps = spec.warmup_steps + spec.measured_steps
    seconds: float = prediction.startup_s + steps * prediction.step_s.get(spec.workload, prediction.other_step_s)
    if spec.interval_steps:
        options = workload_options_class(spec.workload).model_validate(spec.workload_options)
        checkpoints = steps // spec.interval_steps
        state_bytes = options.state_bytes()
        seconds += checkpoints * state_bytes * (1 / prediction.persist_bytes_per_s + 1 / prediction.copy_bytes_per_s)
    return seconds + (prediction.proof_s if spec.proof else 0.0)
