"""A results folder that was moved or copied: its records count as made, whatever the times of files are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lastgood.experiments.config.yaml_file import parse_overrides
from lastgood.experiments.figures.workflow_plan import has_record, plan_figure
from lastgood.experiments.plan.load import parse_config
from tests.experiments.support.records import make_record
from tests.workflow.support.workflow_folder import TINY, WorkflowFolder, planned

DAY_S = 86_400


@pytest.fixture
def moved(flow: WorkflowFolder, tmp_path: Path) -> WorkflowFolder:
    """A working folder that holds nothing but the records of figure 8, a day old."""
    folder = WorkflowFolder(flow.folder.parent / tmp_path.name)
    for spec in plan_figure(parse_config(TINY, [])[0], "fig8"):
        path = folder.folder / "results" / spec.record_path()
        make_record("none").model_copy(update={"spec": spec}).write(path)
        os.utime(path, (path.stat().st_mtime - DAY_S,) * 2)
    return folder


def jobs(folder: WorkflowFolder, *overrides: str) -> dict[str, int]:
    done = folder.plan("fig8", "-n", "--quiet", "rules", "--config", "machine=testbox", *overrides)
    assert done.returncode == 0, done.stdout
    return planned(done.stdout)


def test_records_without_their_data_are_made_even_if_another_run_needs_it(moved: WorkflowFolder) -> None:
    assert len(moved.records()) == 4
    assert "measure" not in jobs(moved) and "dataset" not in jobs(moved)
    # The new interval's two runs need both kinds of data; the four records do not.
    more = jobs(moved, "intervals=2,4")
    assert (more["measure"], more["dataset"]) == (2, 2)


@pytest.mark.slow  # every day it is how the one below begins
def test_data_that_is_newer_than_records_makes_none_again(moved: WorkflowFolder) -> None:
    (moved.folder / "data").mkdir()
    for kind in ("squad", "wikitext"):
        (moved.folder / "data" / f"{kind}.ready").touch()
    assert "measure" not in jobs(moved)
    assert jobs(moved, "intervals=2,4")["measure"] == 2


def test_with_what_snakemake_noted_about_them_as_well(moved: WorkflowFolder) -> None:
    test_data_that_is_newer_than_records_makes_none_again(moved)
    noted = moved.plan("--touch", "--force", *(str(path.relative_to(moved.folder)) for path in moved.records()))
    assert noted.returncode == 0, noted.stdout
    assert any((moved.folder / ".snakemake" / "metadata").iterdir())
    shutil.rmtree(moved.folder / "data")
    assert "measure" not in jobs(moved)
    assert jobs(moved, "intervals=2,4")["measure"] == 2


def test_a_csv_is_made_again_if_it_is_to_hold_fewer_runs(moved: WorkflowFolder) -> None:
    ceilings = moved.folder / "results" / "testbox" / "ceilings.json"
    figures = [moved.folder / "figures" / f"fig8_{model}" for model in ("bert", "transformer_xl")]
    for path in (ceilings, *(Path(f"{stem}{end}") for stem in figures for end in (".csv", "_wide.csv", ".svg"))):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    csvs = [f"figures/{stem.name}.csv" for stem in figures]
    noted = moved.plan(*csvs, "--touch", "--forcerun", *csvs, "--config", "machine=testbox")
    assert noted.returncode == 0, noted.stdout
    assert "collect" not in jobs(moved)
    fewer = jobs(moved, "systems=none")
    assert fewer["collect"] == 2 and "measure" not in fewer


def test_a_record_of_another_run_at_that_path_is_none(tmp_path: Path) -> None:
    spec, other = plan_figure(parse_config(TINY, parse_overrides(["machine=testbox"]))[0], "fig8")[:2]
    path = tmp_path / "r0.json"
    assert not has_record(path, spec)
    make_record("none").model_copy(update={"spec": spec}).write(path)
    assert has_record(path, spec)
    assert not has_record(path, other)
    path.write_bytes(path.read_bytes()[:-30])
    assert not has_record(path, spec)
