"""`lastgood provision run` for real: Ansible, an sshd of its own on loopback, this machine as the host.

The checkout that is provisioned is a small git repository with this one's install/ folder; its install.sh is a stand-in
that makes .venv/bin/python, but for the slow test, which installs Lastgood itself. The prerequisites only print.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.support.git_helper import git
from tests.cluster.support.sshd import Sshd
from tests.suggestions.following import advice, follows, hear

ROOT = Path(__file__).resolve().parents[3]
INSTALL = """#!/usr/bin/env bash
set -eu
cd "$(dirname "$0")"
[ ! -x .venv/bin/python ] || { echo "== already installed in .venv"; exit 0; }
mkdir -p .venv/bin
ln -s "$(command -v "$PYTHON")" .venv/bin/python
"""

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.end()


@pytest.fixture(autouse=True)
def needs_ansible():
    if not Path(sys.executable).with_name("ansible-playbook").is_file() and shutil.which("ansible-playbook") is None:
        pytest.skip("ansible-core is not installed")


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "install", folder / "install", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "README.md").write_text("nothing\n")
    (folder / "Snakefile").write_text("# nothing\n")
    (folder / ".gitignore").write_text("/.venv/\n/logs/\n")
    (folder / "install.sh").write_text(INSTALL)
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "first")
    return folder


class Provision:
    """Calls of `lastgood provision run` in a checkout."""

    def __init__(self, sshd, checkout, folder):
        self.sshd, self.checkout, self.folder = sshd, checkout, folder
        self.target = folder / "target"

    def __call__(self, *arguments, hosts=("node",), prerequisites="dry-run"):
        hostfile = self.folder / "hosts"
        hostfile.write_text("".join(f"{host} slots=1\n" for host in hosts))
        command = [
            sys.executable,
            "-c",
            "from lastgood.cli import main; main()",
            "provision",
            "run",
            hostfile,
            "--json",
        ]
        command += ["--ssh-config", self.sshd.config, "--target", self.target, "--prerequisites", prerequisites]
        done = subprocess.run(
            [*map(str, command), "--no-gpu", "--timeout-s", "400", *arguments],
            cwd=self.checkout,
            env={**os.environ, "ANSIBLE_HOME": str(self.folder / "ansible"), "ANSIBLE_NOCOLOR": "1"},
            capture_output=True,
            text=True,
            timeout=440,
        )
        reports = {report["host"]: report for report in json.loads(done.stdout)} if done.stdout else {}
        return done, reports


@pytest.fixture
def provision(sshd, checkout, tmp_path):
    return Provision(sshd, checkout, tmp_path)


@pytest.mark.slow
def test_a_host_is_brought_to_the_revision_and_the_second_call_changes_nothing(provision, checkout):
    done, reports = provision(hosts=("node", "dead"))
    assert done.returncode == 1, done.stderr
    assert "1 of 2 hosts failed; mend that and call again:\n  dead: " in done.stderr
    assert reports["dead"]["unreachable"] and reports["dead"]["facts"] is None
    found = reports["node"]
    assert found["failure"] is None and found["changed"] > 0, done.stderr
    head = git(checkout, "rev-parse", "HEAD")
    facts = found["facts"]
    assert facts["revision"] == head == git(provision.target, "rev-parse", "HEAD")
    assert facts["kernel"] == platform.release() and facts["cores"] == len(os.sched_getaffinity(0))
    assert facts["memory_bytes"] > 0 and facts["disk_free_bytes"] > 0
    assert facts["python"].startswith("3.") and facts["torch"] is None
    assert json.loads((checkout / "logs/provision/node.json").read_text()) == found

    done, reports = provision()
    assert done.returncode == 0, done.stderr
    assert reports["node"]["changed"] == 0, done.stderr
    assert reports["node"]["facts"]["revision"] == head
    assert not list(provision.target.parent.glob("target.provision/*.bundle"))


@pytest.mark.slow
def test_a_check_changes_nothing_and_says_what_would_change(provision):
    done, reports = provision("--check")
    assert done.returncode == 0, done.stderr
    assert reports["node"]["changed"] > 0 and reports["node"]["facts"]["revision"] is None
    assert not provision.target.exists()
    assert provision()[1]["node"]["changed"] > 0
    assert provision("--check")[1]["node"]["changed"] == 0


@pytest.mark.slow
def test_changes_are_carried_when_asked_for_and_never_overwritten_on_a_host(provision, checkout):
    (checkout / "evaluation" / "README.md").write_text("changed\n")
    done, _ = provision()
    assert done.returncode == 2
    assert "1 files differ from the commit" in done.stderr
    done, _ = provision("--carry-changes")
    assert done.returncode == 0, done.stderr
    assert (provision.target / "evaluation" / "README.md").read_text() == "changed\n"
    assert provision("--carry-changes")[1]["node"]["changed"] == 0
    (provision.target / "Snakefile").write_text("# the host's own\n")
    (checkout / "evaluation" / "README.md").write_text("changed again\n")
    done, reports = provision("--carry-changes")
    assert done.returncode == 1
    assert "has changes of its own" in reports["node"]["failure"] and "Snakefile" in reports["node"]["failure"]
    assert (provision.target / "Snakefile").read_text() == "# the host's own\n"


@pytest.mark.slow
def test_a_failing_installation_is_told_with_its_words(provision, checkout):
    (checkout / "install.sh").write_text("echo no room here >&2; exit 7\n")
    git(checkout, "commit", "--quiet", "-am", "broken")
    done, reports = provision()
    assert done.returncode == 1
    assert "Run install.sh" in reports["node"]["failure"] and "no room here" in reports["node"]["failure"]
    assert "node: Run install.sh" in done.stderr


@pytest.mark.slow
@follows("provisioning did not end within {} s and was stopped; call it again, it goes on where it was (--timeout-s")
def test_a_provisioning_that_takes_too_long_goes_on_where_it_was(provision, checkout):
    waiting = f"[ -e {checkout}/go-on ] || {{ echo $$ >{checkout}/pid; exec sleep 300; }}\n"
    (checkout / "install.sh").write_text(INSTALL.replace("set -eu\n", f"set -eu\n{waiting}"))
    git(checkout, "commit", "--quiet", "-am", "slow")
    (checkout / ".git" / "info" / "exclude").write_text("/go-on\n/pid\n")
    done, _ = provision("--timeout-s", "20")
    assert done.returncode == 1
    longer = advice(hear(done.stderr), r"\((--timeout-s) gives it longer\)")
    head = git(checkout, "rev-parse", "HEAD")
    (checkout / "go-on").touch()
    if (checkout / "pid").exists():  # it has come so far, and sleeps
        os.kill(int((checkout / "pid").read_text()), signal.SIGKILL)
    done, reports = provision(longer, "300")
    assert done.returncode == 0, done.stderr
    assert reports["node"]["facts"]["revision"] == head and (provision.target / ".venv/bin/python").exists()


@pytest.mark.slow
@follows("reboot {} for the driver, or call again with --reboot")
def test_a_driver_that_needs_a_reboot(provision, checkout):
    """The driver and the reboot are played: this machine has no such device, and stays up."""
    driven = checkout / "rebooted"
    (checkout / ".git" / "info" / "exclude").write_text("/rebooted\n")
    needed = f"#!/bin/bash\n[ -e {driven} ] && echo reboot: none || echo reboot: needed\necho changed: yes\n"
    (checkout / "install" / "install_preq_at_vm.sh").write_text(needed)
    book = checkout / "install" / "ansible" / "provision.yml"
    steps = re.sub(
        r"ansible\.builtin\.reboot:\n( +)msg: .*\n +reboot_timeout: \d+",
        rf"ansible.builtin.command:\n\1argv: [touch, {driven}]",
        book.read_text(),
    )
    assert "reboot:\n" not in steps and f"[touch, {driven}]" in steps
    book.write_text(steps)
    git(checkout, "commit", "--quiet", "-am", "a driver")
    done, reports = provision(prerequisites="apply")
    assert done.returncode == 0 and reports["node"]["reboot_needed"], done.stderr
    message = hear(done.stderr)
    again = advice(message, r"for the driver, or call again with (--reboot)")
    assert advice(message, r"reboot (\w+) for the driver") == "node"
    done, reports = provision(again, prerequisites="apply")
    assert done.returncode == 0 and driven.exists(), done.stderr
    assert not reports["node"]["reboot_needed"] and "for the driver" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_lastgood_itself_is_installed(sshd, tmp_path):
    """The whole way: this very checkout, its own install.sh, into an empty folder."""
    provision = Provision(sshd, ROOT, tmp_path)
    hostfile = tmp_path / "hosts"
    hostfile.write_text("node slots=1\n")
    command = [
        sys.executable,
        "-c",
        "from lastgood.cli import main; main()",
        "provision",
        "run",
        str(hostfile),
        "--json",
    ]
    command += ["--ssh-config", str(sshd.config), "--target", str(provision.target), "--prerequisites", "skip"]
    command += ["--carry-changes", "--facts-dir", str(tmp_path / "facts"), "--timeout-s", "1500"]
    environment = {**os.environ, "ANSIBLE_HOME": str(tmp_path / "ansible")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1600)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert found["facts"]["torch"] and found["changed"] > 0
    doctor = [provision.target / ".venv" / "bin" / "lastgood", "plan", "fig8", "--no-probe"]
    assert subprocess.run(doctor, cwd=provision.target, capture_output=True, timeout=120).returncode == 0
