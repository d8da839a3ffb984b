"""`lastgood shadow switch`: a replicating switch in user space between a ring's ranks (docs/checkmate-switch.md)."""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lastgood.cli._output import console, emit_json, emit_table
from lastgood.errors import ConfigError

if TYPE_CHECKING:
    from lastgood.gradients.switch.relay import SwitchLink

__all__ = ["switch"]

_MIN_QUEUE_BYTES = 1 << 20
_MOST_SECONDS = 86400


def switch(
    token_file: Annotated[Path, typer.Option(help="File with the job's token.")],
    link: Annotated[
        list[str] | None,
        typer.Option(metavar="LISTEN=NEXT", help="HOST:PORT where a rank connects = HOST:PORT of the next rank."),
    ] = None,
    shadow: Annotated[
        list[str] | None, typer.Option(metavar="HOST:PORT", help="The shadows, in the order of their numbers.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Test the way through every link and to every shadow.")
    ] = False,
    answer: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="On a trainer: answer such tests where its rank will listen."),
    ] = None,
    queue: Annotated[str, typer.Option(metavar="SIZE", help="What may wait for a shadow, of each rank.")] = "64MiB",
    timeout: Annotated[float, typer.Option(metavar="S", help="Longest wait for a shadow or a test.")] = 60.0,
    report: Annotated[
        float, typer.Option(metavar="S", help="Print counters as a line of JSON every so often; 0: at the end only.")
    ] = 0.0,
    faults: Annotated[
        str | None, typer.Option(metavar="NAME=RATE,...", help="For tests: faults on the copies, as loss=0.01,seed=7.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result of --check to stdout as JSON.")] = False,
) -> None:
    """Relay a ring's links unchanged, and copy what is marked as final to the shadows. Ends with SIGTERM or Ctrl-C.

    A slow shadow never stalls training: what does not fit its queue is dropped and counted, and the shadow asks for it.
    """
    from lastgood.gradients.switch.faults import parse_faults
    from lastgood.gradients.switch.forward import CopySettings
    from lastgood.gradients.switch.relay import Switch, parse_link
    from lastgood.tokens import read_token
    from lastgood.wire.ring_link import parse_address

    token = read_token(token_file)
    if not 0 < timeout <= _MOST_SECONDS or not 0 <= report <= _MOST_SECONDS:
        raise ConfigError(f"--timeout is above 0, and --report not below; both are {_MOST_SECONDS} seconds at most")
    stop = threading.Event()
    if answer is not None:
        from lastgood.gradients.switch.check import answer_checks

        _until_signal(stop)
        console.print(f"switch: answering tests on {answer}; end it with Ctrl-C")
        console.print(f"switch: {answer_checks(answer, token, stop, timeout)} tests were right")
        return
    links = [parse_link(text) for text in link or []]
    shadows = list(shadow or [])
    for address in shadows:
        parse_address(address)
    if not links:
        raise ConfigError("a switch has at least one --link LISTEN=NEXT")
    if check:
        _check(links, shadows, token, timeout, as_json)
        return
    settings = CopySettings(token, _queue_bytes(queue), timeout, None if faults is None else parse_faults(faults))
    _until_signal(stop)
    with Switch(links, shadows, settings) as running:
        for one, address in zip(links, running.addresses, strict=True):
            console.print(f"switch: {address} goes to {one.target}")
        while not stop.wait(report or None):
            _print_line(running.counters())
    # Only now no copy is in progress any more.
    _print_line(running.counters())


def _check(links: list[SwitchLink], shadows: list[str], token: bytes, timeout_s: float, as_json: bool) -> None:
    from lastgood.gradients.switch.check import check_link, check_shadow

    rows = [check_link(link, token, timeout_s) for link in links]
    rows += [check_shadow(number, shadows, token, timeout_s) for number in range(len(shadows))]
    if as_json:
        emit_json([{"what": row.what, "good": row.good, "found": row.found} for row in rows])
    else:
        table = [("ok" if row.good else "BAD", row.what, row.found) for row in rows]
        emit_table("Ways of this switch", ("", "way", "found"), table)
    if not all(row.good for row in rows):
        raise typer.Exit(1)


def _until_signal(stop: threading.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())


def _queue_bytes(text: str) -> int:
    from lastgood.units import option_bytes

    nbytes = option_bytes("--queue", text)
    if nbytes < _MIN_QUEUE_BYTES:
        raise ConfigError(f"--queue {text}: at least 1 MiB, or no record fits")
    return nbytes


def _print_line(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
