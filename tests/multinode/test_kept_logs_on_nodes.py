"""Logs of a failed run on nodes: also of one whose disk this machine does not see, over real ssh."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lastgood.cluster.testbed.testbed import Testbed
from tests.experiments.support.rank_runs import Job, spec_of

pytestmark = pytest.mark.root


@pytest.fixture
def own_disk(bed: Testbed, tmp_path: Path) -> Iterator[Path]:
    """A folder that is another one on vm2."""
    folder = tmp_path / "scratch of runs"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(folder)]
    assert bed.remote().run("vm2", mount, 20).rc == 0
    yield folder
    assert bed.remote().run("vm2", ["umount", "-l", str(folder)], 20).rc == 0


def rank_at_work(job: Job, rank: int) -> psutil.Process:
    """The process of a rank, once it has begun to train."""
    assert job.process is not None
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        assert job.process.poll() is None, job.log.read_text()
        for process in psutil.process_iter():
            try:
                words, values = process.cmdline(), process.environ()
            except psutil.Error:
                continue
            mine = "lastgood.experiments.multirank.process" in words and str(job.scratch) in words[-1]
            if mine and values.get("RANK") == str(rank) and list(job.scratch.glob("run-*/checkpoints/rank-*")):
                return process
        time.sleep(0.1)
    raise AssertionError(f"no rank {rank} within 400 s: {job.log.read_text()}")


@pytest.mark.slow
def test_the_log_of_a_rank_is_fetched_from_its_hosts_own_disk(bed: Testbed, own_disk: Path, tmp_path: Path) -> None:
    job = Job(tmp_path, tmp_path / "data")
    assert job.scratch == own_disk
    hosts = tmp_path / "hosts"
    hosts.write_text("vm1 slots=1\nvm2 slots=1\n")
    spec = spec_of(nodes=2, measured_steps=400_000)
    process = job.start(spec, "--hostfile", str(hosts), "--ssh-config", str(bed.ssh_config))
    try:
        rank = rank_at_work(job, 1)
        there = "run-*/ranks/measure/rank-0000?.log"
        assert [path.name for path in own_disk.glob(there)] == ["rank-00000.log"]
        rank.kill()
        assert process.wait(300) == 1
    finally:
        process.kill()
        process.wait(60)
    said = job.log.read_text()
    log = job.kept / "ranks" / "measure" / "rank-00001.log"
    assert f"rank 1 on vm2 ended with signal 9 (SIGKILL); log: {log}\n" in said, said
    assert f"all logs of this attempt are kept until the next one: {job.kept}\n" in said
    assert "could not be fetched" not in said
    assert "building the workload" in log.read_text()
    assert {path.name for path in log.parent.iterdir()} >= {"rank-00000.log", "rank-00001.log", "ssh-vm1.log"}
    # The run's folder is gone here, and holds nothing there.
    assert job.left() == []
    assert not bed.remote().run("vm2", ["find", str(own_disk), "-type", "f"], 20).text
