"""`lastgood run`: one measurement of any kind, one record."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lastgood.cli._output import console, emit_json
from lastgood.errors import ConfigError

if TYPE_CHECKING:
    from lastgood.experiments.records.base import Spec
    from lastgood.experiments.services.place import RankHosts

__all__ = ["run"]


def run(
    spec: Annotated[
        str | None, typer.Option(help="The run as one line of JSON; `lastgood plan FIGURE --json` prints it.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The record to write; `lastgood collect` takes it at the path that `lastgood plan --json` names."
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="In place of --spec and --out: all runs that `lastgood plan FIGURE --json` wrote here (-: stdin) "
            "and that have no record yet, one after the other, in forks of one process.",
        ),
    ] = None,
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
    """Measure one run and write its record, which appears complete or not at all; or the runs of a plan.

    Its spec says which kind it is: a run, a goodput run (a training that is killed and restarts), updates of shadows.
    Waits for its turn: one measurement at a time on a machine. A run over several ranks (docs/multinode.md) goes to
    the hosts of a hostfile. The logs of one that fails stay beside its record, in r0.logs for r0.json, until the next.
    """
    from lastgood.experiments.records.kinds import parse_spec
    from lastgood.experiments.runs.fork_server import ADDRESS
    from lastgood.experiments.runs.logs import logs_beside
    from lastgood.processes import die_with_parent

    if end_with is not None:
        die_with_parent(end_with)
    if plan is not None:
        if (spec, out, check, timeline, as_json) != (None, None, False, None, False):
            raise ConfigError("--plan: its runs have their own specs and records; leave --spec, --out and the like out")
        _run_plan(plan, data_dir, scratch)
        return
    if spec is None or out is None:
        raise ConfigError("nothing to run: give --spec and --out, or --plan (`lastgood plan FIGURE --json` prints it)")
    # Without the parent's process: the line is there to be called again.
    line = re.sub(r" --end-with[ =]\d+", "", shlex.join(["lastgood", *sys.argv[1:]]))
    kind, chosen = parse_spec(spec, "--spec")
    status = _run_in_fork(os.environ.get(ADDRESS), chosen, shlex.split(line)[1:])
    if status is not None:
        raise typer.Exit(status)
    sys.stderr.write(line + "\n")
    title = chosen.title()
    given = {"check": check or None, "timeline": timeline, "hosts": _hosts(hostfile, ssh_config, how, rate)}
    options = {name: value for name, value in given.items() if value is not None}
    if unknown := options.keys() - kind.options:
        names = ", ".join(_OPTIONS[name] for name in sorted(unknown))
        raise ConfigError(f"{names}: {title} is {kind.name}, which has no such option; leave it out")
    options.pop("check", None)

    def report(text: str) -> None:
        # Plain lines, also at a terminal: a moving status line would be a thread, and the run forks.
        console.print(f"{title}: {text}")

    record = kind.function("execute")(chosen, data_dir, scratch, logs_beside(out), report, **options)
    record.write(out)
    report(record.summary())
    for mark in record.marks():
        # Not a failure of the run: that a system cannot restore is a result, and every figure marks it.
        console.print(f"{title}: {mark}", style="red")
    if as_json:
        emit_json(record.model_dump(mode="json"))
    if check:
        from lastgood.cli.check import print_verdict

        faults = record.faults()
        print_verdict(out, record, faults)
        if faults:
            raise typer.Exit(1)


def _run_in_fork(address: str | None, spec: Spec, command: list[str]) -> int | None:
    """The exit status of a fork of the server's at `address` that does this; None if it is to be done here."""
    from lastgood.experiments.runs.fork_server import run_in_fork

    # Other measurements start processes of their own, perhaps on other hosts.
    if address is None or spec.workload is None or spec.over_ranks:
        return None
    return run_in_fork(address, spec.workload, command)


def _run_plan(plan: Path, data_dir: Path, scratch: Path) -> None:
    """Make what a plan misses. One that fails does not stop the others; exits with 1 then, naming it."""
    from lastgood.experiments.records.kinds import parse_spec
    from lastgood.experiments.runs.fork_server import start_fork_server
    from lastgood.text import parse_json, read_bytes
    from lastgood.units import MIB

    most_bytes = 64 * MIB
    content = sys.stdin.buffer.read(most_bytes) if str(plan) == "-" else read_bytes(plan, most_bytes)
    found = parse_json(content, f"--plan {plan}", most_bytes=most_bytes, error=ConfigError)
    try:
        runs = [(json.dumps(one["spec"]), Path(one["record"])) for one in found["runs"]]
    except (KeyError, TypeError):
        raise ConfigError(f"--plan {plan}: is no plan; make one with `lastgood plan FIGURE --json`") from None
    left = [(text, record, parse_spec(text, f"--plan {plan}")[1]) for text, record in runs if not record.exists()]
    failed: list[str] = []
    server = start_fork_server(console.print)
    try:
        for number, (text, record, spec) in enumerate(left, start=1):
            console.print(f"{number} of {len(left)}: {spec.title()}")
            command = ["run", "--spec", text, "--out", str(record), "--data-dir", str(data_dir)]
            command += ["--scratch", str(scratch)]
            status = _run_in_fork(None if server is None else server.address, spec, command)
            if status is None:
                status = subprocess.call([sys.executable, "-m", "lastgood", *command])
            if status != 0:
                failed.append(spec.title())
    finally:
        if server is not None:
            server.close()
    if failed:
        console.print(f"{len(failed)} of {len(left)} runs failed: {', '.join(failed)}", style="red")
        raise typer.Exit(1)


_OPTIONS = {"check": "--check", "timeline": "--timeline", "hosts": "--hostfile, --ssh-config, --how or --rate"}


def _hosts(hostfile: Path | None, ssh_config: Path | None, how: str, rate: str | None) -> RankHosts | None:
    """What the user says about hosts; None if nothing."""
    if (hostfile, ssh_config, how, rate) == (None, None, "ssh", None):
        return None
    from lastgood.cluster.launch.order import HOWS
    from lastgood.experiments.services.place import RankHosts

    if how not in HOWS:
        raise ConfigError(f"--how {how}: unknown; known: {', '.join(HOWS)}")
    return RankHosts(hostfile, ssh_config, how, rate)
