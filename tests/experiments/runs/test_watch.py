"""Looks at the machines of a run, put together: nodes of a testbed are one machine, hosts are several."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lastgood.experiments.machine.disturbance import Look, look, processes_naming
from lastgood.experiments.records.blocks import Disturbance
from lastgood.experiments.runs import watch as watch_module
from lastgood.experiments.runs.part import Part
from lastgood.experiments.runs.watch import Found, Seen, Watch, merge_seen, what_disturbed, worst_of
from tests.support.patience import wait_until


def seen(host: str, kernel: str, processes: str, own_s: float, own_bytes: int = 0) -> Seen:
    """In a second all of the kernel's processes had 1.5 s and moved 1000 bytes, of which these had so much."""
    before = Look(0.0, 10.0, 4.0, 0.0, None, 0, 0, None, None)
    after = Look(1.0, 11.5, 4.0 + own_s, 0.0, None, 1000, own_bytes, None, None, cpu_hz=2e9)
    return Seen(host, kernel, processes, 2, before, after)


def test_nodes_that_share_a_kernel_are_one_machine_and_what_all_of_them_did_is_the_run_s() -> None:
    (found,) = merge_seen([seen("vm1", "k", "p1", 0.7, 300), seen("vm2", "k", "p2", 0.75, 600)])
    assert found.host == "vm1" and found.elapsed_s == 1.0
    assert found.disturbance.others_cpu_s == pytest.approx(0.05)
    assert found.disturbance.others_disk_bytes == 100
    assert found.disturbance.cpu_hz == 2e9


def test_two_that_see_the_same_processes_count_once() -> None:
    """As two names of one host in a hostfile."""
    (found,) = merge_seen([seen("a", "k", "p", 0.7), seen("b", "k", "p", 0.7)])
    assert found.disturbance.others_cpu_s == pytest.approx(0.8)


def test_who_sees_the_kernel_s_threads_sees_all_nodes() -> None:
    """As a rank outside of a testbed's nodes: what it counts as the run's is in the nodes' own sums as well."""
    host, node = seen("vm", "k", "p", 1.2), seen("node", "k", "p1", 0.7)
    node = replace(node, before=replace(node.before, sees_kernel=False), after=replace(node.after, sees_kernel=False))
    for order in ([host, node], [node, host]):
        (found,) = merge_seen(order)
        assert found.host == "vm" and found.disturbance.others_cpu_s == pytest.approx(0.3)


def test_hosts_are_judged_one_by_one_and_the_disturbed_one_is_named() -> None:
    found = merge_seen([seen("a", "k1", "p", 1.5), seen("b", "k2", "p", 0.5)])
    assert [one.host for one in found] == ["a", "b"]
    assert what_disturbed(found, None) == "b: other processes took 1.00 s of CPU time"
    assert what_disturbed(found[:1], None) is None
    assert what_disturbed(found[1:], None) == "other processes took 1.00 s of CPU time"


def test_of_several_machines_the_worst_is_kept() -> None:
    first = Disturbance(others_cpu_s=1.0, steal_s=0.0, pressure_s={"cpu": 1.0, "io": 0.0}, cpu_hz=2e9, throttled=0)
    second = Disturbance(others_cpu_s=0.0, steal_s=2.0, pressure_s={"cpu": 0.0, "io": 3.0}, cpu_hz=1e9)
    assert worst_of([Found("a", first, 1.0, 2)]) == first
    assert worst_of([Found("a", first, 1.0, 2), Found("b", second, 1.0, 2)]) == Disturbance(
        others_cpu_s=1.0, steal_s=2.0, pressure_s={"cpu": 1.0, "io": 3.0}, cpu_hz=1e9, throttled=0
    )


class Alone(Part):
    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(("busy_looks", "until_s", "looks"), [(0, 60, 2), (3, 60, 5), (1000, 0.5, 6)])
def test_a_disturbed_block_waits_for_a_pause_before_its_repetition(monkeypatch, tmp_path, busy_looks, until_s, looks):
    """Others take half a core at so many looks, each 0.1 s after the one before."""
    made = []

    def fake_look(roots, scratch, *, device):
        number = len(made)
        made.append(number)
        busy_s = 0.05 * min(number, busy_looks)
        return Look(number / 10, busy_s, 0.0, 0.0, None, None, 0, None, None)

    monkeypatch.setattr(watch_module, "look", fake_look)
    monkeypatch.setattr(watch_module.time, "sleep", lambda seconds: None)
    assert Watch(Alone(), tmp_path, device=False).wait_until_calm(until_s) == (busy_looks < 1000)
    assert len(made) == looks


def test_processes_of_a_run_are_found_by_its_folder_and_their_children_are_the_run_s(tmp_path: Path) -> None:
    folder = tmp_path / f"run-{os.getpid()}-0a1b2c3d"
    burn = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    program = "import subprocess, sys; sys.stdin.readline(); subprocess.run([sys.executable, '-c', sys.argv[2]])\n"
    program += "print('done', flush=True); sys.stdin.readline()"
    command = [sys.executable, "-c", program, str(folder / "checkpoints"), burn]
    service = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert service.stdin is not None and service.stdout is not None
    try:
        wait_until(lambda: service.pid in processes_naming(folder.name), "its command line", 60)
        roots = processes_naming(folder.name)
        before = look(roots, tmp_path)
        service.stdin.write("\n")
        service.stdin.flush()
        assert service.stdout.readline() == "done\n"
        # The child has ended, and is in the sum of what waited for it.
        assert look(roots, tmp_path).own_cpu_s - before.own_cpu_s > 0.4
        assert os.getpid() not in roots and processes_naming("run-0-nobody") == frozenset()
    finally:
        service.kill()
        service.communicate(timeout=60)
