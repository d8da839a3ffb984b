"""Figure 9's CSV files: goodput by the artefact's formula, from runs, beside goodput as it was measured.

The formula's terms come from runs of the same configuration: t from `none`, t_c from durable throughput, L from the
restore proof, Tw from the median persist, N from the options. T and F are those of the window that measured runs live
through, so that both are about the same time. docs/goodput.md explains each column.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from lastgood.errors import LastgoodError
from lastgood.experiments.ceilings.record import CeilingsRecord, load_ceilings
from lastgood.experiments.config.values import BASELINE
from lastgood.experiments.formulas.goodput import IDEAL, goodput, lost_s
from lastgood.experiments.records.goodput import GoodputRecord, GoodputSpec
from lastgood.experiments.records.run import RunRecord
from lastgood.experiments.systems.labels import system_label, system_rank
from lastgood.experiments.systems.papers import PCCHECK
from lastgood.experiments.tables.columns import TidyRow, same_named
from lastgood.experiments.tables.csv_text import Collected, median_lines
from lastgood.experiments.tables.panels import records_there
from lastgood.experiments.tables.published import PublishedGain, load_gains
from lastgood.experiments.tables.runs import collect, run_name

__all__ = [
    "FORMULA",
    "GOODPUT_COLUMNS",
    "MEASURED",
    "GoodputRow",
    "collect_goodput",
    "collect_goodput_files",
]

FORMULA, MEASURED = "formula", "measured"


@dataclass(frozen=True)
class GoodputRow:
    """A number by formula, or a measured run; the fields are the columns of the tidy CSV. None is an empty field."""

    figure: str
    panel: str
    machine: str
    scale: str
    workload: str
    system: str
    interval_steps: int
    source: str
    repetition: int
    goodput_formula_iterations_per_s: float | None
    goodput_measured_iterations_per_s: float | None
    durable_goodput_iterations_per_s: float | None
    raw_goodput_iterations_per_s: float | None
    cell_formula_iterations_per_s: float | None
    deviation: float | None
    own_formula_iterations_per_s: float | None
    own_deviation: float | None
    bound_iterations_per_s: float | None
    trace_formula_iterations_per_s: float | None
    iteration_s: float | None
    iteration_with_s: float | None
    load_s: float | None
    write_s: float | None
    max_in_flight: int
    lost_s: float | None
    window_s: float
    failures: int
    compression: float
    trace_name: str
    trace_sha256: str
    trace_s: float
    trace_failures: int
    stretch_start_s: float
    useful_steps: int | None
    lost_steps: int | None
    start_up_s: float | None
    restores: int | None
    restores_checked: int | None
    faults: str
    state_bytes: int
    threads: int
    device: str
    warmup_steps: int
    cpu: str
    cores: int
    memory_bytes: int
    gpu: str | None
    kernel: str
    scratch_filesystem: str
    scratch_device: str
    persist_ceiling_bytes_per_s: float
    copy_ceiling_bytes_per_s: float | None
    ceilings_measured_at: str
    git_revision: str | None
    git_dirty: bool | None
    started_at: str
    record: str
    runs_expected: int
    runs_there: int
    runs_missing: str
    notes: str
    paper_goodput_iterations_per_s: float | None
    paper_source: str | None


GOODPUT_COLUMNS = tuple(field.name for field in fields(GoodputRow))
_OF_ITS_OWN = ("scratch_filesystem", "scratch_device", "git_revision", "git_dirty")
"""Columns that say where the measured run itself ran."""


def collect_goodput_files(
    figure: str,
    panel: str,
    paths: Sequence[Path],
    ceilings_path: Path,
    *,
    partial: bool = False,
    expected: int | None = None,
    reference: Path | None = None,
) -> Collected[GoodputRow]:
    """Load records of both kinds and ceilings from files and collect them.

    With `partial`, files of `paths` that are not there are named as missing; without, they are an error. `reference` is
    a file of published gains.
    """
    there = records_there(f"{figure} {panel}", paths, expected, partial, _name)
    return collect_goodput(
        figure,
        panel,
        [RunRecord.load_placed(path) for path in there.paths if not _is_goodput(path)],
        [GoodputRecord.load_placed(path) for path in there.paths if _is_goodput(path)],
        load_ceilings(ceilings_path),
        runs_expected=there.expected,
        runs_missing=there.missing,
        gains=[] if reference is None else load_gains(reference),
    )


def collect_goodput(
    figure: str,
    panel: str,
    runs: Sequence[RunRecord],
    measured: Sequence[GoodputRecord],
    ceilings: CeilingsRecord,
    *,
    runs_expected: int | None = None,
    runs_missing: Sequence[str] = (),
    gains: Sequence[PublishedGain] = (),
) -> Collected[GoodputRow]:
    """Put `runs`, from which the formula takes its terms, and `measured` runs of one panel together. Pure.

    Raises LastgoodError if records do not make one panel: several workloads, machines' windows or traces, or a run
    given twice.
    """
    name = f"{figure} {panel}"
    if not measured or not runs:
        lacking = "measured goodput run" if not measured else "run for the formula"
        raise LastgoodError(f"{name}: no {lacking} is there, and one kind alone makes no figure; run what is missing")
    spec = _window_of(name, measured, runs)
    base = collect("fig8", panel, runs, ceilings)
    panel_of = _Panel(figure, panel, spec, base.tidy, ceilings)
    rows = [*panel_of.with_gains(panel_of.formula_rows(), gains), *panel_of.measured_rows(measured)]
    if not rows:
        raise LastgoodError(f"{name}: no run with checkpoints is there; run what is missing")
    count = len(runs) + len(measured)
    expected, missing = max(count, runs_expected or 0), "; ".join(runs_missing)
    rows = [replace(row, runs_expected=expected, runs_there=count, runs_missing=missing) for row in rows]
    warnings = [warning.replace("fig8 ", f"{figure} ", 1) for warning in base.warnings]
    for record in measured:
        warnings += [f"{record.spec.title()}: {fault}" for fault in record.faults]
    return Collected(rows, GOODPUT_COLUMNS, _wide(rows), warnings, f"{count} of {expected} runs{_deviations(rows)}")


class _Panel:
    """One panel: what is the same in all its rows, and the terms of the formula by cell."""

    def __init__(
        self, figure: str, panel: str, spec: GoodputSpec, runs: Sequence[TidyRow], ceilings: CeilingsRecord
    ) -> None:
        self._figure, self._panel, self._spec, self._ceilings = figure, panel, spec, ceilings
        self._runs = [row for row in runs if row.system != BASELINE]
        self._iteration_s = next((row.iteration_s for row in runs if row.iteration_s is not None), None)
        loads: dict[tuple[str, int], list[float]] = defaultdict(list)
        for row in self._runs:
            if row.restore_s is not None:
                loads[row.system, row.interval_steps].append(row.restore_s)
        # Only the first repetition of a cell may have proved its restore.
        self._load_s = {cell: statistics.median(values) for cell, values in loads.items()}
        self._formulas: dict[tuple[str, int], list[float]] = defaultdict(list)

    def formula_rows(self) -> list[GoodputRow]:
        """A row for each run, and Ideal at each interval."""
        rows = []
        for run in self._runs:
            load_s = self._load_s.get((run.system, run.interval_steps))
            cost_s = None
            if self._iteration_s is not None and load_s is not None and run.persist_p50_s is not None:
                in_flight = run.max_in_flight or 1
                cost_s = lost_s(run.system, run.interval_steps, self._iteration_s, load_s, run.persist_p50_s, in_flight)
            rows.append(self._formula_row(run, run.system, cost_s, 1 / run.durable_iterations_per_s, load_s))
            value = rows[-1].goodput_formula_iterations_per_s
            if value is not None:
                self._formulas[run.system, run.interval_steps].append(value)
        for interval in sorted({run.interval_steps for run in self._runs}):
            run = next(run for run in self._runs if run.interval_steps == interval)
            loads = [load_s for (_, at), load_s in self._load_s.items() if at == interval]
            if self._iteration_s is None or not loads:
                continue
            # As in the artefact, one load time for Ideal; here the middle of what the systems need.
            load_s = statistics.median(loads)
            cost_s = lost_s(IDEAL, interval, self._iteration_s, load_s, 0.0, 1)
            rows.append(self._formula_row(run, IDEAL, cost_s, self._iteration_s, load_s))
        return sorted(rows, key=lambda row: (system_rank(row.system), row.interval_steps, row.repetition))

    def with_gains(self, rows: Sequence[GoodputRow], gains: Sequence[PublishedGain]) -> list[GoodputRow]:
        """`rows` with where PCcheck would be, had it the published gain over the other system's formula here."""
        found = list(rows)
        for gain in gains:
            others = self._formulas.get((gain.system, gain.interval_steps))
            for number, row in enumerate(found):
                cell = (row.workload, row.system, row.interval_steps)
                if others and cell == (gain.workload, PCCHECK, gain.interval_steps):
                    value = gain.gain * statistics.median(others)
                    found[number] = replace(row, paper_goodput_iterations_per_s=value, paper_source=gain.source)
        return found

    def measured_rows(self, records: Iterable[GoodputRecord]) -> list[GoodputRow]:
        """A row for each measured run, with the formula's number and its deviation."""
        rows = []
        for record in records:
            run = record.spec.run
            cell = (run.system, run.interval_steps)
            formulas = self._formulas.get(cell)
            formula = statistics.median(formulas) if formulas else None
            found = record.goodput_iterations_per_s
            like = next((row for row in self._runs if (row.system, row.interval_steps) == cell), None)
            in_flight = (like.max_in_flight if like else None) or 1
            write_s = like.persist_p50_s if like else None
            own = None
            if run.system != BASELINE and self._iteration_s and record.step_s and record.load_s:
                cost_s = lost_s(*cell, self._iteration_s, record.load_s, write_s or 0.0, in_flight)
                own = goodput(self._spec.window_s, len(self._spec.failures_s), cost_s, record.step_s)
            rows.append(
                self._row(
                    like or self._runs[0],
                    **same_named(record, GOODPUT_COLUMNS)
                    | same_named(record.where, _OF_ITS_OWN)
                    | {"faults": "; ".join(record.faults)},
                    system=run.system,
                    interval_steps=run.interval_steps,
                    source=MEASURED,
                    repetition=run.repetition,
                    goodput_measured_iterations_per_s=found,
                    cell_formula_iterations_per_s=formula,
                    deviation=formula / found - 1 if formula is not None and found > 0 else None,
                    own_formula_iterations_per_s=own,
                    own_deviation=own / found - 1 if own is not None and found > 0 else None,
                    iteration_with_s=record.step_s,
                    max_in_flight=in_flight,
                    lost_steps=sum(one.lost_steps for one in record.lives),
                    record=str(record.spec.record_path()),
                )
            )
        return sorted(rows, key=lambda row: (system_rank(row.system), row.interval_steps, row.repetition))

    def _formula_row(
        self, run: TidyRow, system: str, cost_s: float | None, with_s: float, load_s: float | None
    ) -> GoodputRow:
        spec = self._spec
        value = None if cost_s is None else goodput(spec.window_s, len(spec.failures_s), cost_s, with_s)
        whole = None if cost_s is None else goodput(spec.trace_s, spec.trace_failures, cost_s, with_s)
        ideal = system == IDEAL
        return self._row(
            run,
            system=system,
            repetition=0 if ideal else run.repetition,
            goodput_formula_iterations_per_s=value,
            trace_formula_iterations_per_s=whole,
            iteration_with_s=with_s,
            load_s=load_s,
            write_s=None if ideal else run.persist_p50_s,
            max_in_flight=1 if ideal else run.max_in_flight or 1,
            lost_s=cost_s,
            record="" if ideal else run.record,
        )

    def _bound(self, run: TidyRow) -> float | None:
        """Ideal's goodput at the throughput bound, with a restore that reads the state as fast as the disk can."""
        if run.bound_iterations_per_s is None or self._iteration_s is None:
            return None
        read = self._ceilings.disk.read_bytes_per_s
        load_s = run.state_bytes / read if read > 0 else 0.0
        cost_s = lost_s(IDEAL, run.interval_steps, self._iteration_s, load_s, 0.0, 1)
        return goodput(self._spec.window_s, len(self._spec.failures_s), cost_s, 1 / run.bound_iterations_per_s)

    def _row(self, run: TidyRow, **changes: object) -> GoodputRow:
        """A row with what `run` and the window say, and `changes`."""
        spec = self._spec
        values: dict[str, object] = dict.fromkeys(GOODPUT_COLUMNS)
        values |= {name: getattr(run, name) for name in GOODPUT_COLUMNS if hasattr(run, name)}
        values |= {
            "figure": self._figure,
            "panel": self._panel,
            "source": FORMULA,
            "iteration_s": self._iteration_s,
            "bound_iterations_per_s": self._bound(run),
            "window_s": spec.window_s,
            "failures": len(spec.failures_s),
            "compression": spec.stretch_s / spec.window_s,
            "trace_name": spec.trace_name,
            "trace_sha256": spec.trace_sha256,
            "trace_s": spec.trace_s,
            "trace_failures": spec.trace_failures,
            "stretch_start_s": spec.stretch_start_s,
            "faults": "",
            "paper_source": None,
        }
        return GoodputRow(**{**values, **changes})  # type: ignore[arg-type] # values of several types


def _window_of(name: str, measured: Sequence[GoodputRecord], runs: Sequence[RunRecord]) -> GoodputSpec:
    """The one window that all measured runs live through. Raises LastgoodError if they do not make one panel."""
    alike: list[tuple[str, Callable[[GoodputSpec], object]]] = [
        ("trace", lambda spec: spec.trace_sha256),
        ("window and its failures", lambda spec: (spec.window_s, tuple(spec.failures_s))),
    ]
    for what, value in alike:
        if len({value(record.spec) for record in measured}) > 1:
            raise LastgoodError(f"{name}: measured runs of more than one {what}; collect them one by one")
    specs = [*(record.spec.run for record in measured), *(record.spec for record in runs)]
    for what in ("machine", "scale", "workload"):
        values = {str(getattr(spec, what)) for spec in specs}
        if len(values) > 1:
            raise LastgoodError(f"{name}: a panel shows one {what}, not {', '.join(sorted(values))}")
    counts = Counter(record.spec.record_path() for record in measured)
    twice = sorted(str(path) for path, count in counts.items() if count > 1)
    if twice:
        raise LastgoodError(f"{name}: given twice: {', '.join(twice)}")
    cells = {(record.spec.run.system, record.spec.run.interval_steps, record.spec.cell_hash) for record in measured}
    doubled = [cell for cell, count in Counter((system, at) for system, at, _ in cells).items() if count > 1]
    if doubled:
        raise LastgoodError(f"{name}: two settings of {doubled[0][0]} at interval {doubled[0][1]}; a panel shows one")
    return measured[0].spec


def _is_goodput(path: Path) -> bool:
    return path.absolute().parts[-6:-5] == ("goodput",)


def _name(path: Path) -> str:
    """A short name of a run that is not there."""
    return f"goodput {run_name(path)}" if _is_goodput(path) else run_name(path)


def _deviations(rows: Sequence[GoodputRow]) -> str:
    """How far formula and measurement are apart: the median of each measured cell."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in rows:
        if row.deviation is not None:
            found[row.system, row.interval_steps].append(row.deviation)
    apart = [f"{system_label(name)} f{at} {statistics.median(some):+.1%}" for (name, at), some in found.items()]
    return f"; formula over measurement: {'; '.join(apart)}" if apart else ""


def _wide(rows: Sequence[GoodputRow]) -> list[list[str]]:
    """Median goodput with a row per system and source, measured ones after the formula, and a column per interval."""
    values: dict[tuple[tuple[str, str], int], list[float]] = defaultdict(list)
    for row in rows:
        for value in (row.goodput_formula_iterations_per_s, row.goodput_measured_iterations_per_s):
            if value is not None:
                values[(row.system, row.source), row.interval_steps].append(value)
    intervals = sorted({interval for _, interval in values})
    lines = sorted({line for line, _ in values}, key=lambda line: (system_rank(line[0]), line[1]))
    names = {line: system_label(line[0]) + (" (measured)" if line[1] == MEASURED else "") for line in lines}
    return [["system", *map(str, intervals)], *median_lines(names, intervals, values)]
