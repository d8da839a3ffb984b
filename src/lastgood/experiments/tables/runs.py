"""From run records to one figure's CSV files: a tidy one (a row per run) and a wide one (a row per series).

Everything that a figure shows is in its tidy CSV, and everything in the CSV comes from the records and the ceilings.
docs/figures.md explains each column.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from lastgood.checkpointers.registry import system_traits
from lastgood.errors import LastgoodError
from lastgood.experiments.ceilings.record import CeilingsRecord, load_ceilings
from lastgood.experiments.config.values import BASELINE
from lastgood.experiments.figures.axes import THROUGHPUT, FigureAxes
from lastgood.experiments.figures.registry import figure_kind
from lastgood.experiments.records.run import RunRecord
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.systems.labels import system_label, system_rank
from lastgood.experiments.tables.columns import OF_PAIRS, TIDY_COLUMNS, TidyRow
from lastgood.experiments.tables.csv_text import Collected, field_text, median_lines
from lastgood.experiments.tables.panels import records_there
from lastgood.experiments.tables.published import Published, load_published, published_slowdown
from lastgood.experiments.tables.refuse import record_order, refuse_mixtures, shared_notes
from lastgood.experiments.tables.row import Baseline, Panel, compact_json, tidy_row
from lastgood.sinks import Sink

__all__ = ["TIDY_COLUMNS", "Collected", "TidyRow", "collect", "collect_files", "run_name"]

_PATH_PARTS = 7
"""Parts of RunSpec.record_path(): machine, scale, workload, system, interval, variant, repetition."""


def run_name(path: Path | PurePosixPath, *, variant: bool = False) -> str:
    """``vgg16 pccheck f10 r1`` from a record's path, for messages about a record that is not there.

    With `variant`, its variant as well: in a sweep, the rest does not tell runs apart.
    """
    parts = path.parts[-_PATH_PARTS:]
    if len(parts) < _PATH_PARTS:
        return str(path)
    words = [parts[2], parts[3], parts[4], *([parts[5]] if variant else []), parts[6].removesuffix(".json")]
    return " ".join(words)


def collect_files(
    figure: str,
    panel: str,
    paths: Sequence[Path],
    ceilings_path: Path,
    *,
    partial: bool = False,
    expected: int | None = None,
    reference: Path | None = None,
) -> Collected[TidyRow]:
    """Load records and ceilings from files, and published numbers if there are any, and collect them.

    With `partial`, files of `paths` that are not there are named as missing; without, they are an error. `expected` is
    the number of runs of the complete figure, if `paths` does not name all of them.
    """
    sweep = _axes(figure) is not THROUGHPUT
    there = records_there(f"{figure} {panel}", paths, expected, partial, lambda path: run_name(path, variant=sweep))
    return collect(
        figure,
        panel,
        [RunRecord.load_placed(path) for path in there.paths],
        load_ceilings(ceilings_path),
        runs_expected=there.expected,
        runs_missing=there.missing,
        published=[] if reference is None else load_published(reference),
    )


def collect(
    figure: str,
    panel: str,
    records: Sequence[RunRecord],
    ceilings: CeilingsRecord,
    *,
    runs_expected: int | None = None,
    runs_missing: Sequence[str] = (),
    published: Sequence[Published] = (),
) -> Collected[TidyRow]:
    """Put `records` of one panel together with the ceilings of their machine. Pure; the order of records is no matter.

    Raises LastgoodError if records do not make one panel: several workloads or scales, a run given twice, runs
    without the figure's axis, or two settings of one system at one interval and one value of the axis.
    """
    axes = _axes(figure)
    refuse_mixtures(f"{figure} {panel}", records, axes)
    ordered = sorted(records, key=lambda record: record_order(record, axes))
    panel_notes = shared_notes(ordered, ceilings)
    warnings = [f"{figure} {panel}: {note}" for note in panel_notes]
    baselines = _baselines(ordered)
    proofs = _proofs(ordered)
    expected = max(len(records), runs_expected or 0)
    shared = Panel(figure, panel, axes, ceilings, expected, "; ".join(runs_missing))
    rows = []
    for record in ordered:
        baseline = baselines.get(_workload_key(record.spec))
        notes = [*record.notes, *panel_notes]
        if not axes.baseline:
            pass  # times of single checkpoints are compared with nothing
        elif baseline is None:
            notes.append("no `none` run of this workload: no ratio and no bound")
            warnings.append(
                f"{figure} {panel}: {record.spec.title()}: no `none` run of this workload: no ratio, no bound"
            )
        elif record.spec.repetition not in baseline.iterations_per_s:
            notes.append("no `none` run of this repetition: no ratio")
            warnings.append(f"{figure} {panel}: {record.spec.title()}: no `none` run of this repetition: no ratio")
        rows.append(
            tidy_row(
                shared,
                record,
                baseline,
                proof_equal=proofs.get(record.spec.cell_hash),
                notes="; ".join(notes),
                published=published_slowdown(published, record.spec) if axes is THROUGHPUT else None,
            )
        )
    paired = any(row.rounds is not None for row in rows)
    columns = [name for name in TIDY_COLUMNS if paired or name not in OF_PAIRS]
    return Collected(rows, columns, _wide_table(rows, axes), warnings, f"{len(rows)} of {expected} runs")


def _axes(figure: str) -> FigureAxes:
    axes = figure_kind(figure).axes
    if axes is None:
        raise LastgoodError(f"{figure} is not made of runs; `lastgood collect {figure}` knows how it is")
    return axes


def _workload_key(spec: RunSpec) -> str:
    """What a run and its `none` run share."""
    shared = (spec.machine, spec.scale, spec.workload, spec.workload_options, spec.device, spec.threads, spec.data)
    return compact_json((*shared, spec.ranks, spec.nodes, spec.parallel))


def _baselines(records: Iterable[RunRecord]) -> dict[str, Baseline]:
    """What each workload does without checkpoints, by `_workload_key`."""
    runs: dict[str, list[RunRecord]] = defaultdict(list)
    paired: dict[str, list[RunRecord]] = defaultdict(list)
    for record in records:
        key = _workload_key(record.spec)
        if record.pairs is not None:
            paired[key].append(record)
        elif record.spec.system == BASELINE:
            runs[key].append(record)
    found = {
        key: Baseline(
            iterations_per_s={record.spec.repetition: record.clocks.iterations_per_s for record in found},
            iteration_s=statistics.median(1 / record.clocks.iterations_per_s for record in found),
            hide_s=statistics.median(record.clocks.hide_s for record in found),
        )
        for key, found in runs.items()
    }
    of_pairs = {key: _baseline_of_pairs(found) for key, found in paired.items()}
    return found | {key: baseline for key, baseline in of_pairs.items() if baseline is not None}


def _baseline_of_pairs(records: Sequence[RunRecord]) -> Baseline | None:
    """All blocks without checkpoints, of all runs, if there are any; disturbed ones only if all were."""
    blocks = [block for record in records for block in record.blocks if block.kind == "without"]
    if not blocks:
        return None
    calm = [block for block in blocks if not block.disturbed] or blocks
    step_s = statistics.median(block.step_s for block in calm)
    return Baseline(
        iterations_per_s={record.spec.repetition: 1 / step_s for record in records},
        iteration_s=step_s,
        hide_s=statistics.median(record.clocks.hide_s for record in records),
        disk_bytes_per_s=max(map(_fastest_disk, records)),
    )


def _fastest_disk(record: RunRecord) -> float:
    """The fastest that one run saw the disk, in bytes per second: a burst of plain writes, or a checkpoint."""
    seen = list(record.pairs.write_bursts_bytes_per_s) if record.pairs else []
    traits = system_traits(record.spec.system)
    if traits.safe_in is Sink.DISK and record.clocks.persist_s:
        nbytes = record.ranks.bytes_per_disk if record.ranks else record.workload.state_bytes
        seen.append(nbytes / min(record.clocks.persist_s))
    return max(seen, default=0.0)


def _proofs(records: Iterable[RunRecord]) -> dict[str, bool]:
    """By cell: whether every proof made in it held. Cells without a proof are not there."""
    found: dict[str, bool] = {}
    for record in records:
        if record.proof is not None:
            cell = record.spec.cell_hash
            found[cell] = found.get(cell, True) and record.proof.equal
    return found


# -- the wide file: the layout of the files in PCcheck's artefact -----------------------------------------------------

_SIDE_NAMES = {"system": "system", "interval": "interval_steps"}


def _wide_table(rows: Sequence[TidyRow], axes: FigureAxes) -> list[list[str]]:
    """Medians with a row per series and a column per place on the x axis, as in the files of PCcheck's artefact.

    Systems go by their printed names. If columns are intervals, column 0 (no checkpoints) is filled in every row
    with the one `none` run that all of them share; if rows are intervals, there is no such column.
    """
    values: dict[tuple[str, float], list[float]] = defaultdict(list)
    nones: list[float] = []
    series: dict[str, tuple[float, str]] = {}
    for row in rows:
        value = _wide_value(row, axes)
        if row.system == BASELINE:
            nones += [] if value is None else [value]
            continue
        name, order = _series(row, axes)
        series[name] = order
        place = _place(row, axes)
        if value is not None and place is not None:
            values[name, place].append(value)
    none = statistics.median(nones) if nones else None
    with_none = axes.columns == "interval" and none is not None
    places = sorted({place for _, place in values})
    table = [[_SIDE_NAMES.get(axes.rows, axes.axis), *(["0"] if with_none else []), *map(field_text, places)]]
    if not series and none is not None:
        return [*table, [system_label(BASELINE), field_text(none)]] if with_none else table
    names = {name: name for name in sorted(series, key=lambda name: series[name])}
    for name, *line in median_lines(names, places, values):
        table.append([name, *([field_text(none)] if with_none else []), *line])
    return table


def _wide_value(row: TidyRow, axes: FigureAxes) -> float | None:
    if axes.value == "iterations_per_s":
        return row.iterations_per_s
    if axes.value == "slowdown":
        return row.slowdown
    return None if row.persist_p50_s is None else 1000 * row.persist_p50_s


def _series(row: TidyRow, axes: FigureAxes) -> tuple[str, tuple[float, str]]:
    """The name of the series that a run belongs to, and what to sort it by."""
    if axes.rows == "system":
        return system_label(row.system), system_rank(row.system)
    value = row.interval_steps if axes.rows == "interval" else row.axis_value
    return field_text(value), (-1 if value is None else value, "")


def _place(row: TidyRow, axes: FigureAxes) -> int | float | None:
    return row.interval_steps if axes.columns == "interval" else row.axis_value
