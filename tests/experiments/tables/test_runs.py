"""From known records to known numbers in the CSV files."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lastgood.errors import LastgoodError
from lastgood.experiments.records.run import RunRecord
from lastgood.experiments.tables.columns import OF_PAIRS
from lastgood.experiments.tables.runs import TIDY_COLUMNS, collect, collect_files, run_name
from tests.experiments.support.records import make_ceilings, make_record, place_record

STATE_BYTES = 200_000_000
CEILINGS = make_ceilings(write_bytes_per_s=1e9, copy_bytes_per_s=1e9)


def a_panel() -> list[RunRecord]:
    """Two repetitions of `none`, sync and PCcheck at intervals 1 and 10, with round numbers."""
    common: dict[str, Any] = {"state_bytes": STATE_BYTES, "measured_steps": 20}
    records = []
    for repetition, none in ((0, 10.0), (1, 8.0)):
        records.append(make_record("none", 0, repetition, iterations_per_s=none, hide_s=0.05, **common))
        for system, by_interval in (("sync", {1: 2.0, 10: 5.0}), ("pccheck", {1: 4.0, 10: 8.0})):
            for interval, rate in by_interval.items():
                records.append(
                    make_record(
                        system,
                        interval,
                        repetition,
                        iterations_per_s=rate - repetition,
                        drain_s=2.5 if system == "pccheck" else 0.0,
                        proof=True if repetition == 0 else None,
                        **common,
                    )
                )
    return records


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def written(tmp_path: Path, records: list[RunRecord], **options: Any) -> tuple[list[dict[str, str]], str]:
    tidy, wide = tmp_path / "tidy.csv", tmp_path / "wide.csv"
    collect("fig8", "vgg16", records, CEILINGS, **options).write(tidy, wide)
    return rows_of(tidy), wide.read_text()


def test_known_records_give_known_values(tmp_path: Path) -> None:
    rows, _ = written(tmp_path, a_panel())
    assert list(rows[0]) == [name for name in TIDY_COLUMNS if name not in OF_PAIRS]
    row = next(
        row for row in rows if (row["system"], row["interval_steps"], row["repetition"]) == ("pccheck", "10", "1")
    )
    expected = {
        "figure": "fig8",
        "panel": "vgg16",
        "machine": "testbox",
        "scale": "laptop",
        "workload": "vgg16",
        "iterations_per_s": "7.0",
        "none_iterations_per_s": "8.0",
        "ratio_to_none": "0.875",
        "state_bytes": "200000000",
        "checkpoints_started": "2",
        "checkpoints_durable": "2",
        "checkpoints_failed": "0",
        "enough_checkpoints": "True",
        "persist_p50_s": "0.25",
        "persist_p99_s": "0.25",
        "drain_s": "2.5",
        "bytes_written": "400000000",
        "git_revision": "0123456789abcdef0123456789abcdef01234567",
        "git_dirty": "False",
        "method": "1",
        "copy_ceiling_bytes_per_s": "1000000000.0",
        "persist_ceiling_bytes_per_s": "1000000000.0",
        "runs_expected": "10",
        "runs_missing": "",
        "notes": "",
    }
    assert {name: row[name] for name in expected} == expected
    # 20 steps at 7/s and 2.5 s of drain.
    assert float(row["durable_iterations_per_s"]) == pytest.approx(20 / (20 / 7 + 2.5))
    # Iterations of none take 0.1 and 0.125 s: the median is 0.1125 s. The copy takes 0.2 s, of which 0.05 s hide, every
    # 10 iterations: 1 / (0.1125 + 0.015). The disk would allow 10 * 1e9 / 2e8 = 50.
    assert float(row["iteration_s"]) == pytest.approx(0.1125)
    assert float(row["bound_iterations_per_s"]) == pytest.approx(1 / 0.1275)
    assert row["bound_binds"] == "copy"
    assert float(row["ratio_to_bound"]) == pytest.approx(20 / (20 / 7 + 2.5) * 0.1275)
    # The repetition itself was not proved, its cell was.
    assert row["proof_equal"] == "True"
    assert row["restore_s"] == ""


def test_order_and_bytes_do_not_depend_on_the_order_given(tmp_path: Path) -> None:
    records = a_panel()
    rows, wide = written(tmp_path, records)
    keys = [(row["system"], int(row["interval_steps"]), int(row["repetition"])) for row in rows]
    assert [key[0] for key in keys] == ["none"] * 2 + ["sync"] * 4 + ["pccheck"] * 4
    assert keys[2:6] == [("sync", 1, 0), ("sync", 1, 1), ("sync", 10, 0), ("sync", 10, 1)]
    before = (tmp_path / "tidy.csv").read_bytes()
    random.Random(1).shuffle(records)
    assert written(tmp_path, records)[1] == wide
    assert (tmp_path / "tidy.csv").read_bytes() == before


def test_floats_come_back_as_they_were(tmp_path: Path) -> None:
    rate = 10 / 3
    rows, _ = written(tmp_path, [make_record("none", iterations_per_s=rate)])
    assert float(rows[0]["iterations_per_s"]) == rate


def test_the_wide_layout_is_that_of_the_artefact(tmp_path: Path) -> None:
    # Medians over two repetitions; `none` (10 and 8) fills column 0 of each system.
    assert written(tmp_path, a_panel())[1] == "system,0,1,10\nsync,9.0,1.5,4.5\nPCcheck,9.0,3.5,7.5\n"


def test_the_wide_file_without_none_or_without_systems(tmp_path: Path) -> None:
    assert written(tmp_path, [make_record("sync", 5, iterations_per_s=2.0)])[1] == "system,5\nsync,2.0\n"
    assert written(tmp_path, [make_record("none", iterations_per_s=2.0)])[1] == "system,0\nno checkpoints,2.0\n"


def test_persist_quantiles(tmp_path: Path) -> None:
    times = [0.1 * number for number in range(1, 201)]
    random.Random(2).shuffle(times)
    rows, _ = written(tmp_path, [make_record(persist_s=times), make_record("sync", persist_s=[])])
    assert float(rows[1]["persist_p50_s"]) == pytest.approx(10.05)
    assert float(rows[1]["persist_p99_s"]) == pytest.approx(19.8)
    assert rows[0]["persist_p99_s"] == ""


def test_cells_without_none_have_no_ratio_and_no_bound(tmp_path: Path) -> None:
    found = collect("fig8", "vgg16", [make_record()], CEILINGS)
    row = found.tidy[0]
    assert (row.none_iterations_per_s, row.ratio_to_none, row.bound_iterations_per_s, row.bound_binds) == (None,) * 4
    assert "no `none` run" in row.notes
    assert any("no `none` run" in warning for warning in found.warnings)


def test_a_repetition_without_its_none_keeps_the_bound() -> None:
    found = collect("fig8", "vgg16", [make_record("none"), make_record(repetition=1)], CEILINGS)
    row = found.tidy[1]
    assert row.ratio_to_none is None
    assert row.bound_iterations_per_s is not None
    assert "this repetition" in row.notes


def test_none_of_other_threads_is_no_baseline() -> None:
    found = collect("fig8", "vgg16", [make_record("none", threads=1), make_record(threads=2)], CEILINGS)
    assert found.tidy[1].bound_iterations_per_s is None


def test_too_few_checkpoints_are_marked() -> None:
    one = make_record(durable=1, superseded=0)
    two = make_record("sync", durable=1, superseded=1)
    found = collect("fig8", "vgg16", [make_record("none"), one, two], CEILINGS)
    assert [row.enough_checkpoints for row in found.tidy] == [None, True, False]


def test_a_failed_proof_marks_the_whole_cell() -> None:
    records = [make_record(proof=False), make_record(repetition=1), make_record("sync")]
    found = collect("fig8", "vgg16", records, CEILINGS)
    assert [row.proof_equal for row in found.tidy] == [None, False, False]


def test_mixed_revisions_and_machines_are_flagged() -> None:
    records = [make_record("none"), make_record(git_dirty=True), make_record("sync", machine="otherbox")]
    found = collect("fig8", "vgg16", records, CEILINGS)
    for row in found.tidy:
        assert "mixed revisions: 0123456789ab, 0123456789ab+dirty" in row.notes
        assert "mixed machines: otherbox, testbox" in row.notes
    assert any("mixed revisions" in warning for warning in found.warnings)
    assert not any("mixed" in warning for warning in collect("fig8", "vgg16", a_panel(), CEILINGS).warnings)


def test_foreign_ceilings_and_quick_ones_are_flagged() -> None:
    ceilings = make_ceilings(machine="otherbox", quick=True)
    notes = collect("fig8", "vgg16", [make_record("none")], ceilings).tidy[0].notes
    assert "ceilings are of otherbox, runs of testbox" in notes
    assert "--quick" in notes


def test_cuda_runs_take_the_device_copy() -> None:
    records = [make_record("none", device="cuda"), make_record(device="cuda")]
    row = collect("fig8", "vgg16", records, make_ceilings(device_to_host_pinned_bytes_per_s=5e10)).tidy[1]
    assert row.copy_ceiling_bytes_per_s == 5e10
    with pytest.raises(LastgoodError, match="no device copy"):
        collect("fig8", "vgg16", records, CEILINGS)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (make_record("sync", workload="bert"), "one workload, not bert, vgg16"),
        (make_record("sync", scale="gpu"), "one scale, not gpu, laptop"),
        (make_record(), "given twice"),
        (make_record(repetition=1, threads=4), "two settings of pccheck at interval 10"),
    ],
)
def test_what_is_not_one_panel_is_refused(other: RunRecord, message: str) -> None:
    with pytest.raises(LastgoodError, match=message):
        collect("fig8", "vgg16", [make_record(), other], CEILINGS)


def test_a_record_that_does_not_lie_where_its_settings_say_is_refused(tmp_path: Path) -> None:
    path = place_record(make_record(), tmp_path)
    assert RunRecord.load_placed(path) == make_record()
    moved = path.with_name("r7.json")
    path.rename(moved)
    with pytest.raises(LastgoodError, match=r"r7\.json.*belong at .*r0\.json"):
        RunRecord.load_placed(moved)


def test_an_edited_record_is_refused(tmp_path: Path) -> None:
    path = place_record(make_record(), tmp_path)
    path.write_text(path.read_text().replace('"threads": 2', '"threads": 1'))
    with pytest.raises(LastgoodError, match="belong at"):
        RunRecord.load_placed(path)


def test_a_relative_path_from_inside_the_results_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = place_record(make_record(), tmp_path)
    monkeypatch.chdir(path.parent)
    assert RunRecord.load_placed(Path(path.name)) == make_record()


def test_partial_names_what_is_missing(tmp_path: Path) -> None:
    ceilings = tmp_path / "ceilings.json"
    CEILINGS.write(ceilings)
    paths = [place_record(make_record("none"), tmp_path), tmp_path / make_record(repetition=1).spec.record_path()]
    with pytest.raises(LastgoodError, match="1 of 2 run records are there: vgg16 pccheck f10 r1"):
        collect_files("fig8", "vgg16", paths, ceilings)
    row = collect_files("fig8", "vgg16", paths, ceilings, partial=True).tidy[0]
    assert (row.runs_expected, row.runs_missing) == (2, "vgg16 pccheck f10 r1")
    assert collect_files("fig8", "vgg16", paths[:1], ceilings, partial=True, expected=9).tidy[0].runs_expected == 9
    with pytest.raises(LastgoodError, match="1 of 9"):
        collect_files("fig8", "vgg16", paths[:1], ceilings, expected=9)
    with pytest.raises(LastgoodError, match="none of its 1 run records"):
        collect_files("fig8", "vgg16", paths[1:], ceilings, partial=True)


def test_a_run_has_a_short_name() -> None:
    assert run_name(make_record("sync", 25, 3).spec.record_path()) == "vgg16 sync f25 r3"
    assert run_name(Path("elsewhere.json")) == "elsewhere.json"


def test_the_command(tmp_path: Path) -> None:
    from lastgood.cli import app

    CEILINGS.write(tmp_path / "ceilings.json")
    paths = [place_record(record, tmp_path / "results") for record in a_panel()]
    outs = [tmp_path / "figures" / "fig8_vgg16.csv", tmp_path / "figures" / "fig8_vgg16_wide.csv"]
    arguments = ["collect", "fig8", "vgg16", "--ceilings", tmp_path / "ceilings.json"]
    arguments += ["--out-tidy", outs[0], "--out-wide", outs[1], *paths]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    assert len(rows_of(outs[0])) == 10
    assert outs[1].read_text().startswith("system,0,1,10\n")


def test_every_column_is_explained() -> None:
    text = Path(__file__).parents[3].joinpath("docs", "figures.md").read_text()
    assert [name for name in TIDY_COLUMNS if f"`{name}`" not in text] == []


def test_reference_numbers_name_their_source() -> None:
    files = sorted(Path(__file__).parents[3].joinpath("figures", "reference").glob("*.csv"))
    assert files
    for path in files:
        for row in rows_of(path):
            assert row["source"].strip(), path
            assert float(row["value"]) >= 0
            assert row["unit"]
            assert row["kind"] in {"paper", "artefact", "measured"}
