"""The disturber, and what says whether figures of a quiet and of a disturbed machine agree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.experiments.support.paired_records import make_paired
from tests.support.patience import wait_until

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def records(folder: Path, **ratios: list[float]) -> Path:
    for system, found in ratios.items():
        path = folder / system / "r0.json"
        path.parent.mkdir(parents=True)
        make_paired(system, ratios=found).write(path)
    (folder / "ceilings.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("pccheck", "sync", "words", "code"),
    [
        ([0.9, 0.91, 0.9], [0.5, 0.51, 0.5], ["2 of 2 ratios known to 5 % in both, 0 of", "1 orders of"], 0),
        ([0.8, 0.81, 0.8], [0.5, 0.51, 0.5], ["1 of them different", "DIFFERENT"], 1),
        ([0.4, 0.41, 0.4], [0.5, 0.51, 0.5], ["pccheck and sync have another ORDER"], 1),
        # Not known, so not wrong.
        ([0.5, 0.91, 0.7], [0.3, 0.51, 0.8], ["0 of 2 ratios known", "0 orders of"], 0),
    ],
)
def test_agreement(pccheck: list[float], sync: list[float], words: list[str], code: int, tmp_path: Path) -> None:
    quiet = records(tmp_path / "quiet", pccheck=[0.9, 0.905, 0.9], sync=[0.5, 0.505, 0.5])
    disturbed = records(tmp_path / "disturbed", pccheck=pccheck, sync=sync)
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "agree.py", quiet, disturbed], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stdout + done.stderr
    for word in words:
        assert word in done.stdout


def test_the_disturber_takes_its_share_writes_and_ends_with_its_process(disk: Path) -> None:
    idle = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    command = [sys.executable, BENCHMARKS / "disturber.py", "--directory", disk, "--while-pid", str(idle.pid)]
    disturber = psutil.Popen([*command, "--share", "1"])
    try:
        wait_until(
            lambda: sum(disturber.cpu_times()[:2]) >= 3 and disturber.io_counters().write_chars >= 32 << 20,
            "a burst and a write",
            120,
        )
    finally:
        idle.kill()
        idle.wait(60)
    assert disturber.wait(60) == 0
    assert list(disk.iterdir()) == []
