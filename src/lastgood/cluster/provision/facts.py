"""What provisioning found and did on each host: the report of install/ansible/callback_plugins/lastgood_report.py."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from lastgood.errors import ProvisionError
from lastgood.models import FrozenModel
from lastgood.text import parse_model

__all__ = ["HostFacts", "HostReport", "read_report"]

_MOST_BYTES = 64 << 20
_Text = Field(max_length=4096)


class HostFacts(FrozenModel):
    """One host, as install/ansible/host_facts.py saw it after its provisioning. None: not there, or not known."""

    os: str = _Text
    kernel: str = _Text
    cpu: str = _Text
    cores: int
    memory_bytes: int
    disk_free_bytes: int
    gpus: list[str] = Field(max_length=64)
    driver: str | None = Field(max_length=4096)
    python: str | None = Field(max_length=4096)
    torch: str | None = Field(max_length=4096)
    revision: str | None = Field(max_length=4096)


class HostReport(FrozenModel):
    """One host's part of a provisioning: steps that changed something, and what failed if anything did."""

    host: str = _Text
    ok: int
    changed: int
    unreachable: bool
    failure: str | None
    """What failed, on which step, in Ansible's words; None if all went well."""
    reboot_needed: bool
    facts: HostFacts | None


def read_report(path: Path, hosts: list[str]) -> list[HostReport]:
    """Read the report, in the order of `hosts`. Raises ProvisionError if it is missing or names other hosts."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ProvisionError(
            f"{path}: Ansible ended without a report ({error.strerror}); its own message is above"
        ) from error
    if len(content) > _MOST_BYTES:
        raise ProvisionError(f"{path}: a report of more than {_MOST_BYTES >> 20} MiB cannot be right")
    what = f"{path}: not a report of provisioning"
    found = parse_model(_Report, content, what, most_bytes=_MOST_BYTES, error=ProvisionError)
    reports = {report.host: report for report in found.hosts}
    missing = [host for host in hosts if host not in reports]
    if missing:
        raise ProvisionError(f"{path}: no word of {', '.join(missing)}; Ansible's own message is above")
    return [reports[host] for host in hosts]


class _Report(FrozenModel):
    hosts: list[HostReport]
