"""Figure 9 through Snakemake: a run under kills, its record, CSV and picture, and nothing to do a second time."""

from __future__ import annotations

import csv
import os
import shutil
import sys
from pathlib import Path

import pytest

from lastgood.experiments.records.goodput import GoodputRecord
from tests.workflow.support.workflow_folder import WorkflowFolder

_PLACES = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("lastgood", path=_PLACES) is None, reason="lastgood is not installed"),
]


def test_figure_9_is_made_once(flow: WorkflowFolder) -> None:
    done = flow.call("fig9_bert", "--config", "machine=testbox")
    assert done.returncode == 0, done.stdout
    (path,) = flow.folder.glob("results/testbox/laptop/goodput/bert/sync/f2/*/r0.json")
    record = GoodputRecord.load_placed(path)
    assert record.faults == []
    assert len(record.lives) == 2
    with (flow.folder / "figures" / "fig9_bert.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    measured = [row for row in rows if row["source"] == "measured"]
    assert [float(row["goodput_measured_iterations_per_s"]) for row in measured] == [record.goodput_iterations_per_s]
    assert {row["system"] for row in rows if row["source"] == "formula"} == {"sync", "ideal"}
    for ending in (".pdf", ".png", ".svg", "_wide.csv"):
        assert (flow.folder / "figures" / f"fig9_bert{ending}").stat().st_size > 0
    again = flow.call("fig9_bert", "--config", "machine=testbox")
    assert "Nothing to be done" in again.stdout
