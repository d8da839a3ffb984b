"""What others do while something is timed: found where it happens, and not mistaken for the run's own doing."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import replace

import pytest

from lastgood.experiments.machine.disturbance import Look, disturbance_between, disturbed_by, look
from lastgood.experiments.machine.facts import usable_cores
from lastgood.experiments.records.blocks import Disturbance

BURNT_S = 0.6


def burn_and_say(cpu_s, pipe):
    end_s = time.process_time() + cpu_s  # of this process: a fork begins at 0
    while time.process_time() < end_s:
        pass
    pipe.send(None)
    pipe.recv()


@pytest.fixture
def burner():
    """Burns in a child that stays until the test has looked."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=burn_and_say, args=(BURNT_S, theirs))

    def run():
        child.start()
        ours.recv()

    yield run
    ours.send(None)
    child.join(60)


def test_a_child_of_the_run_is_the_run(tmp_path, burner):
    before = look({os.getpid()}, tmp_path)
    burner()
    after = look({os.getpid()}, tmp_path)
    assert after.own_cpu_s - before.own_cpu_s >= BURNT_S - 0.1
    assert after.busy_s - before.busy_s >= BURNT_S - 0.1


def test_cpu_time_of_others_is_found(tmp_path, burner):
    """The child's parent is not of the run that is watched, which is a process that does nothing."""
    idle = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    idle.start()
    try:
        before = look({idle.pid}, tmp_path)
        burner()
        after = look({idle.pid}, tmp_path)
    finally:
        idle.kill()
        idle.join()
    found = disturbance_between(before, after)
    # Kernel threads count for the run; on a machine that has more to do they may have had some of the time.
    assert found.others_cpu_s >= BURNT_S - 0.15 - (after.own_cpu_s - before.own_cpu_s)
    assert disturbed_by(found, BURNT_S / usable_cores(), None).startswith("other processes took")


def test_what_this_process_writes_is_its_own(tmp_path):
    before = look({os.getpid()}, tmp_path)
    with (tmp_path / "file").open("wb") as file:
        file.write(os.urandom(16 << 20))
        os.fsync(file.fileno())
    after = look({os.getpid()}, tmp_path)
    if before.disk_bytes is None:
        pytest.skip("this folder lies on no block device")
    assert after.own_disk_bytes - before.own_disk_bytes >= 16 << 20
    assert after.disk_bytes - before.disk_bytes >= 16 << 20


ZERO = Look(0.0, 10.0, 5.0, 1.0, {"cpu": 1.0, "io": 2.0, "memory": 0.0}, 1 << 30, 1 << 20, 3, None)


def test_differences():
    later = replace(
        ZERO,
        busy_s=15.0,
        own_cpu_s=8.0,
        steal_s=1.5,
        pressure_s={"cpu": 1.5, "io": 2.0, "memory": 0.0},
        disk_bytes=(1 << 30) + 300,
        own_disk_bytes=(1 << 20) + 100,
        throttled=5,
        device=(1, 1.98e9),
    )
    found = disturbance_between(ZERO, later)
    assert (found.others_cpu_s, found.steal_s, found.others_disk_bytes, found.throttled) == (2.0, 0.5, 200, 2)
    assert found.pressure_s == {"cpu": 0.5, "io": 0.0, "memory": 0.0}
    assert (found.device_others, found.device_clock_hz) == (1, 1.98e9)
    # A process of the run that has ended takes its bytes with it: that is no traffic of minus so much.
    assert disturbance_between(ZERO, replace(ZERO, own_disk_bytes=2 << 20)).others_disk_bytes == 0
    silent = replace(ZERO, pressure_s=None, disk_bytes=None, throttled=None)
    assert disturbance_between(silent, later).others_disk_bytes is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"others_cpu_s": 0.02}, None),
        ({"others_cpu_s": 5.0}, "other processes took 5.00 s of CPU time"),
        ({"steal_s": 5.0}, "other virtual machines took 5.00 s of CPU time (steal)"),
        ({"others_disk_bytes": 10_000_000}, None),
        ({"others_disk_bytes": 900_000_000}, "other processes moved 900 MB on the disk"),
        ({"throttled": 2}, "cores were slowed down for heat 2 times"),
        ({"device_others": 1}, "1 other processes were on the GPU"),
        ({"pressure_s": {"cpu": 1.0, "io": 1.0, "memory": 1.0}}, None),
    ],
)
def test_what_disturbs_a_block_of_a_second(changes, words):
    found = Disturbance(others_cpu_s=0.0, steal_s=0.0).model_copy(update=changes)
    assert disturbed_by(found, 1.0, 1e9) == words
