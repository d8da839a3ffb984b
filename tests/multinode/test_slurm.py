"""Templates for sbatch, and what a run says about its job, on a real Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.multinode.support.processes import processes_with
from tests.multinode.support.slurm_cluster import NODE_TIMEOUT_S, SlurmCluster, why_not

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "install" / "slurm"
pytestmark = pytest.mark.slurm


def test_one_node_runs_its_command_and_passes_its_status_on(slurm: SlurmCluster, tmp_path: Path) -> None:
    command = 'echo "$SLURMD_NODENAME has $SLURM_CPUS_PER_TASK"; exit 3'
    job = slurm.submit(str(TEMPLATES / "one-node.sbatch"), "sh", "-c", command, folder=tmp_path)
    assert slurm.exit_status(job) == 3
    assert re.search(r"(?m)^node[12] has 2$", (tmp_path / f"lastgood-{job}.log").read_text())


@pytest.mark.parametrize("name", ["one-node", "several-nodes"])
def test_a_template_without_a_command_says_how_to_call_it(name: str) -> None:
    done = subprocess.run(["bash", TEMPLATES / f"{name}.sbatch"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: sbatch")


@pytest.mark.slow
def test_ranks_on_several_nodes_meet(slurm: SlurmCluster, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), slurm.env["PATH"]])
    program = Path(__file__).parent / "support" / "sum_ranks.py"
    words = [str(TEMPLATES / "several-nodes.sbatch"), str(program), "an argument"]
    job = slurm.submit(*words, folder=tmp_path, PATH=path, RANKS="2")
    assert slurm.exit_status(job, timeout_s=120) == 0, (tmp_path / f"lastgood-{job}.log").read_text()
    said = sorted(path.read_text() for path in tmp_path.glob(f"lastgood-{job}/**/stdout.log"))
    assert [line.partition(",")[0] for line in said] == [f"rank {rank} of 4: sum 10" for rank in range(4)]
    assert all("['an argument']" in line for line in said)


@pytest.mark.slow
def test_batches_of_dcp_save_load_and_wait(slurm: SlurmCluster, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), slurm.env["PATH"]])
    # In place of a checkout that all nodes see.
    (tmp_path / "install").symlink_to(ROOT / "install")

    def batch(name: str, *arguments: str, **exported: str) -> str:
        words = ["--partition=main", "--cpus-per-task=2", str(ROOT / "evaluation" / "dcp" / name), *arguments]
        job = slurm.submit(*words, folder=tmp_path, PATH=path, **exported)
        assert slurm.exit_status(job, timeout_s=240) == 0, (tmp_path / f"slurm-{job}.out").read_text()
        return (tmp_path / f"slurm-{job}.out").read_text()

    uri, few = str(tmp_path / "at"), ("--iterations", "1", "--warmup", "0")
    said = batch("savebatch.sbatch", *few, URI=uri, MODEL="L7b-2MB")
    suffix = said.split()[-1]
    assert [entry.name for entry in (tmp_path / "at").iterdir()] == [suffix]
    assert "1 of 1 loads equal" in batch("loadbatch.sbatch", *few, URI=uri, SUFFIX=suffix)
    assert "1 of 1 loads equal" in batch("batch.sbatch", *few, URI=uri, MODEL="vit-base-2MB")
    assert batch("waitbatch.sbatch", MINUTES="0.02").count("idle for 0.02 minutes") == 2


def test_a_run_knows_its_job_and_node(slurm: SlurmCluster, tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from lastgood.experiments.machine.facts import where_run; "
        "found = where_run(Path('.')); print(found.slurm_job, found.slurm_node)"
    )
    done = slurm.call("srun", "--nodelist=node2", f"--chdir={tmp_path}", sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    job, node = done.stdout.split()
    assert job.isdigit()
    assert node == "node2"


def test_a_cancelled_job_leaves_nothing_running(slurm: SlurmCluster, tmp_path: Path) -> None:
    mark = "3123.25"
    job = slurm.submit(str(TEMPLATES / "one-node.sbatch"), "sleep", mark, folder=tmp_path)
    slurm.wait_for("sleep", lambda: bool([p for p in processes_with(mark) if p.name() == "sleep"]))
    assert slurm.call("scancel", job).returncode == 0
    assert slurm.wait_for_state(job, "CANCELLED") == "CANCELLED"
    slurm.wait_for("end of the job's processes", lambda: not processes_with(mark), 60)


@pytest.mark.slow
def test_a_lost_node_fails_its_job_within_bounds(slurm: SlurmCluster, tmp_path: Path) -> None:
    mark = "3123.5"
    template = str(TEMPLATES / "one-node.sbatch")
    job = slurm.submit("--nodelist=node1", template, "sleep", mark, folder=tmp_path)
    slurm.wait_for("sleep", lambda: bool([p for p in processes_with(mark) if p.name() == "sleep"]))
    began = time.monotonic()
    slurm.kill_node("node1")
    slurm.wait_for("end of all that ran on node1", lambda: not processes_with(mark), 60)
    try:
        # Not requeued: a run that was cut short is not measured again behind its owner's back.
        assert slurm.wait_for_state(job, "NODE_FAIL", timeout_s=5 * NODE_TIMEOUT_S + 60) == "NODE_FAIL"
        assert time.monotonic() - began < 5 * NODE_TIMEOUT_S + 60
    finally:
        slurm.start_node("node1")
        slurm.wait_for_nodes()


def test_a_killed_test_leaves_no_daemon(tmp_path: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    code = (
        "import pathlib, sys, time; from tests.multinode.support.slurm_cluster import SlurmCluster\n"
        "with SlurmCluster(pathlib.Path(sys.argv[1]), nodes=1): print('up', flush=True); time.sleep(100)"
    )
    driver = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"up\n"
        daemons = [p for p in processes_with(str(tmp_path)) if p.pid != driver.pid]
        assert {"munged", "slurmctld", "slurmd"} <= {p.name() for p in daemons}
    finally:
        driver.kill()
        driver.wait()
    _, alive = psutil.wait_procs(daemons, timeout=60)
    assert not alive
