"""`lastgood import`: weights of another program as the first checkpoint of a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lastgood.cli._output import console, emit_json

__all__ = ["import_checkpoint"]


def import_checkpoint(
    source: Annotated[
        Path,
        typer.Argument(
            help="A file of torch.save or safetensors; a folder of shards, of DCP or of DeepSpeed.", show_default=False
        ),
    ],
    directory: Annotated[Path, typer.Argument(help="Checkpoint directory, new or empty.", show_default=False)],
    step: Annotated[
        int | None, typer.Option(min=0, help="Finished steps.", show_default="what SOURCE says, else 0")
    ] = None,
    part: Annotated[str, typer.Option(help="The entry of the state that plain tensors become.")] = "model",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was imported to stdout as JSON.")] = False,
) -> None:
    """Write a checkpoint that another program made as the first one of a directory, in PCcheck's format.

    Nothing in a file runs. `PCcheck(DIRECTORY).restore({"model": model})` takes it.
    """
    from lastgood.integrations.first_checkpoint import import_checkpoint as import_first

    found = import_first(source, directory, step=step, part=part)
    entries = {name: len(value) if isinstance(value, dict) else 1 for name, value in found.tree.items()}
    if as_json:
        emit_json({"directory": str(directory), "format": found.kind, "step": found.step, "entries": entries})
    else:
        named = ", ".join(f"{name} ({count})" for name, count in entries.items())
        console.print(f"{directory}: step {found.step} from {found.kind}: {named}")
