"""`lastgood mirror setup|check|commands`: mirrors of watched ports to a mirror node (docs/flowcheck-capture.md)."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from lastgood.cli._output import console, emit_json, emit_table
from lastgood.errors import ConfigError

if TYPE_CHECKING:
    from lastgood.cluster.testbed.monitor import Monitor, MonitorCounts
    from lastgood.cluster.testbed.testbed import Testbed

__all__ = ["check", "commands", "setup"]

Bed = Annotated[str, typer.Option("--testbed", help="Which testbed.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print to stdout as JSON.")]


def setup(
    to: Annotated[str, typer.Option(help="The monitor node; copies arrive at its mir0.")],
    watch: Annotated[list[str] | None, typer.Option(help="A node whose traffic is mirrored; repeat it.")] = None,
    split: Annotated[bool, typer.Option("--split", help="A link for each direction: received at mir1.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Remove all that is mirrored to this node.")] = False,
    testbed: Bed = "main",
    as_json: AsJson = False,
) -> None:
    """Mirror all that watched nodes of a testbed send and get to a monitor node. Needs root.

    Safe to call again: a mirror that is right stays as it is. `lastgood testbed down` removes it as well.
    """
    from lastgood.cluster.testbed.testbed import Testbed

    bed = Testbed.load(testbed)
    if undo:
        if watch or split:
            raise ConfigError("--undo removes all that is mirrored to a node; it takes no --watch and no --split")
        found = bed.unmirror(to)
        console.print(
            f"testbed {testbed}: {'nothing is mirrored any more' if found else 'nothing was mirrored'} to {to}"
        )
        return
    monitor = bed.mirror(watch or [], to, split=split)
    if as_json:
        emit_json({**monitor.model_dump(mode="json"), "interfaces": list(monitor.interfaces)})
        return
    console.print(
        f"testbed {testbed}: {', '.join(monitor.watched)}, both ways, to {' and '.join(monitor.interfaces)} of {to}; "
        f"try it: lastgood mirror check --testbed {testbed}"
    )


def check(
    interface: Annotated[str | None, typer.Option(help="Of the monitor node, as mir0; all by default.")] = None,
    to: Annotated[str | None, typer.Option(help="The monitor node; needed if there are several.")] = None,
    count: Annotated[int, typer.Option(help="Marked frames for each node and direction.")] = 100,
    timeout: Annotated[float, typer.Option(metavar="S", help="Longest wait for those of one direction.")] = 10.0,
    counters: Annotated[bool, typer.Option("--counters", help="Send nothing: show what tc and links counted.")] = False,
    testbed: Bed = "main",
    as_json: AsJson = False,
) -> None:
    """Send marked frames from and to each watched node of a testbed, and count their copies; 1 if any is missing."""
    from lastgood.cluster.testbed.testbed import Testbed
    from lastgood.mirror.setup.check import check_mirror

    bed = Testbed.load(testbed)
    monitor = _monitor(bed, to)
    if interface is not None and interface not in monitor.interfaces:
        raise ConfigError(f"--interface {interface}: {monitor.node} has {', '.join(monitor.interfaces)}")
    if counters:
        _show(bed.count_mirrored(monitor.node), monitor, as_json)
        return
    rows = check_mirror(bed, monitor, count=count, timeout_s=timeout)
    rows = [row for row in rows if interface in (None, row.interface)]
    if as_json:
        emit_json([{**asdict(row), "good": row.good} for row in rows])
    else:
        columns = ("", "node", "way", "at", "marks", "seen", "again", "cut", "elsewhere", "tc dropped", "link dropped")
        table = [("ok" if row.good else "BAD", *asdict(row).values()) for row in rows]
        emit_table(f"Mirror of testbed {testbed} to {monitor.node}", columns, table)
    if not all(row.good for row in rows):
        raise typer.Exit(1)


def commands(
    switch: Annotated[str, typer.Option(help="h3c, cisco or arista.")],
    watch: Annotated[list[str], typer.Option(help="Port of a watched rank, as the switch names it; repeat it.")],
    to: Annotated[str, typer.Option(help="Port of the mirror node.")],
    session: Annotated[int, typer.Option(help="Number of the switch's mirroring group or session.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Print what to type on a switch: make the mirror, look at it, remove it."""
    from lastgood.mirror.setup.switches import switch_commands

    found = switch_commands(switch, watch, to, session)
    if as_json:
        emit_json(asdict(found))
        return
    for title, lines in (("make", found.make), ("show", found.show), ("undo", found.undo), ("notes", found.notes)):
        typer.echo(f"# {title}")
        for line in lines:
            typer.echo(f"# {line}" if title == "notes" else line)


def _monitor(bed: Testbed, to: str | None) -> Monitor:
    found = [one for one in bed.monitors() if to in (None, one.node)]
    if len(found) != 1:
        nodes = ", ".join(one.node for one in bed.monitors()) or "no node"
        raise ConfigError(f"testbed {bed.name} mirrors to {nodes}: name one with --to, or make it with mirror setup")
    return found[0]


def _show(counts: list[MonitorCounts], monitor: Monitor, as_json: bool) -> None:
    if as_json:
        emit_json([asdict(one) for one in counts])
        return
    columns = ("node", "way", "at", "frames", "bytes", "tc dropped", "link dropped")
    emit_table(f"Copies to {monitor.node}", columns, (tuple(asdict(one).values()) for one in counts))
