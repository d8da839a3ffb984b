"""Published claims against made-up CSV files that reproduce them, refute them, or lack what they need."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import LastgoodError
from lastgood.experiments.claims.evidence import Sample
from lastgood.experiments.claims.judge import (
    CLAIM_COLUMNS,
    ClaimRow,
    claims_csv,
    claims_markdown,
    judge_claims,
    load_claims,
    load_reference,
)
from lastgood.experiments.claims.outcome import Accepted, judge
from lastgood.experiments.claims.rules import RULES
from lastgood.experiments.tables.files import find_csvs, load_csv, load_csvs
from tests.experiments.support.paired_records import make_paired
from tests.experiments.support.tidy_csvs import NONE_RSS, STATE_BYTES, none, runs, write_panel

REFERENCE = Path(__file__).parents[3] / "figures" / "reference"
PUBLISHED = load_reference(REFERENCE)


def judged(csvs: list[Path], **wanted: str) -> list[ClaimRow]:
    rows = judge_claims(load_csvs(csvs), PUBLISHED)
    return [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]


def one(csvs: list[Path], claim: str, **wanted: str) -> ClaimRow:
    found = judged(csvs, claim=claim, **wanted)
    assert len(found) == 1, [row.claim for row in judged(csvs)]
    return found[0]


def panel(tmp_path: Path, *groups: Any, workload: str = "vgg16") -> list[Path]:
    return [write_panel(tmp_path, [record for group in groups for record in group], workload)]


def goodput_csv(folder: Path, rows: list[tuple[str, str, int, float | None, float | None]]) -> Path:
    """Figure 9: workload, system, interval, measured and formula goodput."""
    path = folder / "fig9_opt.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        names = ("figure", "panel", "machine", "scale", "workload", "system", "interval_steps")
        writer.writerow([*names, "goodput_measured_iterations_per_s", "goodput_formula_iterations_per_s"])
        for workload, system, interval, measured, formula in rows:
            writer.writerow(["fig9", "opt", "testbox", "laptop", workload, system, interval, measured, formula])
    return path


# -- an overhead at an interval ------------------------------------------------------------------------------------

OVERHEAD = "fig8-any-pccheck-overhead-f10"


@pytest.mark.parametrize(
    ("pccheck", "sync", "verdict"),
    [
        ([9.7, 9.75], [5.0, 5.0], "reproduced"),
        ([9.0, 9.1], [5.0, 5.0], "refuted"),
        ([9.7, 9.0], [5.0, 5.0], "not testable"),  # repetitions disagree
        ([8.9, 6.1], [5.0, 5.0], "not testable"),  # 12 and 63 %: another run may well keep it
        ([9.9, 9.9], [9.8, 9.8], "not testable"),  # a plain system keeps the limit as well
        ([9.0, 9.0], [9.8, 9.8], "refuted"),  # it is easy here, and still not kept
    ],
)
def test_an_overhead(tmp_path: Path, pccheck: list[float], sync: list[float], verdict: str) -> None:
    csvs = panel(tmp_path, none([10.0, 10.0]), runs("pccheck", {10: pccheck}), runs("sync", {10: sync}))
    row = one(csvs, OVERHEAD)
    assert row.verdict == verdict
    assert row.measured == pytest.approx(100 * (10 / pccheck[0] + 10 / pccheck[1]) / 2 - 100)
    assert (row.published, row.unit, row.accepted) == (3.0, "percent", "at most 5 % overhead")
    assert "laptop scale" in row.reason
    assert row.values == 2


@pytest.mark.parametrize(
    ("ratios", "verdict", "reason"),
    [
        ([0.97, 0.975, 0.98], "reproduced", "2.56 (95 % interval 1.16 to 3.99)"),
        ([0.8, 0.81, 0.82], "refuted", "23.5 (95 % interval 19.5 to 27.6)"),
        (
            [0.9, 0.97, 0.99],
            "not testable",
            "undecided, the limit lies in the interval: 3.09 (95 % interval -2.41 to 26.1)",
        ),
    ],
)
def test_pairs_of_blocks_are_judged_by_their_interval(
    tmp_path: Path, ratios: list[float], verdict: str, reason: str
) -> None:
    sync = make_paired("sync", 10, [0.4, 0.4, 0.4], proof=True, state_bytes=STATE_BYTES)
    pccheck = make_paired("pccheck", 10, ratios, proof=True, state_bytes=STATE_BYTES, persist_s=[0.9])
    row = one(panel(tmp_path, [make_paired("none"), sync, pccheck]), OVERHEAD)
    assert row.verdict == verdict and row.reason.startswith(reason)


def test_a_cell_that_could_not_be_measured_refutes_nothing(tmp_path: Path) -> None:
    """Its interval covers everything, so also what a claim allows between two limits."""
    gpm = make_paired("gpm", 10, [0.9, 0.9, 0.9], proof=True, state_bytes=STATE_BYTES)
    noisy = make_paired(
        "pccheck", 10, [0.5], disturbed=(0,), ended_by="budget", proof=True, state_bytes=STATE_BYTES, persist_s=[0.9]
    )
    sync = make_paired("sync", 10, [0.4, 0.4, 0.4], proof=True, state_bytes=STATE_BYTES)
    rows = judged(panel(tmp_path, [make_paired("none"), sync, gpm, noisy]))
    gaps = [row for row in rows if "as fast as" in row.statement and row.measured is not None]
    assert gaps and {row.verdict for row in gaps} == {"not testable"}, gaps


@pytest.mark.parametrize(
    ("values", "verdict"),
    [((0.5, 0.6, 0.7), "refuted"), ((0.5, 0.6, 1.7), "not testable"), ((0.95, 1.0, 1.05), "reproduced")],
)
@pytest.mark.parametrize("interval", [False, True])
def test_values_on_both_sides_of_what_is_allowed_refute_nothing(
    values: tuple[float, ...], verdict: str, interval: bool
) -> None:
    sample = Sample(values, interval=interval)
    assert judge("", "", sample, Accepted(0.9, 1.1), "", "").verdict == verdict


@pytest.mark.parametrize("value", [0.5, 1.0])
def test_one_value_is_enough_only_of_what_is_counted(value: float) -> None:
    limits, sample = Accepted(0.9, 1.1), Sample((value,))
    timed = judge("", "", sample, limits, "", "")
    assert timed.verdict == "not testable" and timed.reason.endswith("in one run")
    counted = judge("", "", replace(sample, counted=True), limits, "", "")
    assert counted.verdict == ("reproduced" if value == 1.0 else "refuted")


def test_values_that_scatter_more_than_they_are_away_refute_nothing() -> None:
    for values, verdict in (((0.4, 0.6), "refuted"), ((0.2, 0.6), "not testable"), ((2.0, 1.7), "refuted")):
        assert judge("", "", Sample(values), Accepted(0.9, 1.1), "", "").verdict == verdict, values
    assert judge("", "", Sample((0.2, 0.6), counted=True), Accepted(0.9, 1.1), "", "").verdict == "refuted"


def test_one_unpaired_run_of_each_system_decides_nothing_but_bytes(tmp_path: Path) -> None:
    """Whatever the numbers are: the kinds of numbers that one run says are those of memory."""
    for rate in (1.0, 5.0, 9.9, 10.0):
        cells = [runs(name, {1: [rate], 10: [rate], 50: [rate]}, persist_s=5.0) for name in ("pccheck", "checkfreq")]
        rows = judged(panel(tmp_path, none([10.0]), runs("sync", {1: [3.0], 10: [3.0], 50: [3.0]}), *cells))
        decided = {row.claim for row in rows if row.verdict != "not testable"}
        assert decided and all("memory" in claim for claim in decided), decided


def test_an_overhead_needs_another_system_that_shows_that_it_is_hard(tmp_path: Path) -> None:
    csvs = panel(tmp_path, none([10.0, 10.0]), runs("pccheck", {10: [9.9, 9.9]}))
    assert one(csvs, OVERHEAD).verdict == "not testable"
    assert "no other system" in one(csvs, OVERHEAD).reason


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"proof": False}, "a restore gave another state"),
        ({"failed": 1}, "checkpoints failed"),
        ({"durable": 1}, "fewer than two checkpoints"),
    ],
)
def test_numbers_that_are_worth_nothing_are_not_used(tmp_path: Path, overrides: dict[str, Any], reason: str) -> None:
    cells = runs("pccheck", {10: [9.7, 9.75]}, **overrides)
    row = one(panel(tmp_path, none([10.0, 10.0]), cells, runs("sync", {10: [5.0, 5.0]})), OVERHEAD)
    assert row.verdict == "not testable"
    assert reason in row.reason
    assert row.measured is None


def test_an_interval_that_was_not_measured_is_named(tmp_path: Path) -> None:
    row = one(panel(tmp_path, none([10.0]), runs("pccheck", {5: [9.7], 20: [9.9]})), OVERHEAD)
    assert row.verdict == "not testable"
    assert "only at 5, 20" in row.reason


def test_no_runs_at_all(tmp_path: Path) -> None:
    rows = judge_claims([], PUBLISHED)
    assert {row.verdict for row in rows} == {"not testable"}
    assert len({row.claim for row in rows}) > 30


# -- slowdowns and gaps --------------------------------------------------------------------------------------------


def opt(tmp_path: Path, pccheck: float, checkfreq: float, gpm: float, persist_s: float) -> list[Path]:
    common = {"workload": "opt"}
    return panel(
        tmp_path,
        none([10.0, 10.0], **common),
        runs("pccheck", {50: [pccheck] * 2}, **common),
        runs("checkfreq", {50: [checkfreq] * 2}, persist_s=persist_s, **common),
        runs("gpm", {50: [gpm] * 2}, persist_s=persist_s, **common),
        workload="opt",
    )


def test_the_gaps_of_opt_are_reproduced(tmp_path: Path) -> None:
    csvs = opt(tmp_path, pccheck=9.8, checkfreq=8.5, gpm=5.5, persist_s=6.0)
    pccheck, checkfreq, gpm = (one(csvs, f"fig8-opt-{name}-slowdown-f50") for name in ("pccheck", "checkfreq", "gpm"))
    assert [row.verdict for row in (pccheck, checkfreq, gpm)] == ["reproduced"] * 3
    assert pccheck.accepted == "at most 1.05"
    assert checkfreq.measured == pytest.approx(9.8 / 8.5)
    # Half of what was published: 1 + (1.17 / 1.02 - 1) / 2 and 1 + (1.9 / 1.02 - 1) / 2.
    assert (checkfreq.accepted, gpm.accepted) == ("at least 1.07", "at least 1.43")


def test_a_gap_that_is_not_there_is_refuted_only_where_writes_are_long(tmp_path: Path) -> None:
    claim = "fig8-opt-gpm-slowdown-f50"
    assert one(opt(tmp_path, 9.8, 9.7, 9.6, persist_s=6.0), claim).verdict == "refuted"
    # 0.5 s of writing in 50 iterations of 0.1 s: nothing to wait for.
    row = one(opt(tmp_path, 9.8, 9.7, 9.6, persist_s=0.5), claim)
    assert row.verdict == "not testable"
    assert "takes 10 % of an interval" in row.reason


def test_systems_published_as_alike_must_be_alike(tmp_path: Path) -> None:
    claim = "fig8-vgg16-gpm-iterations-per-s-f10"  # 6.35 of 15.77 against 6.65 of 15.76
    base = (none([10.0] * 2), runs("sync", {10: [3.0] * 2}))
    alike = panel(tmp_path, *base, runs("pccheck", {10: [5.0, 5.1]}), runs("gpm", {10: [5.2, 5.2]}))
    assert one(alike, claim).verdict == "reproduced"
    unlike = panel(tmp_path, *base, runs("pccheck", {10: [9.0, 9.1]}), runs("gpm", {10: [5.2, 5.2]}))
    assert one(unlike, claim).verdict == "refuted"


def test_the_artefact_gives_ratios_and_no_absolute_numbers(tmp_path: Path) -> None:
    slow = runs("checkfreq", {25: [40.0] * 2}, persist_s=9.0)
    groups = (none([100.0] * 2), runs("pccheck", {25: [95.0] * 2}), slow)
    row = one(panel(tmp_path, *groups), "fig8-vgg16-checkfreq-iterations-per-s-f25")
    assert row.verdict == "reproduced"
    assert row.measured == pytest.approx(95 / 40)
    own = (15.742874314174914 / 7.042363043171207) / (15.769409833983385 / 14.2728865888275)
    assert f"{own:.3g} times" in row.statement


# -- shapes --------------------------------------------------------------------------------------------------------

WORST = "fig8-any-earlier-worst-interval-first-f10"


@pytest.mark.parametrize(
    ("checkfreq", "verdict"),
    [
        ({1: 8.0, 10: 4.0, 25: 6.0, 50: 9.0}, "reproduced"),
        ({1: 2.0, 10: 4.0, 25: 6.0, 50: 9.0}, "refuted"),
        ({10: 4.0, 25: 6.0, 50: 9.0}, "not testable"),  # nothing below the range
        ({1: 4.0, 10: 4.0, 25: 6.0, 50: 9.0}, "not testable"),  # a tie
        ({10: 4.0, 25: 6.0}, "not testable"),
    ],
)
def test_the_worst_range(tmp_path: Path, checkfreq: dict[int, float], verdict: str) -> None:
    ours = {interval: [9.5] * 2 for interval in checkfreq}
    theirs = {interval: [rate] * 2 for interval, rate in checkfreq.items()}
    row = one(panel(tmp_path, none([10.0] * 2), runs("pccheck", ours), runs("checkfreq", theirs)), WORST)
    assert row.verdict == verdict, row.reason
    single = {interval: rates[:1] for interval, rates in theirs.items()}
    row = one(panel(tmp_path, none([10.0] * 2), runs("pccheck", ours), runs("checkfreq", single)), WORST)
    assert row.verdict == "not testable"


def test_the_interval_rule(tmp_path: Path) -> None:
    claim = "fig8-any-pccheck-slowdown-by-rule"
    # Tw 2.1 s, N 2, t 0.1 s, q 1.05: intervals from 10 on are allowed, so the slow 5 is no matter.
    sync = runs("sync", {interval: [2.0] * 2 for interval in (5, 10, 20)})
    kept = runs("pccheck", {5: [3.0] * 2, 10: [9.4] * 2, 20: [9.8] * 2}, persist_s=2.1)
    row = one(panel(tmp_path, none([10.0] * 2), sync, kept), claim)
    assert row.verdict == "reproduced"
    assert "the rule allows 10, 20, shown is 10" in row.reason
    broken = runs("pccheck", {5: [3.0] * 2, 10: [8.0] * 2, 20: [9.8] * 2}, persist_s=2.1)
    assert one(panel(tmp_path, none([10.0] * 2), sync, broken), claim).verdict == "refuted"


# -- memory, goodput, an interval of its own -----------------------------------------------------------------------


@pytest.mark.parametrize(("states", "verdict"), [(1.0, "reproduced"), (2.2, "reproduced"), (3.0, "refuted")])
def test_host_memory(tmp_path: Path, states: float, verdict: str) -> None:
    cells = runs("pccheck", {10: [9.0]}, peak_rss_bytes=NONE_RSS + int(states * STATE_BYTES))
    row = one(panel(tmp_path, none([10.0]), cells), "memory-any-pccheck-host-memory")
    assert row.verdict == verdict
    assert row.measured == pytest.approx(states)


def test_memory_of_small_states_and_of_other_processes_is_not_judged(tmp_path: Path) -> None:
    cells = runs("gemini", {10: [9.0]})
    assert one(panel(tmp_path, none([10.0]), cells), "memory-any-gemini-host-memory").verdict == "not testable"
    path = panel(tmp_path, none([10.0]), runs("checkfreq", {10: [9.0]}))[0]
    path.write_text(path.read_text().replace(str(STATE_BYTES), "1000000"))
    row = one([path], "memory-any-checkfreq-host-memory")
    assert row.verdict == "not testable"
    assert "noise" in row.reason


def test_goodput_measured_wins_over_the_formula(tmp_path: Path) -> None:
    claim = "fig9-opt-checkfreq-goodput-gain-f10"
    rows: list[tuple[str, str, int, float | None, float | None]] = [
        ("opt", "pccheck", 10, 9.0, 8.0),
        ("opt", "checkfreq", 10, 5.0, 7.9),
    ]
    row = one([goodput_csv(tmp_path, 2 * rows)], claim)
    assert (row.verdict, row.measured) == ("reproduced", pytest.approx(1.8))
    assert "measured goodput" in row.reason
    formula = [(*row[:3], None, row[4]) for row in rows]
    row = one([goodput_csv(tmp_path, 2 * formula)], claim)
    assert (row.verdict, row.measured) == ("refuted", pytest.approx(8.0 / 7.9))
    assert "by the formula" in row.reason
    assert one([goodput_csv(tmp_path, rows[:1])], claim).verdict == "not testable"


@pytest.mark.parametrize("more", [0, 1, 4])
def test_goodput_of_one_run_of_a_side_decides_nothing(tmp_path: Path, more: int) -> None:
    """However often the other side was measured, and whichever way the numbers point."""
    claim = "fig9-opt-checkfreq-goodput-gain-f10"
    for theirs in (5.0, 8.9):
        rows: list[tuple[str, str, int, float | None, float | None]] = [
            ("opt", "checkfreq", 10, theirs, None),
            *[("opt", "pccheck", 10, 9.0, None)] * (1 + more),
        ]
        row = one([goodput_csv(tmp_path, rows)], claim)
        assert (row.verdict, row.measured) == ("not testable", pytest.approx(9 / theirs))
        assert row.reason.startswith("undecided, a side is one run without pairs"), row.reason
        assert one([goodput_csv(tmp_path, [rows[0], *rows])], claim).verdict == (
            "not testable" if not more else "reproduced" if theirs == 5.0 else "refuted"
        )


def test_the_best_goodput_of_all_cells_decides(tmp_path: Path) -> None:
    rows: list[tuple[str, str, int, float | None, float | None]] = [
        ("opt", "pccheck", 1, 4.0, None),
        ("opt", "checkfreq", 1, 2.0, None),
        ("bert", "pccheck", 50, 9.0, None),
        ("bert", "checkfreq", 50, 8.9, None),
        ("bert", "pccheck", 5, 9.0, None),
        ("bert", "checkfreq", 5, 0.0, None),  # no ratio
    ]
    row = one([goodput_csv(tmp_path, 2 * rows)], "fig9-any-checkfreq-goodput-gain")
    assert (row.verdict, row.measured) == ("reproduced", 2.0)
    assert "opt at interval 1, of 2 cells" in row.reason


def test_checkfreq_at_its_own_interval(tmp_path: Path) -> None:
    claim = "overheads-any-checkfreq-overhead-at-own-interval"
    own = {"storage": {"interval": {"overhead_budget": 0.035, "interval_steps": 20}}}

    def verdict(*rates: float, **more: Any) -> str:
        cells = runs("checkfreq", {20: list(rates)}, **more)
        return one(panel(tmp_path, none([10.0] * len(rates)), cells), claim).verdict

    assert verdict(9.7, 9.7) == "not testable"
    assert verdict(9.7, 9.7, **own) == "reproduced"
    assert verdict(9.0, 9.0, **own) == "refuted"
    assert {verdict(9.7, **own), verdict(9.0, **own)} == {"not testable"}


def test_checkfreq_at_its_own_interval_in_pairs_is_judged_by_its_interval(tmp_path: Path) -> None:
    own = {"storage": {"interval": {"overhead_budget": 0.035, "interval_steps": 20}}, "proof": True}
    for ratios, verdict in (([0.975, 0.98, 0.98], "reproduced"), ([0.9, 0.97, 0.99], "not testable")):
        cell = make_paired("checkfreq", 20, ratios, state_bytes=STATE_BYTES, persist_s=[0.9], **own)
        row = one(panel(tmp_path, [make_paired("none"), cell]), "overheads-any-checkfreq-overhead-at-own-interval")
        assert row.verdict == verdict, row.reason


def test_what_needs_several_machines_is_never_tested(tmp_path: Path) -> None:
    csvs = panel(tmp_path, none([10.0], workload="opt"), runs("gemini", {10: [5.0]}, workload="opt"), workload="opt")
    rows = [row for row in judged(csvs) if "several" in row.setting]
    assert len(rows) > 10
    assert {row.verdict for row in rows} == {"not testable"}
    assert {row.measured for row in rows} == {None}


# -- machines, files -----------------------------------------------------------------------------------------------


def test_machines_are_judged_apart(tmp_path: Path) -> None:
    fast = [*none([10.0] * 2), *runs("pccheck", {10: [9.8] * 2}), *runs("sync", {10: [5.0] * 2})]
    slow = [*none([10.0] * 2), *runs("pccheck", {10: [7.0] * 2}), *runs("sync", {10: [5.0] * 2})]
    first = write_panel(tmp_path, fast)
    text = first.read_text()
    second = write_panel(tmp_path, slow)
    rows = "".join(second.read_text().splitlines(keepends=True)[1:])
    first.write_text(text + rows.replace("testbox", "slowbox"))
    verdicts = {row.machine: row.verdict for row in judged([first], claim=OVERHEAD)}
    assert verdicts == {"slowbox": "refuted", "testbox": "reproduced"}


def test_sweeps_of_other_figures_are_not_mixed_in(tmp_path: Path) -> None:
    whole = panel(tmp_path, none([10.0] * 2), runs("pccheck", {10: [9.8] * 2}), runs("sync", {10: [5.0] * 2}))
    sweep = write_panel(tmp_path, [*none([10.0]), *runs("pccheck", {10: [2.0]})], figure="fig12")
    assert one([*whole, sweep], OVERHEAD).verdict == "reproduced"


def test_the_command_writes_what_can_be_read_again(tmp_path: Path) -> None:
    csvs = panel(tmp_path, none([10.0, 10.0]), runs("pccheck", {10: [9.7, 9.75]}), runs("sync", {10: [5.0, 5.0]}))
    out, markdown = tmp_path / "out" / "claims.csv", tmp_path / "out" / "claims.md"
    done = CliRunner().invoke(app, ["claims", str(csvs[0]), "--out", str(out), "--markdown", str(markdown)])
    assert done.exit_code == 0, done.output
    rows = judged(csvs)
    assert load_claims(out) == rows
    assert out.read_bytes() == claims_csv(rows)
    page = markdown.read_text()
    assert "| reproduced (laptop scale) | PCcheck at interval 10 costs about 3 % of throughput |" in page
    assert page.index("| reproduced") < page.index("| not testable")
    lines = [line for line in page.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in lines} == {7}
    assert len(lines) == len(rows) + 2


def test_markdown_is_no_way_out_of_a_cell(tmp_path: Path) -> None:
    row = judged(panel(tmp_path, none([10.0])))[0]
    evil = ClaimRow(**{**{name: getattr(row, name) for name in CLAIM_COLUMNS}, "reason": "a | b\n<script>"})
    assert "a \\| b &lt;script>" in claims_markdown([evil])


def test_every_number_in_figures_reference_has_a_rule_or_a_reason() -> None:
    for published in PUBLISHED:
        if published.kind != "measured":
            assert published.metric in RULES or "several" in published.setting, published


def test_a_metric_without_a_rule_is_said_to_have_none(tmp_path: Path) -> None:
    path = tmp_path / "more.csv"
    head = (REFERENCE / "fig8.csv").read_text().splitlines()[0]
    path.write_text(f"{head}\nfig8,,any,pccheck,10,elegance,9,points,equal,anywhere,paper,a friend\n")
    (row,) = judge_claims([], load_reference(tmp_path))
    assert (row.verdict, row.reason) == ("not testable", "no rule tests 'elegance'")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fig8,,any,pccheck,ten,overhead,3,percent,about,x,paper,y", "bad.csv:2"),
        ("fig8,,any,pccheck,10,overhead,much,percent,about,x,paper,y", "bad.csv:2"),
        ("fig8,,any", "bad.csv:2"),
    ],
)
def test_bad_reference_rows_are_named(tmp_path: Path, text: str, message: str) -> None:
    head = (REFERENCE / "fig8.csv").read_text().splitlines()[0]
    (tmp_path / "bad.csv").write_text(f"{head}\n{text}\n")
    with pytest.raises(LastgoodError, match=message):
        load_reference(tmp_path)


def test_a_rule_that_needs_an_interval_says_so(tmp_path: Path) -> None:
    head = (REFERENCE / "fig8.csv").read_text().splitlines()[0]
    (tmp_path / "bad.csv").write_text(f"{head}\nfig8,,any,pccheck,,overhead,3,percent,about,x,paper,y\n")
    with pytest.raises(LastgoodError, match="needs an interval_steps"):
        judge_claims([], load_reference(tmp_path))


def test_files_that_are_no_figures_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LastgoodError, match="no figure's CSV"):
        find_csvs(tmp_path)
    for text, message in (("a,b\n1,2\n", "columns are missing"), ("", "not a figure's CSV"), ("\0\0", "fig8_x.csv")):
        (tmp_path / "fig8_x.csv").write_text(text)
        with pytest.raises(LastgoodError, match=message):
            load_csv(tmp_path / "fig8_x.csv")
    path = panel(tmp_path, none([10.0]))[0]
    copy = tmp_path / "copy.csv"
    copy.write_bytes(path.read_bytes())
    with pytest.raises(LastgoodError, match="both hold fig8 vgg16"):
        load_csvs([path, copy])
    claims = tmp_path / "claims.csv"
    claims.write_text("a,b\n1,2\n")
    with pytest.raises(LastgoodError, match=r"claims\.csv: no table of claims"):
        load_claims(claims)
