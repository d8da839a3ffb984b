"""How far a workflow is, as its records come in."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from lastgood.errors import ConfigError
from lastgood.experiments.figures.progress import Progress
from lastgood.experiments.figures.workflow_plan import predict_runs
from lastgood.experiments.machine import lock as machine
from lastgood.experiments.plan.grid import load_grid
from lastgood.experiments.records.spec import RunSpec
from lastgood.locks import FileLock
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
        self.progress = Progress(self.specs, folder, GRID, panels, self.draw, out)

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
    idle = Progress({}, tmp_path, GRID, {}, workflow.draw, nothing)
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
