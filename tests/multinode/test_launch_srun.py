"""`lastgood launch --how srun` on a real Slurm."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lastgood.cluster.hostfile import Hostfile, parse_hostfile
from lastgood.cluster.launch.job import launch
from lastgood.cluster.ssh.remote import Remote
from lastgood.cluster.testbed.testbed import Testbed
from lastgood.errors import LaunchError
from lastgood.experiments.services.place import RankHosts, find_place
from lastgood.ports import free_ports
from tests.multinode.support.processes import processes_with
from tests.multinode.support.slurm_cluster import SlurmCluster
from tests.suggestions.following import advice, follows, refusal

pytestmark = pytest.mark.slurm
HOSTS = parse_hostfile("node1 slots=2\nnode2 slots=1\n")
SUM_RANKS = str(Path(__file__).parent / "support" / "sum_ranks.py")


@pytest.fixture
def cluster(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    for name, value in slurm.env.items():
        monkeypatch.setenv(name, value)
    return slurm


def no_job_left(cluster: SlurmCluster) -> None:
    cluster.wait_for("end of all jobs", lambda: not cluster.call("squeue", "--noheader").stdout, 100)


def test_ranks_meet_and_are_where_the_hostfile_says(cluster: SlurmCluster, tmp_path: Path) -> None:
    result = launch(
        [sys.executable, SUM_RANKS, "a b"], HOSTS, "srun", log_dir=tmp_path, timeout_s=150, env={"COLOUR": "$red %n"}
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
        launch(["sh", "-c", code], HOSTS, "srun", log_dir=tmp_path, timeout_s=150)
    cluster.wait_for("end of the other ranks", lambda: not processes_with(f"sleep {mark}"))
    no_job_left(cluster)


def test_a_node_that_slurm_does_not_know(cluster: SlurmCluster, tmp_path: Path) -> None:
    hosts = parse_hostfile("node1 slots=1\nnode9 slots=1\n")
    with pytest.raises(LaunchError, match=r"srun ended before rank 0 on node1, 1 on node9(?s:.*)srun: error") as caught:
        launch(["true"], hosts, "srun", log_dir=tmp_path, timeout_s=150)
    assert "no Slurm controller" not in str(caught.value)


@pytest.mark.parametrize("victim", ["launch", pytest.param("srun", marks=pytest.mark.slow)])
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
        _, alive = psutil.wait_procs(ranks, timeout=60)
        assert not alive
        _, error = started.communicate(timeout=100)
        if victim == "srun":
            assert started.returncode == 1
            assert re.search(r"rank [01] on node[12]", error), error
            assert re.search(r"srun.*: signal 9", error), error
    finally:
        started.kill()
        started.wait()
    no_job_left(cluster)


# No cluster is started for this: a Slurm that is not there, or whose controller is down, is what it is about.
@pytest.mark.parametrize(
    ("down", "first", "ping"),
    [
        (False, "srun ended before rank 0 on node1", "scontrol: fatal: "),
        # srun tries to reach it for some seconds; the launch has given up before.
        pytest.param(True, "no word from rank 0 on node1", "Slurmctld(primary) at ", marks=pytest.mark.slow),
    ],
    ids=["not configured", "down"],
)
def test_where_no_slurm_answers_the_error_says_what_was_tried_and_what_to_do(
    down: bool, first: str, ping: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if shutil.which("srun") is None:
        pytest.skip("srun is not installed (install/test_prerequisites.sh)")
    (port,) = free_ports()
    here = socket.gethostname()
    lines = ["ClusterName=gone", f"SlurmctldHost={here.partition('.')[0]}(127.0.0.1)", f"SlurmctldPort={port}"]
    lines += ["AuthType=auth/munge", "NodeName=node1 NodeAddr=127.0.0.1", "PartitionName=main Nodes=ALL"]
    config = tmp_path / "slurm.conf"
    config.write_text("".join(f"{line}\n" for line in lines) if down else "")
    monkeypatch.setenv("SLURM_CONF", str(config))
    hosts = parse_hostfile("node1 slots=1\n")
    with pytest.raises(LaunchError) as caught:
        launch(["true"], hosts, "srun", log_dir=tmp_path, timeout_s=150, start_timeout_s=0.5 if down else 150)
    tried, own = str(caught.value).split(f"\n{tmp_path / 'srun.log'}:\n")
    assert tried.startswith(first)
    assert (
        f"no Slurm controller answers {here}, from where srun was to start ranks on node1 (`scontrol ping`: " in tried
    )
    assert f"(`scontrol ping`: {ping}" in tried
    assert "Without a Slurm, take --how ssh or --how torchrun" in tried
    if not down:
        assert re.search(r"(?m)^    srun: fatal: ", own), own


# -- what its errors advise --------------------------------------------------------------------------------------------


def launched(folder: Path, how: str = "srun", hosts: Hostfile = HOSTS, remote: Remote | None = None) -> None:
    launch(["true"], hosts, how, log_dir=folder / "logs", timeout_s=150, remote=remote)  # type: ignore[arg-type]


@follows("there is no srun on this machine; launch from a machine that submits jobs to Slurm, or take --how ssh or")
def test_a_machine_without_srun(
    cluster: SlurmCluster, bed: Testbed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").symlink_to(shutil.which("ssh") or "")
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path / "bin"))
        message = refusal(lambda: launched(tmp_path))
        how = advice(message, r"take --how (\w+) or --how torchrun")
        launched(tmp_path, how, parse_hostfile("vm1 slots=1\n"), bed.remote())
    assert advice(message, "launch from a machine that submits jobs to Slurm")
    launched(tmp_path)


@follows("no Slurm controller answers {}, from where srun was to start ranks on {}")
def test_a_slurm_that_is_configured_elsewhere(
    cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "slurm.conf").write_text("")
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
        message = refusal(lambda: launched(tmp_path))
    variable = advice(message, r"not in Slurm's own place, (\w+) names it")
    monkeypatch.setenv(variable, cluster.env[variable])
    listing = advice(message, r"`(sinfo)` must list these nodes")
    names = subprocess.run([listing, "--noheader", "--Node", "--format=%N"], capture_output=True, text=True, timeout=60)
    assert {*names.stdout.split()} >= {*HOSTS.names}
    assert subprocess.run(advice(message, r"`(scontrol ping)`").split(), timeout=60).returncode == 0
    launched(tmp_path)


@follows("--how srun: {} needs --hostfile FILE with the names of {} of Slurm's nodes (NAME slots=N, one a line)")
def test_a_run_by_srun_names_its_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    spec: Any = SimpleNamespace(title=lambda: "this run", nodes=2, ranks=3, device="cpu")

    def run(given: RankHosts) -> None:
        with find_place(spec, given, print) as place:
            place.start(["true"], {}, tmp_path / "logs", 150, print)

    message = refusal(lambda: run(RankHosts(how="srun")))
    count, form = re.findall(r"names of (\d+) of Slurm's nodes \((NAME slots=N), one a line\)", message)[0]
    listed = cluster.call("sinfo", "--noheader", "--Node", "--format=%N").stdout.split()
    lines = [form.replace("NAME", name).replace("N", str(slots)) for name, slots in zip(listed, (2, 1), strict=True)]
    assert len(lines) == int(count)
    (tmp_path / "hosts").write_text("".join(f"{line}\n" for line in lines))
    run(RankHosts(tmp_path / "hosts", how="srun"))
