"""Runs install/ansible/provision.yml over the hosts of a hostfile."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lastgood.cluster.hostfile import Hostfile
from lastgood.cluster.provision.facts import HostReport, read_report
from lastgood.cluster.provision.inventory import Connection, make_inventory
from lastgood.cluster.provision.revision import Bundle, bundle_checkout
from lastgood.errors import ConfigError, ProvisionError
from lastgood.processes import wait_or_kill

__all__ = ["DEFAULT_TARGET", "Provisioning", "Steps", "find_ansible", "provision_hosts"]

DEFAULT_TARGET = "~/lastgood"
_TARGET = re.compile(r"(~/|/)[A-Za-z0-9_./-]+")
_GRACE_S = 20.0


@dataclass(frozen=True)
class Steps:
    """What is done on each host.

    `prerequisites`: run install/install_preq_at_vm.sh, only print its commands, or leave it out. `gpu`: driver and CUDA
    if a host has a GPU. `reboot`: if a new driver needs it. `install`: run install.sh.
    """

    prerequisites: Literal["apply", "dry-run", "skip"] = "apply"
    gpu: bool = True
    reboot: bool = False
    install: bool = True
    check: bool = False
    """Change nothing: say what would change."""


@dataclass(frozen=True)
class Provisioning:
    """A provisioning: from which checkout, onto which hosts, into which folder there; `timeout_s` bounds all of it."""

    root: Path
    hostfile: Hostfile
    connection: Connection = field(default_factory=Connection)
    steps: Steps = field(default_factory=Steps)
    target: str = DEFAULT_TARGET
    carry_changes: bool = False
    timeout_s: float = 7200.0


def find_ansible() -> str:
    """The ansible-playbook beside this Python, or on the path. Raises ConfigError, naming the extra that brings it."""
    beside = Path(sys.executable).with_name("ansible-playbook")
    found = str(beside) if beside.is_file() else shutil.which("ansible-playbook")
    if found is None:
        raise ConfigError(
            "there is no ansible-playbook here; pip install 'lastgood[provision]' brings it (in a checkout: pip "
            "install -e '.[provision]')"
        )
    return found


def provision_hosts(wanted: Provisioning) -> tuple[Bundle, list[HostReport]]:
    """Bring every host to the checkout's revision and report on each; Ansible's own output goes to stderr.

    A host that fails keeps no other from being finished: look at `failure` of each report. Raises ConfigError for what
    cannot work, ProvisionError if Ansible itself fails or the time is up.
    """
    if not _TARGET.fullmatch(wanted.target) or ".." in wanted.target.split("/"):
        raise ConfigError(
            f"--target: {wanted.target!r}: give an absolute folder, or one that begins with ~/, of letters, digits and "
            "_ . / -"
        )
    program = find_ansible()
    playbook = wanted.root / "install" / "ansible" / "provision.yml"
    if not playbook.is_file():
        raise ConfigError(f"{playbook}: there is no such file; is {wanted.root} a complete checkout?")
    with tempfile.TemporaryDirectory(prefix="lastgood-provision-") as name:
        folder = Path(name)
        bundle = bundle_checkout(wanted.root, folder, carry_changes=wanted.carry_changes)
        inventory, variables, report = (folder / f"{kind}.json" for kind in ("inventory", "variables", "report"))
        inventory.write_text(json.dumps(make_inventory(wanted.hostfile, wanted.connection)), encoding="utf-8")
        variables.write_text(json.dumps(_variables(wanted, bundle)), encoding="utf-8")
        command = [program, "--inventory", str(inventory), "--extra-vars", f"@{variables}", str(playbook)]
        command += ["--check"] if wanted.steps.check else []
        command += ["--ask-become-pass"] if wanted.connection.ask_become_pass else []
        code = _run(command, playbook.parent, report, wanted.timeout_s)
        reports = read_report(report, [host.name for host in wanted.hostfile.hosts])
        if code != 0 and all(found.failure is None for found in reports):
            raise ProvisionError(f"ansible-playbook ended with code {code} though no host failed; its message is above")
    return bundle, reports


def _variables(wanted: Provisioning, bundle: Bundle) -> dict[str, Any]:
    return {
        "lastgood_target": wanted.target,
        "lastgood_bundle": str(bundle.path),
        "lastgood_revision": bundle.revision,
        "lastgood_prerequisites": wanted.steps.prerequisites,
        "lastgood_gpu": wanted.steps.gpu,
        "lastgood_reboot": wanted.steps.reboot,
        "lastgood_install": wanted.steps.install,
    }


def _run(command: list[str], folder: Path, report: Path, timeout_s: float) -> int:
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(folder / "ansible.cfg"),
        "LASTGOOD_REPORT": str(report),
        # Beside the report, in a folder that is removed: ssh's sockets have no place in the user's home.
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(report.parent / "ssh"),
        # Ansible refuses to start in another encoding, and a cron job or a container has the C locale.
        "LC_ALL": "C.UTF-8",
    }
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=sys.stderr.fileno())
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise ProvisionError(
            f"provisioning did not end within {timeout_s:.0f} s and was stopped; call it again, it goes on where it "
            "was (--timeout-s gives it longer)"
        ) from None
    finally:
        if process.poll() is None:
            # Its workers end with it; a kill would leave them.
            process.terminate()
            wait_or_kill(process, _GRACE_S)
