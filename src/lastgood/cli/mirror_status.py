"""`lastgood mirror status|stop|resync`: how a mirror node stands, and what it is told (docs/flowcheck.md)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lastgood.cli._output import console, emit_json
from lastgood.errors import CheckpointError, ConfigError, WaitTimeout

if TYPE_CHECKING:
    from lastgood.mirror.node.status import NodeStatus

__all__ = ["resync", "status", "stop"]

Folder = Annotated[Path, typer.Option("--dir", help="Folder of the node, as `mirror run --dir` has it.")]
BLIND = 3
"""Exit code of `status` for a node that cannot tell newer states."""


def status(
    directory: Folder, as_json: Annotated[bool, typer.Option("--json", help="Print to stdout as JSON.")] = False
) -> None:
    """Show how a node stands. Exits with 0 if it follows or waits, 3 if it is blind, 1 if it does not run."""
    from lastgood.mirror.node.status import read_status

    found = read_status(directory)
    if as_json:
        emit_json({**found.__dict__, "stale": found.stale})
    else:
        for line in _lines(found):
            console.print(line)
    if found.stale or found.stands == "ended":
        raise typer.Exit(1)
    if found.stands == "blind":
        raise typer.Exit(BLIND)


def _lines(found: NodeStatus) -> list[str]:
    ends = "does not run any more" if found.stale else found.stands
    lines = [f"mirror node at {found.address} (process {found.pid}): {ends}"]
    if found.blind:
        lines.append(found.blind)
    held = ", ".join(map(str, found.held)) or "none"
    durable = ", ".join(map(str, found.durable)) or "none"
    lines.append(f"newest step {found.iteration}; can give back from memory: {held}; from its disk: {durable}")
    if found.ranks:
        lines.append("ranks: " + ", ".join(f"{rank} at {address}" for address, rank in found.ranks))
    for stage, counters in found.counters.items():
        lines.append(f"{stage}: " + ", ".join(f"{name} {value:g}" for name, value in sorted(counters.items())))
    return lines


def stop(
    directory: Folder, timeout: Annotated[float, typer.Option(metavar="S", help="Longest wait for its end.")] = 60.0
) -> None:
    """End a node. What it holds in memory is gone; what it spilled stays."""
    from lastgood.mirror.node.status import read_status, runs_here

    found = read_status(directory)
    if not runs_here(directory, found.pid):
        raise CheckpointError(f"{directory}: no mirror node runs here")
    os.kill(found.pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if not runs_here(directory, found.pid):
            console.print(f"mirror node at {found.address}: ended")
            return
        time.sleep(0.1)
    raise WaitTimeout(f"waited {timeout:g} s for the mirror node (process {found.pid}) to end")


def resync(
    directory: Folder,
    source: Annotated[Path, typer.Option("--from", help="Folder of ordinary checkpoints of the training.")],
) -> None:
    """Tell a node where it may take a complete state from, once it is blind."""
    from lastgood.files import storage_errors, write_atomically
    from lastgood.mirror.node.resync import REQUEST_FILE

    if not source.is_dir():
        raise ConfigError(f"--from {source}: there is no such folder")
    path = directory / REQUEST_FILE
    with storage_errors(path, "writing the request"):
        write_atomically(path, f"{source.absolute()}\n".encode())
    console.print(f"the mirror node of {directory} looks for checkpoints in {source}")
