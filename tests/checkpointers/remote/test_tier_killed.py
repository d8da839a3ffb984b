"""SIGKILL at random moments of save, upload, commit and sweep: nothing wrong, nothing half, no byte left over."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.warm import WarmProcess


def killed(tmp_path: Path, rounds: int, seed: int, timeout_s: float) -> dict[str, int]:
    driver = Path(__file__).parents[1] / "support" / "tier_driver.py"
    process = WarmProcess([driver, tmp_path / "job", tmp_path / "remote", rounds, seed])
    said, _ = process.communicate(timeout_s)
    assert process.returncode == 0, said
    return {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", said)}


def test_a_few_kills(tmp_path):
    assert killed(tmp_path, 10, seed=11, timeout_s=150)["new"] > 1


@pytest.mark.slow
def test_two_hundred_kills(tmp_path):
    met = killed(tmp_path, 200, seed=17, timeout_s=800)
    assert met["upload"] > 20 and met["retention"] > 5 and met["new"] > 50
