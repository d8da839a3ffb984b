"""SIGKILL at random moments of save, upload, commit and sweep: nothing wrong, nothing half, no byte left over."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def killed(tmp_path: Path, rounds: int, seed: int, timeout_s: float) -> dict[str, int]:
    driver = "tests.checkpointers.support.tier_driver"
    done = subprocess.run(
        [sys.executable, "-m", driver, str(tmp_path / "job"), str(tmp_path / "remote"), str(rounds), str(seed)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", done.stdout)}


def test_a_few_kills(tmp_path):
    assert killed(tmp_path, 10, seed=11, timeout_s=150)["new"] > 1


@pytest.mark.slow
def test_two_hundred_kills(tmp_path):
    met = killed(tmp_path, 200, seed=17, timeout_s=800)
    assert met["upload"] > 20 and met["retention"] > 5 and met["new"] > 50
