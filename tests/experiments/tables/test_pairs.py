"""Rows of runs in pairs of blocks: ratios first, one statistic for bars, line and bound, nothing above it unmarked."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.errors import LastgoodError
from lastgood.experiments.records.run import RanksRun
from lastgood.experiments.tables.columns import TIDY_COLUMNS
from lastgood.experiments.tables.runs import collect
from tests.experiments.support.paired_records import make_paired
from tests.experiments.support.records import make_ceilings, make_record

ROOT = Path(__file__).resolve().parents[3]
CEILINGS = make_ceilings(write_bytes_per_s=1e8, copy_bytes_per_s=1e10)


def rows(*records):
    return collect("fig8", "vgg16", records, CEILINGS).tidy


def test_rates_are_ratios_times_the_panels_training_without_checkpoints():
    """The machine was half as fast during the second run, which changes no ratio and no bar."""
    found = rows(
        make_paired("pccheck", 10, [0.9, 0.8, 0.85], none_step_s=0.1),
        make_paired("sync", 10, [0.9, 0.8, 0.85], none_step_s=0.2),
        make_paired("none", ratios=[1] * 7, none_step_s=0.1),
    )
    none, slow, calm = (next(row for row in found if row.system == name) for name in ("none", "sync", "pccheck"))
    assert none.iterations_per_s == pytest.approx(10.0)
    for row in (calm, slow):
        assert row.ratio_to_none == pytest.approx(0.85)
        assert row.iterations_per_s == row.durable_iterations_per_s == pytest.approx(8.5)
        assert (row.ratio_low, row.ratio_high) == (pytest.approx(0.722, abs=0.001), pytest.approx(0.991, abs=0.001))
        assert row.slowdown == pytest.approx(1 / 0.85)
        assert (row.rounds, row.rounds_disturbed, row.rounds_ended_by) == (3, 0, "interval")


def test_a_disk_that_was_seen_faster_raises_the_bound():
    by_ceilings, *_ = rows(make_paired("pccheck", 1, state_bytes=100_000_000, persist_s=[2.0]))
    by_burst, *_ = rows(make_paired("pccheck", 1, state_bytes=100_000_000, persist_s=[2.0], bursts=[1.1e8, 2e8]))
    by_system, *_ = rows(make_paired("pccheck", 1, state_bytes=100_000_000, persist_s=[2.0, 0.25]))
    found = [row.persist_ceiling_bytes_per_s for row in (by_ceilings, by_burst, by_system)]
    assert found == [1e8, 2e8, 4e8]
    assert by_ceilings.bound_iterations_per_s == pytest.approx(1.0)
    assert by_system.bound_iterations_per_s == pytest.approx(4.0)


def test_the_disk_of_several_ranks_takes_what_all_of_them_put_on_it():
    ranks = {"launcher": "local", "hosts": ["a"], "link_bits_per_s": None, "bytes_per_link": 0, "ranks": []}
    of_two = RanksRun(bytes_per_disk=200_000_000, **ranks)
    own = make_paired("pccheck", 1, state_bytes=100_000_000, persist_s=[2.0, 0.5])
    record = own.model_copy(update={"ranks": of_two})
    (row,) = rows(record)
    assert row.persist_ceiling_bytes_per_s == 4e8


def test_a_system_that_takes_gradients_is_compared_with_the_panel_s_training():
    """It has no blocks without checkpoints; what older records of it call so sent gradients as well."""
    none = make_paired("none", ratios=[1] * 3, none_step_s=0.1)
    of_old = make_paired("checkmate", 1, [1.0, 1.01, 1.0], none_step_s=0.2)
    blocks = [block for block in of_old.pairs.blocks if block.kind == "with"]
    for pairs in (of_old.pairs, of_old.pairs.model_copy(update={"blocks": blocks})):
        record = of_old.model_copy(update={"pairs": pairs})
        row = next(row for row in rows(none, record) if row.system == "checkmate")
        assert row.ratio_to_none == pytest.approx(0.5, rel=0.02) and row.rounds == 3
        assert row.iterations_per_s == pytest.approx(5.0, rel=0.02)
        assert row.ratio_low <= row.ratio_to_none <= row.ratio_high < 0.6
        # Alone it has nothing to be compared with.
        (alone,) = rows(record)
        assert alone.ratio_to_none is None and alone.bound_iterations_per_s is None


def test_what_is_above_its_bound_says_why():
    within, *_ = rows(make_paired("pccheck", 10, [0.95, 1.02, 1.04]))
    assert within.above_bound == "the bound lies in its interval"
    beyond, *_ = rows(make_paired("pccheck", 10, [1.2, 1.22, 1.25]))
    assert beyond.above_bound.startswith("training without checkpoints was slower beside it")
    below, *_ = rows(make_paired("pccheck", 10, [0.9, 0.9, 0.9]))
    assert below.above_bound is None


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["sync", "pccheck", "gpm", "checkfreq"]),
            st.lists(st.floats(0.05, 3.0), min_size=2, max_size=5),
            st.floats(0.02, 0.5),
            st.lists(st.floats(1e6, 1e10), max_size=3),
            st.sampled_from([1, 10, 25]),
        ),
        min_size=1,
        max_size=4,
        unique_by=lambda one: one[0],
    )
)
def test_no_row_passes_its_bound_unmarked_and_no_bound_the_line(drawn):
    records = [
        make_paired(system, interval, ratios, none_step_s=step_s, bursts=bursts)
        for system, ratios, step_s, bursts, interval in drawn
    ]
    for row in rows(*records, make_paired("none", none_step_s=0.1)):
        assert row.bound_iterations_per_s <= row.none_iterations_per_s * (1 + 1e-9)
        assert row.ratio_to_bound == pytest.approx(row.durable_iterations_per_s / row.bound_iterations_per_s)
        assert row.ratio_to_bound <= 1 + 1e-9 or row.above_bound


def test_no_kept_row_of_pairs_passes_its_bound_unmarked():
    checked = 0
    for path in sorted((ROOT / "figures" / "measured").glob("*/fig*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            found = [row for row in csv.DictReader(file) if "above_bound" in row and row["ratio_to_bound"]]
        for row in found:
            checked += 1
            unmarked = float(row["ratio_to_bound"]) > 1 + 1e-9 and not row["above_bound"]
            assert not unmarked, (path, row["system"], row["interval_steps"])
    assert checked > 90


def test_blocks_that_were_disturbed_make_no_line():
    record = make_paired("pccheck", 10, [0.9, 0.9, 0.9], none_step_s=0.1)
    slow = make_paired("sync", 10, [0.9, 0.9, 0.9], none_step_s=5.0, disturbed=[0, 1, 2])
    found = {row.system: row for row in rows(record, slow)}
    assert found["pccheck"].none_iterations_per_s == pytest.approx(10.0)
    assert found["sync"].rounds_disturbed == 3


def test_only_a_file_with_pairs_has_their_columns(tmp_path):
    out = tmp_path / "tidy.csv"
    collect("fig8", "vgg16", [make_paired("pccheck")], CEILINGS).write(out, tmp_path / "wide.csv")
    assert out.read_text().splitlines()[0].split(",") == list(TIDY_COLUMNS)


def test_both_ways_of_measuring_make_no_panel():
    with pytest.raises(LastgoodError, match=r"a panel shows one way of measuring, not one stretch, pairs of blocks"):
        rows(make_paired("pccheck"), make_record("none", 0))
