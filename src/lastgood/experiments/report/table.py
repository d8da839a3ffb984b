"""The table of the report: a row for each system, interval and workload, from the runs of figures 8 and 9."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from lastgood.checkpointers.registry import BASELINE
from lastgood.experiments.claims.evidence import GOODPUT_COLUMNS
from lastgood.experiments.systems.labels import system_label, system_rank, system_styles, workload_label
from lastgood.experiments.tables.files import FigureCsv, only_figure, run_rows
from lastgood.experiments.tables.marked import above_bound, not_credible

__all__ = ["Cell", "Column", "Row", "Table", "cells_table"]

_KEY = ["machine", "scale", "workload", "system", "interval_steps"]
_MISSING = "-"


@dataclass(frozen=True)
class Column:
    """One column: its short name, what it means, and whether it sorts by number."""

    key: str
    name: str
    unit: str
    help: str
    number: bool = True


@dataclass(frozen=True)
class Cell:
    """One field: what is shown, a second line, and the number that it sorts by (None: at the end)."""

    text: str
    detail: str = ""
    value: float | None = None
    share: float | None = None
    """A bar behind the number, from 0 to 1."""
    tone: str = ""
    """``good``, ``bad`` or ``weak``."""


@dataclass(frozen=True)
class Row:
    """One cell of the measurement."""

    system: str
    colour: str
    interval: int
    workload: str
    place: str
    """Machine and scale."""
    cells: list[Cell]
    flags: list[str]


@dataclass(frozen=True)
class Table:
    """Columns (beyond system, interval and workload) and rows."""

    columns: list[Column]
    rows: list[Row]

    def cells_of(self, key: str) -> list[Cell]:
        """One column's cells, from the first row to the last."""
        place = [column.key for column in self.columns].index(key)
        return [row.cells[place] for row in self.rows]

    @property
    def workloads(self) -> list[str]:
        """Names in print, for the filter."""
        return sorted({row.workload for row in self.rows})

    @property
    def systems(self) -> list[str]:
        """Names in print, in their fixed order."""
        return list(dict.fromkeys(row.system for row in self.rows))

    @property
    def places(self) -> list[str]:
        """Machines with their scales."""
        return sorted({row.place for row in self.rows})


_COLUMNS = [
    Column(
        "throughput", "Throughput", "it/s", "median durable iterations per second; below it the range of repetitions"
    ),
    Column("of_none", "Of none", "%", "durable throughput as a share of training without checkpoints, median"),
    Column("of_bound", "Of bound", "%", "durable throughput as a share of what the machine's ceilings allow, median"),
    Column("proof", "Restore equal", "", "whether the state restored in a fresh process is equal to the bit"),
    Column("stall", "Stall", "ms per checkpoint", "time in which training waits for one checkpoint, median"),
    Column(
        "persist_p50", "Durable lag, median", "s", "from save() until the checkpoint is durable: what a failure loses"
    ),
    Column("persist_p99", "Durable lag, p99", "s", "the same, the value that 99 % do not exceed; largest repetition"),
    Column(
        "goodput_formula",
        "Goodput, formula",
        "it/s",
        "useful iterations per second under the trace, by the papers' formula",
    ),
    Column("goodput_measured", "Goodput, measured", "it/s", "the same, counted while the process was really killed"),
    Column(
        "memory", "Memory over none", "MiB", "peak resident memory above that of training without checkpoints, median"
    ),
    Column("restore", "Restore", "s", "time of a restore in a fresh process, from where the system keeps it, median"),
]
_GOODPUT_KEYS = {
    "goodput_measured_iterations_per_s": "goodput_measured",
    "goodput_formula_iterations_per_s": "goodput_formula",
}


def cells_table(csvs: Sequence[FigureCsv]) -> Table:
    """Aggregate the repetitions of every cell. Cells that only figure 9 has are shown with their goodput alone."""
    runs = run_rows(csvs)
    goodput = only_figure(csvs, "fig9")
    goodput = goodput if {*_KEY} <= set(goodput.columns) else goodput.iloc[0:0]
    keys = {key for frame in (runs, goodput) if len(frame) for key in frame[_KEY].itertuples(index=False, name=None)}
    has_goodput = [_GOODPUT_KEYS[name] for name, _ in GOODPUT_COLUMNS if name in goodput.columns and len(goodput)]
    columns = [column for column in _COLUMNS if column.key not in _GOODPUT_KEYS.values() or column.key in has_goodput]
    styles = system_styles(sorted({str(key[3]) for key in keys}))
    rows = []
    for key in sorted(keys, key=lambda key: (key[2], system_rank(str(key[3])), key[4], key[0], key[1])):
        found = {**_of_runs(runs, key), **_of_goodput(goodput, key)}
        rows.append(
            Row(
                system=system_label(str(key[3])),
                colour=styles[str(key[3])].colour,
                interval=int(key[4]),
                workload=workload_label(str(key[2])),
                place=f"{key[0]}, {key[1]} scale",
                cells=[found.get(column.key, Cell(_MISSING)) for column in columns],
                flags=_flags(_chosen(runs, key)),
            )
        )
    return Table(columns, rows)


def _chosen(frame: pd.DataFrame, key: tuple[Any, ...]) -> pd.DataFrame:
    if not len(frame):
        return frame
    match = pd.Series(True, index=frame.index)
    for name, value in zip(_KEY, key, strict=True):
        match &= frame[name] == value
    return frame[match]


def _of_runs(runs: pd.DataFrame, key: tuple[Any, ...]) -> dict[str, Cell]:
    chosen = _chosen(runs, key)
    if not len(chosen):
        return {}
    durable = _numbers(chosen, "durable_iterations_per_s")
    of_none = durable / _numbers(chosen, "none_iterations_per_s")
    started = _numbers(chosen, "checkpoints_started")
    doubt = not_credible(chosen)
    stalls = _numbers(chosen, "stall_save_s") + _numbers(chosen, "stall_update_s")
    found = {
        "throughput": _cell(durable.median(), _significant, detail=_spread(durable)),
        "of_none": replace(
            _cell(of_none.median(), _percent, share=True),
            detail="not credible" if doubt else "",
            tone="bad" if doubt else "",
        ),
        "of_bound": _cell(_numbers(chosen, "ratio_to_bound").median(), _percent, share=True),
        "proof": _proof(chosen),
    }
    if key[3] == BASELINE:
        return {**found, "proof": Cell(_MISSING)}
    base = _chosen(runs, (*key[:3], BASELINE, 0))
    extra = _numbers(chosen, "peak_rss_bytes").median() - _numbers(base, "peak_rss_bytes").median()
    states = extra / _numbers(chosen, "state_bytes").median()
    return {
        **found,
        "stall": _cell((1e3 * stalls / started.where(started > 0)).median(), _significant),
        "persist_p50": _cell(_numbers(chosen, "persist_p50_s").median(), _seconds),
        "persist_p99": _cell(_numbers(chosen, "persist_p99_s").max(), _seconds),
        "memory": _cell(extra / 2**20, lambda mib: f"{mib:.0f}", detail=_states(states)),
        "restore": _cell(_numbers(chosen, "restore_s").median(), _seconds),
    }


def _of_goodput(goodput: pd.DataFrame, key: tuple[Any, ...]) -> dict[str, Cell]:
    chosen = _chosen(goodput, key)
    found = {}
    for name, _ in GOODPUT_COLUMNS:
        if len(chosen) and name in chosen.columns:
            values = _numbers(chosen, name)
            found[_GOODPUT_KEYS[name]] = _cell(values.median(), _significant, detail=_spread(values))
    return found


def _numbers(frame: pd.DataFrame, name: str) -> pd.Series:
    if name not in frame.columns:
        return pd.Series(math.nan, index=frame.index)
    return pd.to_numeric(frame[name], errors="coerce")


def _cell(value: float, form: Callable[[float], str], *, detail: str = "", share: bool = False) -> Cell:
    number = float(value)
    if not math.isfinite(number):
        return Cell(_MISSING)
    return Cell(form(number), detail, number, min(max(number, 0.0), 1.0) if share else None)


def _proof(chosen: pd.DataFrame) -> Cell:
    values = set(chosen["proof_equal"].astype(str)) if "proof_equal" in chosen.columns else set()
    if "False" in values:
        return Cell("DIFFERS", value=-1.0, tone="bad")
    return Cell("equal", value=1.0, tone="good") if "True" in values else Cell("not proved", value=0.0, tone="weak")


def _flags(chosen: pd.DataFrame) -> list[str]:
    """What takes the worth from a cell's numbers."""
    reasons = [not_credible(chosen), above_bound(chosen, named=False)]
    flags = [reasons[0]] if reasons[0] else [f"above its bound: {reasons[1]}"] if reasons[1] else []
    if "enough_checkpoints" in chosen.columns and (chosen["enough_checkpoints"].astype(str) == "False").any():
        flags.append("fewer than 2 checkpoints in a run")
    failed = int(_numbers(chosen, "checkpoints_failed").sum())
    skipped = int(_numbers(chosen, "checkpoints_skipped").sum())
    if failed:
        flags.append(f"{failed} checkpoints failed")
    if skipped:
        flags.append(f"{skipped} checkpoints skipped")
    return flags


def _spread(values: pd.Series) -> str:
    known = values.dropna()
    return f"{_significant(known.min())} to {_significant(known.max())}" if len(known) > 1 else ""


def _states(states: float) -> str:
    return f"{states:.2f} states" if math.isfinite(states) else ""


def _percent(value: float) -> str:
    return f"{100 * value:.0f}"


def _seconds(value: float) -> str:
    """Milliseconds are enough, so that the column lines up."""
    return f"{value:.3f}" if abs(value) < 10 else _significant(value)


def _significant(value: float) -> str:
    """Three digits, and never an exponent."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 6)}f}"
