"""`lastgood shadow`: Checkmate's shadows, and what belongs to them (docs/checkmate-storage.md)."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lastgood.cli import shadow_bench, shadow_offset, shadow_switch
from lastgood.cli._app import App
from lastgood.cli._output import console, emit_json, emit_table
from lastgood.errors import HostError, LastgoodError, MismatchError, NoCheckpoint

if TYPE_CHECKING:
    from rich.table import Table

    from lastgood.gradients.protocol.messages import Status

__all__ = ["app"]

app = App(help="Checkmate's shadows: serve one, see how they stand, copy gradients to them.", no_args_is_help=True)
app.command("bench")(shadow_bench.bench)
app.command("offset")(shadow_offset.offset)
app.command("switch")(shadow_switch.switch)

TokenFile = Annotated[Path, typer.Option("--token-file", help="File with the token that trainers and shadows share.")]
Shadows = Annotated[list[str], typer.Argument(help="HOST:PORT of every shadow, in their order.")]
_ASK_S = 5.0


@app.command()
def serve(
    token_file: Annotated[Path, typer.Option(help="File with the shared token (mode 600); made if it is not there.")],
    shadow: Annotated[int | None, typer.Option(help="Number of this shadow, from 0; or RANK.")] = None,
    shadows: Annotated[int | None, typer.Option(help="How many there are; or NUM_STORAGE, WORLD_SIZE; else 1.")] = None,
    trainers: Annotated[int | None, typer.Option(help="Ranks that train; or NUM_TRAINING. Others are refused.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for all of this host's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0: one that is free.")] = 0,
    address_file: Annotated[
        Path | None, typer.Option(help="Written, in one step, once trainers can connect; removed at the end.")
    ] = None,
    slots: Annotated[int, typer.Option(help="Iterations whose gradients it can hold, at least 2.")] = 4,
    memory: Annotated[str, typer.Option(help="Limit of memory, as 64GiB; 0: what is available.")] = "0",
    side_memory: Annotated[str, typer.Option(help="Limit of memory for side records.")] = "1GiB",
    threads: Annotated[int, typer.Option(help="Threads of the optimizer.")] = 1,
    receive_threads: Annotated[int, typer.Option(help="Threads that receive gradients.")] = 1,
    cpus: Annotated[
        str | None, typer.Option(help="CPUs for the optimizer, as 0-3,8; shared out by LOCAL_RANK under torchrun.")
    ] = None,
    receive_cpus: Annotated[str | None, typer.Option(help="CPUs for the receiving threads, likewise.")] = None,
    spill_dir: Annotated[Path | None, typer.Option(help="Folder for durable spills; its own for each shadow.")] = None,
    metrics_host: Annotated[str, typer.Option(help="Address of the metrics.")] = "127.0.0.1",
    metrics_port: Annotated[int | None, typer.Option(help="Port of the metrics (Prometheus); 0: a free one.")] = None,
    rendezvous: Annotated[
        bool, typer.Option("--rendezvous", help="Exchange addresses at MASTER_ADDR:MASTER_PORT (torchrun's store).")
    ] = False,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for the other side of a connection.")] = 60.0,
) -> None:
    """Run one shadow in the foreground, until SIGTERM or SIGINT."""
    import logging

    from lastgood.gradients.shadow.launch_env import find_place, own_cpus
    from lastgood.gradients.shadow.metrics import MetricsServer
    from lastgood.gradients.shadow.rendezvous import Rendezvous
    from lastgood.gradients.shadow.service import ShadowService
    from lastgood.gradients.shadow.settings import ShadowSettings
    from lastgood.tokens import read_token
    from lastgood.units import option_bytes

    logging.getLogger("lastgood").setLevel(logging.INFO)
    place = find_place(shadow, shadows, trainers, os.environ)
    settings = ShadowSettings(
        shadow=place.shadow,
        shadows=place.shadows,
        trainers=place.trainers,
        slots=slots,
        limit_bytes=option_bytes("--memory", memory),
        side_limit_bytes=option_bytes("--side-memory", side_memory),
        threads=threads,
        receive_threads=receive_threads,
        cpus=own_cpus(cpus, os.environ),
        receive_cpus=own_cpus(receive_cpus, os.environ),
        spill_directory=spill_dir,
        timeout_s=timeout_s,
    )
    token = read_token(token_file, make=True)
    listener = _listen(host, port)
    service = ShadowService(settings, token, listener)
    metrics = None if metrics_port is None else MetricsServer(service.core, metrics_host, metrics_port)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop())
    service.warm_up()
    found = listener.getsockname()[1]
    described: dict[str, Any] = {
        "host": host,
        "port": found,
        "pid": os.getpid(),
        "shadow": place.shadow,
        "shadows": place.shadows,
        "metrics": None if metrics is None else metrics.address,
    }
    console.print(f"shadow {place.shadow} of {place.shadows} at {host}:{found}")
    try:
        if rendezvous:
            # Kept until the end: others ask the store that may live in this process.
            meeting = Rendezvous(os.environ, place, timeout_s)
            own = socket.gethostname() if host in ("0.0.0.0", "::") else host
            described["all"] = meeting.exchange(place.shadow, f"{own}:{found}")
            console.print(f"all shadows: {' '.join(described['all'])}")
        if address_file is not None:
            _write(address_file, described)
        service.run()
    finally:
        if address_file is not None:
            address_file.unlink(missing_ok=True)
        if metrics is not None:
            metrics.close()


@app.command()
def status(
    shadows: Shadows,
    token_file: TokenFile,
    as_json: Annotated[bool, typer.Option("--json", help="Print to stdout as JSON.")] = False,
) -> None:
    """Show the newest complete step of each shadow, and of all. Exits with 1 if one does not answer."""
    answers = _ask(shadows, token_file)
    overall = _overall(shadows, answers)
    if as_json:
        emit_json(
            {"shadows": [_as_data(address, one) for address, one in zip(shadows, answers, strict=True)], **overall}
        )
    else:
        emit_table("Shadows", _COLUMNS, [_row(address, one) for address, one in zip(shadows, answers, strict=True)])
        console.print(f"all shadows: {overall['why'] or _sentence(overall)}")
    if overall["unreachable"]:
        raise typer.Exit(1)


@app.command()
def watch(
    shadows: Shadows,
    token_file: TokenFile,
    every_s: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    count: Annotated[int, typer.Option(help="Looks until it ends; 0: until it is interrupted.")] = 0,
) -> None:
    """Show all shadows live in the terminal."""
    from rich.console import Console
    from rich.live import Live

    looked = 0
    with Live(console=Console(), auto_refresh=False) as live:
        while not count or looked < count:
            began = time.monotonic()
            answers = _ask(shadows, token_file)
            live.update(_live_table(shadows, answers), refresh=True)
            looked += 1
            if not count or looked < count:
                time.sleep(max(0.0, every_s - (time.monotonic() - began)))


_COLUMNS = (
    "shadow",
    "address",
    "incarnation",
    "applied",
    "holds",
    "newest step",
    "durable step",
    "complete",
    "refused",
)


def _ask(shadows: list[str], token_file: Path) -> list[Status | LastgoodError]:
    from lastgood.gradients.protocol.client import ShadowClient, ask_all
    from lastgood.tokens import read_token

    return ask_all(shadows, read_token(token_file), _ASK_S, ShadowClient.status)


def _overall(shadows: list[str], answers: list[Status | LastgoodError]) -> dict[str, Any]:
    from lastgood.gradients.protocol.client import check_set, choose

    reached = [one for one in answers if not isinstance(one, LastgoodError)]
    unreachable = len(answers) - len(reached)
    found: dict[str, Any] = {"unreachable": unreachable, "step": None, "iteration": None, "source": None, "why": None}
    if unreachable:
        return {**found, "why": f"{unreachable} of {len(answers)} do not answer; without them nothing can be restored"}
    try:
        check_set(reached, shadows)
        choice = choose(reached)
    except (MismatchError, NoCheckpoint) as error:
        return {**found, "why": str(error)}
    return {**found, "step": choice.step, "iteration": choice.iteration, "source": choice.source}


def _sentence(overall: dict[str, Any]) -> str:
    where = "memory" if overall["source"] == "memory" else "durable spills"
    return f"step {overall['step']} can be restored (iteration {overall['iteration']}, from {where})"


def _row(address: str, answer: Status | LastgoodError) -> tuple[Any, ...]:
    if isinstance(answer, LastgoodError):
        return (None, address, None, None, None, str(answer), None, None, None)
    return (
        answer.shadow,
        address,
        answer.epoch,
        answer.applied,
        answer.have,
        max((saved.step for saved in answer.memory), default=None),
        max((saved.step for saved in answer.durable), default=None),
        "yes" if answer.whole else "no",
        sum(answer.refused.values()),
    )


def _as_data(address: str, answer: Status | LastgoodError) -> dict[str, Any]:
    if isinstance(answer, LastgoodError):
        return {"address": address, "error": str(answer)}
    return {"address": address, **answer.content()}


def _live_table(shadows: list[str], answers: list[Status | LastgoodError]) -> Table:
    from rich.table import Table

    overall = _overall(shadows, answers)
    table = Table(*_COLUMNS, title=f"{time.strftime('%H:%M:%S')}  {overall['why'] or _sentence(overall)}")
    for address, answer in zip(shadows, answers, strict=True):
        table.add_row(*("" if cell is None else str(cell) for cell in _row(address, answer)))
    return table


def _listen(host: str, port: int) -> socket.socket:
    from lastgood.wire.gate import open_listener

    try:
        return open_listener(host, port)
    except OSError as error:
        raise HostError(f"cannot listen at {host}:{port}: {error}") from error


def _write(path: Path, described: dict[str, Any]) -> None:
    from lastgood.files import storage_errors, write_atomically

    with storage_errors(path, "writing the address"):
        write_atomically(path, (json.dumps(described) + "\n").encode())
