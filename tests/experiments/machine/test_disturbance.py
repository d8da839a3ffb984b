"""What others do while something is timed: found where it happens, and not mistaken for the run's own doing."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from lastgood.experiments.machine import disturbance
from lastgood.experiments.machine.disturbance import Look, disturbance_between, disturbed_by, look
from lastgood.experiments.machine.facts import usable_cores
from lastgood.experiments.records.blocks import Disturbance

BURNT_S = 0.6


def burn_and_say(cpu_s, pipe):
    end_s = time.process_time() + cpu_s  # of this process: a fork begins at 0
    while time.process_time() < end_s:
        sum(range(10_000))  # in user mode: asking for the time is a system call
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


class Proc:
    """A made-up /proc: a run (10, its child 11), another process (20), and kernel threads if they are seen."""

    OF_KERNEL = 0x00200000

    def __init__(self, folder, *, sees_kernel):
        self.folder, self.sees_kernel = folder, sees_kernel
        self.ticks = {"run": [0, 0], "child": [0, 0], "other": [0, 0], "kworker": [0, 0], "ksoftirqd": [0, 0]}

    def work(self, name, user, system):
        self.ticks[name][0] += user
        self.ticks[name][1] += system

    def write(self):
        soft = self.ticks["ksoftirqd"][1]
        user = sum(user for user, _ in self.ticks.values())
        system = sum(system for _, system in self.ticks.values()) - soft
        (self.folder / "stat").write_text(f"cpu  {user} 0 {system} 5000 0 0 {soft} 0 0 0\ncpu0 0\n")
        self._process(10, 1, "run", "snake (a) 7 8", 0)
        self._process(11, 10, "child", "python", 0)
        self._process(20, 1, "other", "other", 0)
        if self.sees_kernel:
            self._process(3, 2, "ksoftirqd", "ksoftirqd/0", self.OF_KERNEL)
            self._process(5, 2, "kworker", "kworker/u4:1-writeback", self.OF_KERNEL)

    def _process(self, pid, parent, name, command, flags):
        user, system = self.ticks[name]
        rest = [parent, 1, 1, 0, -1, flags, 0, 0, 0, 0, user, system, 0, 0, 20, 0, 1, 0, 0, 0, 0]
        (self.folder / str(pid)).mkdir(exist_ok=True)
        (self.folder / str(pid) / "stat").write_text(f"{pid} ({command}) S {' '.join(map(str, rest))}\n")


@pytest.fixture
def others_cpu(tmp_path, monkeypatch):
    """What others took while processes worked so many ticks, in user and in kernel mode."""

    def run(work, *, sees_kernel):
        (tmp_path / "proc").mkdir(exist_ok=True)
        monkeypatch.setattr(disturbance, "_PROC", tmp_path / "proc")
        proc = Proc(tmp_path / "proc", sees_kernel=sees_kernel)
        proc.write()
        before = look({10}, tmp_path)
        for name, (user, system) in work.items():
            proc.work(name, user, system)
        proc.write()
        after = look({10}, tmp_path)
        assert before.sees_kernel == after.sees_kernel == sees_kernel
        return disturbance_between(before, after).others_cpu_s * os.sysconf("SC_CLK_TCK")

    return run


TRAFFIC = {"run": (70, 30), "child": (200, 90), "kworker": (0, 60), "ksoftirqd": (0, 80)}
"""What a run over ranks makes: its processes, and the kernel's threads that carry its packets and its checkpoints."""


@pytest.mark.parametrize("sees_kernel", [True, False])
def test_kernel_threads_that_carry_a_run_are_not_others(others_cpu, sees_kernel):
    """Also in a node of a testbed, or a container: their time is in the machine's counters, and they are not seen."""
    assert others_cpu(TRAFFIC, sees_kernel=sees_kernel) == pytest.approx(0)


@pytest.mark.parametrize(("sees_kernel", "ticks"), [(True, 70), (False, 50)])
def test_another_process_is_found_beside_them(others_cpu, sees_kernel, ticks):
    """Where the kernel's threads are not seen, by what it does in user mode."""
    assert others_cpu({**TRAFFIC, "other": (50, 20)}, sees_kernel=sees_kernel) == pytest.approx(ticks)


def test_what_serves_interrupts_hides_nobody(others_cpu):
    """Its ticks are a process's, and no busy ones: taken off the busy ones they would hide another process."""
    assert others_cpu({"ksoftirqd": (0, 80), "other": (40, 40)}, sees_kernel=True) == pytest.approx(80)


IN_NAMESPACE = """
import os, sys, time
from pathlib import Path
from lastgood.experiments.machine.disturbance import disturbance_between, look
before = look({os.getpid()}, Path(sys.argv[1]))
print("looked", flush=True)
sys.stdin.readline()
end = time.process_time() + 0.3
while time.process_time() < end: sum(range(10_000))
after = look({os.getpid()}, Path(sys.argv[1]))
found = disturbance_between(before, after)
print(before.sees_kernel, after.own_cpu_s - before.own_cpu_s, found.others_cpu_s, flush=True)
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
def test_a_look_from_a_namespace_sees_its_own_processes_and_those_outside(tmp_path, burner):
    command = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    inside = subprocess.Popen(
        [*command, sys.executable, "-c", IN_NAMESPACE, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert inside.stdout.readline() == "looked\n"
        burner()
        said, _ = inside.communicate("\n", timeout=60)
    finally:
        inside.kill()
        inside.wait(60)
    sees_kernel, own_s, others_s = said.split()
    assert sees_kernel == "False"
    assert float(own_s) >= 0.2 and float(others_s) >= BURNT_S - 0.15
