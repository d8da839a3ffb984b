"""`lastgood provision`: hosts made ready over SSH. docs/provisioning.md describes it, and where cloud VMs come from."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lastgood.cli._app import App
from lastgood.cli._output import console, emit_json, emit_table
from lastgood.errors import ConfigError, ProvisionError
from lastgood.units import format_bytes

if TYPE_CHECKING:
    from lastgood.cluster.provision.facts import HostReport
    from lastgood.cluster.provision.revision import Bundle

__all__ = ["app"]

app = App(help="Make hosts ready over SSH.", no_args_is_help=True)


@app.command()
def run(
    hostfile: Annotated[Path, typer.Argument(help="A DeepSpeed hostfile: one host a line, NAME slots=N.")],
    ssh_config: Annotated[
        Path | None, typer.Option(envvar="LASTGOOD_SSH_CONFIG", help="An ssh configuration instead of your own.")
    ] = None,
    user: Annotated[str | None, typer.Option(help="Log in as this user [default: ssh's].")] = None,
    target: Annotated[str, typer.Option(help="The checkout's folder on the hosts.")] = "~/lastgood",
    check: Annotated[bool, typer.Option("--check", help="Change nothing; say what would change.")] = False,
    prerequisites: Annotated[Literal["apply", "dry-run", "skip"], typer.Option(help="System packages.")] = "apply",
    gpu: Annotated[bool, typer.Option(help="Driver and CUDA, on hosts with a GPU.")] = True,
    reboot: Annotated[bool, typer.Option("--reboot", help="Reboot hosts whose new driver needs it.")] = False,
    install: Annotated[bool, typer.Option(help="Run install.sh on the hosts.")] = True,
    carry_changes: Annotated[
        bool, typer.Option("--carry-changes", help="Send a tree with changes, as a commit of their own.")
    ] = False,
    accept_new_keys: Annotated[
        bool, typer.Option("--accept-new-keys", help="Trust hosts that ssh has never seen, such as fresh VMs.")
    ] = False,
    ask_become_pass: Annotated[
        bool, typer.Option("--ask-become-pass", help="Ask for the hosts' sudo password.")
    ] = False,
    facts_dir: Annotated[Path, typer.Option(help="Folder for one JSON file of facts a host.")] = Path("logs/provision"),
    timeout_s: Annotated[float, typer.Option(min=1, help="For all hosts together.")] = 7200.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print to stdout as JSON.")] = False,
) -> None:
    """Bring every host of HOSTFILE to this checkout's revision, ready to run; a second call changes nothing.

    Exits with 1 if a host failed; the others are finished all the same.
    """
    from lastgood.cluster.hostfile import read_hostfile
    from lastgood.cluster.provision.inventory import Connection
    from lastgood.cluster.provision.playbook import Provisioning, Steps, provision_hosts
    from lastgood.experiments.plan.grid import find_root
    from lastgood.files import write_atomically

    wanted = Provisioning(
        root=find_root(),
        hostfile=read_hostfile(hostfile),
        connection=Connection(ssh_config, user, accept_new_keys, ask_become_pass),
        steps=Steps(prerequisites, gpu, reboot, install, check),
        target=target,
        carry_changes=carry_changes,
        timeout_s=timeout_s,
    )
    with _writing_facts(facts_dir):  # tried before the hosts are busy for an hour
        facts_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=facts_dir).close()
    bundle, reports = provision_hosts(wanted)
    with _writing_facts(facts_dir):
        for report in reports:
            content = (report.model_dump_json(indent=1) + "\n").encode()
            write_atomically(facts_dir / f"{report.host}.json", content, mode=None)
    if as_json:
        emit_json([report.model_dump(mode="json") for report in reports])
    else:
        _print_reports(bundle, reports, check=check)
    rebooting = [report.host for report in reports if report.reboot_needed]
    if rebooting:
        console.print(f"reboot {', '.join(rebooting)} for the driver, or call again with --reboot")
    failed = [report for report in reports if report.failure is not None]
    if failed:
        told = "\n".join(f"  {report.host}: {_first_lines(report.failure)}" for report in failed)
        raise ProvisionError(f"{len(failed)} of {len(reports)} hosts failed; mend that and call again:\n{told}")


@contextmanager
def _writing_facts(facts_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ProvisionError(f"{facts_dir}: the facts cannot be written: {error}; name another --facts-dir") from error


def _first_lines(text: str | None) -> str:
    return "\n    ".join((text or "").splitlines()[:6])


def _print_reports(bundle: Bundle, reports: list[HostReport], *, check: bool) -> None:
    rows = []
    for report in reports:
        facts = report.facts
        state = "unreachable" if report.unreachable else "FAILED" if report.failure is not None else "ready"
        row = [report.host, "checked" if check and state == "ready" else state, report.changed]
        if facts is not None:
            gpus = f"{len(facts.gpus)} x {facts.gpus[0]}, driver {facts.driver}" if facts.gpus else "none"
            row += [facts.os, facts.kernel, f"{facts.cores} x {facts.cpu}", format_bytes(facts.memory_bytes)]
            row += [format_bytes(facts.disk_free_bytes), gpus, facts.python, facts.torch]
            row += [None if facts.revision is None else facts.revision[:12]]
        rows.append(row + [None] * (12 - len(row)))
    carried = f", with {len(bundle.carried)} changed files" if bundle.carried else ""
    columns = ("host", "", "would change" if check else "changed", "system", "kernel", "cores", "memory", "free disk")
    title = f"Revision {bundle.revision[:12]}{carried}"
    emit_table(title, (*columns, "GPUs", "Python", "torch", "revision"), rows)


@app.command(
    "cloud",
    hidden=True,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def _replaced() -> None:
    """Of earlier versions. To be removed in version 0.2."""
    raise ConfigError(
        "provision cloud is replaced by two playbooks: `ansible-playbook install/ansible/cloud_aws.yml` and "
        "cloud_gcp.yml; docs/provisioning.md describes them"
    )
