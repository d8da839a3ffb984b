"""Figure 8e on a testbed, from nothing to the picture, through a workflow that is killed meanwhile."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lastgood.cluster.testbed.testbed import why_no_testbed
from lastgood.experiments.records.run import RunRecord
from tests.support.patience import wait_until
from tests.workflow.support.workflow_folder import WorkflowFolder

_PLACES = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("lastgood", path=_PLACES) is None, reason="lastgood is not installed"),
]


def wait_for(what: str, found: Callable[[], bool], timeout_s: float) -> None:
    wait_until(found, what, timeout_s, every_s=0.1)


def beds() -> set[str]:
    """Testbeds of runs: their names begin with r and the run's process."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0].rsplit("-", 1)[0] for line in listed.splitlines() if line.startswith("lgtb-r")}


def test_a_killed_workflow_leaves_no_testbed_and_the_next_one_makes_the_figure(flow: WorkflowFolder) -> None:
    reason = why_no_testbed()
    if reason is not None:
        pytest.skip(reason)
    before = beds()
    workflow = flow.start("fig8e")
    wait_for("testbed", lambda: bool(beds() - before) or workflow.poll() is not None, 200)
    assert workflow.poll() is None, flow.log()
    (made,) = beds() - before
    workflow.kill()
    workflow.wait()
    wait_for("end of the testbed", lambda: made not in beds(), 60)
    done = flow.call("fig8e")
    assert done.returncode == 0, done.stdout
    assert beds() <= before
    with (flow.folder / "figures" / "fig8e_bert.csv").open() as file:
        rows = {row["system"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"none", "pccheck"}
    assert {row["nodes"] for row in rows.values()} == {"2"} and rows["pccheck"]["proof_equal"] == "True"
    assert {row["link_bits_per_s"] for row in rows.values()} == {"1000000000"}
    for ending in (".pdf", ".png", ".svg", "_wide.csv"):
        assert (flow.folder / "figures" / f"fig8e_bert{ending}").stat().st_size
    for record in flow.records():
        assert RunRecord.load(record).spec.nodes == 2
    again = flow.plan("fig8e", "-n", "--quiet", "rules")
    assert "Nothing to be done" in again.stdout, again.stdout
