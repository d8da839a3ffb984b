"""kill -9 at random instants: whatever was reported durable is there afterwards, to the bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from kill_writer import state_bytes
from reference_reader import read_directory
from slot_helpers import content_of, load, open_store

from lastgood.storage import SlotStore

SUPPORT = Path(__file__).parent / "support"


def run_and_kill(directory: Path, after_s: float, *, from_start: bool) -> int:
    """Kill the writer `after_s` after its start or its first report; return the highest step it reported."""
    child = subprocess.Popen(
        [sys.executable, str(SUPPORT / "kill_writer.py"), str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None and child.stderr is not None
    first = b"" if from_start else child.stdout.readline()
    timer = threading.Timer(after_s, os.kill, (child.pid, signal.SIGKILL))
    timer.start()
    rest = child.stdout.read()
    timer.join()
    trouble = child.stderr.read().decode()
    assert child.wait(60) == -signal.SIGKILL and "Traceback" not in trouble, trouble
    whole_lines = (first + rest).rpartition(b"\n")[0]
    return max((int(line) for line in whole_lines.split()), default=0)


def check(directory: Path, reported: int) -> None:
    view = SlotStore.peek(directory)
    found = view.committed() if directory.exists() else []
    assert [info.step for info in found][:1] >= [reported][: reported > 0]
    for info in found:
        assert load(view, info) == content_of(info.step, state_bytes(info.step))
    seen = read_directory(directory)
    assert [one.step for one in seen] == [info.step for info in found]
    for one in seen[:1]:
        assert one.stream == content_of(one.step, state_bytes(one.step))


def kill_many(directory: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    best = 0
    for number in range(kills):
        # From the start: in the middle of opening, of making slots, or before the first commit.
        from_start = number % 2 == 0
        best = max(best, run_and_kill(directory, chance.uniform(0.0, 0.2), from_start=from_start))
        check(directory, best)
    with open_store(directory, slots=5) as store:
        assert not list(directory.glob("*.lastgood-tmp"))
        assert kills // 2 < store.incarnation <= kills + 1


def test_kills(tmp_path: Path) -> None:
    kill_many(tmp_path, 20, seed=20)


@pytest.mark.slow
def test_many_kills(tmp_path: Path) -> None:
    kill_many(tmp_path, 1000, seed=1000)
