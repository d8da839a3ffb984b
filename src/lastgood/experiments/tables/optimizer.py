"""The CSV files of the panel on a shadow's updates: a row for each run, number of threads and number of shadows."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from lastgood.errors import LastgoodError
from lastgood.experiments.records.optimizer import OptimizerRecord
from lastgood.experiments.systems.papers import CHECKMATE
from lastgood.experiments.tables.columns import same_named
from lastgood.experiments.tables.csv_text import Collected, median_lines
from lastgood.experiments.tables.runs import records_there

__all__ = ["OPTIMIZER_COLUMNS", "UpdateRow", "collect_updates", "collect_updates_files"]


@dataclass(frozen=True)
class UpdateRow:
    """One point of one run; the fields are the columns of the tidy CSV, in their order."""

    figure: str
    panel: str
    machine: str
    scale: str
    workload: str
    system: str
    repetition: int
    model: str
    optimizer: str
    parameters: int
    threads: int
    shadows: int
    updates: int
    update_s: float
    """Median; of each update, the shadow that takes longest counts."""
    update_min_s: float
    update_max_s: float
    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    torch: str
    git_revision: str | None
    git_dirty: bool | None
    started_at: str
    record: str
    runs_expected: int
    runs_missing: str


OPTIMIZER_COLUMNS = tuple(field.name for field in fields(UpdateRow))


def _wide(rows: Sequence[UpdateRow]) -> list[list[str]]:
    """Median seconds: a row for each number of shadows, a column for each number of threads."""
    values: dict[tuple[int, int], list[float]] = defaultdict(list)
    for row in rows:
        values[row.shadows, row.threads].append(row.update_s)
    threads = sorted({count for _, count in values})
    names = {shadows: str(shadows) for shadows in sorted({shadows for shadows, _ in values})}
    return [["shadows", *map(str, threads)], *median_lines(names, threads, values)]


def collect_updates_files(
    figure: str,
    panel: str,
    paths: Sequence[Path],
    _ceilings: Path,
    *,
    partial: bool = False,
    expected: int | None = None,
    reference: Path | None = None,  # noqa: ARG001 - as for other kinds
) -> Collected[UpdateRow]:
    """Load records and collect them. With `partial`, those that are not there are named; without, they are an error.

    Neither ceilings nor published numbers stand beside updates.
    """
    there = records_there(f"{figure} {panel}", paths, expected, partial, lambda path: "/".join(path.parts[-4:]))
    records = [OptimizerRecord.load_placed(path) for path in there.paths]
    return collect_updates(figure, panel, records, runs_expected=there.expected, runs_missing=there.missing)


def collect_updates(
    figure: str,
    panel: str,
    records: Sequence[OptimizerRecord],
    *,
    runs_expected: int,
    runs_missing: Sequence[str] = (),
) -> Collected[UpdateRow]:
    """Pure. Raises LastgoodError if records are of more than one cell: their points would mix."""
    cells = {record.spec.cell_hash for record in records}
    if len(cells) > 1:
        raise LastgoodError(f"{figure} {panel}: records of {len(cells)} settings; a panel shows one")
    rows = []
    for record in sorted(records, key=lambda record: record.spec.repetition):
        spec = record.spec
        for point in sorted(record.points, key=lambda point: (point.shadows, point.threads)):
            values = {
                **same_named(spec, OPTIMIZER_COLUMNS),
                **same_named(record.where, OPTIMIZER_COLUMNS),
                "figure": figure,
                "panel": panel,
                "workload": spec.panel,
                "system": CHECKMATE,
                "parameters": record.parameters,
                "threads": point.threads,
                "shadows": point.shadows,
                "updates": len(point.update_s),
                "update_s": statistics.median(point.update_s),
                "update_min_s": min(point.update_s),
                "update_max_s": max(point.update_s),
                "torch": record.where.versions.get("torch", "unknown"),
                "started_at": record.started_at,
                "record": str(spec.record_path()),
                "runs_expected": runs_expected,
                "runs_missing": "; ".join(runs_missing),
            }
            rows.append(UpdateRow(**values))
    revisions = {(row.git_revision, row.git_dirty) for row in rows}
    warnings = [f"{figure} {panel}: mixed revisions"] if len(revisions) > 1 else []
    return Collected(rows, OPTIMIZER_COLUMNS, _wide(rows), warnings, f"{len(records)} of {runs_expected} runs")
