"""Figures 11 to 14: from the configuration to runs, from known records to known numbers, and their pictures."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from lastgood.errors import ConfigError, LastgoodError
from lastgood.experiments.config.schema import Config
from lastgood.experiments.config.yaml_file import parse_overrides
from lastgood.experiments.figures.registry import figure_kind, figure_names
from lastgood.experiments.figures.workflow_plan import plan_figure, plan_workflow, predict_runs
from lastgood.experiments.plan import machine_checks as feasible
from lastgood.experiments.plan.grid import load_grid
from lastgood.experiments.plan.load import load_config, parse_config
from lastgood.experiments.plots.canvas import read_tidy
from lastgood.experiments.plots.captions import persist_caption, sweep_caption
from lastgood.experiments.plots.persist import draw_persist, plot_persist
from lastgood.experiments.plots.style import series_styles
from lastgood.experiments.plots.sweep import draw_sweep, plot_sweep
from lastgood.experiments.records.base import Spec
from lastgood.experiments.records.run import RunRecord
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.tables.runs import collect
from lastgood.workloads.options import Vgg16Options
from tests.experiments.support.paired_records import make_paired
from tests.experiments.support.records import make_ceilings, make_record

ROOT = Path(__file__).resolve().parents[2]
LAPTOP = ROOT / "config" / "laptop.yaml"
CEILINGS = make_ceilings(write_bytes_per_s=1e9, copy_bytes_per_s=1e9)
VGG: dict[str, Any] = {"batch_size": 4, "image_size": 32, "classes": 10, "classifier_width": 256}
STATE_BYTES = Vgg16Options(**VGG).state_bytes()
SWEEPS = ("fig12", "fig13", "fig14")


def configure(*entries: str) -> Config:
    few = [] if any(entry.startswith("systems=") for entry in entries) else ["systems=none,sync,checkfreq,pccheck"]
    return parse_config(LAPTOP, parse_overrides([*few, *entries, "machine=testbox"]))[0]


def runs(figure: str, *entries: str) -> list[RunSpec]:
    found = plan_figure(configure(*entries), figure)
    assert all(isinstance(spec, RunSpec) for spec in found)
    return [spec for spec in found if isinstance(spec, RunSpec)]


# -- plans ---------------------------------------------------------------------------------------------------------


def test_figure_11_is_every_system_at_every_size_one_checkpoint_at_a_time() -> None:
    specs = runs(
        "fig11", "systems=sync,pccheck", "fig11={systems: null, sizes_mb: [10, 300], repetitions: 2, checkpoints: 7}"
    )
    cells = [(spec.system, spec.workload_options["megabytes"], spec.repetition) for spec in specs]
    assert sorted(cells) == sorted(itertools.product(["sync", "pccheck"], [10, 300], [0, 1]))
    assert [cell[2] for cell in cells] == [0] * 4 + [1] * 4
    for spec in specs:
        assert (spec.workload, spec.interval_steps, spec.measured_steps, spec.drain_each) == ("blob", 1, 7, True)
        assert spec.system_options.get("writer_threads", 4) == 4
    assert {spec.system for spec in runs("fig11", "fig11={systems: checkfreq}")} == {"checkfreq"}


def test_figure_12_is_every_n_at_every_interval_with_one_writer() -> None:
    specs = runs("fig12", "fig12={in_flight: [1, 4], intervals: [1, 5], repetitions: 1}")
    cells = [(spec.system_options.get("max_in_flight"), spec.interval_steps) for spec in specs]
    assert sorted(cells, key=str) == sorted([(None, 0), (1, 1), (1, 5), (4, 1), (4, 5)], key=str)
    assert {spec.system_options.get("writer_threads") for spec in specs} == {None, 1}
    assert not any(spec.drain_each for spec in specs)


def test_figure_14_counts_the_pool_in_sizes_of_the_state() -> None:
    specs = runs("fig14", "fig14={pool_shares: [0.25, 1, 2], intervals: 1, repetitions: 1}")
    pools = [spec.system_options["pool_bytes"] for spec in specs if spec.system == "pccheck"]
    assert sorted(pools, key=str) == sorted([STATE_BYTES // 4, None, 2 * STATE_BYTES], key=str)


def test_cells_of_several_figures_are_measured_once() -> None:
    twice = [f"{figure}={{repetitions: 2}}" for figure in SWEEPS]
    fig9 = "fig9={systems: [checkfreq, pccheck], intervals: [10]}"
    plan = plan_workflow(configure("models=vgg16", "intervals=1,10", "repetitions=2", fig9, *twice))
    count = {figure: len(plan.records[figure, "vgg16"]) for figure in ("fig8", *SWEEPS)}
    in_figure_8 = set(plan.records["fig8", "vgg16"])
    # `none` twice everywhere; two writer threads are figure 8's, and so is a pool of the state's size.
    assert {figure: len(in_figure_8 & set(plan.records[figure, "vgg16"])) for figure in SWEEPS} == {
        "fig12": 2,
        "fig13": 2 + 4,
        "fig14": 2 + 4,
    }
    assert count == {"fig8": 2 * 7, "fig12": 2 * 10, "fig13": 2 * 9, "fig14": 2 * 9}
    # Figures 12 and 13 share one writer thread under two in flight, at intervals 1 and 10.
    shared = (2 + 6 + 6) + 4
    # Figure 9 has figure 8's runs, and two measured ones.
    only_figure_9 = set(plan.records["fig9", "vgg16"]) - in_figure_8
    assert len(only_figure_9) == 2
    elsewhere = ("fig11", "fig8e", "fig8f", "checkmate", "dcp", "flowcheck", "remote", "stellatrain")
    others = [records for (figure, _), records in plan.records.items() if figure in elsewhere]
    assert len(plan.specs) == sum(count.values()) + sum(map(len, others)) + 2 - shared


def predicted_s(figure: str, specs: Sequence[Spec]) -> float:
    return sum(run.seconds for run in predict_runs(specs, Path("nowhere"), load_grid(ROOT, figure)))


def test_the_four_figures_take_at_most_a_quarter_of_an_hour_on_a_laptop() -> None:
    config = configure()
    seen = {spec.record_path() for spec in runs("fig8")}
    minutes = 0.0
    for figure in ("fig11", *SWEEPS):
        new = [spec for spec in plan_figure(config, figure) if spec.record_path() not in seen]
        seen |= {spec.record_path() for spec in new}
        minutes += predicted_s(figure, new) / 60
    assert 2 < minutes < 15


def test_larger_states_are_predicted_to_take_longer() -> None:
    small, large = (predicted_s("fig11", runs("fig11", f"fig11={{sizes_mb: {size}}}")) for size in (10, 1000))
    assert large > 1.5 * small


@pytest.mark.parametrize("figure", figure_names())
def test_what_the_registry_names_is_there(figure: str) -> None:
    kind = figure_kind(figure)
    assert callable(kind.collector())
    assert callable(kind.drawer())
    planned = {spec.panel for spec in kind.plan(configure())}
    assert planned == set(kind.panels(configure()))


def test_an_unknown_figure_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown figure 'fig10'; known: fig8, .*fig14"):
        figure_kind("fig10")


# -- what cannot work ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "parts"),
    [
        ("fig11={sizes_mb: [10, 10]}", ["--config: fig11.sizes_mb: [10, 10]: listed more than once: 10"]),
        ("fig11={sizes_mb: 0}", ["fig11.sizes_mb[0]: 0"]),
        ("fig11={systems: none,sync}", ["fig11.systems", "none takes no checkpoints"]),
        ("fig12={in_flight: 65}", ["fig12.in_flight[0]: 65", "less than or equal to 64"]),
        ("fig12={model: vgg}", ["fig12.model: 'vgg': unknown model 'vgg' (did you mean vgg16?)"]),
        ("fig13={intervals: 0}", ["fig13.intervals[0]: 0: interval 0 is the run without checkpoints"]),
        ("fig14={pool_shares: 17}", ["fig14.pool_shares[0]: 17"]),
        ("fig14={pool_shares: .nan}", ["--config: fig14=", "the number .nan is not finite"]),
        ("fig14={pool: 1}", ["fig14.pool: unknown key", "pool_shares"]),
        (
            "fig14={pool_shares: [0.01, 1]}",
            ["--config: fig14.pool_shares[0]: 0.01", "a pool holds at least two chunks, 8 MiB; allowed: from 0.04"],
        ),
    ],
)
def test_bad_sections_are_refused_with_source_key_and_choices(entry: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        configure(entry)
    for part in parts:
        assert part in str(caught.value)


def test_sizes_that_do_not_fit_are_refused_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feasible, "lies_in_memory", lambda _: False)
    monkeypatch.setattr(feasible, "free_bytes", lambda _: 20 << 30)
    monkeypatch.setattr(feasible, "memory_bytes", lambda: 10 << 30)
    overrides = parse_overrides(["machine=testbox", "fig11={sizes_mb: [10, 8000]}"])
    with pytest.raises(ConfigError) as caught:
        load_config(LAPTOP, overrides)
    disk, memory = str(caught.value).splitlines()
    assert "--config: fig11.sizes_mb: scratch " in disk
    assert "has 20 GiB free, and a state of 7.45 GiB with pccheck needs 29.8 GiB" in disk
    assert "--config: fig11.sizes_mb: a state of 7.45 GiB with" in memory
    assert "this machine has 10 GiB; leave the largest out" in memory
    load_config(LAPTOP, parse_overrides(["machine=testbox", "fig11={sizes_mb: [10, 1000]}"]))


# -- from records to CSV files -------------------------------------------------------------------------------------


def pccheck(interval: int, repetition: int = 0, *, rate: float, options: dict[str, Any], **more: Any) -> RunRecord:
    own = {"max_in_flight": 2, "writer_threads": 2, "pool_bytes": None, **options}
    common: dict[str, Any] = {"workload_options": VGG, "state_bytes": STATE_BYTES + 6000, "measured_steps": 20}
    values = {**common, "proof": True, **more}
    return make_record("pccheck", interval, repetition, iterations_per_s=rate, system_options=own, **values)


def none(rate: float = 10.0, repetition: int = 0) -> RunRecord:
    return make_record("none", 0, repetition, iterations_per_s=rate, workload_options=VGG, measured_steps=20)


def concurrency() -> list[RunRecord]:
    rates = {(1, 1): 2.5, (1, 5): 5.0, (4, 1): 4.0, (4, 5): 8.0}
    found = [none(), none(8.0, 1)]
    for (count, interval), rate in rates.items():
        options = {"max_in_flight": count, "writer_threads": 1}
        found += [pccheck(interval, 0, rate=rate, options=options), pccheck(interval, 1, rate=rate, options=options)]
    return found


def blob(system: str, megabytes: int, repetition: int = 0, *, persist_s: list[float], **more: Any) -> RunRecord:
    return make_record(
        system,
        1,
        repetition,
        workload="blob",
        workload_options={"megabytes": megabytes},
        state_bytes=megabytes * 1_000_000,
        measured_steps=len(persist_s),
        persist_s=persist_s,
        **{"proof": True, "drain_each": True, **more},
    )


def persist_times() -> list[RunRecord]:
    return [
        blob("sync", 10, persist_s=[0.02, 0.03, 0.1]),
        blob("sync", 100, persist_s=[0.2, 0.4, 0.3]),
        blob("pccheck", 10, 0, persist_s=[0.01, 0.012, 0.011], system_options={"writer_threads": 4}),
        blob("pccheck", 10, 1, persist_s=[0.015, 0.013, 0.02], system_options={"writer_threads": 4}),
        blob("pccheck", 100, 0, persist_s=[0.11] * 3, system_options={"writer_threads": 4}),
    ]


def csv_of(tmp_path: Path, figure: str, records: list[RunRecord], **options: Any) -> Path:
    panel = records[0].spec.workload
    path = tmp_path / f"{figure}.csv"
    collect(figure, panel, records, CEILINGS, **options).write(path, tmp_path / "wide.csv")
    return path


def wide(tmp_path: Path, figure: str, records: list[RunRecord]) -> list[list[str]]:
    csv_of(tmp_path, figure, records)
    with (tmp_path / "wide.csv").open(newline="") as file:
        return list(csv.reader(file))


def test_figure_11_from_known_records(tmp_path: Path) -> None:
    # Milliseconds: medians over the checkpoints of a run, then over runs, 11 and 15 ms for PCcheck.
    table = wide(tmp_path, "fig11", persist_times())
    assert table[0] == ["system", "10", "100"]
    assert [[line[0], *map(float, line[1:])] for line in table[1:]] == [
        ["sync", pytest.approx(30), pytest.approx(300)],
        ["PCcheck", pytest.approx(13), pytest.approx(110)],
    ]
    frame = read_tidy(tmp_path / "fig11.csv")
    row = frame[(frame["system"] == "sync") & (frame["axis_value"] == 100)].iloc[0]
    assert (row["axis"], row["persist_min_s"], row["persist_p50_s"], row["persist_max_s"]) == (
        "megabytes",
        0.2,
        0.3,
        0.4,
    )
    assert row["persist_bound_s"] == pytest.approx(0.1)
    assert frame["notes"].isna().all()


def test_figure_12_from_known_records(tmp_path: Path) -> None:
    # `none` at 10 and 8 iterations/s; 2.5 with one in flight: slowdowns of 4 and 3.2, so 3.6.
    assert wide(tmp_path, "fig12", concurrency()) == [
        ["max_in_flight", "0", "1", "5"],
        ["1", "1.0", "3.6", "1.8"],
        ["4", "1.0", "2.25", "1.125"],
    ]


def test_slowdown_counts_the_drain(tmp_path: Path) -> None:
    # 20 steps in 4 s and 1 s of drain: 4 durable iterations/s against 10.
    csv_of(tmp_path, "fig13", [none(), pccheck(1, rate=5.0, options={}, drain_s=1.0)])
    row = read_tidy(tmp_path / "fig13.csv").iloc[1]
    assert row["slowdown"] == pytest.approx(2.5)
    # The disk takes 1e9 / state checkpoints a second, the copy state / 1e9 s less the 0.06 s that it can hide behind.
    copied = 0.1 + max(0.0, (STATE_BYTES + 6000) / 1e9 - 0.06)
    assert row["slowdown_bound"] == pytest.approx(max(copied, (STATE_BYTES + 6000) / 1e9) / 0.1)


def test_figure_13_from_known_records(tmp_path: Path) -> None:
    records = [none()]
    records += [
        pccheck(interval, rate=rate, options={"writer_threads": count})
        for count, interval, rate in ((1, 1, 2.0), (1, 10, 8.0), (3, 1, 4.0), (3, 10, 10.0))
    ]
    assert wide(tmp_path, "fig13", records) == [
        ["interval_steps", "1", "3"],
        ["1", "5.0", "2.5"],
        ["10", "1.25", "1.0"],
    ]


def test_figure_14_from_known_records(tmp_path: Path) -> None:
    pools = {STATE_BYTES // 4: 2.0, None: 4.0, 2 * STATE_BYTES: 5.0}
    records = [none(), *(pccheck(1, rate=rate, options={"pool_bytes": pool}) for pool, rate in pools.items())]
    assert wide(tmp_path, "fig14", records) == [["interval_steps", "0.25", "1.0", "2.0"], ["1", "5.0", "2.5", "2.0"]]
    frame = read_tidy(tmp_path / "fig14.csv")
    assert list(frame["pool_bytes"].dropna()) == [STATE_BYTES // 4, STATE_BYTES + 6000, 2 * STATE_BYTES]


def test_two_settings_at_one_value_of_the_axis_are_refused() -> None:
    records = [none(), *(pccheck(1, rate=2.0, options={"max_in_flight": 4, "writer_threads": p}) for p in (1, 2))]
    with pytest.raises(LastgoodError, match="two settings of pccheck at interval 1 and max_in_flight 4: "):
        collect("fig12", "vgg16", records, CEILINGS)
    assert len(collect("fig13", "vgg16", records, CEILINGS).tidy) == 3


@pytest.mark.parametrize(
    ("figure", "record", "message"),
    [
        ("fig12", make_record("sync"), "a run without max_in_flight, which this figure varies"),
        ("fig13", make_record("sync"), "a run without writer_threads"),
        ("fig14", make_record("pccheck"), "a run without pool_bytes"),
        ("fig11", make_record("sync"), "not one checkpoint at a time of a blob"),
        ("fig11", blob("sync", 10, persist_s=[0.1], drain_each=False), "not one checkpoint at a time of a blob"),
    ],
)
def test_runs_of_another_figure_are_refused(figure: str, record: RunRecord, message: str) -> None:
    with pytest.raises(LastgoodError, match=message):
        collect(figure, record.spec.workload, [record], CEILINGS)


# -- pictures ------------------------------------------------------------------------------------------------------


def texts_of(figure: Figure) -> list[str]:
    texts = [text.get_text() for text in [*figure.texts, *figure.axes[0].texts]]
    return [*texts, *(text.get_text() for text in figure.legends[0].get_texts())]


def line(figure: Figure, label: str) -> list[float]:
    """The y values of the line that the legend calls `label`."""
    legend = figure.legends[0]
    names = [text.get_text() for text in legend.get_texts()]
    colour = legend.get_lines()[names.index(label)].get_color()
    drawn = [one for one in figure.axes[0].lines if one.get_color() == colour and one.get_linestyle() != "None"]
    return [float(value) for one in drawn for value in one.get_ydata()]  # type: ignore[union-attr]


def test_markers_lines_and_bound_of_a_sweep_stand_where_the_numbers_are(tmp_path: Path) -> None:
    path = csv_of(tmp_path, "fig12", concurrency())
    figure = draw_sweep(read_tidy(path))
    assert line(figure, "1 in flight") == [3.6, 1.8]
    assert line(figure, "4 in flight") == [2.25, 1.125]
    assert line(figure, "no checkpoints") == [1.0, 1.0]
    circles = [one for one in figure.axes[0].lines if one.get_markersize() < 3]
    assert sorted(list(one.get_ydata()) for one in circles)[-1] == [4.0, 3.2]  # type: ignore[arg-type]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["1", "5"]
    frame = read_tidy(path)
    levels = {
        round(one.get_segments()[0][0][1], 9) for one in figure.axes[0].collections if one.get_linewidth()[0] > 1.5
    }
    assert levels == {round(float(value), 9) for value in frame["slowdown_bound"][2:]}


def test_persist_times_stand_where_the_numbers_are(tmp_path: Path) -> None:
    figure = draw_persist(read_tidy(csv_of(tmp_path, "fig11", persist_times())))
    assert line(figure, "sync") == pytest.approx([30, 300])
    assert line(figure, "PCcheck") == pytest.approx([13, 110])
    assert line(figure, "bound (disk)") == pytest.approx([10, 100])
    assert figure.axes[0].get_yscale() == "log"
    whiskers = [one.get_segments()[0][:, 1].tolist() for one in figure.axes[0].collections]
    assert pytest.approx([20, 100]) in whiskers


def test_shares_of_the_state_are_written_as_in_the_paper(tmp_path: Path) -> None:
    shares = (0.25, 0.5, 0.3, 2.0)
    records = [none()]
    records += [pccheck(1, rate=2.0, options={"pool_bytes": int(share * STATE_BYTES)}) for share in shares]
    figure = draw_sweep(read_tidy(csv_of(tmp_path, "fig14", records)))
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["m/4", "3m/10", "m/2", "2m"]


def test_numbers_that_mean_less_are_marked(tmp_path: Path) -> None:
    records = [
        none(),
        pccheck(1, rate=2.0, options={"writer_threads": 1}, proof=False),
        pccheck(1, rate=2.0, options={"writer_threads": 2}, proof=None),
        pccheck(1, rate=2.0, options={"writer_threads": 3}, durable=1),
        pccheck(1, rate=2.0, options={"writer_threads": 4}),
    ]
    meanings = {"RESTORE DIFFERS", "restore not proved", "fewer than 2 checkpoints"}
    assert set(texts_of(draw_sweep(read_tidy(csv_of(tmp_path, "fig13", records))))) >= {*meanings, "?", "<2"}
    clean = texts_of(draw_sweep(read_tidy(csv_of(tmp_path, "fig13", [records[0], records[-1]]))))
    assert not meanings & set(clean)
    wrong = [blob("sync", 10, persist_s=[0.1, 0.1], proof=False)]
    assert "RESTORE DIFFERS" in texts_of(draw_persist(read_tidy(csv_of(tmp_path, "fig11", wrong))))


def test_the_captions_say_it_all(tmp_path: Path) -> None:
    sweep = "".join(texts_of(draw_sweep(read_tidy(csv_of(tmp_path, "fig12", concurrency())))))
    persist = "".join(texts_of(draw_persist(read_tidy(csv_of(tmp_path, "fig11", persist_times())))))
    for caption in (sweep, persist):
        plain = " ".join(caption.replace("\N{NO-BREAK SPACE}", " ").split())
        for part in (
            "Machine testbox (Example CPU, 2 cores; ext4 on /dev/sda1)",
            "scale laptop",
            "2 threads",
            "Revision",
        ):
            assert part.replace(" ", "") in plain.replace(" ", ""), plain
    assert "2repetitions:" in sweep.replace(" ", "")
    assert "withp=1" in sweep.replace(" ", "").replace("\N{NO-BREAK SPACE}", "")


def many(figure: str) -> list[RunRecord]:
    """As much as any configuration draws."""
    if figure == "fig11":
        systems = ("sync", "checkfreq", "gpm", "gemini", "dcp", "pccheck")
        return [
            blob(system, size, repetition, persist_s=[size / 1000 * (1 + place / 5 + repetition / 9)] * 2)
            for place, system in enumerate(systems)
            for size in (10, 30, 100, 300, 1000, 10_000)
            for repetition in range(3)
        ]
    option = {"fig12": "max_in_flight", "fig13": "writer_threads", "fig14": "pool_bytes"}[figure]
    intervals = (1, 5, 10, 15, 20, 25, 30) if figure == "fig12" else (1, 10, 25)
    values = [STATE_BYTES // 4, STATE_BYTES // 2, None, 2 * STATE_BYTES] if figure == "fig14" else [1, 2, 4, 6, 8]
    return [none(20.0, repetition) for repetition in range(3)] + [
        pccheck(interval, repetition, rate=19 * interval / (interval + 30 / (place + 1)), options={option: value})
        for place, value in enumerate(values)
        for interval in intervals
        for repetition in range(3)
    ]


@pytest.mark.parametrize("width", ["single", "double"])
@pytest.mark.parametrize("figure", ["fig11", *SWEEPS])
def test_no_text_touches_another(tmp_path: Path, figure: str, width: Any) -> None:
    frame = read_tidy(csv_of(tmp_path, figure, many(figure), runs_expected=999, runs_missing=["a run"] * 30))
    drawn = draw_persist(frame, width) if figure == "fig11" else draw_sweep(frame, width)
    FigureCanvasAgg(drawn).draw()
    axes = drawn.axes[0]
    low, high = axes.get_ylim()
    texts = [*drawn.texts, *axes.get_xticklabels(), axes.xaxis.label, axes.yaxis.label]
    texts += [text for text in axes.get_yticklabels() if low <= text.get_position()[1] <= high]
    texts += drawn.legends[0].get_texts()
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    for (one, first), (two, second) in itertools.combinations(boxes, 2):
        shared = Bbox.intersection(first, second)
        assert shared is None or min(shared.width, shared.height) < 1.5, (one, two)
    for text, box in boxes:
        assert box.x0 >= 0, text
        assert box.x1 <= drawn.bbox.x1 + 1, text
    assert min(text.get_fontsize() for text in texts) >= 7


MOST_ASIDE = 0.02
"""Of the axis: nobody reads another value off."""


@pytest.mark.parametrize("figure", ["fig11", *SWEEPS])
def test_points_stand_at_their_values(tmp_path: Path, figure: str) -> None:
    frame = read_tidy(csv_of(tmp_path, figure, many(figure)))
    axes = (draw_persist(frame) if figure == "fig11" else draw_sweep(frame)).axes[0]
    on_axis = axes.transAxes.inverted()
    values = sorted(set(frame["axis_value"])) if figure == "fig11" else range(len(axes.get_xticks()))
    places = [on_axis.transform(axes.transData.transform((float(value), 1.0)))[0] for value in values]
    drawn = [
        on_axis.transform(axes.transData.transform((float(x), 1.0)))[0]
        for line in axes.lines
        if line.get_marker() not in ("None", "")
        for x in line.get_xdata()  # type: ignore[union-attr]
    ]
    assert len(drawn) >= 3 * len(places)
    aside = [min(abs(x - place) for place in places) for x in drawn]
    assert max(aside) <= MOST_ASIDE + 1e-9
    # They do stand beside each other.
    assert max(aside) > MOST_ASIDE / 2


def test_intervals_of_pairs_are_drawn_as_slowdowns(tmp_path: Path) -> None:
    options = {"max_in_flight": 1, "writer_threads": 2}
    records = [
        make_paired("none", 0),
        make_paired("pccheck", 10, (0.5, 0.5, 0.8), system_options=options, proof=True, ended_by="budget"),
        make_paired("pccheck", 20, (1.6, 1.6, 1.6), system_options=options, proof=True, disturbed=[2]),
    ]
    frame = read_tidy(csv_of(tmp_path, "fig12", records))
    figure = draw_sweep(frame)
    axes = figure.axes[0]
    whiskers = [
        sorted(segment[:, 1].tolist())
        for lines in axes.collections
        for segment in lines.get_segments()  # type: ignore[attr-defined]
        if segment[0][0] == segment[1][0]
    ]
    paired = frame[frame["ratio_low"].notna()]
    expected = [[1 / row.ratio_high, 1 / row.ratio_low] for row in paired.itertuples()]
    assert expected[0] == pytest.approx([0.565, 1 / 0.5], abs=0.001)
    assert whiskers == [pytest.approx(ends) for ends in expected]
    # No circle: the blocks are of one run.
    assert not [line for line in axes.lines if line.get_markersize() < 3]
    texts = texts_of(figure)
    assert {"stayed noisy", "better than its bound"} <= set(texts)
    caption = sweep_caption(frame).replace("\N{NO-BREAK SPACE}", " ")
    for part in (
        "marker the median of their slowdowns; whisker its 95 % bootstrap interval",
        "1 disturbed pair is not counted. Dashed whisker",
        "(PCcheck 10)",
        "Triangle: better than its bound (PCcheck 20: training without checkpoints was slower beside it",
    ):
        assert part in caption, caption


@pytest.mark.parametrize("highest", [1.02, 1.4, 3.5, 30, 4000])
def test_the_slowdown_axis_has_labels_at_any_range(tmp_path: Path, highest: float) -> None:
    records = [none(), pccheck(1, rate=10 / highest, options={}), pccheck(10, rate=9.9, options={})]
    figure = draw_sweep(read_tidy(csv_of(tmp_path, "fig13", records)), "single")
    FigureCanvasAgg(figure).draw()
    axes = figure.axes[0]
    shown = [value for value in axes.get_yticks() if axes.get_ylim()[0] <= value <= axes.get_ylim()[1]]
    assert 3 <= len(shown) <= 12
    assert any(math.isclose(value, 1.0) for value in shown)


@pytest.mark.parametrize(("figure", "plot"), [("fig11", plot_persist), ("fig12", plot_sweep)])
def test_a_second_drawing_gives_the_same_bytes_and_partial_ones_say_so(tmp_path: Path, figure: str, plot: Any) -> None:
    records = persist_times() if figure == "fig11" else concurrency()
    path = csv_of(tmp_path, figure, records, runs_expected=len(records) + 1, runs_missing=["one run"])
    with pytest.raises(LastgoodError, match="missing: one run"):
        plot(path, tmp_path / "refused")
    first, second = (plot(path, tmp_path / name / figure, partial=True) for name in ("a", "b"))
    assert [found.suffix for found in first] == [".pdf", ".png", ".svg"]
    for one, two in zip(first, second, strict=True):
        assert one.stat().st_size > 1000
        assert one.read_bytes() == two.read_bytes()


def test_a_csv_of_another_figure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LastgoodError, match="axis 'megabytes' is no sweep"):
        draw_sweep(read_tidy(csv_of(tmp_path, "fig11", persist_times())))
    with pytest.raises(LastgoodError, match="no persist times"):
        draw_persist(read_tidy(csv_of(tmp_path, "fig12", concurrency())))


def test_only_none_is_drawn_too(tmp_path: Path) -> None:
    assert len(plot_sweep(csv_of(tmp_path, "fig12", [none()]), tmp_path / "odd", width="single")) == 3


def test_lines_are_told_apart_without_colour() -> None:
    assert len({style.marker for style in series_styles(5)}) == 5


def test_the_caption_says_where_a_disk_was_faster_than_its_ceiling() -> None:
    frame = read_tidy(ROOT / "figures" / "measured" / "amd-epyc-2c" / "fig11_blob.csv")
    faster = frame.assign(persist_p50_s=frame["persist_bound_s"] / 1.5)
    slower = frame.assign(persist_p50_s=frame["persist_bound_s"] * 1.5)
    assert "Up to 1.50 times as fast" in persist_caption(faster)
    assert "times as fast" not in persist_caption(slower)
    # What never goes to the disk says nothing about it.
    in_memory = persist_caption(faster.assign(system="gemini")).replace("\N{NO-BREAK SPACE}", " ")
    assert "from save() until it is in its peers' memory under Gemini." in in_memory
    assert "GiB/s, which does not bind Gemini. Rev" in in_memory
    assert "does not bind" not in persist_caption(faster)


def test_the_caption_of_slowdowns_says_where_a_checkpoint_is_safe(tmp_path: Path) -> None:
    frame = read_tidy(csv_of(tmp_path, "fig12", concurrency()))
    disk = "checkpoint is flushed to the disk (fsync, msync, or direct I/O and flush). 1 is no slowdown."
    assert disk in sweep_caption(frame)
    assert disk in sweep_caption(frame[frame["system"] == "none"])
