"""The CSV files of the figure of torch's distributed checkpoint: a row for each run and operation."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, Literal

from lastgood.errors import LastgoodError
from lastgood.experiments.ceilings.record import CeilingsRecord, load_ceilings
from lastgood.experiments.dcp.storages import STORAGES
from lastgood.experiments.records.dcp import DcpRecord
from lastgood.experiments.tables.csv_text import Collected, median_lines
from lastgood.experiments.tables.panels import PanelRecords, load_panel
from lastgood.units import MIB

__all__ = ["DCP_COLUMNS", "DcpRow", "collect_dcp", "collect_dcp_files"]

_OPERATIONS: Final[tuple[Literal["save", "load"], ...]] = ("save", "load")


@dataclass(frozen=True)
class DcpRow:
    """One operation of one run; the fields are the columns of the tidy CSV, in their order. None is an empty field."""

    figure: str
    panel: str
    machine: str
    scale: str
    model: str
    state: str
    spread: str
    medium: str
    """disk or s3."""
    storage: str
    label: str
    """For the legend."""
    threads: int | None
    ranks: int
    operation: str
    repetition: int
    iterations: int
    state_bytes: int
    mib_per_s: float
    """Median over the iterations: all bytes over the slowest rank's time."""
    mib_per_s_min: float
    mib_per_s_max: float
    slowest_s: float
    """Median, as all that follow."""
    stall_s: float
    skew_s: float | None
    coordination_s: float | None
    cpu_s_per_gib: float | None
    """CPU seconds of all ranks."""
    server_cpu_s_per_gib: float | None
    """Of the S3 server of the run's own; so are the next two."""
    requests: float | None
    failed_requests: float | None
    """With status 500 and above: clients repeat them."""
    requests_usd: float | None
    """Their list price on AWS."""
    bound_mib_per_s: float | None
    bound_of: str | None
    """What the bound was measured by."""
    durable: bool
    equal: bool | None
    """Whether every load gave what was saved."""
    invalid: str
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


DCP_COLUMNS = tuple(field.name for field in fields(DcpRow))


def collect_dcp_files(
    figure: str,
    panel: str,
    paths: Sequence[Path],
    ceilings: Path,
    *,
    partial: bool = False,
    expected: int | None = None,
    reference: Path | None = None,  # noqa: ARG001 - as for other kinds
) -> Collected[DcpRow]:
    """Load records (`load_panel`) and collect them; no published numbers stand beside these."""
    of = load_panel(DcpRecord, figure, panel, paths, expected, partial=partial)
    return collect_dcp(of, load_ceilings(ceilings))


def collect_dcp(of: PanelRecords[DcpRecord], ceilings: CeilingsRecord) -> Collected[DcpRow]:
    """Pure. Raises LastgoodError for records of more than one model, or of another machine than the ceilings'."""
    models = {record.spec.model for record in of.records}
    if len(models) > 1:
        raise LastgoodError(f"{of.name}: records of {len(models)} models; a panel shows one")
    of.refuse_other_machines(ceilings)
    # A disk that was seen faster than its ceiling says can do that.
    on_disk = [record for record in of.records if record.spec.medium == "disk"]
    loads = [one.mib_per_s for record in on_disk for one in record.counted("load")]
    read_mib_per_s = max([ceilings.disk.read_bytes_per_s / MIB, *loads])
    rows = []
    for record in sorted(of.records, key=_order):
        for operation in _OPERATIONS:
            if record.counted(operation):
                rows.append(_row(of, record, operation, read_mib_per_s))
    unequal = sorted({row.record for row in rows if row.equal is False})
    marks = [f"{path}: a load did not give what was saved" for path in unequal]
    return of.collected(rows, DCP_COLUMNS, _wide(rows), marks)


def _order(record: DcpRecord) -> tuple[bool, int, int, int, int]:
    spec, names = record.spec, [storage.name for storage in STORAGES]
    threads = int(spec.storage_options.get("thread_count", 0))
    return spec.medium == "s3", names.index(spec.storage), threads, spec.ranks, spec.repetition


def _row(
    of: PanelRecords[DcpRecord], record: DcpRecord, operation: Literal["save", "load"], read_mib_per_s: float
) -> DcpRow:
    spec, counted = record.spec, record.counted(operation)
    rates = [one.mib_per_s for one in counted]
    threads = spec.storage_options.get("thread_count")
    label = next(storage.label for storage in STORAGES if storage.name == spec.storage)
    label += " on S3" if spec.medium == "s3" and _is_on_disk_too(spec.storage) else ""
    work = [one.server for one in counted if one.server is not None]
    loads = [one.equal for one in record.iterations if one.operation == "load"]
    bound, bound_of = _bound(record, operation, read_mib_per_s)
    return DcpRow(
        **{
            **of.shared_columns(record, DCP_COLUMNS),
            "label": label if threads is None else f"{label}, {threads} thread{'' if threads == 1 else 's'}",
            "threads": threads,
            "operation": operation,
            "iterations": len(counted),
            "state_bytes": record.state_bytes,
            "mib_per_s": statistics.median(rates),
            "mib_per_s_min": min(rates),
            "mib_per_s_max": max(rates),
            "slowest_s": statistics.median(one.slowest_s for one in counted),
            "stall_s": statistics.median(max(rank.stall_s for rank in one.ranks) for one in counted),
            "skew_s": _median([one.skew_s for one in counted]),
            "coordination_s": _median([one.coordination_s for one in counted]),
            "cpu_s_per_gib": _median([one.cpu_s_per_gib for one in counted]),
            "server_cpu_s_per_gib": _median([one.server_cpu_s_per_gib for one in counted]),
            "requests": _median([float(sum(one.requests.values())) for one in work]),
            "failed_requests": _median([float(one.failed) for one in work]),
            "requests_usd": _median([one.usd for one in work]),
            "bound_mib_per_s": bound,
            "bound_of": bound_of,
            "durable": record.durable,
            "equal": all(loads) if loads else None,
            "invalid": "; ".join(record.invalid),
        }
    )


def _is_on_disk_too(name: str) -> bool:
    return any(storage.name == name and storage.disk is not None for storage in STORAGES)


def _bound(
    record: DcpRecord, operation: Literal["save", "load"], read_mib_per_s: float
) -> tuple[float | None, str | None]:
    """What disk or bucket take beside the saves themselves, and what they give; at least as much as was seen."""
    if record.spec.medium == "s3":
        raw = record.raw_write_bytes_per_s if operation == "save" else record.raw_read_bytes_per_s
        if not raw:
            return None, None
        fastest = max(one.mib_per_s for one in record.counted(operation))
        bound = max(statistics.median(raw) / MIB, fastest)
        return bound, "plain puts on S3" if operation == "save" else "plain gets on S3"
    if operation == "load":
        return read_mib_per_s, "the disk's read ceiling or the fastest load"
    if not record.raw_write_bytes_per_s:
        return None, None
    fastest = max(one.mib_per_s for one in record.counted("save"))
    return max(statistics.median(record.raw_write_bytes_per_s) / MIB, fastest), "plain writes between the saves"


def _median(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def _wide(rows: Sequence[DcpRow]) -> list[list[str]]:
    """Median MiB/s: a row for each storage and number of threads, a column for each operation and number of ranks."""
    values: dict[tuple[str, tuple[str, int]], list[float]] = defaultdict(list)
    for row in rows:
        values[row.label, (row.operation, row.ranks)].append(row.mib_per_s)
    ranks = sorted({row.ranks for row in rows})
    places = [(operation, count) for operation in _OPERATIONS for count in ranks]
    names = {label: label for label in dict.fromkeys(row.label for row in rows)}
    return [["storage", *(f"{operation} {count}" for operation, count in places)], *median_lines(names, places, values)]
