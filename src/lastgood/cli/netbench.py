"""`lastgood netbench`: what a network path carries, by number of streams and size of messages."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lastgood.cli._output import emit_json, emit_table, reporter
from lastgood.cli._peer import TOKEN_VARIABLE, needed_token, read_token, serve_peer
from lastgood.errors import ConfigError
from lastgood.units import format_bytes, format_rate, format_seconds, parse_bytes

if TYPE_CHECKING:
    from lastgood.experiments.ceilings.network import NetworkPlan, NetworkPoint
    from lastgood.experiments.ceilings.network_peer import Direction

__all__ = ["netbench"]

_MOST_SECONDS = 100.0
_report = reporter("netbench")


class Way(str, Enum):
    """Which way bytes go, as this machine sees it."""

    send = "send"
    receive = "receive"
    both = "both"


def netbench(
    peer: Annotated[
        str | None, typer.Option(metavar="HOST[:PORT]", help="The other machine [default: this one, over loopback].")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Only answer another machine's --peer, for --serve-s seconds.")
    ] = False,
    streams: Annotated[str, typer.Option(help="Connections at once, each way.")] = "1,2,4",
    messages: Annotated[str, typer.Option(help="Sizes of what is written at once.")] = "64KiB,1MiB",
    ways: Annotated[list[Way] | None, typer.Option("--way", help="Which way; may be repeated [default: send].")] = None,
    seconds: Annotated[float, typer.Option(min=0.05, max=10, help="Of one pass.")] = 0.5,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Passes of each combination, in turn.")] = 3,
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS[:PORT]", help="Where --serve listens; 0.0.0.0 is every interface.")
    ] = "0.0.0.0",
    serve_s: Annotated[float, typer.Option(min=1, max=86400, help="How long --serve answers.")] = 3600,
    peer_token_file: Annotated[
        Path | None, typer.Option(help=f"File with the token of both machines (default: ${TOKEN_VARIABLE}).")
    ] = None,
    end_with: Annotated[int | None, typer.Option(metavar="PID", help="End when the parent process PID ends.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every pass to stdout as JSON.")] = False,
) -> None:
    """Measure plain TCP to another machine, or over loopback: what gradients on their way to a shadow can use.

    Run it with --serve on one machine and with --peer on the other. Waits until no run is being timed.
    """
    from lastgood.experiments.ceilings.network import measure_points
    from lastgood.experiments.ceilings.network_peer import parse_address
    from lastgood.experiments.machine.lock import machine_turn
    from lastgood.processes import die_with_parent

    if end_with is not None:
        die_with_parent(end_with)
    if serve:
        if peer is not None:
            raise ConfigError("--serve only answers another machine; leave out --peer")
        serve_peer(listen, serve_s, read_token(peer_token_file), _report)
        return
    plan = _plan(streams, messages, ways or [Way.send], seconds, rounds)
    token, address = "", None
    if peer is not None:
        token, address = needed_token(peer_token_file, peer, "--serve"), parse_address(peer)
    with machine_turn(_report):
        points = measure_points((*address, token) if address else None, plan)
    if as_json:
        emit_json({"peer": peer, "points": [point.model_dump(mode="json") for point in points]})
    else:
        _show(peer or "loopback", points)


def _plan(streams: str, messages: str, ways: list[Way], seconds: float, rounds: int) -> NetworkPlan:
    from lastgood.experiments.ceilings.network import NetworkPlan
    from lastgood.experiments.ceilings.network_peer import MAX_MESSAGE_BYTES, MAX_STREAMS

    try:
        counts = tuple(dict.fromkeys(int(part) for part in streams.split(",")))
        sizes = tuple(dict.fromkeys(parse_bytes(part) for part in messages.split(",")))
    except ValueError as error:
        raise ConfigError(f"--streams {streams} --messages {messages}: {error}; write 1,4 and 64KiB,1MiB") from error
    if not all(1 <= count <= MAX_STREAMS for count in counts):
        raise ConfigError(f"--streams {streams}: 1 to {MAX_STREAMS} connections can be measured")
    if not all(1 <= size <= MAX_MESSAGE_BYTES for size in sizes):
        raise ConfigError(f"--messages {messages}: sizes from 1 byte to {format_bytes(MAX_MESSAGE_BYTES)}")
    named: dict[Way, Direction] = {Way.send: "send", Way.receive: "receive", Way.both: "both"}
    directions = tuple(dict.fromkeys(named[way] for way in ways))
    total_s = len(counts) * len(sizes) * len(directions) * rounds * seconds
    if total_s > _MOST_SECONDS:
        raise ConfigError(
            f"that takes {format_seconds(total_s)}, and {format_seconds(_MOST_SECONDS)} are allowed, so that others "
            "get their turn; ask for fewer combinations, --rounds or --seconds"
        )
    return NetworkPlan(
        streams=counts, message_bytes=sizes, directions=directions, repetitions=rounds, pass_s=seconds, iperf3_s=0
    )


def _show(path: str, points: list[NetworkPoint]) -> None:
    rows = [
        (
            point.direction,
            point.streams,
            format_bytes(point.message_bytes),
            format_rate(point.median_bytes_per_s),
            f"{format_rate(min(point.bytes_per_s))} to {format_rate(max(point.bytes_per_s))}",
        )
        for point in points
    ]
    emit_table(f"TCP, {path}", ("way", "streams", "message", "median", "spread"), rows)
