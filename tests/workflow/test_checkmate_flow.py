"""Checkmate's figure on a testbed, from nothing to its pictures: shadows, kills, a shadow's updates."""

from __future__ import annotations

import csv
import os
import shutil
import sys
from pathlib import Path

import pytest

from lastgood.cluster.testbed.testbed import why_no_testbed
from tests.workflow.support.workflow_folder import WorkflowFolder

_PLACES = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("lastgood", path=_PLACES) is None, reason="lastgood is not installed"),
]


def rows_of(flow: WorkflowFolder, panel: str) -> list[dict[str, str]]:
    with (flow.folder / "figures" / f"checkmate_{panel}.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_figure_from_nothing(flow: WorkflowFolder) -> None:
    reason = why_no_testbed()
    if reason is not None:
        pytest.skip(reason)
    done = flow.call("checkmate")
    assert done.returncode == 0, done.stdout
    rows = {(row["system"], row["interval_steps"]): row for row in rows_of(flow, "bert")}
    assert set(rows) == {("none", "0"), ("pccheck", "2"), ("checkmate", "1")}
    own, other = rows["checkmate", "1"], rows["pccheck", "2"]
    assert own["proof_equal"] == "True" and own["shadows"] == "2"
    # Every parameter's gradient in every measured step, fp32.
    assert int(own["shadow_received_bytes"]) == 4 * int(own["parameters"]) * int(own["measured_steps"])
    assert float(own["shadow_cpu_s"]) > 0 and own["paper_ranges"]
    for row in (own, other):
        assert row["kills"] == "1" and row["lives_unlike"] == "0" and int(row["lost_steps"]) >= 0
    updates = rows_of(flow, "optimizer")
    assert [(row["threads"], row["shadows"]) for row in updates] == [("1", "1")] and float(updates[0]["update_s"]) > 0
    for panel in ("bert", "optimizer"):
        for ending in (".pdf", ".png", ".svg", "_wide.csv"):
            assert (flow.folder / "figures" / f"checkmate_{panel}{ending}").stat().st_size
    again = flow.plan("checkmate", "-n", "--quiet", "rules")
    assert "Nothing to be done" in again.stdout, again.stdout
