"""`lastgood launch --how srun` on a real Slurm."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lastgood.cluster.hostfile import parse_hostfile
from lastgood.cluster.launch import launch
from lastgood.errors import LaunchError
from tests.multinode.slurm_cluster import SlurmCluster
from tests.multinode.test_slurm import processes_with

pytestmark = pytest.mark.slurm
HOSTS = parse_hostfile("node1 slots=2\nnode2 slots=1\n")
SUM_RANKS = str(Path(__file__).with_name("sum_ranks.py"))


@pytest.fixture
def cluster(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    for name, value in slurm.env.items():
        monkeypatch.setenv(name, value)
    return slurm


def no_job_left(cluster: SlurmCluster) -> None:
    cluster.wait_for("end of all jobs", lambda: not cluster.call("squeue", "--noheader").stdout, 30)


def test_ranks_meet_and_are_where_the_hostfile_says(cluster: SlurmCluster, tmp_path: Path) -> None:
    result = launch(
        [sys.executable, SUM_RANKS, "a b"], HOSTS, "srun", log_dir=tmp_path, timeout_s=60, env={"COLOUR": "$red %n"}
    )
    assert [(one.rank, one.host) for one in result.ranks] == [(0, "node1"), (1, "node1"), (2, "node2")]
    for rank in range(3):
        text = (tmp_path / f"rank-{rank:05d}.log").read_text()
        assert re.search(rf"(?m)^rank {rank} of 3: sum 6, interface \S+, \['a b'\]$", text), text
        assert "colour '$red %n'" in text
    no_job_left(cluster)


def test_a_failed_rank_ends_the_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    mark = "4123.5"
    code = f"if [ $SLURMD_NODENAME = node2 ]; then echo the reason; exit 5; fi; sleep {mark}"
    with pytest.raises(LaunchError, match=r"rank 2 on node2 ended with exit status 5(?s:.*)the reason"):
        launch(["sh", "-c", code], HOSTS, "srun", log_dir=tmp_path, timeout_s=60)
    assert not processes_with(f"sleep {mark}")
    no_job_left(cluster)


def test_a_node_that_slurm_does_not_know(cluster: SlurmCluster, tmp_path: Path) -> None:
    hosts = parse_hostfile("node1 slots=1\nnode9 slots=1\n")
    with pytest.raises(LaunchError, match=r"srun ended before rank 0 on node1, 1 on node9(?s:.*)srun: error"):
        launch(["true"], hosts, "srun", log_dir=tmp_path, timeout_s=60)


@pytest.mark.parametrize("victim", ["launch", "srun"])
def test_ranks_outlive_nobody(cluster: SlurmCluster, tmp_path: Path, victim: str) -> None:
    mark = "5123.5" if victim == "srun" else "6123.5"
    hostfile = tmp_path / "hosts"
    hostfile.write_text("node1 slots=1\nnode2 slots=1\n")
    code = "from lastgood.cli import main; main()"
    command = [sys.executable, "-c", code, "launch", "--how", "srun", "--hostfile", str(hostfile)]
    command += ["--logs", str(tmp_path / "logs"), "--", "sleep", mark]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        cluster.wait_for("ranks", lambda: len([p for p in processes_with(mark) if p.name() == "sleep"]) == 2)
        ranks = [p for p in processes_with(mark) if p.name() == "sleep"]
        if victim == "launch":
            started.kill()
        else:
            for process in psutil.Process(started.pid).children():
                process.kill()
        _, alive = psutil.wait_procs(ranks, timeout=20)
        assert not alive
        _, error = started.communicate(timeout=40)
        if victim == "srun":
            assert started.returncode == 1
            assert re.search(r"rank [01] on node[12]", error), error
            assert re.search(r"srun.*: signal 9", error), error
    finally:
        started.kill()
        started.wait()
    no_job_left(cluster)
