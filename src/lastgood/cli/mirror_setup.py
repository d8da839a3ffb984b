"""`lastgood mirror setup|check|commands`: mirrors of watched ports to a mirror node (docs/flowcheck-capture.md)."""

from __future__ import annotations

from typing import Annotated

import typer

from lastgood.cli._output import emit_json

__all__ = ["commands"]

AsJson = Annotated[bool, typer.Option("--json", help="Print to stdout as JSON.")]


def commands(
    switch: Annotated[str, typer.Option(help="h3c, cisco or arista.")],
    watch: Annotated[list[str], typer.Option(help="Port of a watched rank, as the switch names it; repeat it.")],
    to: Annotated[str, typer.Option(help="Port of the mirror node.")],
    session: Annotated[int, typer.Option(help="Number of the switch's mirroring group or session.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Print what to type on a switch: make the mirror, look at it, remove it."""
    from dataclasses import asdict

    from lastgood.mirror.setup.switches import switch_commands

    found = switch_commands(switch, watch, to, session)
    if as_json:
        emit_json(asdict(found))
        return
    for title, lines in (("make", found.make), ("show", found.show), ("undo", found.undo), ("notes", found.notes)):
        typer.echo(f"# {title}")
        for line in lines:
            typer.echo(f"# {line}" if title == "notes" else line)
