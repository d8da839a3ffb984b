"""Figure 8 through a real Slurm: records, logs, and days on which a run, a job or a node is lost.

The tests share one folder and build on each other, in their order.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lastgood.experiments.records.run import RunRecord
from tests.multinode.support.slurm_cluster import SlurmCluster
from tests.workflow.support.workflow_folder import ROOT, WorkflowFolder

_PLACES = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("lastgood", path=_PLACES) is None, reason="lastgood is not installed"),
    pytest.mark.skipif(
        importlib.util.find_spec("snakemake_executor_plugin_slurm") is None, reason="lastgood[slurm] is not installed"
    ),
]
PROFILE = ("--workflow-profile", str(ROOT / "profiles" / "slurm"))
# Not to wait half a minute for a job that took ten seconds.
HURRY = (
    "--slurm-init-seconds-before-status-checks",
    "1",
    "--seconds-between-status-checks",
    "1",
    "--latency-wait",
    "5",
)
ONE_MODEL = ("--config", "models=bert", "machine=testbox", "threads=1")


@pytest.fixture(scope="module")
def cluster(slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    before = dict(os.environ)
    os.environ.update(slurm.env)
    yield slurm
    os.environ.clear()
    os.environ.update(before)


def measuring(flow: WorkflowFolder) -> psutil.Process | None:
    """The `lastgood run` of this folder that has begun its log, on whatever node."""
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if words[2:3] != ["run"] or "--out" not in words or process.cwd() != str(flow.folder):
                continue
            log = flow.folder / "logs" / Path(words[words.index("--out") + 1]).relative_to("results")
            if log.with_suffix(".log").exists():
                return process
        except psutil.Error:
            continue
    return None


def job_of(process: psutil.Process) -> str:
    return process.environ()["SLURM_JOB_ID"]


def wait_for_run(flow: WorkflowFolder, workflow: subprocess.Popen[str], timeout_s: float = 120) -> psutil.Process:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = measuring(flow)
        if found is not None:
            return found
        assert workflow.poll() is None, flow.log()
        time.sleep(0.1)
    raise AssertionError(f"no run within {timeout_s:.0f} s\n{flow.log()}")


def test_the_plan_needs_no_node(cluster: SlurmCluster, flow: WorkflowFolder) -> None:
    # A machine that submits need not be able to measure: it may have no GPU.
    done = flow.call("fig8", "-n", *PROFILE, *ONE_MODEL, "device=cuda")
    assert done.returncode == 0, done.stdout


def test_a_lost_run_is_named_with_its_log(cluster: SlurmCluster, flow: WorkflowFolder) -> None:
    workflow = flow.start("fig8", *PROFILE, *HURRY, *ONE_MODEL)
    run = wait_for_run(flow, workflow)
    run.send_signal(signal.SIGKILL)
    assert workflow.wait(timeout=200) == 1
    log = flow.log()
    (named,) = set(re.findall(r"(?m)^    log: (logs/testbox/laptop/bert/[^, ]+\.log)", log))
    assert (flow.folder / named).exists()
    assert re.search(r"SLURM-job '\d+' failed, SLURM status is: 'FAILED'", log), log
    assert "missing: " in log


def test_a_cancelled_job_is_named(cluster: SlurmCluster, flow: WorkflowFolder) -> None:
    workflow = flow.start("fig8", *PROFILE, *HURRY, *ONE_MODEL, "intervals=1", "iterations=100000")
    job = job_of(wait_for_run(flow, workflow))
    assert cluster.call("scancel", job).returncode == 0
    cluster.wait_for("end of the other run's wait", lambda: cluster.state_of(job) == "CANCELLED")
    cluster.call("scancel", "--user=root")
    assert workflow.wait(timeout=100) == 1
    assert re.search(rf"SLURM-job '{job}' failed, SLURM status is: 'CANCELLED'", flow.log()), flow.log()


def test_a_lost_node_is_named(cluster: SlurmCluster, flow: WorkflowFolder) -> None:
    workflow = flow.start("fig8", *PROFILE, *HURRY, *ONE_MODEL, "intervals=1", "iterations=100000")
    run = wait_for_run(flow, workflow)
    job, node = job_of(run), run.environ()["SLURMD_NODENAME"]
    cluster.kill_node(node)
    try:
        cluster.wait_for("NODE_FAIL", lambda: cluster.state_of(job) == "NODE_FAIL", 200)
        cluster.call("scancel", "--user=root")
        assert workflow.wait(timeout=100) == 1
        assert re.search(rf"SLURM-job '{job}' failed .*SLURM status is: 'NODE_FAIL'", flow.log()), flow.log()
    finally:
        cluster.start_node(node)
        cluster.wait_for_nodes()


def test_the_next_call_makes_what_is_missing(cluster: SlurmCluster, flow: WorkflowFolder) -> None:
    done = flow.call("fig8", *PROFILE, *HURRY, *ONE_MODEL)
    assert done.returncode == 0, done.stdout
    for ending in (".csv", "_wide.csv", ".pdf", ".png", ".svg"):
        assert (flow.folder / "figures" / f"fig8_bert{ending}").stat().st_size > 0
    records = [RunRecord.load(path) for path in flow.records()]
    assert sorted(record.spec.system for record in records) == ["none", "sync"]
    for record in records:
        assert record.where.slurm_job is not None
        assert record.where.slurm_node in cluster.nodes
        # Two nodes share this machine and its turns: what a run waited for the other is no part of it.
        assert record.clocks.elapsed_s <= record.wall_s < 60
    for path in flow.records():
        log = flow.folder / "logs" / path.relative_to(flow.folder / "results").with_suffix(".log")
        assert log.read_text(encoding="utf-8").startswith("lastgood run --spec ")


def test_local_and_slurm_share_their_records(cluster: SlurmCluster, flow: WorkflowFolder) -> None:
    done = flow.call("fig8", *ONE_MODEL)
    assert "Nothing to be done" in done.stdout
