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
from lastgood.experiments.tables.csv_text import Collected, median_lines
from lastgood.experiments.tables.panels import PanelRecords, load_panel

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
    """Load records (`load_panel`) and collect them; neither ceilings nor published numbers stand beside updates."""
    return collect_updates(load_panel(OptimizerRecord, figure, panel, paths, expected, partial=partial))


def collect_updates(of: PanelRecords[OptimizerRecord]) -> Collected[UpdateRow]:
    """Pure. Raises LastgoodError if records are of more than one cell: their points would mix."""
    cells = {record.spec.cell_hash for record in of.records}
    if len(cells) > 1:
        raise LastgoodError(f"{of.name}: records of {len(cells)} settings; a panel shows one")
    rows = []
    for record in sorted(of.records, key=lambda record: record.spec.repetition):
        for point in sorted(record.points, key=lambda point: (point.shadows, point.threads)):
            values = {
                **of.shared_columns(record, OPTIMIZER_COLUMNS),
                "workload": record.spec.panel,
                "system": CHECKMATE,
                "parameters": record.parameters,
                "threads": point.threads,
                "shadows": point.shadows,
                "updates": len(point.update_s),
                "update_s": statistics.median(point.update_s),
                "update_min_s": min(point.update_s),
                "update_max_s": max(point.update_s),
            }
            rows.append(UpdateRow(**values))
    return of.collected(rows, OPTIMIZER_COLUMNS, _wide(rows))
