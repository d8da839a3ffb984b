"""A tiny workflow for real, through bad days: killed, a run lost, finished, repeated, extended, reported.

The tests share one folder and build on each other, in their order.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from lastgood.experiments.machine.lock import machine_lock
from lastgood.experiments.records.run import RunRecord
from tests.experiments.support.records import make_ceilings
from tests.workflow.support.workflow_folder import WorkflowFolder

# The order in which the Snakefile looks for it.
_PLACES = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
pytestmark = pytest.mark.skipif(shutil.which("lastgood", path=_PLACES) is None, reason="lastgood is not installed")

T = TypeVar("T")


def wait_for(what: str, found: Callable[[], T], timeout_s: float = 300.0) -> T:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = found()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"no {what} within {timeout_s:.0f} s")


def log_of(flow: WorkflowFolder, record: Path) -> Path:
    return flow.folder / "logs" / record.relative_to(flow.folder / "results").with_suffix(".log")


def running_run(flow: WorkflowFolder, workflow: int) -> psutil.Process | None:
    """The measurement that a workflow has under way: it has begun its log, and not yet written its record."""
    try:
        for child in psutil.Process(workflow).children(recursive=True):
            words = child.cmdline()
            if words[2:3] == ["run"]:
                record = flow.folder / words[words.index("--out") + 1]
                log = log_of(flow, record)
                if not record.exists() and log.exists() and log.stat().st_size:
                    return child
    except psutil.Error:
        pass
    return None


def panel(flow: WorkflowFolder, model: str) -> list[Path]:
    endings = (".csv", "_wide.csv", ".pdf", ".png", ".svg")
    return [flow.folder / "figures" / f"fig8_{model}{ending}" for ending in endings]


@pytest.mark.slow
def test_kill_9_leaves_no_orphan_and_no_half_record(flow: WorkflowFolder) -> None:
    workflow = flow.start("fig8")
    wait_for("first record", lambda: flow.records() or workflow.poll() is not None)
    assert workflow.poll() is None, flow.log()
    run = wait_for("second run", lambda: running_run(flow, workflow.pid))
    family = [run, *run.children(recursive=True)]
    workflow.kill()
    workflow.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    for record in flow.records():
        RunRecord.load(record)
    assert not list(flow.folder.glob("figures/*.csv"))


def test_a_lost_run_leaves_a_partial_figure_and_the_others_go_on(flow: WorkflowFolder) -> None:
    ceilings = flow.folder / "results" / "testbox" / "ceilings.json"
    if not ceilings.exists():  # the test above has them measured
        make_ceilings(machine="testbox").write(ceilings)
    before = flow.records()
    workflow = flow.start("fig8")
    run = wait_for("run", lambda: running_run(flow, workflow.pid))
    run.send_signal(signal.SIGKILL)
    assert workflow.wait(timeout=500) == 1
    log = flow.log()
    missing = re.search(r"fig8 (\w+): 1 of 2 runs; missing: \1 (?:none f0|sync f2) r0", log)
    assert missing is not None, log
    assert f"partial figure: figures/partial/fig8_{missing[1]}.pdf" in log
    for ending in (".csv", ".pdf", ".png", ".svg"):
        assert (flow.folder / "figures" / "partial" / f"fig8_{missing[1]}{ending}").stat().st_size > 0
    assert not any(path.exists() for path in panel(flow, missing[1]))
    # Figures 12 to 14 share a run with this one; nobody asked for them.
    drawn = {path.stem.removesuffix("_wide") for path in (flow.folder / "figures" / "partial").iterdir()}
    assert drawn == {f"fig8_{missing[1]}"}
    (other,) = {"bert", "transformer_xl"} - {missing[1]}
    assert all(path.exists() for path in panel(flow, other))
    assert len(flow.records()) == 3
    assert set(before) <= set(flow.records())


def test_the_next_call_makes_the_missing_run_only(flow: WorkflowFolder) -> None:
    times = {record: record.stat().st_mtime_ns for record in flow.records()}
    done = flow.call("fig8")
    assert done.returncode == 0, done.stdout
    assert all(path.exists() for model in ("bert", "transformer_xl") for path in panel(flow, model))
    assert not list((flow.folder / "figures" / "partial").glob("*"))
    assert len(flow.records()) == 4
    assert {record: record.stat().st_mtime_ns for record in times} == times
    for record in flow.records():
        found = RunRecord.load(record)
        assert record.relative_to(flow.folder / "results").as_posix() == str(found.spec.record_path())
        assert found.proof is None if found.spec.system == "none" else found.proof is not None and found.proof.equal
        assert log_of(flow, record).read_text(encoding="utf-8").startswith("lastgood run --spec ")


@pytest.mark.slow  # every day test_dry's second workflow finds the lock of a first one
def test_of_two_workflows_that_begin_together_one_goes_on_undisturbed(flow: WorkflowFolder) -> None:
    """Neither is through before the other has its turn, since the test holds the machine."""
    record = flow.records()[0]
    spec, times = RunRecord.load(record).spec, record.stat()
    record.unlink()
    target, names = str(record.relative_to(flow.folder)), ("one.log", "two.log")
    turn = machine_lock()
    turn.acquire(240)
    try:
        both = {name: flow.start(target, log_name=name) for name in names}
        wait_for("end of one", lambda: any(one.poll() is not None for one in both.values()))
        (ended,) = [name for name, one in both.items() if one.poll() is not None]
        (other,) = set(names) - {ended}
        said = flow.log(ended)
        assert both[ended].returncode == 1, said
        assert f"this folder's workflow is held by process {both[other].pid}" in said
        assert len([line for line in said.splitlines() if "snakemake -d FOLDER" in line]) == 1
        assert "Traceback" not in said
        wait_for("run of the other", lambda: running_run(flow, both[other].pid))
    finally:
        turn.release()
    assert both[other].wait(timeout=300) == 0, flow.log(other)
    assert RunRecord.load(record).spec == spec
    assert "is held by" not in flow.log(other)
    os.utime(record, ns=(times.st_atime_ns, times.st_mtime_ns))  # for the tests below nothing has happened


def test_a_repeated_call_does_nothing(flow: WorkflowFolder) -> None:
    done = flow.plan("fig8")
    assert done.returncode == 0
    assert "Nothing to be done" in done.stdout


@pytest.mark.slow  # every day `test_the_next_call_makes_the_missing_run_only` shows that records stay
def test_a_further_interval_only_adds_and_fewer_rebuild_the_figure_only(flow: WorkflowFolder) -> None:
    before = flow.call("fig8_bert")
    assert before.returncode == 0, before.stdout
    times = {record: record.stat().st_mtime_ns for record in flow.records()}
    done = flow.call("fig8_bert", "--config", "intervals=1,2")
    assert done.returncode == 0, done.stdout
    added = set(flow.records()) - set(times)
    assert [record.parts[-3] for record in added] == ["f1"]
    assert {record: record.stat().st_mtime_ns for record in times} == times
    with panel(flow, "bert")[0].open(encoding="utf-8") as file:
        assert sorted(row["interval_steps"] for row in csv.DictReader(file)) == ["0", "1", "2"]
    fewer = flow.plan("fig8_bert", "-n", "--quiet", "rules")
    assert re.search(r"^collect +1$", fewer.stdout, re.MULTILINE)
    assert not re.search(r"^measure +", fewer.stdout, re.MULTILINE)


@pytest.mark.slow  # every day CI makes `test_simple` once
def test_the_smoke_test_measures_at_every_call(flow: WorkflowFolder) -> None:
    stamps = []
    for _ in range(2):
        done = flow.call("test_simple")
        assert done.returncode == 0, done.stdout
        assert "passed: results/test_simple.json" in done.stdout
        stamps.append((flow.folder / "results" / "test_simple.json").stat().st_mtime_ns)
    assert stamps[0] < stamps[1]


@pytest.mark.slow  # every day runs/test_fork_server and runs/test_execute interrupt a run
def test_ctrl_c_stops_the_run_and_leaves_no_record(flow: WorkflowFolder) -> None:
    process = flow.start("fig8", "--config", "intervals=5", "iterations=100000")
    run = wait_for("run", lambda: running_run(flow, process.pid))
    family = [run, *run.children(recursive=True)]
    before = flow.records()
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=200) != 0
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    assert flow.records() == before


@pytest.mark.slow  # measures for six figures; every day the page and the claims are made of given records
def test_the_page_and_the_claims_are_made_of_the_figures(flow: WorkflowFolder) -> None:
    done = flow.call("report", "claims", "--config", "models=transformer_xl")
    assert done.returncode == 0, done.stdout
    page = (flow.folder / "figures" / "report.html").read_text(encoding="utf-8")
    assert "Figure 8c: Transformer-XL" in page
    # Figures 8 and 9 of one model, and 11 to 14.
    assert page.count("data:image/svg+xml;base64,") == 6
    assert "Ceilings of testbox" in page
    assert (flow.folder / "figures" / "claims.md").read_text(encoding="utf-8").count("| not testable |") > 20
    assert "Nothing to be done" in flow.call("report", "claims", "--config", "models=transformer_xl").stdout
