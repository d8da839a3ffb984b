"""Suggestions of `lastgood hosts check` and of launches over ssh, followed to the letter on real nodes."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lastgood.cluster.hostfile import parse_hostfile
from lastgood.cluster.launch.job import launch
from lastgood.cluster.launch.launchers import _check_deepspeed
from lastgood.cluster.testbed.testbed import Testbed
from lastgood.units import MIB
from tests.multinode.support.host_checks import check, faults
from tests.multinode.support.pythons import bare_python, changed_python, install_here
from tests.suggestions.following import advice, follows, hear, refusal
from tests.suggestions.packages import packages_of

pytestmark = pytest.mark.root
NO_BANDWIDTH = "--no-bandwidth"
NO_DEEPSPEED = "import sys; sys.modules['deepspeed'] = None\n"


def to_do(report: dict[str, Any], host: str, what: str) -> str:
    """What a report says to do about a fault."""
    (found,) = [one["to_do"] for one in report["findings"] if (one["host"], one["what"]) == (host, what)]
    return hear(found)


def well(bed: Testbed, *arguments: object) -> bool:
    """Whether nothing is wrong any more."""
    code, report = check(bed, NO_BANDWIDTH, *arguments)
    assert (code, faults(report)) == (0, []), report["findings"]
    return True


@follows("end what listens there (`ss -ltnp`), or choose others with --ports")
def test_ports_that_are_taken(bed: Testbed) -> None:
    listener = "import socket, time; s = socket.create_server(('', 29621)); print('on', flush=True); time.sleep(60)"
    with bed.remote().start("vm2", [sys.executable, "-c", listener], stdout=subprocess.PIPE) as taking:
        assert taking.stdout is not None
        assert taking.stdout.readline() == b"on\n"
        report = check(bed, NO_BANDWIDTH)[1]
        assert [(one["host"], one["what"], one["found"]) for one in report["findings"]] == [
            ("vm2", "ports", "taken: 29621")
        ]
        message = to_do(report, "vm2", "ports")
        assert well(bed, advice(message, r"others with (--ports)"), "29630-29632")
        listed = bed.remote().run("vm2", advice(message, r"`(ss .*)`").split(), 60).text
        (pid,) = re.findall(r":29621 .*\bpid=(\d+)", listed)
        assert bed.remote().run("vm2", ["kill", pid], 60).rc == 0
        taking.wait(60)
    assert well(bed)


@pytest.mark.slow  # every day test_check has its findings, and the other tests here real hosts
@follows(
    "make it, or name another with --folder",
    "free {}, or name another with --folder",
)
def test_folders_that_are_missing_or_full(bed: Testbed, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    asked = ("--folder", folder, "--min-free", "6 MiB")
    report = check(bed, NO_BANDWIDTH, *asked)[1]
    assert faults(report) == [("vm1", "disk"), ("vm2", "disk")]
    assert well(bed, advice(to_do(report, "vm2", "disk"), r"another with (--folder)"), tmp_path)
    folder.mkdir()
    assert well(bed, *asked)
    # A small disk of the node's own, with something on it.
    remote = bed.remote()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={8 * MIB}", "none", str(folder)]
    assert remote.run("vm2", mount, 60).rc == 0
    try:
        fill = ["dd", "if=/dev/zero", f"of={folder}/old", f"bs={MIB}", "count=5", "status=none"]
        assert remote.run("vm2", fill, 60).rc == 0
        message = to_do(check(bed, NO_BANDWIDTH, *asked)[1], "vm2", "disk")
        assert advice(message, r"free (\S+ \w+),") == "3 MiB"
        assert well(bed, advice(message, r"another with (--folder)"), tmp_path)
        assert remote.run("vm2", ["truncate", "-s", str(2 * MIB), f"{folder}/old"], 60).rc == 0
        assert well(bed, *asked)
    finally:
        remote.run("vm2", ["umount", str(folder)], 60)


@follows(
    "install it for {}, or name its Python with --python",
    "run bash install.sh there",
    "{}: {} has no lastgood there; install it at the same place on every host",
)
def test_a_python_without_lastgood(bed: Testbed, tmp_path: Path) -> None:
    python = bare_python(tmp_path / "environment")
    report = check(bed, NO_BANDWIDTH, "--python", python)[1]
    message = to_do(report, "vm2", "lastgood")
    assert to_do(report, "vm2", "torch")
    # Of the environment that install.sh makes.
    assert well(bed, advice(message, r"Python with (--python)"), sys.executable)

    def launched() -> None:
        hosts = parse_hostfile("vm1 slots=1\nvm2 slots=1\n")
        launch(["true"], hosts, "ssh", log_dir=tmp_path, timeout_s=100, remote=bed.remote(), python=str(python))

    assert advice(refusal(launched), r"vm1: (\S+) has no lastgood there; install it") == str(python)
    assert advice(message, r"install it for (\S+),") == str(python)
    install_here(python)  # nodes of a testbed share this machine's files
    assert well(bed, "--python", python)
    launched()


@follows(
    "use one version on all hosts (--python names the interpreter)",
    "set it by NTP (Debian: apt-get install chrony); {} ms are allowed",
)
def test_another_python_and_another_time(bed: Testbed, tmp_path: Path) -> None:
    ahead = tmp_path / "ahead_s"
    ahead.write_text("5")
    start = (
        "import platform, time; now = time.time; platform.python_version = lambda: '3.9.1'\n"
        f"time.time = lambda: now() + float(open({str(ahead)!r}).read())\n"
    )
    python = changed_python(tmp_path / "python", start, host="vm2")
    report = check(bed, NO_BANDWIDTH, "--python", python)[1]
    assert {("vm2", "clock"), ("vm2", "Python")} == {*faults(report)}
    assert advice(to_do(report, "vm2", "clock"), r"(\d+) ms are allowed") == "100"
    ahead.write_text("0")
    report = check(bed, NO_BANDWIDTH, "--python", python)[1]
    assert faults(report) == [("vm2", "Python")]
    assert well(bed, advice(to_do(report, "vm2", "Python"), r"(--python) names"), sys.executable)


def launched_by(bed: Testbed, folder: Path, how: str, python: Path, *words: str) -> None:
    hosts = parse_hostfile("vm1 slots=1\nvm2 slots=1\n")
    launch(
        ["true"],
        hosts,
        how,  # type: ignore[arg-type] - a word of a message
        log_dir=folder / how,
        timeout_s=100,
        remote=bed.remote(),
        python=str(python),
        env={"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        launcher_args=words,
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdsh") is None, reason="pdsh is not installed")
@follows(
    "DeepSpeed's launcher puts {} into a shell's command as it is, where it falls apart",
    "DeepSpeed's launcher is not installed for {}: pip install 'lastgood[deepspeed]' there, or choose --how torchrun",
    "with --how ssh there is no launcher to give it to; leave it out, or take --how torchrun",
)
def test_what_torchrun_can_use_and_others_cannot(bed: Testbed, tmp_path: Path) -> None:
    with_blank = changed_python(tmp_path / "my environment" / "python", NO_DEEPSPEED)
    message = refusal(lambda: launched_by(bed, tmp_path, "deepspeed", with_blank))
    assert advice(message, r"or --how (torchrun) or openmpi") == "torchrun"
    without = changed_python(tmp_path / "environment" / "python", NO_DEEPSPEED)
    message = refusal(lambda: launched_by(bed, tmp_path, "deepspeed", without))
    assert "deepspeed" in packages_of(advice(message, r"pip install 'lastgood\[(\w+)\]'"))
    if importlib.util.find_spec("deepspeed") is not None:
        _check_deepspeed(sys.executable)
    how = advice(message, r"choose --how (\w+)")
    word = "--max-restarts=0"
    message = refusal(lambda: launched_by(bed, tmp_path, "ssh", with_blank, word))
    assert advice(message, r"leave it out, or take --how (\w+)") == how
    launched_by(bed, tmp_path, "ssh", with_blank)
    # A blank in its path, no DeepSpeed, and a word for the launcher.
    launched_by(bed, tmp_path, how, with_blank, word)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None or shutil.which("pdsh") is None, reason="no mpirun, or no pdsh")
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="lastgood[deepspeed] is not installed")
def test_a_blank_in_the_path_of_a_python(bed: Testbed, tmp_path: Path) -> None:
    """The other ways that the refusal of DeepSpeed's launcher names."""
    with_blank = changed_python(tmp_path / "my environment" / "python", "")
    message = refusal(lambda: launched_by(bed, tmp_path, "deepspeed", with_blank))
    launched_by(bed, tmp_path, advice(message, r"or --how torchrun or (\w+)"), with_blank)
    launched_by(bed, tmp_path, "deepspeed", changed_python(tmp_path / "environment" / "python", ""))
