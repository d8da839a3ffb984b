"""How far a workflow is, as its records come in."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from lastgood.errors import ConfigError
from lastgood.experiments.config.schema import Config
from lastgood.experiments.figures.progress import Progress
from lastgood.experiments.figures.workflow_plan import (
    grids_of_records,
    load_prediction_grid,
    plan_workflow,
    predict_runs,
)
from lastgood.experiments.machine import lock as machine
from lastgood.experiments.machine.facts import machine_label
from lastgood.experiments.plan.grid import load_grid
from lastgood.experiments.plan.load import parse_config
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.runs.probe import Probe, probe_file
from lastgood.locks import FileLock
from lastgood.units import format_seconds
from tests.experiments.support.records import make_record
from tests.experiments.support.run_specs import spec_of
from tests.support.patience import wait_until

ROOT = Path(__file__).resolve().parents[3]
GRID = load_grid(ROOT, "fig8")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Workflow:
    """Six runs of one panel, none of which is there."""

    def __init__(self, folder: Path, out: io.StringIO) -> None:
        specs = [spec_of(system, interval=f) for system in ("sync", "pccheck", "checkfreq") for f in (1, 2)]
        self.specs: dict[str, RunSpec] = {str(folder / spec.record_path()): spec for spec in specs}
        self.drawn: list[int] = []
        self.faults: list[Exception] = []
        panels = {("fig8", "vgg16"): list(self.specs)}
        self.progress = Progress(self.specs, folder, dict.fromkeys(self.specs, GRID), panels, self.draw, out)

    def draw(self, figure: str, model: str) -> None:
        assert (figure, model) == ("fig8", "vgg16")
        self.drawn.append(self.there())
        if self.faults:
            raise self.faults.pop()

    def there(self) -> int:
        return sum(Path(record).exists() for record in self.specs)

    def make(self, count: int, wall_s: float = 30.0) -> None:
        left = [record for record in self.specs if not Path(record).exists()]
        for record in left[:count]:
            spec = self.specs[record]
            make_record(spec.system).model_copy(update={"spec": spec, "wall_s": wall_s}).write(Path(record))


@pytest.fixture(autouse=True)
def _turn_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lastgood.experiments.figures.progress as module

    assert module.machine_lock is machine.machine_lock
    monkeypatch.setattr(module, "machine_lock", lambda: FileLock(tmp_path / "turn", "the test's turn"))


def test_the_line_counts_records_and_says_how_long_the_others_take(tmp_path: Path) -> None:
    out = Terminal()
    workflow = Workflow(tmp_path, out)
    assert re.fullmatch(r"measured 0 of 6, about .* left", workflow.progress.line())
    workflow.make(2)
    assert workflow.progress.line().startswith("measured 2 of 6, about ")
    workflow.make(4)
    assert workflow.progress.line() == "measured 6 of 6"


def test_pictures_are_drawn_after_a_third_and_two_thirds_and_the_line_changes_in_place(tmp_path: Path) -> None:
    out = Terminal()
    workflow = Workflow(tmp_path, out)
    workflow.faults = [ConfigError("no ceilings yet")]
    workflow.progress.start()
    for count, drawn in ((1, []), (1, [2]), (1, [2]), (1, [2, 4]), (2, [2, 4])):
        workflow.make(count)
        seen = workflow.there()
        wait_until(lambda seen=seen: f"measured {seen} of 6" in out.getvalue(), f"{seen} records to be told", 60)
        wait_until(lambda drawn=drawn: len(workflow.drawn) >= len(drawn), "the picture", 60)
        assert workflow.drawn == drawn
    workflow.progress.stop()
    text = out.getvalue()
    assert "no picture of fig8 vgg16 yet: no ceilings yet" in text
    assert text.count("\n") == 1 and text.endswith("measured 6 of 6\n")
    assert text.count("\r\x1b[K") >= 5


def test_a_file_gets_a_line_at_times_and_a_call_without_measurements_none(tmp_path: Path) -> None:
    out = io.StringIO()
    workflow = Workflow(tmp_path, out)
    workflow.make(1)
    workflow.progress.start()
    wait_until(lambda: "measured 1 of 6" in out.getvalue(), "the first line", 60)
    workflow.make(1)
    wait_until(lambda: workflow.drawn == [2], "the picture", 60)
    workflow.progress.stop()
    assert out.getvalue().count("\n") == 1  # the next one is due in a minute
    nothing = io.StringIO()
    idle = Progress({}, tmp_path, {}, {}, workflow.draw, nothing)
    idle.start()
    idle.stop()
    assert nothing.getvalue() == ""


def test_records_correct_what_the_model_says_of_the_others(tmp_path: Path) -> None:
    workflow = Workflow(tmp_path, Terminal())
    before = {run.record: run.seconds for run in predict_runs(workflow.specs.values(), tmp_path, GRID)}
    slow = 3 * before[next(iter(before))]
    workflow.make(1, wall_s=slow)
    first, *others = predict_runs(workflow.specs.values(), tmp_path, GRID)
    assert (first.done, first.seconds, first.source) == (True, slow, "records")
    for run in others:
        assert (run.done, run.source) == (False, "model")
        assert run.seconds == pytest.approx(3 * before[run.record])


def configure(folder: Path) -> Config:
    few = {"models": ["vgg16"], "systems": ["none", "sync"], "intervals": [1, 10], "threads": 1}
    places = {"results_dir": str(folder / "results"), "scratch": str(folder / "scratch")}
    return parse_config(ROOT / "config" / "laptop.yaml", {**few, **places})[0]


def test_each_record_is_predicted_by_the_grid_of_the_figure_that_was_asked_for_and_shows_it(tmp_path: Path) -> None:
    config = configure(tmp_path)
    plan = plan_workflow(config)
    grids = grids_of_records(ROOT, config, plan, [])
    assert grids.keys() == plan.specs.keys()
    first: dict[str, str] = {}
    for (figure, _), records in plan.records.items():
        for record in records:
            first.setdefault(record, figure)
    assert {record: grids[record].title for record in first} == {
        record: load_prediction_grid(ROOT, figure).title for record, figure in first.items()
    }
    assert {"fig8", "fig9", "fig11"} <= set(first.values())
    panel = next(panel for panel in plan.records if panel[0] == "fig12")
    asked = grids_of_records(ROOT, config, plan, [panel])
    shared = [record for record in plan.records[panel] if first[record] == "fig8"]
    assert shared and all(asked[record] == load_prediction_grid(ROOT, "fig12") for record in plan.records[panel])


def test_the_line_of_a_workflow_of_several_figures_adds_what_each_of_them_predicts(tmp_path: Path) -> None:
    config = configure(tmp_path)
    plan = plan_workflow(config)
    grids = grids_of_records(ROOT, config, plan, plan.records)
    progress = Progress(plan.specs, Path(config.results_dir), grids, plan.records, lambda *_: None, Terminal())
    by_figure: dict[str, list[str]] = {}
    for record in plan.specs:
        figure = next(figure for (figure, _), records in plan.records.items() if record in records)
        by_figure.setdefault(figure, []).append(record)
    alone_s = sum(
        run.seconds
        for figure, records in by_figure.items()
        for run in predict_runs([plan.specs[one] for one in records], tmp_path, load_prediction_grid(ROOT, figure))
    )
    assert progress.line() == f"measured 0 of {len(plan.specs)}, about {format_seconds(alone_s)} left"
    all_by_fig8 = sum(run.seconds for run in predict_runs(plan.specs.values(), tmp_path, GRID))
    assert format_seconds(alone_s) != format_seconds(all_by_fig8)


def test_the_line_knows_what_a_look_at_the_machine_found(tmp_path: Path) -> None:
    config = configure(tmp_path)
    plan = plan_workflow(config)
    spec = next(spec for spec in plan.specs.values() if isinstance(spec, RunSpec) and spec.workload == "vgg16")
    before = grids_of_records(ROOT, config, plan, plan.records)
    probe = Probe(
        machine=machine_label(),
        scratch=str(config.scratch_folder.absolute()),
        device=spec.device,
        threads=spec.threads,
        options={"vgg16": spec.workload_options},
        build_s={"vgg16": 1.0},
        step_s={"vgg16": 77.0},
        persist_bytes_per_s=1e9,
        disturbed=False,
    )
    path = probe_file(config)
    path.parent.mkdir(parents=True)
    path.write_text(probe.model_dump_json())
    after = grids_of_records(ROOT, config, plan, plan.records)
    record = next(record for record, one in plan.specs.items() if one == spec)
    assert after[record].prediction["laptop"].step_s["vgg16"] == 77.0
    assert before[record].prediction["laptop"].step_s["vgg16"] != 77.0
    # Runs that are called another machine's are not this one's, and garbage says nothing.
    elsewhere = config.model_copy(update={"machine": "another"})
    assert grids_of_records(ROOT, elsewhere, plan, plan.records) == before
    path.write_bytes(b"\xff{")
    assert grids_of_records(ROOT, config, plan, plan.records) == before
