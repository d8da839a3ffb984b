"""install.sh says what to do when something is missing, before it changes anything."""

from __future__ import annotations

import fcntl
import os
import subprocess
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
    assert "unknown argument --fast (known: --system-torch, --own-torch)" in output


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
