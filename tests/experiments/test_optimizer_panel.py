"""The panel on a shadow's updates: plan, record, columns and picture."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from lastgood.errors import LastgoodError
from lastgood.experiments.config.yaml_file import parse_overrides
from lastgood.experiments.figures.registry import figure_kind
from lastgood.experiments.figures.workflow_plan import plan_figure, plan_workflow
from lastgood.experiments.optbench.execute import execute_optimizer
from lastgood.experiments.plan.load import parse_config
from lastgood.experiments.plots.optimizer import draw_optimizer, read_updates
from lastgood.experiments.records.optimizer import OptimizerRecord, OptimizerSpec
from lastgood.experiments.tables.optimizer import OPTIMIZER_COLUMNS, collect_updates
from lastgood.experiments.tables.panels import PanelRecords
from tests.experiments.support.optimizer_records import record_of, spec_of, written

ROOT = Path(__file__).resolve().parents[2]


def configure(*entries: str) -> Any:
    return parse_config(ROOT / "config" / "laptop.yaml", parse_overrides([*entries, "machine=testbox"]))[0]


def test_the_plan_holds_one_run_a_repetition_in_a_panel_of_its_own() -> None:
    config = configure("checkmate={repetitions: 2, optimizer: {threads: [1, 2, 4], model: vgg11}}")
    specs = [spec for spec in plan_figure(config, "checkmate") if isinstance(spec, OptimizerSpec)]
    assert [spec.repetition for spec in specs] == [0, 1]
    assert {(spec.model, spec.threads, spec.panel) for spec in specs} == {("vgg11", (1, 2, 4), "optimizer")}
    records = plan_workflow(config).records["checkmate", "optimizer"]
    assert len(records) == 2
    for path in records:
        assert "/optimizer/vgg11/adamw/t4-m2-c" in path
        assert not any(part.startswith("f") and part[1:].isdigit() for part in Path(path).parts)


def test_settings_are_in_the_path_and_repetitions_share_a_cell() -> None:
    assert spec_of().cell_hash == spec_of(1).cell_hash
    for change in ({"threads": (1,)}, {"updates": 4}, {"optimizer": "sgd"}, {"method": 2}):
        assert spec_of(**change).cell_hash != spec_of().cell_hash
    assert OptimizerSpec.model_validate_json(spec_of().canonical_json()) == spec_of()


def test_a_record_that_was_moved_is_refused(tmp_path: Path) -> None:
    (path,) = written(tmp_path, record_of())
    assert OptimizerRecord.load_placed(path) == record_of()
    moved = path.with_name("r7.json")
    path.rename(moved)
    with pytest.raises(LastgoodError, match="it was moved or edited"):
        OptimizerRecord.load_placed(moved)


def test_every_point_is_a_row_with_its_median_and_range(tmp_path: Path) -> None:
    paths = written(tmp_path, record_of(), record_of(1, factor=3.0))
    collect = figure_kind("checkmate").collector()
    found: Any = collect("checkmate", "optimizer", paths, tmp_path / "no ceilings are needed")
    tidy, wide = tmp_path / "tidy.csv", tmp_path / "wide.csv"
    found.write(tidy, wide)
    with tidy.open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == OPTIMIZER_COLUMNS
    assert [(row["repetition"], row["shadows"], row["threads"]) for row in rows[:4]] == [
        ("0", "1", "1"),
        ("0", "1", "2"),
        ("0", "3", "1"),
        ("0", "3", "2"),
    ]
    assert (rows[0]["update_s"], rows[0]["update_min_s"], rows[0]["update_max_s"]) == ("2.0", "1.0", "3.0")
    with wide.open() as file:
        table = list(csv.reader(file))
    assert table[0] == ["shadows", "1", "2"]
    # Medians over repetitions: 2 and 6 seconds with one shadow and one thread.
    assert table[1] == ["1", "4.0", "2.0"]
    assert found.summary == "2 of 2 runs"


def test_records_of_two_settings_do_not_mix() -> None:
    with pytest.raises(LastgoodError, match="records of 2 settings"):
        collect_updates(PanelRecords("checkmate", "optimizer", [record_of(), record_of(optimizer="sgd")], 2))


def test_a_lacking_run_is_an_error_unless_partial(tmp_path: Path) -> None:
    paths = [*written(tmp_path, record_of()), tmp_path / spec_of(1).record_path()]
    collect = figure_kind("checkmate").collector()
    with pytest.raises(LastgoodError, match="1 of 2 run records"):
        collect("checkmate", "optimizer", paths, tmp_path)
    collect("checkmate", "optimizer", paths, tmp_path, partial=True).write(tmp_path / "t.csv", tmp_path / "w.csv")
    draw = figure_kind("checkmate").drawer()
    with pytest.raises(LastgoodError, match="partial: 1 of 2 runs"):
        draw(tmp_path / "t.csv", tmp_path / "picture")
    first = draw(tmp_path / "t.csv", tmp_path / "a" / "picture", partial=True)
    again = draw(tmp_path / "t.csv", tmp_path / "b" / "picture", partial=True)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]


@pytest.mark.slow
def test_updates_are_timed_for_real(tmp_path: Path) -> None:
    spec = spec_of(model="resnet50", optimizer="sgd", threads=(1,), shadows=(1, 2), updates=2)
    record = execute_optimizer(spec, tmp_path, tmp_path, tmp_path, lambda _: None)
    assert [(point.threads, point.shadows, len(point.update_s)) for point in record.points] == [(1, 1, 2), (1, 2, 2)]
    assert record.parameters == 25_557_032


def test_a_benchmark_that_fails_is_an_error_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(LastgoodError, match=r"(?s)exit status 2.*lenet"):
        execute_optimizer(spec_of(model="lenet", shadows=(2,)), tmp_path, tmp_path, tmp_path, lambda _: None)


def test_the_picture_has_a_line_for_each_number_of_shadows(tmp_path: Path) -> None:
    paths = written(tmp_path, record_of())
    found: Any = figure_kind("checkmate").collector()("checkmate", "optimizer", paths, tmp_path)
    found.write(tmp_path / "t.csv", tmp_path / "w.csv")
    figure = draw_optimizer(read_updates(tmp_path / "t.csv"))
    lines = [[float(value) for value in line.get_ydata()] for line in figure.axes[0].lines]  # type: ignore[union-attr]
    assert lines == [pytest.approx([2, 1]), pytest.approx([2 / 3, 1 / 3])]
    assert figure.axes[0].get_ylabel() == "one whole update (s)"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["1 shadow", "3 shadows"]
