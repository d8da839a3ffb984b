"""`lastgood goodput run`: one measured goodput run, one record."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from lastgood.cli._app import App
from lastgood.cli._output import console, emit_json

__all__ = ["app"]

app = App(help="Goodput under failures: a training that is really killed and really restarts.")


@app.callback()
def _goodput() -> None:
    """Keeps `run` a command of its own, with one command or with several."""


@app.command()
def run(
    spec: Annotated[str, typer.Option(help="The run as one line of JSON; `lastgood plan fig9 --json` prints them.")],
    out: Annotated[
        Path,
        typer.Option(
            help="The record to write; `lastgood collect` takes it at the path that `lastgood plan --json` names."
        ),
    ],
    data_dir: Annotated[Path, typer.Option(help="Folder of prepared data.")] = Path("data"),
    scratch: Annotated[Path, typer.Option(help="Folder on the disk to measure.")] = Path("scratch"),
    end_with: Annotated[
        int | None,
        typer.Option(metavar="PID", help="End when the parent process PID ends, so that workflows leave no orphans."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record to stdout as well.")] = False,
) -> None:
    """Train through a window in which the training process is killed at the spec's failures, and count what is left.

    Waits for its turn: one measurement at a time on a machine. The record appears whole or not at all.
    """
    from lastgood.experiments.goodput.execute import execute_goodput
    from lastgood.experiments.records.goodput import GoodputSpec
    from lastgood.experiments.runs.logs import logs_beside
    from lastgood.processes import die_with_parent
    from lastgood.text import parse_model
    from lastgood.units import MIB

    if end_with is not None:
        die_with_parent(end_with)
    command = ["lastgood", "goodput", "run", "--spec", spec, "--out", str(out)]
    sys.stderr.write(shlex.join([*command, "--data-dir", str(data_dir), "--scratch", str(scratch)]) + "\n")
    chosen = parse_model(GoodputSpec, spec, "--spec: not a goodput run", most_bytes=MIB)

    def report(stage: str) -> None:
        console.print(f"{chosen.title()}: {stage}", markup=False)

    record = execute_goodput(chosen, data_dir, scratch, logs_beside(out), report)
    record.write(out)
    console.print(
        f"{chosen.title()}: {record.useful_steps} useful steps in {record.window_s:.1f} s of uptime with "
        f"{len(record.lives) - 1} failures, {record.goodput_iterations_per_s:.3g} iterations/s "
        f"({record.raw_goodput_iterations_per_s:.3g} with start-up); {record.restores_checked} of {record.restores} "
        f"restores checked, {record.wall_s:.0f} s in all"
    )
    for fault in record.faults:
        # Not a failure of the run: that a system cannot restore is a result, and the figure marks it.
        console.print(f"[red]{chosen.title()}: {fault}")
    if as_json:
        emit_json(record.model_dump(mode="json"))
