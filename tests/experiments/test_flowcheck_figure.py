"""FlowCheck's figure: plan, records, columns and pictures, a panel for each part."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lastgood.errors import ConfigError, LastgoodError
from lastgood.experiments.config.yaml_file import parse_overrides
from lastgood.experiments.figures.registry import figure_kind
from lastgood.experiments.figures.workflow_plan import plan_figure, plan_workflow
from lastgood.experiments.flowcheck.execute import execute_flowcheck
from lastgood.experiments.flowcheck.stages import look_at
from lastgood.experiments.plan.grid import load_grid
from lastgood.experiments.plan.load import parse_config
from lastgood.experiments.plots.captions import flowcheck_caption
from lastgood.experiments.plots.flowcheck import draw_flowcheck, plot_flowcheck, read_flowcheck
from lastgood.experiments.records.flowcheck import FLOWCHECK_PARTS, FlowcheckRecord, FlowcheckSpec
from lastgood.experiments.records.kinds import FLOWCHECK, kind_of_spec, parse_spec
from lastgood.experiments.tables.flowcheck import FLOWCHECK_COLUMNS, collect_flowcheck
from lastgood.experiments.tables.flowcheck_numbers import UNRECOVERABLE, watched_name
from lastgood.experiments.tables.panels import PanelRecords
from lastgood.mirror.node.status import NodeStatus
from lastgood.mirror.odds import RingJob, lost_step_probability
from tests.experiments.support.flowcheck_records import record_of, spec_of

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "figures" / "reference" / "flowcheck.csv"
PARTS = pytest.mark.parametrize("part", FLOWCHECK_PARTS)


def configure(*entries: str) -> Any:
    return parse_config(ROOT / "config" / "laptop.yaml", parse_overrides([*entries, "machine=testbox"]))[0]


def write_all(folder: Path, *records: FlowcheckRecord) -> list[Path]:
    paths = [folder / record.spec.record_path() for record in records]
    for path, record in zip(paths, records, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        record.write(path)
    return paths


def frame_of(folder: Path, part: str, *records: FlowcheckRecord, reference: Path | None = REFERENCE) -> pd.DataFrame:
    paths = write_all(folder, *(records or [record_of(part)]))
    collect = figure_kind("flowcheck").collector()
    collect("flowcheck", part, paths, folder / "no ceilings", reference=reference).write(
        folder / "tidy.csv", folder / "wide.csv"
    )
    return read_flowcheck(folder / "tidy.csv")


# -- plan --------------------------------------------------------------------------------------------------------------


def test_each_part_is_a_run_and_a_panel_and_nothing_else_makes_it() -> None:
    config = configure("flowcheck={repetitions: 2}")
    specs: Any = plan_figure(config, "flowcheck")
    assert [(spec.part, spec.repetition) for spec in specs] == [
        (part, number) for number in (0, 1) for part in FLOWCHECK_PARTS
    ]
    assert specs[0].cell_hash == specs[len(FLOWCHECK_PARTS)].cell_hash
    assert len({spec.record_path() for spec in specs}) == len(specs)
    records = plan_workflow(config).records
    assert all(len(records["flowcheck", part]) == 2 for part in FLOWCHECK_PARTS)
    assert not figure_kind("flowcheck").always(config)
    some = configure("flowcheck={parts: sizing}")
    assert (
        [spec.panel for spec in plan_figure(some, "flowcheck")] == figure_kind("flowcheck").panels(some) == ["sizing"]
    )


def test_the_laptop_plan_stays_within_the_minutes_it_may_take() -> None:
    grid = load_grid(ROOT, "flowcheck")
    for scale in ("laptop", "gpu", "paper"):
        assert grid.prediction[scale].startup_s > 0
    specs = plan_figure(configure(), "flowcheck")
    assert sum(FLOWCHECK.function("modelled_s")(spec, grid.prediction["laptop"]) for spec in specs) < 12 * 60


@pytest.mark.parametrize(
    "entry, message",
    [
        ("flowcheck={parts: [floppy]}", "floppy"),
        ("flowcheck={recovery: {watched: [[0, 8]]}}", "a ring of 8 has ranks 0 to 7"),
        ("flowcheck={recovery: {watched: [[1, 1]]}}", "twice"),
        ("flowcheck={recovery: {loss_rates: [0]}}", "0"),
        ("flowcheck={sizing: {models: [2T]}}", "2T"),
        ("flowcheck={sizing: {gpu_link_gbit: fast}}", "fast"),
        ("flowcheck={capture: {frame_bytes: [10]}}", "10"),
        ("flowcheck={lives: {failures: 0}}", "0"),
        ("flowcheck={training: {systems: [none]}}", "always measured"),
        ("flowcheck={training: {shape: {width: 0}}}", "width"),
        ("flowcheck={stages: {widths: [130]}}", "130 is not a multiple of the 4 heads"),
        ("flowcheck={capture: {offered: [1furlong]}}", "1furlong"),
    ],
)
def test_what_cannot_be_is_refused_before_any_job(entry: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)flowcheck.*{message}"):
        configure(entry)


@PARTS
def test_settings_are_in_the_path_and_a_spec_is_found_by_its_keys(part: str) -> None:
    spec = spec_of(part)
    assert spec.cell_hash == spec_of(part, 3).cell_hash != spec_of(part, method=2).cell_hash
    assert parse_spec(spec.canonical_json(), "--spec") == (FLOWCHECK, spec)
    assert kind_of_spec(spec) is FLOWCHECK
    assert FlowcheckSpec.model_validate_json(spec.canonical_json()) == spec
    assert f"flowcheck/{part}/c{spec.cell_hash}/r0.json" in str(spec.record_path())


@PARTS
def test_a_record_lies_where_its_spec_says_and_is_of_its_part(part: str, tmp_path: Path) -> None:
    record = record_of(part)
    (path,) = write_all(tmp_path, record)
    assert FlowcheckRecord.load_placed(path) == record
    assert record.summary()
    with pytest.raises(LastgoodError, match="it was moved or edited"):
        FlowcheckRecord.load_placed(path.rename(path.with_name("r7.json")))
    other = next(one for one in FLOWCHECK_PARTS if one != part)
    mixed = {**json.loads(record.model_dump_json()), "result": json.loads(record_of(other).model_dump_json())["result"]}
    with pytest.raises(ValueError, match="in a record of"):
        FlowcheckRecord.model_validate(mixed)


# -- columns -----------------------------------------------------------------------------------------------------------


@PARTS
def test_every_number_is_a_row_and_repetitions_are_medians_in_the_wide_file(part: str, tmp_path: Path) -> None:
    frame = frame_of(tmp_path, part, record_of(part), record_of(part, 1))
    assert tuple(frame.columns) == FLOWCHECK_COLUMNS
    assert set(frame["system"]) == {"flowcheck"}
    assert (frame["runs_expected"] == 2).all()
    with (tmp_path / "wide.csv").open() as file:
        header, *lines = csv.reader(file)
    assert header[0] == "number"
    assert len(lines) == len(frame[["measure", "series", "source"]].drop_duplicates())
    assert "Machine testbox" in flowcheck_caption(frame)


def test_formula_simulation_and_measurement_stand_beside_the_published_number(tmp_path: Path) -> None:
    frame = frame_of(tmp_path, "recovery")
    assert set(frame["source"]) == {"formula", "simulated", "measured", "published"}
    (published,) = frame[frame["source"] == "published"].to_dict("records")
    assert (published["x"], published["y"], published["measure"]) == (1e-9, 6e-12, UNRECOVERABLE)
    line = frame[(frame["source"] == "formula") & (frame["measure"] == UNRECOVERABLE)]
    one = line[line["series"] == "1 watched"].sort_values("x")
    job = RingJob(8, 1 << 20, 1024)
    for _, row in one.iterrows():
        assert row["y"] == pytest.approx(lost_step_probability(job, (0,), row["x"]))
    assert one["y"].is_monotonic_increasing
    points = frame[(frame["source"] == "measured") & (frame["measure"] != UNRECOVERABLE)]
    assert set(points["y"]) == {0.9} and (points["y_low"] < 0.9).all() and (points["y_high"] > 0.9).all()
    assert "all gradients called complete equal the true ones" in flowcheck_caption(frame)


def test_a_gradient_that_differs_is_shouted(tmp_path: Path) -> None:
    record = record_of("recovery", differing=1)
    assert record.marks()
    found = collect_flowcheck(PanelRecords("flowcheck", "recovery", [record], 1))
    assert any("DIFFER" in warning for warning in found.warnings)
    assert "GRADIENTS DIFFER" in flowcheck_caption(frame_of(tmp_path, "recovery", record))


def test_ways_of_training_stand_beside_each_other_and_a_node_that_is_behind_is_shouted(tmp_path: Path) -> None:
    frame = frame_of(tmp_path, "training")
    names = ["no checkpoints", "mirror only", "FlowCheck", "CheckFreq", "sync"]
    assert list(dict.fromkeys(frame["place"])) == names
    assert set(frame[frame["place"] == "FlowCheck"]["y"]) == {110.0}
    assert "FlowCheck 1.1" in flowcheck_caption(frame)
    assert "DID NOT HOLD" not in flowcheck_caption(frame)
    behind = record_of("training", differing=1)
    assert "LAST STEP OF 2 OF 2" in flowcheck_caption(frame_of(tmp_path / "behind", "training", behind))


def test_stages_are_told_by_step_and_as_a_share_of_the_gap(tmp_path: Path) -> None:
    frame = frame_of(tmp_path, "stages")
    step = frame[frame["measure"] == "time of a step (ms)"]
    one = step[step["place"] == "1.28 M, width 128"].set_index("series")["y"]
    # 4 steps between the looks, and 5 updates.
    assert one.to_dict() == pytest.approx(
        {"parse": 10, "extract": 20, "take over": 5, "update": 20, "from step to step": 100}
    )
    share = frame[frame["measure"] != "time of a step (ms)"]
    assert share.groupby("place")["y"].sum().tolist() == pytest.approx([55, 55])
    assert "width 128 0.55, width 512 0.55" in flowcheck_caption(frame)
    assert "DID NOT HOLD" not in flowcheck_caption(frame)
    behind = frame_of(tmp_path / "behind", "stages", record_of("stages", differing=1))
    assert "LAST STEP OF 2 OF 2" in flowcheck_caption(behind)


def test_the_gap_is_a_line_over_the_stages_and_no_part_of_them(tmp_path: Path) -> None:
    (axes, share) = draw_flowcheck(frame_of(tmp_path, "stages")).axes
    tops = [patch.get_y() + patch.get_height() for patch in axes.patches]  # type: ignore[attr-defined]
    assert max(tops) == pytest.approx(55)
    assert axes.get_ylim()[1] > 100
    assert {text.get_text() for text in axes.texts} == {text.get_text() for text in share.texts} == {"55"}


def test_a_block_without_a_step_between_its_looks_is_none() -> None:
    block = record_of("stages").result.blocks[0]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="no step between"):
        type(block).model_validate({**block.model_dump(), "last": block.model_dump()["first"]})


def test_clocks_of_a_node_are_read_from_its_status() -> None:
    counters = {
        "parse": {"seconds": 1.0, "payload_bytes": 9},
        "extract": {"seconds": 2.0},
        "node": {"seconds": 5.0},
        "update": {"seconds": 4.0, "steps": 7, "waited": 3.5},
    }
    status = NodeStatus(1, "", "follows", None, 1, 8, (), (), counters=counters)
    found = look_at(status)
    assert (found.steps, found.updates) == (8, 7)
    assert found.stage_s == {"parse": 1.0, "extract": 2.0, "take over": 1.5, "update": 4.0}


def test_useful_steps_count_and_the_trace_has_its_own_rate(tmp_path: Path) -> None:
    frame = frame_of(tmp_path, "lives")
    window = frame[frame["source"] == "measured"]
    assert list(window["y"]) == pytest.approx([75, 75])  # 150 steps of 0.1 s in 20 s
    rate = frame[frame["source"] == "model"]
    # 18 s trained 152 steps; a failure costs one step in the mean, and the restore of 1 s.
    step_s = 18 / 152
    assert rate["y"].iloc[0] == pytest.approx(100 * (1 - 100 * (step_s + 1) / 1e6) * 0.1 / step_s)
    (published,) = frame[frame["source"] == "published"].to_dict("records")
    assert (published["measure"], published["y"]) == (rate["measure"].iloc[0], 98)
    assert "2, 0 iterations lost by kill" in flowcheck_caption(frame)
    wrong = frame_of(tmp_path / "wrong", "lives", record_of("lives", differing=3))
    assert "LOSSES OF STEPS DONE AGAIN DIFFER" in flowcheck_caption(wrong)


def test_shares_of_frames_and_what_a_node_needs(tmp_path: Path) -> None:
    capture = frame_of(tmp_path, "capture")
    assert list(capture["y"]) == [0, 0.5, 0, 0.5]
    assert list(capture["x"]) == pytest.approx([1, 8, 1, 8])
    assert "DPDK: not here" in flowcheck_caption(capture)
    assert "800 of 1000 missing frames were dropped at that ring" in flowcheck_caption(capture)
    sizing = frame_of(tmp_path / "sizing", "sizing")
    assert set(sizing["source"]) == {"model"}
    assert "capture" not in set(sizing["series"])  # it was not measured
    assert "and so not in the cores: capture" in flowcheck_caption(sizing)
    assert len(set(sizing["place"])) == 4


def test_neighbours_and_others_are_told_apart() -> None:
    names = [watched_name(8, ranks) for ranks in ((3,), (0, 1), (0, 7), (0, 4), (0, 1, 2), (0, 3, 5), (0, 1, 4))]
    assert names == [
        "1 watched",
        "2 watched, neighbours",
        "2 watched, neighbours",
        "2 watched, apart",
        "3 watched, neighbours",
        "3 watched, apart",
        "3 watched, partly neighbours",
    ]


def test_mixtures_and_what_is_missing_are_refused(tmp_path: Path) -> None:
    other = spec_of("sizing").settings.model_copy(update={"updates": 6})
    with pytest.raises(LastgoodError, match="different settings"):
        collect_flowcheck(
            PanelRecords("flowcheck", "sizing", [record_of("sizing"), record_of("sizing", settings=other)], 2)
        )
    paths = [*write_all(tmp_path, record_of("sizing")), tmp_path / spec_of("sizing", 1).record_path()]
    collect = figure_kind("flowcheck").collector()
    with pytest.raises(LastgoodError, match="1 of 2 run records"):
        collect("flowcheck", "sizing", paths, tmp_path)
    collect("flowcheck", "sizing", paths, tmp_path, partial=True).write(tmp_path / "t.csv", tmp_path / "w.csv")
    with pytest.raises(LastgoodError, match="partial: 1 of 2 runs"):
        plot_flowcheck(tmp_path / "t.csv", tmp_path / "picture")
    assert plot_flowcheck(tmp_path / "t.csv", tmp_path / "picture", partial=True)


# -- pictures ----------------------------------------------------------------------------------------------------------


@PARTS
def test_a_panel_has_a_small_picture_for_each_measure_and_nothing_overlaps(part: str, tmp_path: Path) -> None:
    frame = frame_of(tmp_path, part)
    figure = draw_flowcheck(frame, "single" if part == "sizing" else "double")
    measures = list(dict.fromkeys(frame[frame["source"] != "published"]["measure"]))
    assert [axes.get_title(loc="left") for axes in figure.axes] == measures
    boxes = [axes.get_position() for axes in figure.axes]
    assert all(0 <= box.x0 < box.x1 <= 1 and 0 <= box.y0 < box.y1 <= 1 for box in boxes)
    assert not any(one.overlaps(other) for one in boxes for other in boxes if one is not other)


def test_a_second_drawing_is_the_same_to_the_byte(tmp_path: Path) -> None:
    frame_of(tmp_path, "training")
    first, again = (plot_flowcheck(tmp_path / "tidy.csv", tmp_path / name / "picture") for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]


def test_series_differ_without_colour_too(tmp_path: Path) -> None:
    (axes, _) = draw_flowcheck(frame_of(tmp_path, "recovery")).axes
    lines: list[Any] = [line for line in axes.lines if len(list(line.get_xdata())) > 5]  # type: ignore[arg-type]
    assert len({str(line._unscaled_dash_pattern) for line in lines}) == len(lines) == 3
    stacks = draw_flowcheck(frame_of(tmp_path / "sizing", "sizing")).axes[2]
    assert len({patch.get_hatch() for patch in stacks.patches}) == 2


# -- for real ----------------------------------------------------------------------------------------------------------


def test_what_is_measured_goes_through_the_parser_and_is_the_truth(tmp_path: Path) -> None:
    small = {"simulated": 0, "measured": 8, "ranks": 4, "gradient_bytes": 64 << 10, "watched": ((0,), (0, 2))}
    settings = spec_of("recovery").settings.model_copy(update={**small, "loss_rates": (1e-5, 0.05)})
    spec = spec_of("recovery", settings=settings)
    result: Any = execute_flowcheck(spec, tmp_path, tmp_path, tmp_path, lambda _: None).result
    found = {(point.watched, point.loss_rate): point for point in result.points}
    assert len(found) == 4
    assert all(point.differing == 0 for point in result.points)
    assert found[(0,), 1e-5].share == found[(0, 2), 1e-5].share == 1
    assert found[(0,), 0.05].share < found[(0, 2), 0.05].share


def test_rates_of_parsing_and_updating_are_measured(tmp_path: Path) -> None:
    settings = spec_of("sizing").settings.model_copy(update={"updates": 1, "traffic_bytes": 1 << 20})
    spec = spec_of("sizing", settings=settings)
    result: Any = execute_flowcheck(spec, tmp_path, tmp_path, tmp_path, lambda _: None).result
    assert [rate.name for rate in result.rates] == ["parse", "update"]
    assert all(rate.per_core_s > 1e6 for rate in result.rates)


def test_simulation_agrees_with_the_formula(tmp_path: Path) -> None:
    settings = spec_of("recovery").settings.model_copy(update={"simulated": 300, "measured": 0})
    record = execute_flowcheck(spec_of("recovery", settings=settings), tmp_path, tmp_path, tmp_path, lambda _: None)
    job = RingJob(8, 1 << 20, 1024)
    result: Any = record.result
    assert len(result.points) == 9
    for point in result.points:
        expected = 1 - lost_step_probability(job, point.watched, point.loss_rate)
        assert abs(point.share - expected) < 0.1
