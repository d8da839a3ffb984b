"""StellaTrain's figure: plan, records, columns, pictures, and its runs at their smallest."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from lastgood.cluster.testbed.testbed import why_no_testbed
from lastgood.errors import ConfigError, LastgoodError
from lastgood.experiments.config.yaml_file import parse_overrides
from lastgood.experiments.figures.registry import figure_kind
from lastgood.experiments.figures.workflow_plan import plan_figure, plan_workflow
from lastgood.experiments.plan.grid import load_grid
from lastgood.experiments.plan.load import parse_config
from lastgood.experiments.plots.stellatrain import draw_stellatrain, plot_stellatrain, read_stellatrain
from lastgood.experiments.plots.stellatrain_caption import stellatrain_caption
from lastgood.experiments.records.kinds import STELLATRAIN, kind_of_spec, parse_spec
from lastgood.experiments.records.stellatrain import (
    ALONE,
    KERNELS,
    STELLATRAIN_PARTS,
    WAYS,
    KernelsSettings,
    LinksSettings,
    StellatrainPart,
    StellatrainRecord,
    StellatrainSpec,
)
from lastgood.experiments.stellatrain_runs import execute
from lastgood.experiments.stellatrain_runs.execute import execute_stellatrain, order_of_ways
from lastgood.experiments.stellatrain_runs.kernels import measure_kernels
from lastgood.experiments.stellatrain_runs.rank import sent_bytes, steps_of_block
from lastgood.experiments.tables.panels import PanelRecords
from lastgood.experiments.tables.stellatrain import STELLATRAIN_COLUMNS, collect_stellatrain, link_bound
from tests.experiments.support.stellatrain_records import GRADIENT, LINKS, record_of, spec_of

ROOT = Path(__file__).resolve().parents[2]
PARTS = pytest.mark.parametrize("part", STELLATRAIN_PARTS)


def configure(*entries: str) -> Any:
    return parse_config(ROOT / "config" / "laptop.yaml", parse_overrides([*entries, "machine=testbox"]))[0]


def collected(*records: StellatrainRecord) -> Any:
    return collect_stellatrain(PanelRecords("stellatrain", records[0].spec.part, records, len(records)))


def frame_of(folder: Path, *records: StellatrainRecord, expected: int | None = None) -> pd.DataFrame:
    """Of records on the disk, by way of the tidy file."""
    paths = [folder / record.spec.record_path() for record in records]
    for path, record in zip(paths, records, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        record.write(path)
    collect = figure_kind("stellatrain").collector()
    found = collect("stellatrain", records[0].spec.part, paths, folder / "none", partial=True, expected=expected)
    found.write(folder / "tidy.csv", folder / "wide.csv")
    return read_stellatrain(folder / "tidy.csv")


# -- plan --------------------------------------------------------------------------------------------------------------


def test_each_part_is_a_run_and_a_panel_by_its_name_alone() -> None:
    config = configure("stellatrain={repetitions: 2}")
    specs: Any = plan_figure(config, "stellatrain")
    assert [(spec.part, spec.repetition) for spec in specs] == [
        (part, number) for number in (0, 1) for part in STELLATRAIN_PARTS
    ]
    assert specs[0].cell_hash == specs[2].cell_hash
    assert len({spec.record_path() for spec in specs}) == 4
    records = plan_workflow(config).records
    assert all(len(records["stellatrain", part]) == 2 for part in STELLATRAIN_PARTS)
    assert not figure_kind("stellatrain").always(config)
    some = configure("stellatrain={parts: kernels}")
    assert [spec.panel for spec in plan_figure(some, "stellatrain")] == ["kernels"]
    assert figure_kind("stellatrain").panels(some) == ["kernels"]


def test_the_defaults_are_all_ways_at_three_rates_within_twenty_minutes() -> None:
    links = plan_figure(configure("threads=2"), "stellatrain")[0].links  # type: ignore[attr-defined]
    assert links.ways == WAYS[1:] and links.threads == 1
    assert [rate / 1e6 for rate in links.rates_bits_per_s] == [100, 500, 1000]
    grid = load_grid(ROOT, "stellatrain")
    seconds = STELLATRAIN.function("modelled_s")
    specs = plan_figure(configure(), "stellatrain")
    assert 60 < sum(seconds(spec, grid.prediction["laptop"]) for spec in specs) < 20 * 60


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("stellatrain={parts: [roof]}", "roof"),
        ("stellatrain={links: {ways: [horovod]}}", "horovod"),
        ("stellatrain={links: {ways: [alone]}}", "always measured"),
        ("stellatrain={links: {rates: [1furlong]}}", "1furlong"),
        ("stellatrain={links: {warmup: 3}}", "warmup"),
        ("stellatrain={links: {compression: 1}}", "compression"),
        ("stellatrain={kernels: {elements: 10}}", "elements"),
    ],
)
def test_what_cannot_be_is_refused_before_any_job(entry: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)stellatrain.*{message}"):
        configure(entry)


# -- records -----------------------------------------------------------------------------------------------------------


@PARTS
def test_a_spec_is_found_by_its_keys_and_a_record_at_its_place(part: StellatrainPart, tmp_path: Path) -> None:
    spec = spec_of(part)
    assert parse_spec(spec.canonical_json(), "here") == (STELLATRAIN, spec)
    assert kind_of_spec(spec) is STELLATRAIN
    assert spec_of(part, compression=0.9).record_path() != spec.record_path()
    record = record_of(part)
    frame_of(tmp_path, record)
    assert StellatrainRecord.load_placed(tmp_path / spec.record_path()) == record
    assert record.summary()


def test_a_spec_has_one_part_and_a_record_what_is_its_own() -> None:
    with pytest.raises(ValueError, match="of one part"):
        StellatrainSpec(machine="testbox", scale="laptop")
    with pytest.raises(ValueError, match="of one part"):
        StellatrainSpec(machine="testbox", scale="laptop", links=spec_of().links, kernels=spec_of("kernels").kernels)
    with pytest.raises(ValueError, match="not what a record of links holds"):
        StellatrainRecord.model_validate({**record_of().model_dump(), "blocks": []})
    with pytest.raises(ValueError, match="each once"):
        LinksSettings(**{**LINKS, "ways": ("ddp", "ddp")})


# -- columns -----------------------------------------------------------------------------------------------------------


def test_the_bound_is_the_lower_of_compute_and_link() -> None:
    assert link_bound(0.2, 45e6, 100e6) == (pytest.approx(1 / 3.6), "link")
    assert link_bound(0.2, 450e3, 100e6) == (pytest.approx(5.0), "compute")
    assert link_bound(0.2, 0, 100e6) == (5.0, "compute")


def test_each_block_has_the_bound_of_its_bytes_and_its_round() -> None:
    found = collected(record_of())
    rows = {(row.way, row.rate_bits_per_s, row.round): row for row in found.tidy}
    ddp = rows["ddp", 100_000_000, 0]
    assert ddp.bound_steps_per_s == pytest.approx(100e6 / (8 * GRADIENT)) and ddp.binds == "link"
    assert ddp.of_bound == pytest.approx(3.6 / 3.8)
    assert rows["v16-1", 1_000_000_000, 1].bound_steps_per_s == pytest.approx(5.0)
    assert rows["v16-1", 1_000_000_000, 1].binds == "compute"
    assert found.warnings == []
    header, *lines = found.wide
    assert header[:4] == ["way", "0.1gbit iterations/s", "0.1gbit of bound", "0.1gbit bytes"]
    assert [line[0] for line in lines][:2] == ["compute alone", "DDP"] and len(lines) == len(WAYS)
    assert float(lines[1][3]) == GRADIENT


def test_a_way_above_its_bound_is_named(tmp_path: Path) -> None:
    slow = record_of(alone=2.0)
    assert any("v16, staleness 1 at 1gbit: " in text for text in collected(slow).warnings)
    assert "ABOVE ITS BOUND" in stellatrain_caption(frame_of(tmp_path, slow))


def test_kernels_stand_beside_the_read_of_their_round() -> None:
    found = collected(record_of("kernels"))
    rows = [row for row in found.tidy if row.way == "sgd-dense"]
    assert [row.of_read for row in rows] == [pytest.approx(2.0)] * 3
    assert [line[0] for line in found.wide][1:3] == ["one read", "SGD dense"]
    assert len(found.wide) == 1 + len(KERNELS)


def test_records_of_several_settings_are_refused() -> None:
    with pytest.raises(LastgoodError, match="several settings"):
        collected(record_of(), record_of(compression=0.9))


# -- pictures ----------------------------------------------------------------------------------------------------------


@PARTS
def test_a_picture_is_drawn_from_its_csv_alone(part: StellatrainPart, tmp_path: Path) -> None:
    frame = frame_of(tmp_path, record_of(part), expected=2)
    assert tuple(next(csv.reader((tmp_path / "tidy.csv").open()))) == STELLATRAIN_COLUMNS
    figure = draw_stellatrain(frame)
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_xticklabels()]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    if part == "links":
        assert names == ["100 Mbit/s", "1000 Mbit/s"]
        assert legend[:2] == ["DDP", "DDP, fp16 hook"] and "bound" in legend[-1]
        assert len({(patch.get_facecolor(), patch.get_hatch()) for patch in figure.legends[0].get_patches()}) == 9
        assert "DDP: 45;" in stellatrain_caption(frame) and "11.2 million" in stellatrain_caption(frame)
    else:
        assert len(names) == len(KERNELS) - 1 and "36%" in names[-1] and "%" not in names[0]
        assert "one read (110 ms)" in legend
        assert "3300" in [text.get_text() for text in axes.texts]
        assert "25 million" in stellatrain_caption(frame) and "of which 1 % are sent" in stellatrain_caption(frame)
    with pytest.raises(LastgoodError, match="--partial"):
        plot_stellatrain(tmp_path / "tidy.csv", tmp_path / "picture")
    made = plot_stellatrain(tmp_path / "tidy.csv", tmp_path / "picture", partial=True)
    assert {one.suffix for one in made} == {".pdf", ".png", ".svg"}


# -- runs --------------------------------------------------------------------------------------------------------------


def test_every_round_has_every_way_once_in_another_order() -> None:
    rounds = order_of_ways(spec_of(rounds=4), 100_000_000)
    assert all(sorted(ways) == sorted(WAYS) for ways in rounds)
    assert len({tuple(ways) for ways in rounds}) == 4
    assert rounds == order_of_ways(spec_of(rounds=4), 100_000_000) != order_of_ways(spec_of(rounds=4), 10**9)


def test_a_block_is_about_as_long_as_asked_and_averages_as_often_as_it_should() -> None:
    assert steps_of_block(0.1, 3.0, 200, 1) == 30
    assert steps_of_block(5.0, 3.0, 200, 1) == 2
    assert steps_of_block(0.001, 3.0, 200, 1) == 200
    assert steps_of_block(5.0, 3.0, 200, 4) == 4


def test_what_a_device_sent_is_read_from_the_kernels_table(tmp_path: Path) -> None:
    table = tmp_path / "dev"
    table.write_text(
        "Inter-|   Receive |  Transmit\n face |bytes packets|bytes packets\n"
        "    lo: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n  eth0:11 12 13 14 15 16 17 18 4242 20 21 22 23 24 25 26\n"
    )
    assert sent_bytes("eth0", table) == 4242
    with pytest.raises(ConfigError, match="eth9"):
        sent_bytes("eth9", table)
    assert sent_bytes("lo") >= 0


def test_links_without_a_testbed_are_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(execute, "why_no_testbed", lambda: "a testbed needs root")
    with pytest.raises(ConfigError, match="a testbed needs root"):
        execute_stellatrain(spec_of(), tmp_path, tmp_path, tmp_path / "logs", lambda _: None)


def test_kernels_are_timed_and_what_compressors_keep_is_told() -> None:
    threads = torch.get_num_threads()
    try:
        settings = KernelsSettings(elements=1 << 16, compression=0.99, threads=1, rounds=2)
        times = measure_kernels(settings, 0, lambda _: None)
    finally:
        torch.set_num_threads(threads)
    found = {one.kernel: one for one in times}
    assert tuple(found) == KERNELS and {len(one.seconds) for one in times} == {2}
    assert found["topk"].energy_kept == pytest.approx(found["torch-topk"].energy_kept)
    kept = [float(found[name].energy_kept or 0) for name in ("randomk", "v16", "topk")]
    assert kept == sorted(kept) and kept[0] < 0.05
    assert found["topk"].elements_kept == (1 << 16) // 100
    assert found["read"].energy_kept is None


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.measures
@pytest.mark.skipif(why_no_testbed() is not None, reason="no testbed here")
def test_all_ways_train_over_a_slow_link_and_compressed_ones_send_less(tmp_path: Path) -> None:
    small = {"model": "mlp", "size_px": 256, "batch": 2, "rates_bits_per_s": (100_000_000,), "rounds": 1}
    spec = spec_of(**small, block_s=0.2, most_steps=6)
    record = execute_stellatrain(spec, tmp_path, tmp_path, tmp_path / "logs", lambda _: None)
    blocks = {block.way: block for block in record.blocks}
    assert set(blocks) == set(WAYS) and record.parameters == 273_418
    sent = {way: block.sent_bytes_per_step / (4 * record.parameters) for way, block in blocks.items()}
    assert sent[ALONE] < 0.001
    assert 1.0 < sent["ddp"] < 1.1 and 0.5 < sent["fp16"] < 0.55 and 0.25 < sent["post-local"] < 0.3
    assert sent["powersgd-1"] < sent["powersgd-4"] < 0.1
    for way in ("topk-0", "v16-0", "topk-1", "v16-1"):
        assert 0.004 < sent[way] < 0.03, way
    assert collected(record).wide[0][0] == "way"
