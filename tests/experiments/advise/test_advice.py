"""Advice: the formula by hand, its optimum against Young's rule and brute force, fits, files, held-out scores."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lastgood.errors import ConfigError, LastgoodError
from lastgood.experiments.advise.cells import rates_of, read_cells
from lastgood.experiments.advise.model import (
    Cell,
    Question,
    Rates,
    advise,
    default_intervals,
    fit_costs,
    goodput_fraction,
    iteration_with_s,
    model_costs,
    undecided,
)
from lastgood.experiments.advise.score import score, summary
from lastgood.experiments.tables.runs import collect
from tests.experiments.support.goodput_records import make_goodput
from tests.experiments.support.paired_records import make_paired
from tests.experiments.support.records import make_ceilings, make_record, place_record

GB = 1e9
HOUR = 3600.0
RATES = Rates(write=1 * GB, copy=10 * GB, read=2 * GB, network=0.5 * GB, device="cuda")
QUESTION = Question(state_bytes=4 * GB, iteration_s=0.1, mtbf_s=10 * HOUR, nodes=5, hide_s=0.08)
MEASURED = Path(__file__).resolve().parents[3] / "figures" / "measured" / "amd-epyc-2c"
DOCS = Path(__file__).resolve().parents[3] / "docs" / "advise.md"


# -- the model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "interval", "expected_s"),
    [
        # 4 GB: written in 4 s, copied in 0.4 s (0.32 s of it not hidden), sent in 8 s.
        ("sync", 10, 0.1 + 4 / 10),
        ("gpm", 10, 0.1 + 4 / 10),
        ("checkfreq", 10, (0.4 + 4) / 10),
        ("checkfreq", 100, 0.1 + 0.32 / 100),
        ("pccheck", 10, 4 / 10),
        ("pccheck", 40, 0.1 + 0.32 / 40),
        ("pccheck", 1000, 0.1 + 0.32 / 1000),
        ("gemini", 10, 8 / 10),
        ("gemini", 100, 0.1 + 0.32 / 100),
    ],
)
def test_an_iteration_takes_what_the_ceilings_say(system: str, interval: int, expected_s: float) -> None:
    costs, notes = model_costs(RATES, QUESTION)
    assert not notes
    assert iteration_with_s(costs[system], QUESTION, interval, RATES) == pytest.approx(expected_s)


def test_a_cpu_hides_no_copy_and_a_device_most_of_it() -> None:
    question = replace(QUESTION, hide_s=None)
    costs, _ = model_costs(RATES, question)
    assert iteration_with_s(costs["pccheck"], question, 1000, RATES) == pytest.approx(0.1 + (0.4 - 0.085) / 1000)
    on_cpu = replace(RATES, device="cpu")
    assert iteration_with_s(costs["pccheck"], question, 1000, on_cpu) == pytest.approx(0.1 + 0.4 / 1000)


@pytest.mark.parametrize(
    ("system", "lost"),
    # f t = 5 s; a checkpoint takes 4.4 s or 4 s; loading 2 s after a restart of 3 s.
    [
        ("checkfreq", 5 + 5),
        ("sync", 2.5 + 5),
        ("gpm", 2.5 + 5),
        ("pccheck", 5 + 2.5 + 4 / 2),
        # Its state comes from the peer, in 8 s; half a job is lost if that fails too before 2 copies are there again.
        ("gemini", 5 + 11 + -math.expm1(-(11 + 50 * 0.16 + 8) / 36000) * 50 * HOUR),
    ],
)
def test_goodput_by_hand(system: str, lost: float) -> None:
    question = replace(QUESTION, restart_s=3.0, job_s=100 * HOUR)
    costs, _ = model_costs(RATES, question)
    (row,) = [found for found in advise(question, costs, RATES, [50]) if found.system == system]
    taken_s = iteration_with_s(costs[system], question, 50, RATES)
    # A failure of the job every two hours.
    assert row.lost_s == pytest.approx(lost)
    assert row.goodput == pytest.approx((1 - lost / 7200) * 0.1 / taken_s)
    assert row.useful_hours_per_day == pytest.approx(24 * row.goodput)
    assert row.slowdown == pytest.approx(taken_s / 0.1)
    assert row.period_s == pytest.approx(50 * taken_s)
    assert row.source == "model"


def test_gemini_needs_a_second_node_and_a_measured_network() -> None:
    costs, notes = model_costs(RATES, replace(QUESTION, nodes=1))
    assert "gemini" not in costs
    assert "one node" in notes[0]
    costs, notes = model_costs(replace(RATES, network=None), QUESTION)
    assert "gemini" not in costs
    assert "--peer" in notes[0]


def test_an_unknown_system_counts_like_the_most_cautious() -> None:
    numbers = {"durable_s": 1.0, "load_s": 1.0, "max_in_flight": 1}
    assert goodput_fraction("mine", 9, QUESTION, 0.2, **numbers) == goodput_fraction(
        "checkfreq", 9, QUESTION, 0.2, **numbers
    )


def test_the_best_interval_obeys_youngs_rule() -> None:
    """Young, CACM 1974: for a stall d and failures every M seconds the best period is about sqrt(2 d M)."""
    costs, _ = model_costs(RATES, QUESTION)
    (row,) = advise(QUESTION, {"sync": costs["sync"]}, RATES)
    assert row.interval_steps * 0.1 == pytest.approx(math.sqrt(2 * 4 * 7200), rel=0.15)


@settings(max_examples=40, deadline=None)
@given(
    system=st.sampled_from(["sync", "gpm", "checkfreq", "pccheck", "gemini"]),
    state=st.floats(0.01, 100),
    iteration_s=st.floats(0.01, 3),
    mtbf_h=st.floats(0.05, 50),
)
@example(system="checkfreq", state=20.0, iteration_s=1.0, mtbf_h=0.0625)
def test_no_interval_at_all_is_much_better(system: str, state: float, iteration_s: float, mtbf_h: float) -> None:
    """Brute force: the round numbers that are tried lose under half a per cent to every whole number."""
    question = Question(state_bytes=state * GB, iteration_s=iteration_s, mtbf_s=mtbf_h * HOUR, nodes=2)
    costs, _ = model_costs(RATES, question)
    (row,) = advise(question, {system: costs[system]}, RATES)
    most = min(3000, int(2 * question.job_mtbf_s / iteration_s) + 2)
    best = advise(question, {system: costs[system]}, RATES, range(1, most))[0]
    assert row.goodput >= best.goodput - 0.005


def test_rows_are_sorted_and_ties_write_less() -> None:
    costs, _ = model_costs(RATES, QUESTION)
    rows = advise(QUESTION, costs, RATES, [1, 10, 100, 1000])
    assert len(rows) == 20
    assert [row.goodput for row in rows] == sorted((row.goodput for row in rows), reverse=True)
    hopeless = replace(QUESTION, mtbf_s=5.0)
    assert advise(hopeless, {"sync": costs["sync"]}, RATES, [1, 7])[0].interval_steps == 7
    assert advise(hopeless, costs, RATES)[0].goodput == 0


def test_default_intervals_end_at_the_jobs_mtbf() -> None:
    assert default_intervals(replace(QUESTION, mtbf_s=5 * 2.0)) == list(range(1, 21))
    assert default_intervals(replace(QUESTION, mtbf_s=0.01)) == [1]
    assert max(default_intervals(replace(QUESTION, mtbf_s=1e9))) <= 10_000_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state_bytes": 0.0}, "the state must be 1 to"),
        ({"state_bytes": -1.0}, "the state must be 1 to"),
        ({"state_bytes": float("nan")}, "the state must be"),
        ({"state_bytes": 1e16}, r"1 to 1e\+15 bytes, not 1e\+16"),
        ({"iteration_s": 0.0}, "the iteration time must be 1e-06 to 3600 seconds"),
        ({"iteration_s": 4000.0}, "not 4000"),
        ({"mtbf_s": 0.0}, "the MTBF of a node must be 5e-06 to"),
        ({"mtbf_s": float("inf")}, "the MTBF of a node"),
        ({"nodes": 0}, "the number of nodes must be 1 to"),
        ({"nodes": 10**7}, r"1 to 1e\+06, not 1e\+07"),
        ({"max_in_flight": 0}, "in flight must be"),
        ({"restart_s": -1.0}, "the restart time must be 0 to 86400"),
        ({"job_s": -1.0}, "the length of the job"),
        ({"hide_s": 0.2}, r"hide behind must be 0 to 0\.1"),
    ],
)
def test_numbers_that_no_training_has(change: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(QUESTION, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("interval", [0, -5, 10_000_001])
def test_intervals_are_bounded(interval: int) -> None:
    costs, _ = model_costs(RATES, QUESTION)
    with pytest.raises(ConfigError, match="an interval must be 1 to 10000000"):
        advise(QUESTION, costs, RATES, [10, interval])


# -- fits ----------------------------------------------------------------------------------------------------------


def cell(
    system: str, interval: int, ratio: float, *, workload: str = "a", state_gb: float = 1.0, **more: float
) -> Cell:
    values = {"iteration_s": 0.1, "hide_s": 0.1, "durable_s": 2.0 * state_gb, "load_s": 3.0 * state_gb, **more}
    return Cell(workload, "", system, interval, state_gb * GB, ratio=ratio, max_in_flight=2, **values)  # type: ignore[arg-type]


def cells_of(system: str, stall: float, busy: float) -> list[Cell]:
    """What the formula gives, for three workloads; `stall` and `busy` in seconds a GB."""
    found = []
    for workload, state_gb, t in (("a", 1.0, 0.1), ("b", 3.0, 0.2), ("c", 0.5, 0.05)):
        for interval in (1, 3, 10, 30, 100):
            taken_s = max(t + stall * state_gb / interval, busy * state_gb / interval)
            found.append(
                cell(system, interval, taken_s / t, workload=workload, state_gb=state_gb, iteration_s=t, hide_s=t)
            )
    return found


@settings(max_examples=15, deadline=None)
@given(stall=st.floats(0.05, 3), excess=st.floats(1.0, 1.5))
def test_a_fit_finds_the_numbers_that_made_the_cells(stall: float, excess: float) -> None:
    busy = 1.0 + stall * excess
    rates = Rates(write=100 * GB, copy=1e6 * GB, device="cuda")
    found = fit_costs(cells_of("pccheck", stall, busy), rates, QUESTION)["pccheck"]
    assert found.stall * GB == pytest.approx(stall, rel=0.02)
    assert found.busy * GB == pytest.approx(busy, rel=0.02)
    assert found.durable * GB == pytest.approx(2.0)
    assert found.load * GB == pytest.approx(3.0)
    assert found.source == "records, 15 cells"
    assert found.measured == (1, 100)


def test_a_fit_is_never_better_than_the_ceilings() -> None:
    cells = [cell("pccheck", 1, 1.0), cell("sync", 1, 1.0)]
    found = fit_costs(cells, RATES, QUESTION)
    assert found["pccheck"].busy == pytest.approx(1 / RATES.write)
    assert found["sync"].stall == pytest.approx(1 / RATES.write)


def test_cells_that_cannot_tell_mean_a_stall() -> None:
    """One interval is explained by either number; the stall goes on at longer intervals, so it is the cautious one."""
    found = fit_costs([cell("mine", 10, 1.5)], RATES, QUESTION)["mine"]
    assert found.busy == 0
    assert found.stall * GB == pytest.approx(0.5, rel=0.02)


def test_intervals_beyond_the_measured_say_so() -> None:
    costs = fit_costs(cells_of("sync", 1.0, 0.0), RATES, QUESTION)
    rows = {row.interval_steps: row.source for row in advise(QUESTION, costs, RATES, [1, 100, 101])}
    assert rows == {
        1: "records, 15 cells",
        100: "records, 15 cells",
        101: "records, 15 cells, extrapolated",
    }


@pytest.mark.parametrize(("spread", "rivals"), [(0.15, ["sync"]), (0.01, [])])
def test_systems_whose_intervals_overlap_are_undecided(spread: float, rivals: list[str]) -> None:
    # 1 and 1.25 s a GB of stall: about 5 % of goodput between them at these intervals.
    cells = [*cells_of("gpm", 1.0, 0.0), *cells_of("sync", 1.25, 0.0)]
    known = [replace(one, ends=((1 - spread) * one.ratio, (1 + spread) * one.ratio)) for one in cells]
    costs = fit_costs(known, RATES, QUESTION)
    found = advise(QUESTION, costs, RATES, [30])
    assert [row.system for row in found] == ["gpm", "sync"]
    best = found[0].goodput_interval
    assert best is not None and best.low < best.middle == found[0].goodput <= best.high
    assert [row.system for row in undecided(found)] == rivals
    # One run without pairs says nothing of noise, on either side.
    plain = advise(QUESTION, fit_costs(cells, RATES, QUESTION), RATES, [30])
    assert [row.goodput for row in plain] == [row.goodput for row in found]
    assert [row.system for row in undecided(plain)] == ["sync"] and plain[0].goodput_interval is None
    for lone, system in ((0, "gpm"), (-1, "sync")):
        mixed = list(known)
        mixed[lone] = cells[lone]
        costs = fit_costs(mixed, RATES, QUESTION)
        assert [name for name in costs if costs[name].ends is None] == [system]
        assert [row.system for row in undecided(advise(QUESTION, costs, RATES, [30]))] == ["sync"]
    # A model has no noise.
    assert undecided(advise(QUESTION, model_costs(RATES, QUESTION)[0], RATES, [30])) == []


# -- files ---------------------------------------------------------------------------------------------------------


def records_of(workload: str = "vgg16", **more: object) -> list:
    rates = {("none", 0): (5.0, 5.2), ("pccheck", 1): (4.0, 4.1), ("pccheck", 10): (4.9, 5.0), ("sync", 10): (3.0, 2.5)}
    return [
        make_record(
            system,
            interval,
            repetition,
            iterations_per_s=rate,
            workload=workload,
            proof=True if repetition == 0 and system != "none" else None,
            drain_s=0.2 if system == "pccheck" else 0.0,
            **more,
        )
        for (system, interval), pair in rates.items()
        for repetition, rate in enumerate(pair)
    ]


def test_cells_are_medians_of_ratios_within_repetitions(tmp_path: Path) -> None:
    for record in records_of():
        place_record(record, tmp_path)
    found = read_cells(tmp_path)
    assert (found.machine, found.device, found.rates, found.notes) == ("testbox", "cpu", None, [])
    by_cell = {(cell.system, cell.interval_steps): cell for cell in found.cells}
    assert sorted(by_cell) == [("pccheck", 1), ("pccheck", 10), ("sync", 10)]
    assert by_cell["sync", 10].ratio == pytest.approx((5.0 / 3.0 + 5.2 / 2.5) / 2)
    assert by_cell["sync", 10].ends == pytest.approx((5.0 / 3.0, 5.2 / 2.5))
    # 40 steps, and the drain counts.
    taken = [(40 / rate + 0.2) / 40 for rate in (4.0, 4.1)]
    assert by_cell["pccheck", 1].ratio == pytest.approx((5.0 * taken[0] + 5.2 * taken[1]) / 2)
    one = by_cell["pccheck", 1]
    assert one.iteration_s == pytest.approx((1 / 5.0 + 1 / 5.2) / 2)
    assert one.hide_s == pytest.approx(0.6 * one.iteration_s)
    assert (one.durable_s, one.load_s, one.max_in_flight) == (0.25, 0.125, 2)
    assert one.state_bytes == 100 << 20


def test_runs_under_failures_of_figure_11_and_of_several_ranks_are_no_cells(tmp_path: Path) -> None:
    for record in records_of():
        place_record(record, tmp_path)
    expected = read_cells(tmp_path)
    goodput = make_goodput("sync", 10)
    goodput.write(tmp_path / goodput.spec.record_path())
    other = make_record("sync", 1, iterations_per_s=2.0)
    for change in ({"drain_each": True}, {"ranks": 2, "nodes": 2, "parallel": "ddp"}):
        place_record(other.model_copy(update={"spec": other.spec.model_copy(update=change)}), tmp_path)
    assert read_cells(tmp_path) == expected


def write_csv(folder: Path, name: str, records: list) -> Path:
    folder.mkdir(exist_ok=True)
    collect("fig8", name, records, make_ceilings()).write(folder / f"{name}.csv", folder / f"{name}_wide.csv")
    return folder / f"{name}.csv"


def test_a_csv_says_what_its_records_say(tmp_path: Path) -> None:
    for record in records_of():
        place_record(record, tmp_path / "records")
    write_csv(tmp_path / "csv", "vgg16", records_of())
    from_csv, from_records = read_cells(tmp_path / "csv"), read_cells(tmp_path / "records")
    assert from_csv.rates == Rates(write=1e9, copy=1e10, device="cpu")

    def numbers(found: Cell) -> list[object]:
        return [pytest.approx(value) if isinstance(value, float | tuple) else value for value in vars(found).values()]

    assert [numbers(cell) for cell in from_csv.cells] == [list(vars(cell).values()) for cell in from_records.cells]
    # A run that is there twice counts once, or its repetition would outweigh the other.
    write_csv(tmp_path / "some", "vgg16", [record for record in records_of() if record.spec.repetition == 0])
    assert [numbers(cell) for cell in read_cells(tmp_path).cells] == [
        list(vars(cell).values()) for cell in from_csv.cells
    ]


def test_cells_in_pairs_have_the_interval_of_their_blocks(tmp_path: Path) -> None:
    records = [make_paired("none", 0), make_paired("pccheck", 10, (0.8, 0.5, 0.8), proof=True, none_step_s=0.1)]
    for record in records:
        place_record(record, tmp_path / "records")
    write_csv(tmp_path / "csv", "vgg16", records)
    for folder in ("records", "csv"):
        (found,) = read_cells(tmp_path / folder).cells
        assert (found.ratio, found.ends) == (pytest.approx(1 / 0.8), pytest.approx((1 / 0.8, 4.423), abs=0.001))


def test_one_run_in_one_stretch_has_no_interval(tmp_path: Path) -> None:
    """One in pairs has one, if of no width."""
    for record in [record for record in records_of() if record.spec.repetition == 0]:
        place_record(record, tmp_path / "stretch")
    assert {cell.ends for cell in read_cells(tmp_path / "stretch").cells} == {None}
    for record in [make_paired("none", 0), make_paired("pccheck", 10, (0.8, 0.8, 0.8), proof=True)]:
        place_record(record, tmp_path / "pairs")
    (found,) = read_cells(tmp_path / "pairs").cells
    assert found.ends == pytest.approx((1.25, 1.25))


def test_runs_that_say_nothing_are_left_out_and_named(tmp_path: Path) -> None:
    records = [
        make_record("none", iterations_per_s=5.0),
        make_record("pccheck", 1),
        make_record("pccheck", 2, proof=False),
        make_record("pccheck", 4, failed=1),
        make_record("pccheck", 5, skipped=2),
        make_record("pccheck", 40, durable=1),
        make_record("pccheck", 8, repetition=3),
    ]
    for record in records:
        place_record(record, tmp_path)
    found = read_cells(tmp_path)
    assert [cell.interval_steps for cell in found.cells] == [1]
    text = "\n".join(found.notes)
    for part in ("f2 is left out: its restore proof", "f4 is left out: 1 of its", "f5 is left out: 2 of its"):
        assert part in text
    assert "f40 is left out: it wrote 1" in text
    assert "f8: no `none` run of its repetitions" in text


def test_of_several_options_the_most_measured_count(tmp_path: Path) -> None:
    few = {"max_in_flight": 4, "writer_threads": 1}
    records = [*records_of(), make_record("pccheck", 2, system_options=few)]
    for record in records:
        place_record(record, tmp_path)
    found = read_cells(tmp_path)
    assert ("pccheck", 2) not in {(cell.system, cell.interval_steps) for cell in found.cells}
    assert "pccheck has 2 sets of options" in found.notes[0]


@pytest.mark.parametrize(("field", "other"), [("machine", "otherbox"), ("device", "cuda")])
def test_several_machines_or_devices_need_a_choice(tmp_path: Path, field: str, other: str) -> None:
    for record in [*records_of(), *records_of(**{field: other, "state_bytes": 7 << 20})]:
        place_record(record, tmp_path)
    with pytest.raises(ConfigError, match=f"several {field}s: .*{other}.*choose with --{field}"):
        read_cells(tmp_path)
    chosen = read_cells(tmp_path, **{field: other})  # type: ignore[arg-type]
    assert {cell.state_bytes for cell in chosen.cells} == {7 << 20}
    with pytest.raises(ConfigError, match="no run of machine 'nowhere'; it has"):
        read_cells(tmp_path, machine="nowhere")


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        read_cells(tmp_path / "no")
    with pytest.raises(ConfigError, match="no run; it has none"):
        read_cells(tmp_path)
    place_record(make_record("pccheck", 10), tmp_path)
    with pytest.raises(ConfigError, match="no cell with a `none` run"):
        read_cells(tmp_path)


@pytest.mark.parametrize(
    ("column", "value"),
    [("durable_iterations_per_s", "fast"), ("iterations_per_s", "0"), ("system_options", "{"), ("device", "tpu")],
)
def test_a_damaged_csv_is_named_with_its_line(tmp_path: Path, column: str, value: str) -> None:
    path = write_csv(tmp_path, "vgg16", records_of())
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    rows[2][column] = value
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(LastgoodError, match=r"vgg16\.csv, line 4: "):
        read_cells(tmp_path)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    path = place_record(make_record("none"), tmp_path)
    path.write_text("{}")
    with pytest.raises(LastgoodError, match=r"r0\.json"):
        read_cells(tmp_path)


def test_rates_of_a_record() -> None:
    ceilings = make_ceilings(device_to_host_pinned_bytes_per_s=5e10)
    assert rates_of(ceilings, "cuda") == Rates(write=1e9, copy=5e10, read=5e8, network=None, device="cuda")
    assert rates_of(ceilings, "cpu").copy == 1e10


# -- scores --------------------------------------------------------------------------------------------------------


def test_a_world_as_the_formula_has_no_regret() -> None:
    rates = Rates(write=100 * GB, copy=1e6 * GB, device="cuda")
    cells = cells_of("pccheck", 0.1, 1.0) + cells_of("sync", 3.0, 0.0)
    scores = score(cells, rates, [60.0, 3600.0])
    assert len(scores) == 6
    assert {found.workload for found in scores} == {"a", "b", "c"}
    assert max(found.records_regret for found in scores) < 1e-3
    # Half of the cells are sync's, and no advice is worse than a blind one.
    assert min(found.median_regret for found in scores) > 0.001
    assert "held-out cases: advice from records 0.0" in summary(scores)


def test_a_regret_by_hand() -> None:
    """`b` behaves in another way than `a`, so the advice from `a` is wrong there, by so much."""
    cells = [
        cell("sync", 10, 1.2, durable_s=0.0, load_s=0.0),
        cell("gpm", 10, 1.5, durable_s=0.0, load_s=0.0),
        cell("sync", 10, 1.5, workload="b", durable_s=0.0, load_s=0.0),
        cell("gpm", 10, 1.2, workload="b", durable_s=0.0, load_s=0.0),
    ]
    rates = Rates(write=1e4 * GB, copy=1e5 * GB, device="cuda")
    found = {row.workload: row for row in score(cells, rates, [50.0])}
    assert found["b"].from_records == found["b"].from_others == "sync f10"
    assert found["b"].best == "gpm f10"
    # Both lose f t / 2 = 0.5 s of every 50.
    assert found["b"].best_goodput == pytest.approx(0.99 / 1.2)
    assert found["b"].records_regret == pytest.approx(1 - 1.2 / 1.5)
    assert found["b"].worst_regret == pytest.approx(1 - 1.2 / 1.5)
    assert found["b"].median_regret == pytest.approx((1 - 1.2 / 1.5) / 2)


def test_the_held_out_workload_is_not_looked_at() -> None:
    cells = cells_of("pccheck", 0.1, 1.0) + cells_of("sync", 0.5, 0.0)
    changed = [
        replace(found, ratio=9.0) if found.workload == "a" and found.system == "pccheck" else found for found in cells
    ]
    choices = [
        [row.from_records for row in score(some, RATES, [60.0]) if row.workload == "a"] for some in (cells, changed)
    ]
    assert choices[0] == choices[1]


def test_one_workload_cannot_be_scored() -> None:
    with pytest.raises(ConfigError, match="only a"):
        score([cell("sync", 10, 1.2)], RATES, [60.0])


def test_nothing_is_scored_where_nothing_gets_anywhere() -> None:
    with pytest.raises(ConfigError, match="ask for a longer MTBF"):
        score(cells_of("sync", 1.0, 0.0), RATES, [1e-3])


def test_the_docs_print_what_the_committed_figures_give() -> None:
    """docs/advise.md shows the regret of figures/measured; it is this one."""
    measured = read_cells(MEASURED)
    assert measured.rates is not None
    scores = score(measured.cells, measured.rates, [72.0, 360.0, 3600.0])
    text = DOCS.read_text()
    renew = "docs/advise.md is not of these figures: print its table anew with its own command"
    assert summary(scores) in " ".join(text.split()), renew
    for found in scores:
        row = [found.workload, found.best, found.from_records, f"{found.records_regret:.2%}", found.from_model]
        assert any(all(part in line for part in row) for line in text.splitlines()), row
