"""Disks that fail in chosen moments: real calls of real processes fail, the store and a training with PCcheck go on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from replay import build_shim
from store_faults import SCENARIOS as STORE_SCENARIOS

SUPPORT = Path(__file__).parent / "support"
PCCHECK_SCENARIOS = [
    "failed_write",
    "failed_flush[void record]",
    "failed_flush[data]",
    "failed_flush[commit record]",
    "each_kind_is_logged_once",
    "short_writes",
    "short_reads",
    "failed_read_of_data",
    "failed_read_of_the_only_one",
    "no_room_to_grow",
    "missing_directory",
    "renamed_directory",
    "full_disk",
    "read_only_directory",
]
GPM_SCENARIOS = [
    "failed_flush[void record]",
    "failed_flush[data]",
    "failed_flush[commit record]",
    "each_kind_is_logged_once",
    "no_room_to_grow",
    "missing_directory",
    "renamed_directory",
    "removed_area",
    "cut_area",
    "full_disk",
    "read_only_directory",
]
"""Named here as well, since the programs that have them import torch."""

Told = dict[str, str]


def run(shim: Path, program: str, place: Path, names: list[str]) -> Told:
    """What a program tells of each scenario, and which it knows; one that it does not reach has what went wrong."""
    done = subprocess.run(
        [sys.executable, str(SUPPORT / program), str(place), *names],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    lost = f"not reached\nexit {done.returncode}\n{done.stderr[-4000:]}"
    told = dict(re.findall(r"\x01(.*?)\x02([^\x01]*)", done.stdout, re.DOTALL))
    return {name: told.get(name, lost) for name in ["known", *names]}


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim("faulty_disk.c", tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="module")
def store_told(shim: Path, tmp_path_factory: pytest.TempPathFactory) -> Told:
    return run(shim, "store_faults.py", tmp_path_factory.mktemp("store"), list(STORE_SCENARIOS))


@pytest.fixture(scope="module")
def pccheck_told(shim: Path, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """One process for all, since importing torch takes longer than they do."""
    return run(shim, "pccheck_faults.py", tmp_path_factory.mktemp("pccheck"), PCCHECK_SCENARIOS)


@pytest.fixture(scope="module")
def gpm_told(shim: Path, tmp_path_factory: pytest.TempPathFactory) -> Told:
    return run(shim, "gpm_faults.py", tmp_path_factory.mktemp("gpm"), GPM_SCENARIOS)


def judge(told: str) -> None:
    outcome, _, details = told.partition("\n")
    if outcome == "skipped":
        pytest.skip(details)
    assert outcome == "passed", told


@pytest.mark.parametrize("name", STORE_SCENARIOS)
def test_store(store_told: Told, name: str) -> None:
    judge(store_told[name])


@pytest.mark.parametrize("name", PCCHECK_SCENARIOS)
def test_pccheck(pccheck_told: Told, name: str) -> None:
    judge(pccheck_told[name])


@pytest.mark.parametrize("name", GPM_SCENARIOS)
def test_gpm(gpm_told: Told, name: str) -> None:
    judge(gpm_told[name])


@pytest.mark.parametrize(("fixture", "named"), [("pccheck_told", PCCHECK_SCENARIOS), ("gpm_told", GPM_SCENARIOS)])
def test_all_scenarios_are_run(request: pytest.FixtureRequest, fixture: str, named: list[str]) -> None:
    told: Told = request.getfixturevalue(fixture)
    assert sorted(told["known"].splitlines()) == sorted(named)


def test_a_fault_armed_from_the_environment(shim: Path, tmp_path: Path) -> None:
    """The library strikes the very call that it was told to, and the next one passes."""
    program = (
        "import os; f = os.open('struck', os.O_CREAT | os.O_RDWR)\n"
        "for number in range(4):\n"
        "    try: print(os.pwrite(f, b'x' * 10, 0))\n"
        "    except OSError as error: print(error.errno)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={
            **os.environ,
            "LD_PRELOAD": str(shim),
            "FAULT_CALL": "write",
            "FAULT_NAME": "struck",
            "FAULT_SKIP": "2",
            "FAULT_ERROR": "28",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert done.stdout.split() == ["10", "10", "28", "10"]
