"""`lastgood run`: one measurement, one record."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lastgood.cli._output import console, emit_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from lastgood.experiments.records.run import RunRecord
    from lastgood.experiments.records.spec import RunSpec

__all__ = ["run"]


def run(
    spec: Annotated[str, typer.Option(help="The run as one line of JSON; `lastgood plan FIGURE --json` prints them.")],
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
    check: Annotated[
        bool,
        typer.Option("--check", help="Print a verdict on the record, as `lastgood check` does; exit 1 at a fault."),
    ] = False,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a Chrome trace of the measured steps, which Perfetto opens, as well."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record to stdout as well.")] = False,
    hostfile: Annotated[
        Path | None,
        typer.Option(help="Hosts for a run over several ranks [default: a testbed of its own, or this machine]."),
    ] = None,
    ssh_config: Annotated[
        Path | None, typer.Option(help="An ssh configuration in place of your own [default: $LASTGOOD_SSH_CONFIG].")
    ] = None,
    how: Annotated[str, typer.Option(help="What starts the ranks, as in `lastgood launch`.")] = "ssh",
    rate: Annotated[
        str | None, typer.Option(help="Rate of each host's link, as 1gbit: a testbed's limit; else only noted.")
    ] = None,
) -> None:
    """Measure one run and write its record, which appears whole or not at all.

    Waits for its turn: one measurement at a time on a machine. A run over several ranks (docs/multinode.md) goes to
    the hosts of a hostfile. The logs of one that fails stay beside its record, in r0.logs for r0.json, until the next.
    """
    from lastgood.errors import ConfigError
    from lastgood.experiments.records.spec import RunSpec
    from lastgood.experiments.runs.execute import execute
    from lastgood.experiments.runs.logs import logs_beside
    from lastgood.processes import die_with_parent
    from lastgood.text import parse_model
    from lastgood.units import MIB

    if end_with is not None:
        die_with_parent(end_with)
    command = [
        "lastgood",
        "run",
        "--spec",
        spec,
        "--out",
        str(out),
        "--data-dir",
        str(data_dir),
        "--scratch",
        str(scratch),
    ]
    if timeline is not None:
        command += ["--timeline", str(timeline)]
    for option, value in (("--hostfile", hostfile), ("--ssh-config", ssh_config), ("--rate", rate)):
        command += [] if value is None else [option, str(value)]
    command += [] if how == "ssh" else ["--how", how]
    sys.stderr.write(shlex.join(command) + "\n")
    chosen = parse_model(RunSpec, spec, "--spec: not a run", most_bytes=MIB)
    # Plain lines, also at a terminal: a moving status line would be a thread, and the run forks.

    def report(stage: str) -> None:
        console.print(f"{chosen.title()}: {stage}", markup=False)

    if chosen.ranks > 1:
        record = _over_ranks(
            chosen, data_dir, scratch, logs_beside(out), report, timeline, hostfile, ssh_config, how, rate
        )
    elif hostfile is not None:
        raise ConfigError(f"--hostfile: {chosen.title()} has one rank; leave it out")
    else:
        record = execute(chosen, data_dir, scratch, logs_beside(out), report, timeline)
    record.write(out)
    clocks = record.clocks
    proof = "" if record.proof is None else f", restore {'proved' if record.proof.equal else 'NOT EQUAL'}"
    console.print(
        f"{chosen.title()}: {clocks.iterations_per_s:.3g} iterations/s, "
        f"{record.counts.durable} durable checkpoints{proof}, {record.wall_s:.0f} s in all"
    )
    if as_json:
        emit_json(record.model_dump(mode="json"))
    if check:
        from lastgood.cli.check import print_verdict
        from lastgood.experiments.records.verdict import judge

        faults = judge(record)
        print_verdict(out, record, faults)
        if faults:
            raise typer.Exit(1)
    if record.proof is not None and not record.proof.equal:
        # Not a failure of the run: that a system cannot restore is a result, and every figure marks it.
        console.print(f"[red]{chosen.title()}: the restored state differs from the live one; see the record's proof")


def _over_ranks(
    spec: RunSpec,
    data_dir: Path,
    scratch: Path,
    logs: Path,
    report: Callable[[str], None],
    timeline: Path | None,
    hostfile: Path | None,
    ssh_config: Path | None,
    how: str,
    rate: str | None,
) -> RunRecord:
    from lastgood.cluster.launch.order import HOWS
    from lastgood.errors import ConfigError
    from lastgood.experiments.multirank.execute import execute_ranks
    from lastgood.experiments.services.place import RankHosts

    if timeline is not None:
        raise ConfigError("--timeline is for runs of one rank")
    if how not in HOWS:
        raise ConfigError(f"--how {how}: unknown; known: {', '.join(HOWS)}")

    def stop(number: int, _: object) -> None:
        # As an exception, so that ranks on other hosts, and a testbed, end with this.
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    return execute_ranks(spec, data_dir, scratch, logs, report, RankHosts(hostfile, ssh_config, how, rate))
