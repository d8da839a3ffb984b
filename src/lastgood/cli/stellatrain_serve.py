"""`lastgood stellatrain serve` and `status`: the telemetry and the controller of a training, and how it stands."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lastgood.cli._output import console, emit_json
from lastgood.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from lastgood.sparse.control.telemetry_server import Choosing

__all__ = ["choosing", "serve", "status"]

DEFAULT_PORT = 7477
_PIPE_WIDTH = 200

TokenFile = Annotated[
    Path, typer.Option("--token-file", help="File with the token that the ranks and the server share (mode 600).")
]
MostSamples = Annotated[int | None, typer.Option(help="The batch of all ranks may grow up to that [default: stays].")]
LeastCompression = Annotated[float, typer.Option(help="Never less, whatever links give.")]
Surface = Annotated[
    Path | None, typer.Option(help="A profile by `lastgood stellatrain profile` [default: none, so g is 0].")
]
Lambda = Annotated[float, typer.Option("--lambda", help="Weight of the loss's lag.")]
Scale = Annotated[float, typer.Option(help="Scale of the lag.")]


def choosing(
    most_samples: int | None, least_compression: float, surface: Path | None, lambda_: float, g_scale: float
) -> Choosing:
    """How a controller chooses, by these options. Raises ConfigError."""
    from lastgood.sparse.control.controller import ControllerSettings
    from lastgood.sparse.control.objective import NoSurface
    from lastgood.sparse.control.replay import read_surface
    from lastgood.sparse.control.telemetry_server import Choosing

    options: dict[str, Any] = {"least_compression": least_compression, "lambda_": lambda_, "g_scale": g_scale}
    if most_samples is not None:
        options["most_samples"] = most_samples
    try:
        ControllerSettings(elements=1, samples=1, **options)
    except ValueError as error:
        raise ConfigError(f"no controller has these options: {' '.join(str(error).split())[:300]}") from error
    return Choosing(options, NoSurface() if surface is None else read_surface(surface))


def serve(
    token_file: Annotated[Path, typer.Option(help="File with the shared token (mode 600); made if it is not there.")],
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for all of this host's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: one that is free.")] = DEFAULT_PORT,
    controller: Annotated[
        bool, typer.Option("--controller/--no-controller", help="Choose batch sizes and compression, or only look.")
    ] = True,
    metrics_port: Annotated[int | None, typer.Option(help="Port of the metrics (Prometheus); 0: a free one.")] = None,
    metrics_host: Annotated[str, typer.Option(help="Address of the metrics.")] = "127.0.0.1",
    most_samples: MostSamples = None,
    least_compression: LeastCompression = 0.0,
    surface: Surface = None,
    lambda_: Lambda = 5.0,
    g_scale: Scale = 1.0,
    seconds: Annotated[float | None, typer.Option(min=0, help="End after so long [default: by SIGTERM].")] = None,
) -> None:
    """Take what the ranks of a training measure, and choose their batches and compression, until SIGTERM or SIGINT.

    Ranks reach it by `lastgood stellatrain train --controller HOST:PORT`. Without it their training goes on as it is.
    """
    from threading import Timer

    from lastgood.sparse.control.telemetry_metrics import TelemetryNumbers
    from lastgood.sparse.control.telemetry_server import TelemetryServer
    from lastgood.tokens import read_token
    from lastgood.wire.ring_link import listen_ring
    from lastgood.wire.scrape import ScrapeServer

    chosen = choosing(most_samples, least_compression, surface, lambda_, g_scale) if controller else None
    token = read_token(token_file, make=True)
    listener = listen_ring(host, port)
    server = TelemetryServer(listener, token, chosen, console.print)
    found = listener.getsockname()[1]
    metrics = None
    timer = None
    try:
        if metrics_port is not None:
            metrics = ScrapeServer(TelemetryNumbers(server), metrics_host, metrics_port, console.print)
            console.print(f"metrics at http://{metrics.address}/metrics")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        if seconds is not None:
            timer = Timer(seconds, server.stop)
            timer.daemon = True
            timer.start()
        console.print(f"telemetry at {host}:{found}")
        server.run()
    finally:
        listener.close()
        server.close()
        if timer is not None:
            timer.cancel()
        if metrics is not None:
            metrics.close()


def status(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Of `lastgood stellatrain serve`.")],
    token_file: TokenFile,
    watch_s: Annotated[
        float | None, typer.Option("--watch", min=0.1, help="Show it again so often, in seconds, until Ctrl-C.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print once to stdout as JSON.")] = False,
) -> None:
    """Show what each rank of a training does, and the setting that the controller has chosen."""
    from rich.console import Console
    from rich.live import Live

    from lastgood.sparse.control.telemetry import ask_view
    from lastgood.tokens import read_token

    token = read_token(token_file)
    view = ask_view(address, token)
    screen = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    if as_json:
        emit_json(view)
    elif watch_s is None:
        screen.print(_table(view))
    else:
        with Live(_table(view), console=screen, auto_refresh=False) as live:
            while True:
                time.sleep(watch_s)
                live.update(_table(ask_view(address, token)), refresh=True)


_COLUMNS = ("rank", "host", "iteration", "samples", "compute", "waiting", "sent", "kept", "age", "link", "state")


def _table(view: dict[str, Any]) -> Table:
    from rich.table import Table

    setting = view["setting"]
    title = "no training has connected" if view["job"] is None else "as the training was begun"
    if setting is not None:
        sizes = ", ".join(map(str, setting["samples"]))
        title = f"setting {setting['number']}: batches of {sizes}, compression {setting['compression']:g}"
    table = Table(title=title, title_justify="left")
    for column in _COLUMNS:
        table.add_column(column)
    for one in view["ranks"]:
        table.add_row(*_row(one))
    return table


def _row(one: dict[str, Any]) -> Iterable[str]:
    last = one["last"]
    state = "connected" if one["connected"] else "gone"
    if one["silent_s"] is not None and one["silent_s"] > 5:
        state += f", silent for {one['silent_s']:.0f} s"
    if last is None:
        return (str(one["rank"]), one["host"], *[""] * 8, state)
    link, kept, age = one["link_bits_per_s"], last["energy_kept"], last["residual_age_iterations"]
    return (
        str(one["rank"]),
        one["host"],
        str(last["iteration"]),
        str(last["samples"]),
        f"{last['compute_s'] * 1e3:.0f} ms",
        f"{last['waited_s'] * 1e3:.0f} ms",
        f"{last['sent_bytes'] / 1e6:.3g} MB",
        "" if kept is None else f"{kept:.0%}",
        "" if age is None else f"{age:.3g} iterations",
        "" if link is None else f"{link / 1e6:.3g} Mbit/s",
        state,
    )
