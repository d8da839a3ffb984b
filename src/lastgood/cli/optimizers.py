"""`lastgood optimizers run`: one measured panel of a shadow's updates, one record."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from lastgood.cli._app import App
from lastgood.cli._output import console

__all__ = ["app"]

app = App(help="How long a shadow's update takes, as Checkmate's figure shows it.")


@app.callback()
def _optimizers() -> None:
    """Keeps `run` a command of its own, with one command or with several."""


@app.command()
def run(
    spec: Annotated[str, typer.Option(help="The run as one line of JSON; `lastgood plan checkmate --json` prints it.")],
    out: Annotated[
        Path,
        typer.Option(
            help="The record to write; `lastgood collect` takes it at the path that `lastgood plan --json` names."
        ),
    ],
    scratch: Annotated[Path, typer.Option(help="A folder on this machine's disk, for the record.")] = Path(),
    end_with: Annotated[
        int | None,
        typer.Option(metavar="PID", help="End when the parent process PID ends, so that workflows leave no orphans."),
    ] = None,
) -> None:
    """Time whole updates with `lastgood optbench` and write the record, which appears whole or not at all."""
    from lastgood.experiments.optbench.execute import execute_optimizer
    from lastgood.experiments.records.optimizer import OptimizerSpec
    from lastgood.processes import die_with_parent
    from lastgood.text import parse_model
    from lastgood.units import MIB

    if end_with is not None:
        die_with_parent(end_with)
    sys.stderr.write(shlex.join(["lastgood", "optimizers", "run", "--spec", spec, "--out", str(out)]) + "\n")
    chosen = parse_model(OptimizerSpec, spec, "--spec: not a run of updates", most_bytes=MIB)
    record = execute_optimizer(chosen, scratch, lambda stage: console.print(f"{chosen.title()}: {stage}"))
    record.write(out)
    console.print(f"{chosen.title()}: {len(record.points)} points, {record.wall_s:.0f} s in all", markup=False)
