"""install.sh says what to do when something is missing, before it changes anything."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def checkout(tmp_path):
    """A copy of what install.sh reads, in a folder with a blank, without an environment."""
    folder = tmp_path / "a checkout"
    (folder / "native").mkdir(parents=True)
    for name in ("install.sh", "pyproject.toml", "constraints.txt"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def install(checkout, *arguments, **environment):
    done = subprocess.run(
        ["bash", checkout / "install.sh", *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert not (checkout / ".venv").exists()
    return done.returncode, done.stdout


def program(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_no_python(checkout):
    code, output = install(checkout, PYTHON="no-such-python")
    assert code == 1
    assert "apt-get install python3" in output


def test_an_old_python(checkout, tmp_path):
    old = program(tmp_path, "python3.9", 'case "$2" in *print*) echo 3.9;; *) exit 1;; esac')
    code, output = install(checkout, PYTHON=old)
    assert code == 1
    assert "is Python 3.9, 3.10 or newer is needed; name another with PYTHON=" in output


def test_a_compiler_without_cpp17(checkout, tmp_path):
    code, output = install(checkout, CXX=program(tmp_path, "c++", "exit 1"))
    assert code == 1
    assert "cannot compile C++17; install g++" in output


def test_a_full_disk(checkout, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    program(tools, "df", "printf 'Filesystem 1M-blocks Used Available\\nd 9 9 17 1 /\\n'")
    code, output = install(checkout, PATH=f"{tools}{os.pathsep}{os.environ['PATH']}")
    assert code == 1
    assert "17 MiB free, 8192 MiB are needed; make room" in output


def test_an_unknown_argument(checkout):
    code, output = install(checkout, "--fast")
    assert code == 1
    assert "unknown argument --fast (known: --system-torch, --own-torch, --wheels FOLDER, --extras LIST)" in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--wheels",), "--wheels needs a value"),
        (("--extras",), "--extras needs a value"),
        (("--wheels", "no such folder"), "--wheels: there is no folder no such folder; install/offline.py makes one"),
    ],
)
def test_values_of_arguments(checkout, arguments, said):
    code, output = install(checkout, *arguments)
    assert code == 1
    assert said in output


def test_one_at_a_time_in_a_folder(checkout):
    held = os.open(checkout, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    command = ["bash", checkout / "install.sh", "--fast"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as second:
        try:
            assert second.stdout.readline() == "== waiting for another install.sh in this folder\n"
            os.close(held)
            assert "unknown argument --fast" in second.communicate(timeout=60)[0]
        finally:
            second.kill()


def offline(*arguments):
    command = [sys.executable, ROOT / "install" / "offline.py", "folder", "--list", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_offline_takes_what_the_other_machine_lacks():
    done = offline("--python", "3.12", "--extras", "cli,test", "--have", "torch,cmake")
    names = {line.partition("==")[0] for line in done.stdout.splitlines()}
    # Extras and what they need, what the core needs, and what builds it.
    assert {"typer", "rich", "pytest", "pluggy", "pydantic", "pydantic-core", "safetensors", "nanobind"} <= names
    # What only torch needs is there with it.
    assert [name for name in names if re.fullmatch("torch|lastgood|sympy|networkx|cmake|snakemake", name)] == []
    assert {"nanobind", "ninja", "scikit-build-core"} == {line for line in done.stdout.splitlines() if "==" not in line}


def test_offline_follows_the_markers_of_the_other_python():
    assert "tomli==" not in offline("--python", "3.12", "--extras", "test").stdout
    refused = offline("--python", "3.10", "--extras", "test")
    assert refused.returncode == 1
    assert "is not installed here, so its version cannot be chosen" in refused.stderr


def test_all_tests_of_a_gpu_need_a_folder(tmp_path):
    done = subprocess.run(["bash", ROOT / "tests" / "gpu.sh"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "name a folder for the results" in done.stderr
