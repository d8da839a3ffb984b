"""Power cuts on a real ext4: a virtual machine saves, its disk is recorded, every epoch between flushes is replayed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vm_guest import CHECKPOINTS, KEEP
from vm_machine import Recording, Unavailable, find_kernel, record, tools
from vm_replay import Outcome

SUPPORT = Path(__file__).resolve().parent / "support"
SEEDED = 8
"""Random crash states of each epoch, beside nothing and all."""

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(1800)]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path) -> None:
    """Skip, with the reason, where no virtual machine can be started or no disk image mounted."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    try:
        found = tools()
        find_kernel()
    except Unavailable as error:
        pytest.skip(str(error))
    image, mount_point = tmp_path / "trial.img", tmp_path / "trial"
    image.write_bytes(bytes(4 << 20))
    mount_point.mkdir()
    subprocess.run([found["mkfs.ext4"], "-q", image], check=True, timeout=60)
    mount = [found["mount"], "-t", "ext4", "-o", "loop", image, mount_point]
    tried = subprocess.run([found["unshare"], "--mount", *mount], capture_output=True, text=True, timeout=60)
    if tried.returncode != 0:
        pytest.skip(f"mounting an image in a namespace of its own was refused: {tried.stderr.strip()}")


def replay(folder: Path, recording: Recording, *, seeded: int) -> Outcome:
    workplace = folder / "replay"
    workplace.mkdir()
    order = folder / "replay.json"
    files = {name: str(getattr(recording, name)) for name in ("before", "after", "log")}
    order.write_text(
        json.dumps({**files, "reports": recording.reports, "workplace": str(workplace), "seed": 1, "seeded": seeded})
    )
    program = [sys.executable, str(SUPPORT / "vm_replay.py"), str(order), str(os.getpid())]
    done = subprocess.run(
        [tools()["unshare"], "--mount", "--propagation", "private", *program],
        env={**os.environ, "PYTHONPATH": str(SUPPORT.parents[1] / "storage" / "support")},
        capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outcome = Outcome(**json.loads(done.stdout))
    print(outcome)
    return outcome


def check_the_recording(recording: Recording, outcome: Outcome) -> None:
    steps = [step for step, _ in recording.reports]
    # A slower checkpoint may be superseded by a newer one, but most are not, and none is reported twice.
    assert len(set(steps)) == len(steps) > CHECKPOINTS // 2 and max(steps) == CHECKPOINTS
    assert outcome.same_disk
    assert outcome.promising > outcome.states // 2


def test_every_epoch_between_flushes(tmp_path: Path) -> None:
    recording = record(tmp_path / "vm")
    outcome = replay(tmp_path, recording, seeded=SEEDED)
    check_the_recording(recording, outcome)
    assert (outcome.lost, outcome.wrong) == ([], [])
    # Three flushes for each checkpoint; the kernel makes one of those that come at once.
    assert outcome.epochs > 2 * CHECKPOINTS
    assert outcome.states > 2 * outcome.epochs
    assert min(outcome.empty, outcome.ahead, outcome.restarts) > KEEP


def test_a_store_that_does_not_flush_is_found_out(tmp_path: Path) -> None:
    """What makes the test above worth something: without the flushes it fails. Even so, nothing wrong is read."""
    recording = record(tmp_path / "vm", lying=True)
    outcome = replay(tmp_path, recording, seeded=2)
    check_the_recording(recording, outcome)
    assert outcome.lost_states > outcome.states // 20
    assert outcome.wrong == []
