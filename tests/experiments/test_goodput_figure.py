"""Figure 9: its plan, known records that give known numbers, what is refused, and the picture."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from matplotlib.patches import Rectangle

from lastgood.errors import ConfigError, LastgoodError
from lastgood.experiments.config.yaml_file import parse_overrides
from lastgood.experiments.figures.workflow_plan import plan_figure, plan_workflow, predict_runs
from lastgood.experiments.machine.facts import checkout_root
from lastgood.experiments.plan.grid import load_grid
from lastgood.experiments.plan.load import parse_config
from lastgood.experiments.plots.goodput import draw_goodput, plot_goodput, read_goodput
from lastgood.experiments.records.goodput import GoodputSpec
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.report.table import cells_table
from lastgood.experiments.tables.files import load_csv
from lastgood.experiments.tables.goodput import GOODPUT_COLUMNS, collect_goodput, collect_goodput_files
from lastgood.experiments.tables.published import load_gains
from tests.experiments.support.goodput_records import make_goodput
from tests.experiments.support.records import make_ceilings, make_record, place_record

ROOT = checkout_root()
CEILINGS = make_ceilings()


def known_runs():
    """t = 0.1 s; PCcheck 8 it/s with two in flight and CheckFreq 5 it/s, durable; L = 0.125 s, Tw = 0.25 s."""
    return [
        make_record("none", iterations_per_s=10.0),
        make_record("checkfreq", 10, iterations_per_s=5.0, proof=True),
        make_record("pccheck", 10, iterations_per_s=8.0, proof=True),
        make_record("pccheck", 20, iterations_per_s=9.0, proof=True),
    ]


def known():
    measured = [make_goodput(), make_goodput("checkfreq", useful=160)]
    return collect_goodput("fig9", "vgg16", known_runs(), measured, CEILINGS)


def row_of(found, system, interval, source):
    (row,) = [row for row in found.tidy if (row.system, row.interval_steps, row.source) == (system, interval, source)]
    return row


# -- the plan ------------------------------------------------------------------------------------------------------


def configure(*entries):
    return parse_config(ROOT / "config" / "laptop.yaml", parse_overrides([*entries, "machine=testbox"]))[0]


def test_the_plan_is_figure_8s_runs_and_the_measured_ones():
    config = configure("models=vgg16", "repetitions=1", "fig9={systems: [sync], intervals: [10, 50], repetitions: 2}")
    specs = plan_figure(config, "fig9")
    runs = [spec for spec in specs if isinstance(spec, RunSpec)]
    measured = [spec for spec in specs if isinstance(spec, GoodputSpec)]
    assert len(specs) == len(runs) + len(measured)
    assert {spec.record_path() for spec in plan_figure(config, "fig8")} < {spec.record_path() for spec in runs}
    assert {spec.interval_steps for spec in runs} == {0, 1, 10, 25, 50}
    cells = [(spec.run.system, spec.run.interval_steps, spec.repetition) for spec in measured]
    assert sorted(cells) == [("sync", 10, 0), ("sync", 10, 1), ("sync", 50, 0), ("sync", 50, 1)]
    # Every measured cell has the runs that its formula needs.
    formulas = {(spec.system, spec.interval_steps) for spec in runs}
    assert {cell[:2] for cell in cells} <= formulas
    assert len({tuple(spec.failures_s) for spec in measured}) == 1
    assert len(measured[0].failures_s) == config.fig9.failures
    assert measured[0].stretch_s / measured[0].trace_s == pytest.approx(config.fig9.failures / 37, rel=0.05)


def test_records_of_figure_9_have_places_of_their_own():
    plan = plan_workflow(configure())
    shared = set(plan.records["fig9", "bert"]) & set(plan.records["fig8", "bert"])
    assert shared == set(plan.records["fig8", "bert"])
    # Beside figure 8's: Gemini at three intervals twice, for the formula, and four systems that are measured.
    assert len(plan.records["fig9", "bert"]) == len(shared) + 3 + 4


def test_the_laptop_measures_figure_9_within_twelve_minutes():
    specs = [spec for spec in plan_figure(configure(), "fig9") if isinstance(spec, GoodputSpec)]
    runs = predict_runs(specs, Path("nowhere"), load_grid(ROOT, "fig9"))
    assert {run.source for run in runs} == {"model"}
    assert 5 * 60 < sum(run.seconds for run in runs) <= 12 * 60


def test_a_record_predicts_its_cell_and_marks_it_done(tmp_path):
    specs = [spec for spec in plan_figure(configure("models=vgg16"), "fig9") if isinstance(spec, GoodputSpec)]
    record = make_goodput().model_copy(update={"spec": specs[0], "wall_s": 77.0})
    record.write(tmp_path / specs[0].record_path())
    first, second, *_ = predict_runs(specs, tmp_path, load_grid(ROOT, "fig9"))
    assert (first.done, first.seconds, first.source) == (True, 77.0, "records")
    assert not second.done


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("fig9={window_s: 0}", ["fig9.window_s: 0", "above 0"]),
        ("fig9={window_s: .nan}", ["fig9={window_s: .nan}", "not finite"]),
        ("fig9={failures: 1001}", ["fig9.failures: 1001"]),
        ("fig9={systems: none}", ["fig9.systems", "nothing to time"]),
        ("fig9={intervals: [0]}", ["fig9.intervals"]),
        ("fig9={trace: /nowhere}", ["fig9.trace", "no such file"]),
    ],
)
def test_bad_sections_are_refused(entry, words):
    with pytest.raises(ConfigError) as caught:
        configure(entry)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_bad_trace_is_refused_by_its_line(tmp_path):
    bad = tmp_path / "bad.trace"
    bad.write_text("period_s 63\n5x64 4y3\n")
    with pytest.raises(ConfigError, match=r"fig9\.trace: .*line 2: '4y3'"):
        configure(f"fig9={{trace: {bad}}}")
    bad.write_text("period_s 63\n5x64 4x63\n")
    with pytest.raises(ConfigError, match="no failure in it"):
        configure(f"fig9={{trace: {bad}}}")


# -- the numbers ---------------------------------------------------------------------------------------------------


def test_known_records_give_known_numbers():
    found = known()
    # One failure in 40 s. PCcheck at 10: 0.125 + 10 * 0.1 / 2 + 0.1 * min(2.5, 20) / 2 = 0.75 s lost; t_c 1/8 s.
    pccheck = row_of(found, "pccheck", 10, "formula")
    assert pccheck.lost_s == pytest.approx(0.75)
    assert pccheck.goodput_formula_iterations_per_s == pytest.approx((40 - 0.75) * 8 / 40)
    # Over the whole trace: 10 failures in 4000 s.
    assert pccheck.trace_formula_iterations_per_s == pytest.approx((4000 - 7.5) * 8 / 4000)
    # CheckFreq: 10 * 0.1 + 0.125 s.
    checkfreq = row_of(found, "checkfreq", 10, "formula")
    assert checkfreq.goodput_formula_iterations_per_s == pytest.approx((40 - 1.125) * 5 / 40)
    # Ideal: 0.5 + 0.125 s, at 10 it/s.
    ideal = row_of(found, "ideal", 10, "formula")
    assert ideal.goodput_formula_iterations_per_s == pytest.approx((40 - 0.625) * 10 / 40)
    measured = row_of(found, "pccheck", 10, "measured")
    assert measured.goodput_measured_iterations_per_s == 5.0
    assert measured.goodput_formula_iterations_per_s is None
    assert measured.durable_goodput_iterations_per_s == 4.75
    assert measured.cell_formula_iterations_per_s == pccheck.goodput_formula_iterations_per_s
    assert measured.deviation == pytest.approx((40 - 0.75) * 8 / 40 / 5 - 1)
    # With the run's own step of 0.2 s and load of 0.5 s: 0.5 + 0.5 + 0.125 s lost.
    assert measured.own_formula_iterations_per_s == pytest.approx((40 - 1.125) * 5 / 40)
    assert measured.own_deviation == pytest.approx((40 - 1.125) / 40 - 1)
    assert (measured.useful_steps, measured.lost_steps, measured.start_up_s) == (200, 10, 2.0)
    assert (measured.failures, measured.compression) == (1, 10.0)
    # 100 MiB at 1 GB/s every 10 iterations of 0.1 s: the disk allows 10 it/s or less; read at half of that.
    state = 100 * (1 << 20)
    assert measured.bound_iterations_per_s == pytest.approx((40 - 0.5 - state / 0.5e9) * min(10, 10e9 / state) / 40)
    assert found.wide == [
        ["system", "10", "20"],
        ["CheckFreq", repr(checkfreq.goodput_formula_iterations_per_s), ""],
        ["CheckFreq (measured)", "4.0", ""],
        [
            "PCcheck",
            repr(pccheck.goodput_formula_iterations_per_s),
            repr(row_of(found, "pccheck", 20, "formula").goodput_formula_iterations_per_s),
        ],
        ["PCcheck (measured)", "5.0", ""],
        ["Ideal", *(repr(row_of(found, "ideal", at, "formula").goodput_formula_iterations_per_s) for at in (10, 20))],
    ]
    assert "6 of 6 runs; formula over measurement: CheckFreq f10 +21.5%; PCcheck f10 +57.0%" in found.summary


def test_repetitions_count_by_their_median():
    runs = [
        make_record("none", iterations_per_s=10.0),
        *(
            make_record("pccheck", 10, n, iterations_per_s=rate, proof=True if n == 0 else None)
            for n, rate in enumerate((8.0, 6.0, 7.0))
        ),
    ]
    found = collect_goodput("fig9", "vgg16", runs, [make_goodput()], CEILINGS)
    assert row_of(found, "pccheck", 10, "measured").cell_formula_iterations_per_s == pytest.approx((40 - 0.75) * 7 / 40)
    # The load time of the one proof serves all repetitions.
    assert all(row.load_s == 0.125 for row in found.tidy if row.source == "formula")


def test_without_a_proof_or_a_baseline_there_is_no_formula():
    for runs in (
        [make_record("none"), make_record("pccheck", 10)],
        [make_record("pccheck", 10, proof=True)],
    ):
        found = collect_goodput("fig9", "vgg16", runs, [make_goodput()], CEILINGS)
        assert row_of(found, "pccheck", 10, "formula").goodput_formula_iterations_per_s is None
        assert row_of(found, "pccheck", 10, "measured").deviation is None


def test_faults_are_in_the_rows_and_the_warnings():
    fault = "incarnation 1: restored step 4, and step 10 had been called durable"
    found = collect_goodput("fig9", "vgg16", known_runs(), [make_goodput(faults=[fault])], CEILINGS)
    assert row_of(found, "pccheck", 10, "measured").faults == fault
    assert any(fault in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ([], "no measured goodput run"),
        ([make_goodput(), make_goodput()], "given twice"),
        ([make_goodput(), make_goodput(repetition=1, trace_sha256="b" * 64)], "more than one trace"),
        ([make_goodput(), make_goodput(repetition=1, failures_s=[10.0])], "more than one window"),
        ([make_goodput(run=make_record("sync", 10, workload="bert").spec)], "one workload, not bert, vgg16"),
        (
            [make_goodput(), make_goodput(run=make_record("pccheck", 10, 1, workload_options={"batch_size": 9}).spec)],
            "two settings of pccheck at interval 10",
        ),
    ],
)
def test_records_that_are_no_panel_are_refused(measured, words):
    with pytest.raises(LastgoodError, match=words):
        collect_goodput("fig9", "vgg16", known_runs(), measured, CEILINGS)


@pytest.fixture
def files(tmp_path):
    paths = [place_record(record, tmp_path / "results") for record in known_runs()]
    for record in (make_goodput(), make_goodput("checkfreq", useful=160)):
        paths.append(tmp_path / "results" / record.spec.record_path())
        record.write(paths[-1])
    ceilings = tmp_path / "ceilings.json"
    CEILINGS.write(ceilings)
    return paths, ceilings


def test_files_give_the_same_as_records_and_missing_ones_are_named(files, tmp_path):
    paths, ceilings = files
    found = collect_goodput_files("fig9", "vgg16", paths, ceilings)
    assert found.tidy == known().tidy
    found.write(tmp_path / "tidy.csv", tmp_path / "wide.csv")
    with (tmp_path / "tidy.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == GOODPUT_COLUMNS
    assert [float(row["goodput_measured_iterations_per_s"] or 0) for row in rows] == [
        row.goodput_measured_iterations_per_s or 0 for row in found.tidy
    ]
    paths[-1].unlink()
    with pytest.raises(LastgoodError, match=r"5 of 6 .*goodput"):
        collect_goodput_files("fig9", "vgg16", paths, ceilings)
    partial = collect_goodput_files("fig9", "vgg16", paths, ceilings, partial=True)
    assert (partial.tidy[0].runs_there, partial.tidy[0].runs_expected) == (5, 6)
    partial.write(tmp_path / "tidy.csv", tmp_path / "wide.csv")
    with pytest.raises(LastgoodError, match="partial: 5 of 6"):
        plot_goodput(tmp_path / "tidy.csv", tmp_path / "fig9")
    assert len(plot_goodput(tmp_path / "tidy.csv", tmp_path / "fig9", partial=True)) == 3


def test_the_published_gain_stands_over_the_other_systems_formula(tmp_path):
    runs = [run.model_copy(update={"spec": run.spec.model_copy(update={"workload": "opt"})}) for run in known_runs()]
    measured = make_goodput(run=make_record("pccheck", 10, proof=True, workload="opt").spec)
    gains = load_gains(ROOT / "figures" / "reference" / "fig9.csv")
    assert [(gain.workload, gain.system, gain.interval_steps, gain.gain) for gain in gains] == [
        ("opt", "checkfreq", 10, 1.77)
    ]
    found = collect_goodput("fig9", "opt", runs, [measured], CEILINGS, gains=gains)
    marked = row_of(found, "pccheck", 10, "formula")
    checkfreq = row_of(found, "checkfreq", 10, "formula").goodput_formula_iterations_per_s
    assert marked.paper_goodput_iterations_per_s == pytest.approx(1.77 * checkfreq)
    assert "PCcheck, ASPLOS 2025" in marked.paper_source
    assert [row for row in found.tidy if row.paper_goodput_iterations_per_s is not None] == [marked]
    figure = draw_goodput(read_goodput(csv_of(tmp_path, found)))
    assert "paper's gain of PCcheck" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_report_finds_both_goodputs(tmp_path):
    table = cells_table([load_csv(csv_of(tmp_path, known()))])
    names = {column.key for column in table.columns}
    assert {"goodput_formula", "goodput_measured"} <= names
    shown = {
        row.system: cell.value
        for row, cell in zip(table.rows, table.cells_of("goodput_measured"), strict=True)
        if row.interval == 10
    }
    assert (shown["CheckFreq"], shown["PCcheck"], shown["Ideal"]) == (4.0, 5.0, None)


# -- the picture ---------------------------------------------------------------------------------------------------


def csv_of(tmp_path, found):
    found.write(tmp_path / "tidy.csv", tmp_path / "wide.csv")
    return tmp_path / "tidy.csv"


def test_bars_and_lines_have_the_heights_of_the_csv(tmp_path):
    found = known()
    axes = draw_goodput(read_goodput(csv_of(tmp_path, found))).axes[0]
    heights = {round(patch.get_height(), 6) for patch in axes.patches if isinstance(patch, Rectangle)}
    # Measured, and what of it was durable.
    assert heights == {5.0, 4.75, 4.0}
    lines = {tuple(float(y) for y in line.get_ydata()) for line in axes.lines}
    formula = [row_of(found, "pccheck", at, "formula").goodput_formula_iterations_per_s for at in (10, 20)]
    assert tuple(formula) in lines
    ideal = [row_of(found, "ideal", at, "formula").goodput_formula_iterations_per_s for at in (10, 20)]
    assert tuple(ideal) in lines


@pytest.mark.parametrize("width", ["single", "double"])
def test_a_picture_says_what_it_shows_and_is_the_same_twice(width, tmp_path):
    path = csv_of(tmp_path, known())
    text = " ".join(text.get_text() for text in draw_goodput(read_goodput(path), width).texts)
    text = text.replace("\N{NO-BREAK SPACE}", " ")
    assert "Figure 9: VGG-16" in text
    for words in ("killed 1 time in 40 s", "trace example", "CheckFreq 10: +21%", "PCcheck 10: +57%", "own terms"):
        assert words in text, text
    first = [file.read_bytes() for file in plot_goodput(path, tmp_path / "one", width=width)]
    second = [file.read_bytes() for file in plot_goodput(path, tmp_path / "two", width=width)]
    assert first == second


def test_a_fault_is_in_the_picture(tmp_path):
    found = collect_goodput("fig9", "vgg16", known_runs(), [make_goodput(faults=["incarnation 1: wrong"])], CEILINGS)
    figure = draw_goodput(read_goodput(csv_of(tmp_path, found)))
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "RESTORE DIFFERS" in labels
    assert "1 RUN WITH WRONG RESTORES" in " ".join(text.get_text() for text in figure.texts)
    honest = draw_goodput(read_goodput(csv_of(tmp_path, known())))
    assert "RESTORE DIFFERS" not in [text.get_text() for text in honest.legends[0].get_texts()]


def test_a_csv_of_another_figure_is_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(LastgoodError, match="columns are missing"):
        read_goodput(path)
