"""`lastgood ceilings`: what this machine can do at best, and the network to another one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lastgood.cli._output import emit_json, emit_table, reporter
from lastgood.cli._peer import TOKEN_VARIABLE, needed_token, read_token
from lastgood.cli._peer import serve_peer as answer_peers
from lastgood.errors import ConfigError
from lastgood.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from lastgood.experiments.ceilings.record import CeilingsRecord

__all__ = ["ceilings"]

_report = reporter("ceilings")


def ceilings(
    scratch: Annotated[
        Path | None, typer.Option(help="Folder on the disk to measure; must not be in memory.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File of the record (JSON).", show_default=False)] = None,
    machine: Annotated[
        str | None, typer.Option(help="Label of this machine (default: made of processor and GPU).")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short look, not good enough for figures.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Measure even if the file of --out is from today and this machine.")
    ] = False,
    peer: Annotated[
        str | None, typer.Option(metavar="HOST[:PORT]", help="Measure the network to this machine too.")
    ] = None,
    serve_peer: Annotated[
        bool, typer.Option("--serve-peer", help="Only answer another machine's --peer, for --serve-s seconds.")
    ] = False,
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS[:PORT]", help="Where --serve-peer listens; 0.0.0.0 is every interface.")
    ] = "0.0.0.0",
    serve_s: Annotated[float, typer.Option(min=1, max=86400, help="How long --serve-peer answers.")] = 3600,
    peer_token_file: Annotated[
        Path | None, typer.Option(help=f"File with the token of both machines (default: ${TOKEN_VARIABLE}).")
    ] = None,
    end_with: Annotated[int | None, typer.Option(metavar="PID", help="End when the parent process PID ends.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record to stdout as JSON.")] = False,
) -> None:
    """Measure disk, memory, network and device copies: the ceilings that the bound in every figure rests on.

    Takes 25 seconds at most, and waits until no run is being timed. A record of today and of this machine is kept.
    For the network between two machines, run it with --serve-peer on one and with --peer on the other.
    """
    from lastgood.experiments.ceilings.measure import Peer, cached_or_measured
    from lastgood.experiments.ceilings.network_peer import parse_address
    from lastgood.experiments.machine.facts import machine_label
    from lastgood.processes import die_with_parent

    if end_with is not None:
        die_with_parent(end_with)
    if serve_peer:
        if peer is not None or scratch is not None or out is not None:
            raise ConfigError("--serve-peer only answers another machine; leave out --peer, --scratch and --out")
        answer_peers(listen, serve_s, read_token(peer_token_file), _report)
        return
    if scratch is None or out is None:
        raise ConfigError("--scratch (a folder on the disk to measure) and --out (the record's file) are needed")
    to_measure = None
    if peer is not None:
        token = needed_token(peer_token_file, peer, "--serve-peer")
        host, port = parse_address(peer)
        to_measure = Peer(host, port, token)
    record, fresh = cached_or_measured(
        out, scratch, machine or machine_label(), quick=quick, force=force, peer=to_measure, report=_report
    )
    _report(f"{'measured in ' + format_seconds(record.wall_s) if fresh else 'of today, kept'}; {out}")
    if as_json:
        emit_json(record.model_dump(mode="json"))
    else:
        _show(record)


def _show(record: CeilingsRecord) -> None:
    rows: list[tuple[str, str, str, str]] = []
    for name, points in (("disk write", record.disk.write), ("disk read", record.disk.read)):
        best = max(points, key=lambda point: point.median_bytes_per_s)
        path = "direct I/O" if record.disk.direct_io else "buffered, fdatasync"
        how = f"{best.jobs} jobs, {format_bytes(best.block_bytes)}, {path}"
        spread = f"{format_rate(min(best.bytes_per_s))} to {format_rate(max(best.bytes_per_s))}"
        rows.append((name, format_rate(best.median_bytes_per_s), spread, how))
    for name, rate in (("write", record.disk.fio_write_bytes_per_s), ("read", record.disk.fio_read_bytes_per_s)):
        if rate is not None:
            rows.append((f"disk {name}, by fio", format_rate(rate), "", "the same jobs and blocks, once"))
    flushes = record.disk.fdatasync_s
    spread = f"{format_seconds(min(flushes))} to {format_seconds(max(flushes))}"
    rows.append(("fdatasync of 4 KiB", format_seconds(record.disk.median_fdatasync_s), spread, f"{len(flushes)} times"))
    for curve in record.memory_copy:
        spread = f"{format_rate(min(curve.bytes_per_s))} to {format_rate(max(curve.bytes_per_s))}"
        how = f"{curve.threads} thread{'s' if curve.threads > 1 else ''}"
        rows.append(("memory copy", format_rate(curve.median_bytes_per_s), spread, how))
    networks = [("loopback", record.loopback.points, "send")]
    for peer in record.peers:
        ways = (("to", "send"), ("from", "receive"), ("both ways,", "both"))
        networks += [(f"network {words} {peer.address}", peer.points, way) for words, way in ways]
    for name, flows, way in networks:
        flow = max((flow for flow in flows if flow.direction == way), key=lambda flow: flow.median_bytes_per_s)
        spread = f"{format_rate(min(flow.bytes_per_s))} to {format_rate(max(flow.bytes_per_s))}"
        how = f"TCP, {flow.streams} streams, messages of {format_bytes(flow.message_bytes)}"
        rows.append((name, format_rate(flow.median_bytes_per_s), spread, how))
    if record.loopback.iperf3_bytes_per_s is not None:
        rows.append(("loopback, by iperf3", format_rate(record.loopback.iperf3_bytes_per_s), "", "TCP, 1 stream"))
    for name, copied, how in (
        ("device to host", record.device_to_host_pinned_bytes_per_s, "pinned"),
        ("host to device", record.host_to_device_pinned_bytes_per_s, "pinned"),
        ("device to host", record.device_to_host_pageable_bytes_per_s, "pageable"),
        ("host to device", record.host_to_device_pageable_bytes_per_s, "pageable"),
    ):
        if copied is not None:
            rows.append((name, format_rate(copied), "", f"{how}, {record.device}"))
    place = f"{record.where.scratch_filesystem} on {record.where.scratch_device}"
    title = f"Ceilings of {record.machine}, {record.measured_at} ({place})"
    emit_table(title, ("what", "median", "spread", "how"), rows)
