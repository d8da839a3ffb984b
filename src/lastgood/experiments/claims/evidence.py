"""What the CSV files say about one machine: samples of ratios, one value for each repetition."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from lastgood.checkpointers.registry import BASELINE
from lastgood.errors import CorruptCheckpoint
from lastgood.experiments.systems.labels import system_label
from lastgood.experiments.systems.papers import PCCHECK
from lastgood.experiments.tables.frames import pair_interval
from lastgood.text import parse_json
from lastgood.units import MIB

__all__ = ["GOODPUT_COLUMNS", "Evidence", "Sample", "json_object"]

GOODPUT_COLUMNS = (
    ("goodput_measured_iterations_per_s", "measured goodput"),
    ("goodput_formula_iterations_per_s", "goodput by the formula"),
)
"""Columns of figure 9's CSV, the better evidence first."""


@dataclass(frozen=True)
class Sample:
    """A number measured several times; if `trouble` is not empty, it is not usable."""

    values: tuple[float, ...]
    trouble: str = ""
    interval: bool = False
    """Whether `values` are the ends of an interval, with the estimate between them."""
    counted: bool = False
    """Whether it was counted, as bytes, and not timed: one run says it then."""
    runs: int | None = None
    """Of a comparison of times or rates, the runs of the side that has fewest; None: as many as values."""

    @property
    def of_one_run(self) -> bool:
        """Whether a time or rate rests on one unpaired run of a side, which cannot tell an effect from noise."""
        fewest = len(self.values) if self.runs is None else self.runs
        return not self.interval and not self.counted and fewest < 2

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The smallest value."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The largest value."""
        return max(self.values)

    @property
    def good(self) -> bool:
        """Whether there are values to judge by."""
        return bool(self.values) and not self.trouble

    def map(self, change: Callable[[float], float]) -> Sample:
        """The same runs in another unit."""
        return replace(self, values=tuple(change(value) for value in self.values))


@dataclass(frozen=True)
class Evidence:
    """Figure 8's runs and figure 9's goodput, of one machine at one scale."""

    machine: str
    scale: str
    runs: pd.DataFrame
    goodput: pd.DataFrame

    @property
    def workloads(self) -> list[str]:
        """Workloads with runs."""
        return sorted(set(self.runs["workload"]))

    @property
    def shares_cores(self) -> bool:
        """Whether training on the CPU takes every core, so that copies and writes take time from it."""
        if not len(self.runs) or not {"threads", "cores", "device"} <= set(self.runs.columns):
            return False
        return bool(((self.runs["device"] == "cpu") & (self.runs["threads"] >= self.runs["cores"])).all())

    def systems(self, workload: str) -> list[str]:
        """Systems that take checkpoints, of one workload."""
        return sorted(set(self.runs.loc[self.runs["workload"] == workload, "system"]) - {BASELINE})

    def intervals(self, workload: str, system: str) -> list[int]:
        """Intervals at which a system was measured."""
        chosen = self.runs[(self.runs["workload"] == workload) & (self.runs["system"] == system)]
        return sorted({int(interval) for interval in chosen["interval_steps"]})

    def cell(self, workload: str, system: str, interval: int) -> pd.DataFrame:
        """The repetitions of one system at one interval."""
        runs = self.runs
        return runs[(runs["workload"] == workload) & (runs["system"] == system) & (runs["interval_steps"] == interval)]

    def slowdown(self, workload: str, system: str, interval: int) -> Sample:
        """The slowdown of one cell, a value for each repetition."""
        cell = self.cell(workload, system, interval)
        if cell.empty:
            return Sample((), self._lack(workload, system, interval))
        sample = self.slowdown_of(cell)
        lacks = "" if sample.values else f"{workload}: no run without checkpoints beside it"
        return replace(sample, trouble=_trouble(cell) or lacks)

    def slowdown_of(self, runs: pd.DataFrame) -> Sample:
        """Throughput without checkpoints divided by durable throughput with them, of runs of one workload."""
        measured = pair_interval(runs)
        if measured is not None:
            return Sample(measured.map(lambda ratio: 1 / ratio), interval=True)
        none = pd.to_numeric(runs["none_iterations_per_s"])
        values = (none / pd.to_numeric(runs["durable_iterations_per_s"])).dropna()
        return Sample(tuple(float(value) for value in values))

    def gain(self, workload: str, system: str, other: str, interval: int) -> Sample:
        """Durable throughput of `system` divided by that of `other`, a value for each repetition that both have."""
        cells = [self.cell(workload, name, interval) for name in (system, other)]
        for name, cell in zip((system, other), cells, strict=True):
            trouble = self._lack(workload, name, interval) if cell.empty else _trouble(cell)
            if trouble:
                return Sample((), trouble)
        ours, others = (pair_interval(cell) for cell in cells)
        if ours is not None and others is not None:
            return Sample(ours.over(others), interval=True)
        mine, theirs = (cell.set_index("repetition")["durable_iterations_per_s"].astype(float) for cell in cells)
        values = tuple(float(value) for value in (mine / theirs).dropna())
        return Sample(values, "" if values else f"{system} and {other} share no repetition")

    def load(self, workload: str, system: str, interval: int) -> float | None:
        """Share of an interval that one persist of `system` takes: Tw / (f t); above 1, training must wait for it."""
        cell = self.cell(workload, system, interval)
        if cell.empty or not {"persist_p50_s", "iteration_s"} <= set(cell.columns):
            return None
        load = float(cell["persist_p50_s"].median()) / (interval * float(cell["iteration_s"].median()))
        return load if math.isfinite(load) else None

    def slowest(self, workload: str, interval: int, but: Iterable[str] = ()) -> tuple[str, float] | None:
        """The system with the largest median slowdown at an interval, and that slowdown; `but` are left out."""
        found = []
        for system in self.systems(workload):
            sample = self.slowdown(workload, system, interval)
            if system not in set(but) and sample.good:
                found.append((sample.median, system))
        return (max(found)[1], max(found)[0]) if found else None

    def goodput_gains(
        self, other: str, workload: str | None, interval: int | None
    ) -> tuple[dict[tuple[str, int], Sample], str]:
        """Goodput of PCcheck divided by that of `other`, by workload and interval, and which goodput it is.

        Measured goodput is taken if there is any, the formula's elsewhere. A cell in which `other` comes to nothing
        has no ratio and is left out.
        """
        frame = self.goodput
        for column, name in GOODPUT_COLUMNS:
            if column not in frame.columns or frame[column].isna().all():
                continue
            chosen = frame[frame[column].notna()]
            if workload is not None:
                chosen = chosen[chosen["workload"] == workload]
            if interval is not None:
                chosen = chosen[chosen["interval_steps"] == interval]
            gains: dict[tuple[str, int], Sample] = {}
            for (model, steps), cell in chosen.groupby(["workload", "interval_steps"]):
                mine = cell.loc[cell["system"] == PCCHECK, column].astype(float)
                theirs = cell.loc[cell["system"] == other, column].astype(float)
                if len(mine) and len(theirs) and theirs.min() > 0:
                    # Every run of one against every run of the other: what their spread allows.
                    pairs = tuple(a / b for a in mine for b in theirs)
                    gains[str(model), int(float(str(steps)))] = Sample(pairs, runs=min(len(mine), len(theirs)))
            if gains:
                return gains, name
        return {}, ""

    def memory(self, workload: str, system: str, column: str) -> Sample:
        """Peak of `column` above that of the `none` run, in states; a value for each run of all intervals."""
        runs = self.runs
        if not {column, "state_bytes"} <= set(runs.columns):
            return Sample((), f"the CSV files lack the column {column}")
        ours = runs[(runs["workload"] == workload) & (runs["system"] == system)]
        base = runs[(runs["workload"] == workload) & (runs["system"] == BASELINE)]
        if ours.empty or base.empty:
            return Sample(
                (), f"{workload}: no run of {system}" if ours.empty else f"{workload}: no run without checkpoints"
            )
        extra = (ours[column].astype(float) - float(base[column].median())) / ours["state_bytes"].astype(float)
        return Sample(tuple(float(value) for value in extra), counted=True)

    def own_intervals(self, system: str) -> pd.DataFrame:
        """Runs in which a system chose its interval to keep an overhead budget, as their `storage` column tells."""
        if "storage" not in self.runs.columns:
            return self.runs.iloc[0:0]
        chosen = [_has_budget(text) for text in self.runs["storage"]]
        return self.runs[(self.runs["system"] == system) & pd.Series(chosen, index=self.runs.index, dtype=bool)]

    def _lack(self, workload: str, system: str, interval: int) -> str:
        there = self.intervals(workload, system)
        name = system_label(system)
        if not there:
            return f"no run of {name} with {workload}"
        return f"no run of {name} with {workload} at interval {interval}, only at {', '.join(map(str, there))}"


def _trouble(cell: pd.DataFrame) -> str:
    """What makes a cell's throughput worth nothing."""
    first = cell.iloc[0]
    name = f"{system_label(str(first['system']))} with {first['workload']} at interval {int(first['interval_steps'])}"
    if "proof_equal" in cell.columns and (cell["proof_equal"].astype(str) == "False").any():
        return f"{name}: a restore gave another state"
    if "checkpoints_failed" in cell.columns and (cell["checkpoints_failed"].astype(float) > 0).any():
        return f"{name}: checkpoints failed"
    if "enough_checkpoints" in cell.columns and (cell["enough_checkpoints"].astype(str) == "False").any():
        return f"{name}: fewer than two checkpoints in a run"
    return ""


def json_object(text: Any) -> dict[str, Any]:
    """The object that a CSV's field holds as JSON; an empty one if it holds none."""
    if not isinstance(text, str):
        return {}
    try:
        found = parse_json(text, "a field", most_bytes=MIB)
    except CorruptCheckpoint:
        return {}
    return found if isinstance(found, dict) else {}


def _has_budget(text: Any) -> bool:
    interval = json_object(text).get("interval")
    return isinstance(interval, dict) and interval.get("overhead_budget") is not None
