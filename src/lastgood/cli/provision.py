"""`lastgood provision`: hosts made ready over SSH, and cloud VMs to make ready. docs/provisioning.md describes both."""

from __future__ import annotations

import getpass
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lastgood.cli._app import App
from lastgood.cli._output import console, emit_json, emit_table
from lastgood.errors import ConfigError, ProvisionError
from lastgood.units import format_bytes

if TYPE_CHECKING:
    from lastgood.cluster.provision.cloud import Cloud, Vm
    from lastgood.cluster.provision.facts import HostReport
    from lastgood.cluster.provision.revision import Bundle

__all__ = ["app"]

app = App(help="Make hosts ready over SSH; create, list and destroy cloud VMs.", no_args_is_help=True)
cloud_app = App(help="Cloud VMs with tags: create, list, destroy. They cost money.", no_args_is_help=True)
app.add_typer(cloud_app, name="cloud")


class Prerequisites(str, Enum):
    """What to do with install/install_preq_at_vm.sh."""

    apply = "apply"
    dry_run = "dry-run"
    skip = "skip"


class Provider(str, Enum):
    """Clouds that can be used."""

    aws = "aws"
    gcp = "gcp"


class Address(str, Enum):
    """Which address of a VM goes into a hostfile."""

    public = "public"
    private = "private"


AsJson = Annotated[bool, typer.Option("--json", help="Print to stdout as JSON.")]


@app.command()
def run(
    hostfile: Annotated[Path, typer.Argument(help="A DeepSpeed hostfile: one host a line, NAME slots=N.")],
    ssh_config: Annotated[
        Path | None, typer.Option(envvar="LASTGOOD_SSH_CONFIG", help="An ssh configuration instead of your own.")
    ] = None,
    user: Annotated[str | None, typer.Option(help="Log in as this user [default: ssh's].")] = None,
    target: Annotated[str, typer.Option(help="The checkout's folder on the hosts.")] = "~/lastgood",
    check: Annotated[bool, typer.Option("--check", help="Change nothing; say what would change.")] = False,
    prerequisites: Annotated[Prerequisites, typer.Option(help="System packages.")] = Prerequisites.apply,
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
    as_json: AsJson = False,
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
        steps=Steps(prerequisites.value, gpu, reboot, install, check),
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
        console.print(f"reboot {', '.join(rebooting)} for the driver, or call again with --reboot", markup=False)
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


# -- clouds --------------------------------------------------------------------------------------------------------

ProviderOption = Annotated[Provider, typer.Option(help="Which cloud.")]
RegionOption = Annotated[str | None, typer.Option(help="AWS: the region.")]
ZoneOption = Annotated[str | None, typer.Option(help="GCP: the zone. AWS: one zone of the region.")]
ProjectOption = Annotated[str | None, typer.Option(help="GCP: the project [default: that of your credentials].")]
EndpointOption = Annotated[str | None, typer.Option(help="A stand-in for the cloud's address, for tests.")]


@cloud_app.command()
def create(
    provider: ProviderOption,
    machine: Annotated[str, typer.Option(help="Machine type; docs/provisioning.md lists those of the papers.")],
    count: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
    name: Annotated[str | None, typer.Option(help="Name of the run [default: made from the time].")] = None,
    owner: Annotated[str | None, typer.Option(help="For the tag `owner` [default: your user name].")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Cheaper, and taken away at any time.")] = False,
    region: RegionOption = None,
    zone: ZoneOption = None,
    project: ProjectOption = None,
    image: Annotated[str | None, typer.Option(help="An image [default: the newest Ubuntu 24.04].")] = None,
    disk_gb: Annotated[int | None, typer.Option(min=20, max=16384, help="Size of the disk.")] = None,
    ssh_public_key: Annotated[Path | None, typer.Option(help="Key file (.pub) to log in with, as user ubuntu.")] = None,
    network: Annotated[str | None, typer.Option(help="AWS: a security group. GCP: a network.")] = None,
    hostfile: Annotated[Path | None, typer.Option(help="Write the VMs' addresses here.")] = None,
    address: Annotated[Address, typer.Option(help="Which address the hostfile has.")] = Address.public,
    max_usd_per_hour: Annotated[float, typer.Option(help="Refuse to cost more, without --yes.")] = 10.0,
    usd_per_hour: Annotated[float | None, typer.Option(help="Price of one VM, where the table lacks it.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Also above --max-usd-per-hour.")] = False,
    endpoint: EndpointOption = None,
    timeout_s: Annotated[float, typer.Option(min=1, help="Until all VMs run.")] = 900.0,
    as_json: AsJson = False,
) -> None:
    """Create VMs and wait until they run. The command that destroys them is printed first."""
    from lastgood.cluster.hostfile import Host, write_hostfile
    from lastgood.cluster.provision.cloud import Order, create_vms
    from lastgood.cluster.provision.machines import find_machine, guard_price, price_order

    kind = find_machine(provider.value, machine)
    created = Order.now()
    order = Order(
        machine=machine,
        count=count,
        run=name or f"lg-{created[:15].replace('t', '-')}",
        owner=_owner(owner),
        disk_gb=disk_gb or kind.disk_gb,
        spot=spot,
        image=image,
        ssh_key=None if ssh_public_key is None else _public_key(ssh_public_key),
        network=network,
        created=created,
    )
    price = price_order(provider.value, machine, count, order.disk_gb, usd_per_hour)
    guard_price(price, f"{count} x {machine}", max_usd_per_hour, yes=yes)
    cloud = _open_cloud(provider, region, zone, project, endpoint)
    _say(f"{count} x {machine}: about {price.usd_per_hour:.2f} USD an hour ({price.source}); run {order.run}")
    vms = create_vms(cloud, order, _say, timeout_s=timeout_s)
    if hostfile is not None:
        chosen = [vm.address if address is Address.public else vm.private_address for vm in vms]
        hosts = [Host(where, max(1, kind.gpus)) for where in chosen if where is not None]
        write_hostfile(hostfile, hosts, f"{machine} of {provider.value}, run {order.run}")
        _say(f"next: lastgood provision run {hostfile} --user ubuntu --accept-new-keys --reboot")
    _print_vms(vms, as_json=as_json)


@cloud_app.command("list")
def list_vms(
    provider: ProviderOption,
    name: Annotated[str | None, typer.Option(help="Only this run.")] = None,
    region: RegionOption = None,
    zone: ZoneOption = None,
    project: ProjectOption = None,
    endpoint: EndpointOption = None,
    as_json: AsJson = False,
) -> None:
    """List the VMs that carry the tag project=lastgood; others are not seen. AWS: of one region."""
    from lastgood.cluster.provision.cloud import check_run_name

    if name is not None:
        check_run_name(name)
    _print_vms(_open_cloud(provider, region, zone, project, endpoint).find(name), as_json=as_json)


@cloud_app.command()
def destroy(
    provider: ProviderOption,
    name: Annotated[str, typer.Option(help="The run whose VMs end.")],
    region: RegionOption = None,
    zone: ZoneOption = None,
    project: ProjectOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without, only say what would be destroyed.")] = False,
    endpoint: EndpointOption = None,
    timeout_s: Annotated[float, typer.Option(min=1, help="Until all are gone.")] = 600.0,
) -> None:
    """Destroy the VMs of a run, with their disks, and wait until they are gone. Only VMs with the tags are touched."""
    from lastgood.cluster.provision.cloud import destroy_vms

    gone = destroy_vms(_open_cloud(provider, region, zone, project, endpoint), name, _say, yes=yes, timeout_s=timeout_s)
    _say(f"{len(gone)} VMs destroyed" if gone else f"there are no VMs of run {name} here; nothing to do")


def _open_cloud(
    provider: Provider, region: str | None, zone: str | None, project: str | None, endpoint: str | None
) -> Cloud:
    if provider is Provider.gcp:
        from lastgood.cluster.provision.cloud_gcp import GcpCloud

        if region is not None:
            raise ConfigError("--region is for AWS; on GCP give --zone, such as us-central1-a")
        return GcpCloud(project, zone, endpoint)
    from lastgood.cluster.provision.cloud_aws import AwsCloud

    if project is not None:
        raise ConfigError("--project is for GCP; on AWS the credentials say whose account it is")
    # The zone us-east-1a lies in the region us-east-1.
    region = region or (zone[:-1] if zone is not None and zone[-1:].isalpha() else None)
    if region is None:
        raise ConfigError("AWS: give --region, such as us-east-1, or --zone")
    return AwsCloud(region, zone, endpoint)


def _say(text: str) -> None:
    console.print(text, markup=False)


def _owner(name: str | None) -> str:
    if name is None:
        try:
            name = getpass.getuser()
        except (KeyError, OSError):
            name = "unknown"
    # What every cloud takes as a tag's value.
    return re.sub(r"[^a-z0-9_-]", "-", name.lower())[:60]


def _public_key(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(16385).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--ssh-public-key {path}: cannot be read: {error}; `ssh-keygen -t ed25519` makes one"
        ) from error
    if (
        not re.fullmatch(r"(ssh|ecdsa|sk)-[A-Za-z0-9@.-]+ [A-Za-z0-9+/=]+( [A-Za-z0-9@._+ -]*)?", text)
        or len(text) > 16384
    ):
        raise ConfigError(f"--ssh-public-key {path}: not one line of a public key; name the file that ends in .pub")
    return text


def _print_vms(vms: list[Vm], *, as_json: bool) -> None:
    if as_json:
        emit_json([vars(vm) for vm in vms])
        return

    def rest(vm: Vm) -> tuple[str | None, ...]:
        return vm.private_address, vm.owner, vm.created

    columns = ("run", "name", "id", "machine", "spot", "state", "zone", "public", "private", "owner", "created")
    rows = [
        (vm.run, vm.name, vm.id, vm.machine, "spot" if vm.spot else "", vm.state, vm.zone, vm.address, *rest(vm))
        for vm in vms
    ]
    emit_table("VMs with the tag project=lastgood", columns, rows)
