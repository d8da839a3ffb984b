"""`lastgood launch`: one program on all hosts of a hostfile."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from lastgood.cli._output import console, reporter

__all__ = ["launch"]


def launch(
    program: Annotated[list[str], typer.Argument(metavar="-- CMD", help="The program, and its arguments, after `--`.")],
    hostfile: Annotated[Path, typer.Option(help="Hosts, one a line: NAME slots=N. For srun: Slurm's node names.")],
    logs: Annotated[Path, typer.Option(help="Folder for logs; each rank writes there on its own host.")],
    how: Annotated[
        str, typer.Option(help="torchrun, ssh (nothing else), deepspeed (pdsh), openmpi (DeepSpeed's, mpirun) or srun.")
    ] = "torchrun",
    ssh_config: Annotated[
        Path | None, typer.Option(help="An ssh configuration in place of your own [default: $LASTGOOD_SSH_CONFIG].")
    ] = None,
    env: Annotated[list[str] | None, typer.Option(metavar="K=V", help="A variable for all ranks; repeat it.")] = None,
    cwd: Annotated[str | None, typer.Option(help="The ranks' working folder [default: this one].")] = None,
    python: Annotated[str | None, typer.Option(help="Python on the hosts [default: this one's path].")] = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds that the program may take.")] = 86400.0,
    start_timeout_s: Annotated[float, typer.Option(help="Seconds until all ranks have started.")] = 120.0,
    master_addr: Annotated[str | None, typer.Option(help="The first host's address [default: found out].")] = None,
    master_port: Annotated[int | None, typer.Option(help="A port of the first host [default: a free one].")] = None,
    launcher_arg: Annotated[
        list[str] | None, typer.Option(metavar="ARG", help="One more word for the launcher itself; repeat it.")
    ] = None,
) -> None:
    """Run a program once for each slot of a hostfile.

    The first rank that fails ends the job and is named, with its host, exit status and last lines. Nothing outlives
    this command: Ctrl-C, SIGTERM and even SIGKILL to it end all ranks on all hosts.
    """
    import sys

    from lastgood.cluster.hostfile import read_hostfile
    from lastgood.cluster.launch.job import launch as run
    from lastgood.cluster.launch.order import HOWS
    from lastgood.cluster.ssh.remote import Remote, SshOptions
    from lastgood.errors import ConfigError
    from lastgood.processes import exit_on

    if how not in HOWS:
        raise ConfigError(f"--how {how}: unknown; known: {', '.join(HOWS)}")
    settings = {}
    for pair in env or []:
        name, sign, value = pair.partition("=")
        if not sign:
            raise ConfigError(f"--env {pair}: write NAME=VALUE")
        settings[name] = value

    exit_on(signal.SIGTERM, signal.SIGHUP)
    result = run(
        program,
        read_hostfile(hostfile),
        how,
        env=settings,
        log_dir=logs,
        timeout_s=timeout_s,
        start_timeout_s=start_timeout_s,
        remote=Remote(SshOptions.choose(ssh_config)),
        cwd=cwd,
        python=python or sys.executable,
        master_addr=master_addr,
        master_port=master_port,
        launcher_args=launcher_arg or [],
        report=reporter("launch"),
    )
    console.print(f"launch: all {len(result.ranks)} ranks ended well after {result.wall_s:.1f} s")
