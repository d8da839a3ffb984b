"""The CSV files of the panel on a shadow's updates: a row for each run, number of threads and number of shadows."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from lastgood.errors import LastgoodError
from lastgood.experiments.records.optimizer import OptimizerRecord
from lastgood.experiments.systems.papers import CHECKMATE
from lastgood.experiments.tables.csv_text import csv_bytes, field_text
from lastgood.files import write_result

__all__ = ["OPTIMIZER_COLUMNS", "CollectedUpdates", "UpdateRow", "collect_updates", "collect_updates_files"]


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


@dataclass(frozen=True)
class CollectedUpdates:
    """The panel's numbers."""

    rows: list[UpdateRow]
    warnings: list[str]

    def write(self, out_tidy: Path, out_wide: Path) -> None:
        """Write both CSV files, each whole or not at all."""
        tidy = [list(OPTIMIZER_COLUMNS), *([field_text(value) for value in astuple(row)] for row in self.rows)]
        write_result(out_tidy, csv_bytes(tidy))
        write_result(out_wide, csv_bytes(self._wide()))

    def summary(self) -> str:
        """How many runs it holds."""
        runs = len({row.record for row in self.rows})
        return f"{runs} of {self.rows[0].runs_expected} runs"

    def _wide(self) -> list[list[str]]:
        """Median seconds: a row for each number of shadows, a column for each number of threads."""
        values: dict[tuple[int, int], list[float]] = defaultdict(list)
        for row in self.rows:
            values[row.shadows, row.threads].append(row.update_s)
        threads = sorted({key[1] for key in values})
        table = [["shadows", *map(str, threads)]]
        for shadows in sorted({key[0] for key in values}):
            found = [values.get((shadows, count)) for count in threads]
            line = [field_text(statistics.median(times) if times else None) for times in found]
            table.append([str(shadows), *line])
        return table


def collect_updates_files(
    figure: str,
    panel: str,
    paths: Sequence[Path],
    _ceilings: Path,
    *,
    partial: bool = False,
    expected: int | None = None,
    reference: Path | None = None,  # noqa: ARG001 - as for other kinds
) -> CollectedUpdates:
    """Load records and collect them. With `partial`, those that are not there are named; without, they are an error.

    Neither ceilings nor published numbers stand beside updates.
    """
    there = [path for path in paths if path.exists()]
    missing = ["/".join(path.parts[-4:]) for path in paths if not path.exists()]
    wanted = max(len(paths), expected or 0)
    if not there or (len(there) < wanted and not partial):
        named = f": {', '.join(missing)}" if missing else ""
        raise LastgoodError(f"{figure} {panel}: {len(there)} of {wanted} run records are there{named}")
    records = [OptimizerRecord.load_placed(path) for path in there]
    return collect_updates(figure, panel, records, runs_expected=wanted, runs_missing=missing)


def collect_updates(
    figure: str,
    panel: str,
    records: Sequence[OptimizerRecord],
    *,
    runs_expected: int,
    runs_missing: Sequence[str] = (),
) -> CollectedUpdates:
    """Pure. Raises LastgoodError if records are of more than one cell: their points would mix."""
    cells = {record.spec.cell_hash for record in records}
    if len(cells) > 1:
        raise LastgoodError(f"{figure} {panel}: records of {len(cells)} settings; a panel shows one")
    rows = []
    for record in sorted(records, key=lambda record: record.spec.repetition):
        spec, where = record.spec, record.where
        for point in sorted(record.points, key=lambda point: (point.shadows, point.threads)):
            rows.append(
                UpdateRow(
                    figure=figure,
                    panel=panel,
                    machine=spec.machine,
                    scale=spec.scale,
                    workload=spec.panel,
                    system=CHECKMATE,
                    repetition=spec.repetition,
                    model=spec.model,
                    optimizer=spec.optimizer,
                    parameters=record.parameters,
                    threads=point.threads,
                    shadows=point.shadows,
                    updates=len(point.update_s),
                    update_s=statistics.median(point.update_s),
                    update_min_s=min(point.update_s),
                    update_max_s=max(point.update_s),
                    cpu=where.cpu,
                    cores=where.cores,
                    memory_bytes=where.memory_bytes,
                    kernel=where.kernel,
                    torch=where.versions.get("torch", "unknown"),
                    git_revision=where.git_revision,
                    git_dirty=where.git_dirty,
                    started_at=record.started_at,
                    record=str(spec.record_path()),
                    runs_expected=runs_expected,
                    runs_missing="; ".join(runs_missing),
                )
            )
    revisions = {(row.git_revision, row.git_dirty) for row in rows}
    return CollectedUpdates(rows, [f"{figure} {panel}: mixed revisions"] if len(revisions) > 1 else [])
