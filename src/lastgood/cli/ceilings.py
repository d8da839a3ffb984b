"""`lastgood ceilings`: what this machine can do at best."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lastgood.cli._output import console, emit_json, emit_table
from lastgood.units import format_bytes, format_rate, format_seconds

__all__ = ["ceilings"]


def ceilings(
    scratch: Annotated[Path, typer.Option(help="Folder on the disk to measure; must not be in memory.")],
    out: Annotated[Path, typer.Option(help="File of the record (JSON).")],
    machine: Annotated[
        str | None, typer.Option(help="Label of this machine (default: made of processor and GPU).")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short look, not good enough for figures.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Measure even if the file of --out is from today and this machine.")
    ] = False,
    end_with: Annotated[int | None, typer.Option(metavar="PID", help="End when the parent process PID ends.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record to stdout as JSON.")] = False,
) -> None:
    """Measure disk, memory and device copies: the ceilings that the bound in every figure rests on.

    Takes under 15 seconds, and waits until no run is being timed. A record of today and of this machine is kept.
    """
    from lastgood.experiments.ceilings import cached_or_measured
    from lastgood.experiments.machine import machine_label
    from lastgood.processes import die_with_parent

    if end_with is not None:
        die_with_parent(end_with)

    def report(text: str) -> None:
        console.print(f"ceilings: {text}", markup=False)

    record, fresh = cached_or_measured(
        out, scratch, machine or machine_label(), quick=quick, force=force, report=report
    )
    report(f"{'measured in ' + format_seconds(record.wall_s) if fresh else 'of today, kept'}; {out}")
    if as_json:
        emit_json(record.model_dump(mode="json"))
        return
    rows: list[tuple[str, str, str, str]] = []
    for name, points in (("disk write", record.disk.write), ("disk read", record.disk.read)):
        best = max(points, key=lambda point: point.median_bytes_per_s)
        path = "direct I/O" if record.disk.direct_io else "buffered, fdatasync"
        how = f"{best.jobs} jobs, {format_bytes(best.block_bytes)}, {path}"
        spread = f"{format_rate(min(best.bytes_per_s))} to {format_rate(max(best.bytes_per_s))}"
        rows.append((name, format_rate(best.median_bytes_per_s), spread, how))
    flushes = record.disk.fdatasync_s
    spread = f"{format_seconds(min(flushes))} to {format_seconds(max(flushes))}"
    rows.append(("fdatasync of 4 KiB", format_seconds(record.disk.median_fdatasync_s), spread, f"{len(flushes)} times"))
    for curve in record.memory_copy:
        spread = f"{format_rate(min(curve.bytes_per_s))} to {format_rate(max(curve.bytes_per_s))}"
        how = f"{curve.threads} thread{'s' if curve.threads > 1 else ''}"
        rows.append(("memory copy", format_rate(curve.median_bytes_per_s), spread, how))
    for name, rate in (
        ("device to host", record.device_to_host_pinned_bytes_per_s),
        ("host to device", record.host_to_device_pinned_bytes_per_s),
    ):
        if rate is not None:
            rows.append((name, format_rate(rate), "", f"pinned, {record.device}"))
    place = f"{record.where.scratch_filesystem} on {record.where.scratch_device}"
    title = f"Ceilings of {record.machine}, {record.measured_at} ({place})"
    emit_table(title, ("what", "median", "spread", "how"), rows)
