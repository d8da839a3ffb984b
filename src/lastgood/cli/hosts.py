"""`lastgood hosts`: make a hostfile, and check that its hosts are fit to train together."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lastgood.cli._app import App
from lastgood.cli._output import console, emit_json, emit_table, reporter
from lastgood.errors import ConfigError
from lastgood.units import format_bytes, format_rate, option_bytes

if TYPE_CHECKING:
    from lastgood.cluster.host_check.check import CheckReport
    from lastgood.cluster.hostfile import Hostfile

__all__ = ["app"]

app = App(help="Hostfiles of several machines: make one, check its hosts.", no_args_is_help=True)

SshConfig = Annotated[
    Path | None,
    typer.Option("--ssh-config", help="ssh configuration; by default $LASTGOOD_SSH_CONFIG, else your own."),
]


@app.command()
def make(
    hosts: Annotated[list[str], typer.Argument(help="Addresses or names, in the order of ranks.")],
    slots: Annotated[int, typer.Option(help="Processes on each host: its GPUs.")] = 1,
    out: Annotated[Path, typer.Option(help="The hostfile to write.")] = Path("hostfile"),
    user: Annotated[str | None, typer.Option(help="The user on the hosts, for the ssh configuration.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a hostfile of other hosts.")] = False,
) -> None:
    """Write a DeepSpeed hostfile, and print what ssh needs to reach hosts that a cloud has just made."""
    from lastgood.cluster.hostfile import Host, read_hostfile, write_hostfile
    from lastgood.cluster.ssh.remote import SshOptions

    SshOptions(user=user)  # refuses what is no user's name
    wanted = tuple(Host(name, slots) for name in hosts)
    if out.exists() and not force and read_hostfile(out).hosts != wanted:
        raise ConfigError(f"{out}: there are other hosts in it; choose another --out, or replace it with --force")
    made = write_hostfile(out, wanted, f"written by lastgood hosts make; {slots} slots a host")
    console.print(f"{out}: {len(made.hosts)} hosts, {made.slots} slots")
    sys.stdout.write(_steps(made, user, out))


def _steps(hostfile: Hostfile, user: str | None, out: Path) -> str:
    who = user or "USER"
    copies = "".join(f"ssh-copy-id -i ~/.ssh/lastgood.pub {who}@{name}\n" for name in hostfile.names)
    return (
        "\n# 1. A key without a passphrase (or add it to an agent), and its public half on every host:\n"
        "ssh-keygen -t ed25519 -N '' -f ~/.ssh/lastgood\n"
        f"{copies}"
        "\n# 2. In ~/.ssh/config, here and on every host (ranks reach each other by these names too):\n"
        f"Host {' '.join(hostfile.names)}\n"
        f"    User {who}\n"
        "    IdentityFile ~/.ssh/lastgood\n"
        "    IdentitiesOnly yes\n"
        "\n# 3. Their host keys: compare the fingerprints that this shows with those of the cloud's console:\n"
        f"ssh-keyscan -t ed25519 {' '.join(hostfile.names)} | tee -a ~/.ssh/known_hosts | ssh-keygen -lf -\n"
        "\n# 4. Whether they can train together:\n"
        f"lastgood hosts check {out}\n"
    )


@app.command()
def check(
    hostfile: Annotated[Path, typer.Argument(help="The hostfile.")],
    ssh_config: SshConfig = None,
    user: Annotated[str | None, typer.Option(help="The user on the hosts.")] = None,
    python: Annotated[str, typer.Option(help="Python on the hosts, with Lastgood installed.")] = sys.executable,
    folder: Annotated[
        str, typer.Option(help="Folder on the hosts whose free space counts; relative to the login folder.")
    ] = ".",
    min_free: Annotated[str, typer.Option(help="Free space that each host needs.")] = "4 GiB",
    ports: Annotated[str, typer.Option(help="Control ports that must be free and reachable.")] = "29500-29509",
    clock_limit_ms: Annotated[float, typer.Option(help="How far a clock may be from this machine's.")] = 100.0,
    connect_timeout: Annotated[int, typer.Option(help="Seconds that a connection may take.")] = 10,
    bandwidth: Annotated[
        bool, typer.Option(help="Let all hosts send to each other, up to 64 MiB and 2 s a pair.")
    ] = True,
    min_bandwidth: Annotated[str, typer.Option(help="Bytes per second that each pair needs, as 100 MB.")] = "0",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report to stdout as JSON.")] = False,
) -> None:
    """Check ssh, clocks, code, versions, disk, GPUs, ports and network of all hosts; exit 1 if one has a fault."""
    from lastgood.cluster.host_check.check import CheckOptions, check_hosts
    from lastgood.cluster.hostfile import read_hostfile
    from lastgood.cluster.ssh.remote import Remote, SshOptions

    options = CheckOptions(
        python=python,
        folder=folder,
        min_free_bytes=option_bytes("--min-free", min_free),
        ports=_ports(ports),
        clock_limit_s=clock_limit_ms / 1e3,
        bandwidth=bandwidth,
        min_bytes_per_s=option_bytes("--min-bandwidth", min_bandwidth),
    )
    hosts = read_hostfile(hostfile)
    remote = Remote(SshOptions.choose(ssh_config, user, connect_timeout_s=connect_timeout))
    report = check_hosts(hosts, remote, options, reporter("hosts"))
    if as_json:
        emit_json(report.as_json())
    else:
        _show(hosts, report)
    if not report.ok:
        raise typer.Exit(1)


def _ports(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
    if found is None:
        raise ConfigError(f"--ports: not a range: {text[:80]!r}; write it as 29500-29509")
    return int(found[1]), int(found[2])


def _show(hostfile: Hostfile, report: CheckReport) -> None:
    from lastgood.cluster.host_check.check import clock_text

    rows = []
    for host in hostfile.hosts:
        facts, clock = report.facts.get(host.name), report.clocks.get(host.name)
        if facts is None or clock is None:
            rows.append([host.name, "not reached", *[""] * 6])
            continue
        slowest = report.slowest_from(host.name)
        code = "missing" if facts.code is None else (facts.revision or facts.code or "")[:12]
        free = "no such folder" if facts.free_bytes is None else f"{format_bytes(facts.free_bytes)} free"
        rate = "" if slowest is None else f"{format_rate(slowest.bytes_per_s or 0.0)} to {slowest.target}"
        versions = f"{facts.python}, torch {facts.torch or 'missing'}"
        rows.append(
            [
                host.name,
                clock_text(clock),
                code,
                versions,
                free,
                f"{len(facts.gpus)} / {host.slots}",
                rate,
                facts.hostname,
            ]
        )
    columns = ("host", "clock", "code", "Python", "disk", "GPUs / slots", "slowest sending", "calls itself")
    emit_table(f"Hosts of {hostfile.origin}", columns, rows)
    if report.findings:
        faults = [(one.verdict, one.host, one.what, one.found, one.to_do) for one in report.findings]
        emit_table("What is not well", ("", "host", "what", "found", "to do"), faults)
    else:
        console.print("all hosts are well")
