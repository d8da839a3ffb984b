"""What records make one panel: refused are mixtures that would mislead, and noted is what readers must know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

from lastgood.errors import LastgoodError
from lastgood.experiments.ceilings.record import CeilingsRecord
from lastgood.experiments.figures.axes import THROUGHPUT, FigureAxes
from lastgood.experiments.records.base import WhereRun
from lastgood.experiments.records.run import RunRecord
from lastgood.experiments.systems.labels import system_rank

__all__ = ["record_order", "refuse_mixtures", "shared_notes"]


def record_order(record: RunRecord, axes: FigureAxes) -> tuple[tuple[int, str], int, float, int]:
    """Sort key of a panel's records: system, interval, value of the axis, repetition."""
    spec = record.spec
    value = axes.value_of(spec)
    return (system_rank(spec.system), spec.interval_steps, -1 if value is None else value, spec.repetition)


def refuse_mixtures(name: str, records: Sequence[RunRecord], axes: FigureAxes) -> None:
    """Refuse records that do not make one panel. Raises LastgoodError; the message begins with `name`."""
    if not records:
        raise LastgoodError(f"{name}: no run record")
    for what, values in (
        ("workload", {record.spec.workload for record in records}),
        ("scale", {record.spec.scale for record in records}),
        ("number of ranks", {str(record.spec.ranks) for record in records}),
        ("number of nodes", {str(record.spec.nodes) for record in records}),
        ("kind of parallelism", {record.spec.parallel for record in records}),
        ("link rate", {_link(record) for record in records}),
        ("way of measuring", {"one stretch" if record.pairs is None else "pairs of blocks" for record in records}),
    ):
        if len(values) > 1:
            raise LastgoodError(
                f"{name}: a panel shows one {what}, not {', '.join(sorted(values))}; collect them one by one"
            )
    twice = [str(path) for path, count in Counter(record.spec.record_path() for record in records).items() if count > 1]
    if twice:
        raise LastgoodError(f"{name}: given twice: {', '.join(sorted(twice))}")
    cells: dict[tuple[str, int, float | None], PurePosixPath] = {}
    for record in sorted(records, key=lambda record: record_order(record, axes)):
        spec = record.spec
        path = spec.record_path()
        value = axes.value_of(spec)
        first = cells.setdefault((spec.system, spec.interval_steps, value), path)
        if first.parent != path.parent:
            at = "" if axes is THROUGHPUT else f" and {axes.axis} {value}"
            raise LastgoodError(
                f"{name}: two settings of {spec.system} at interval {spec.interval_steps}{at}: "
                f"{first.parent} and {path.parent}; a panel shows one, so leave the other out"
            )


def shared_notes(records: Sequence[RunRecord], ceilings: CeilingsRecord) -> list[str]:
    """What every row of a panel should say, because its rows are not of one make."""
    notes: list[str] = []

    def note_mixed(what: str, values: set[str], of_ceilings: str | None = None) -> None:
        named = ", ".join(sorted(values))
        if len(values) > 1:
            notes.append(f"mixed {what}: {named}")
        if of_ceilings is not None and values != {of_ceilings}:
            notes.append(f"ceilings are of {of_ceilings}, runs of {named}")

    note_mixed("revisions", {_revision(record) for record in records})
    note_mixed("machines", {record.spec.machine for record in records}, ceilings.machine)
    note_mixed("scratch disks", {_disk(record.where) for record in records}, _disk(ceilings.where))
    for package in ("torch", "python"):
        note_mixed(f"versions of {package}", {record.where.versions.get(package, "unknown") for record in records})
    for system in dict.fromkeys(record.spec.system for record in records):
        methods = sorted({record.spec.method for record in records if record.spec.system == system})
        if len(methods) > 1:
            notes.append(f"mixed methods of {system}: {', '.join(map(str, methods))}")
    if ceilings.quick:
        notes.append("ceilings were measured with --quick")
    return notes


def _link(record: RunRecord) -> str:
    rate = record.ranks.link_bits_per_s if record.ranks else None
    return "unknown" if rate is None else f"{rate / 1e9:g} Gbit/s"


def _disk(where: WhereRun) -> str:
    return f"{where.scratch_filesystem} on {where.scratch_device}"


def _revision(record: RunRecord) -> str:
    revision = (record.where.git_revision or "unknown")[:12]
    return f"{revision}+dirty" if record.where.git_dirty else revision
