"""Facts about the machine, on this machine and on made-up ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lastgood.experiments.machine import facts as machine
from lastgood.experiments.machine.facts import CudaDevice


@pytest.fixture(autouse=True)
def _fresh_devices() -> None:
    machine.cuda_devices.cache_clear()


@pytest.mark.parametrize(
    ("cpu", "cores", "gpus", "label"),
    [
        ("AMD EPYC", 2, (), "amd-epyc-2c"),
        ("AMD EPYC 7763 64-Core Processor", 64, (), "amd-epyc-7763-64c"),
        (
            "Intel(R) Xeon(R) Platinum 8480+",
            16,
            ("NVIDIA H100 80GB HBM3",),
            "intel-xeon-platinum-8480-16c-h100-80gb-hbm3",
        ),
        ("Intel(R) Core(TM) i7-8700 CPU @ 3.20GHz", 12, (), "intel-core-i7-8700-12c"),
        ("Intel(R) Xeon(R) CPU", 8, ("Tesla T4", "Tesla T4"), "intel-xeon-8c-2x-t4"),
        ("aarch64", 4, (), "aarch64-4c"),
        ("x" * 100, 4, (), "x" * 64),
    ],
)
def test_labels(monkeypatch: pytest.MonkeyPatch, cpu: str, cores: int, gpus: tuple[str, ...], label: str) -> None:
    monkeypatch.setattr(machine, "cpu_model", lambda: cpu)
    monkeypatch.setattr(machine, "usable_cores", lambda: cores)
    monkeypatch.setattr(machine, "cuda_devices", lambda: tuple(CudaDevice(name, None) for name in gpus))
    assert machine.machine_label() == label
    assert re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", label)


def test_this_machine_has_a_label_that_a_spec_takes() -> None:
    assert re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", machine.machine_label())


def test_hidden_devices_are_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.cuda_devices() == ()


def test_devices_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559'\necho 'Odd, [N/A]'\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.cuda_devices() == (CudaDevice("NVIDIA H100 80GB HBM3", 81559 << 20), CudaDevice("Odd", None))


def test_cores_respect_the_affinity() -> None:
    assert 1 <= machine.usable_cores() <= len(os.sched_getaffinity(0))


def test_memory_is_a_sane_number() -> None:
    assert 1 << 28 < machine.memory_bytes() < 1 << 50


def test_free_bytes_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert machine.free_bytes(tmp_path / "a" / "b") > 0


# -- software ------------------------------------------------------------------------------------------------------


def test_outside_of_git_there_is_no_revision(tmp_path: Path) -> None:
    assert machine.git_state(None) == (None, None)
    assert machine.git_state(tmp_path) == (None, None)


def test_revision_and_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init", "-q")
    assert machine.git_state(tmp_path) == (None, None)
    (tmp_path / "file").write_text("1", encoding="utf-8")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    revision, dirty = machine.git_state(tmp_path)
    assert revision is not None
    assert re.fullmatch(r"[0-9a-f]{40,64}", revision)
    assert dirty is False
    (tmp_path / "untracked").touch()
    assert machine.git_state(tmp_path) == (revision, False)
    (tmp_path / "file").write_text("2", encoding="utf-8")
    assert machine.git_state(tmp_path) == (revision, True)


def test_where_run(tmp_path: Path) -> None:
    where = machine.where_run(tmp_path / "scratch")
    assert where.scratch_path == str(tmp_path / "scratch")
    assert where.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert where.cores == machine.usable_cores()


def test_none_of_it_imports_torch() -> None:
    names = ["config.schema", "plan.load", "figures.workflow_plan", "plan.grid", "machine.facts"]
    imports = ", ".join(f"lastgood.experiments.{name}" for name in names)
    code = f"import sys, {imports}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
