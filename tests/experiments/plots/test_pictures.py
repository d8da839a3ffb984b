"""Pictures: made from the CSV alone, the same bytes each time, nothing on top of anything else."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from typer.testing import CliRunner

from lastgood.checkpointers.registry import checkpointer_names
from lastgood.errors import LastgoodError
from lastgood.experiments.plots.canvas import _MARKS, mark_handles, partial_text, read_tidy
from lastgood.experiments.plots.captions import throughput_caption
from lastgood.experiments.plots.throughput import draw_throughput, plot_throughput
from lastgood.experiments.records.run import RunRecord
from lastgood.experiments.systems.labels import panel_title, system_styles
from lastgood.experiments.tables.runs import collect
from tests.experiments.support.paired_records import make_paired
from tests.experiments.support.records import make_ceilings, make_record

ROOT = Path(__file__).resolve().parents[3]
INTERVALS = (1, 5, 10, 25, 50, 75, 100, 200)
SYSTEMS = ("sync", "checkfreq", "gpm", "gemini", "dcp", "pccheck")


def panel(systems: tuple[str, ...], intervals: tuple[int, ...], repetitions: int, **common: Any) -> list[RunRecord]:
    records = []
    for repetition in range(repetitions):
        records.append(make_record("none", 0, repetition, iterations_per_s=10 + repetition / 10, **common))
        for place, system in enumerate(systems):
            for interval in intervals:
                rate = 9 * interval / (interval + 5 - place / 2) + repetition / 10
                records.append(
                    make_record(
                        system,
                        interval,
                        repetition,
                        iterations_per_s=rate,
                        drain_s=0.4,
                        proof=True if repetition == 0 else None,
                        measured_steps=max(20, 2 * interval),
                        **common,
                    )
                )
    return records


def csv_of(tmp_path: Path, records: list[RunRecord], **options: Any) -> Path:
    path = tmp_path / "fig8.csv"
    collect("fig8", "vgg16", records, make_ceilings(), **options).write(path, tmp_path / "wide.csv")
    return path


def shown(figure: Figure) -> list[str]:
    texts = [text.get_text() for text in figure.texts] + [text.get_text() for text in figure.axes[0].texts]
    for legend in figure.legends:
        texts += [text.get_text() for text in legend.get_texts()]
    return texts


def test_a_second_drawing_from_the_csv_alone_gives_the_same_bytes(tmp_path: Path) -> None:
    path = csv_of(tmp_path, panel(("sync", "pccheck"), (1, 10), 2))
    first = plot_throughput(path, tmp_path / "a" / "fig8_vgg16")
    assert [found.suffix for found in first] == [".pdf", ".png", ".svg"]
    assert sorted(found.name for found in (tmp_path / "a").iterdir()) == sorted(found.name for found in first)
    moved = tmp_path / "elsewhere.csv"
    path.rename(moved)
    for one, two in zip(first, plot_throughput(moved, tmp_path / "b" / "fig8_vgg16"), strict=True):
        assert one.stat().st_size > 1000
        assert one.read_bytes() == two.read_bytes(), one.suffix


@pytest.mark.parametrize("width", ["single", "double"])
@pytest.mark.parametrize(
    ("systems", "intervals", "repetitions"),
    [(SYSTEMS, INTERVALS, 3), (("pccheck",), (10,), 1), (("sync", "checkfreq", "pccheck"), (1, 10, 25), 2)],
    ids=["most", "least", "laptop"],
)
def test_no_text_touches_another(
    tmp_path: Path, width: Any, systems: tuple[str, ...], intervals: tuple[int, ...], repetitions: int
) -> None:
    missing = [f"vgg16 pccheck f{interval} r9" for interval in range(30)]
    path = csv_of(tmp_path, panel(systems, intervals, repetitions), runs_expected=999, runs_missing=missing)
    figure = draw_throughput(read_tidy(path), width)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    axes = figure.axes[0]
    texts = [*figure.texts, *axes.texts, *axes.get_xticklabels(), axes.xaxis.label, axes.yaxis.label]
    texts += [
        text for text in axes.get_yticklabels() if axes.get_ylim()[0] <= text.get_position()[1] <= axes.get_ylim()[1]
    ]
    texts += figure.legends[0].get_texts()
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    for (one, first), (two, second) in itertools.combinations(boxes, 2):
        # Lines of text may share a border's half pixel.
        shared = Bbox.intersection(first, second)
        assert shared is None or min(shared.width, shared.height) < 1.5, (one, two)
    for text, box in boxes:
        assert box.x0 >= 0, text
        assert box.y0 >= -1, text
        assert box.x1 <= figure.bbox.x1 + 1, text
        assert box.y1 <= figure.bbox.y1 + 1, text
    assert min(text.get_fontsize() for text in texts) >= 7


def test_bars_lines_and_bound_stand_where_the_numbers_are(tmp_path: Path) -> None:
    records = [
        make_record("none", 0, 0, iterations_per_s=10.0),
        make_record("none", 0, 1, iterations_per_s=8.0),
        make_record("pccheck", 1, 0, iterations_per_s=4.0, measured_steps=20, drain_s=5.0, proof=True),
        make_record("pccheck", 1, 1, iterations_per_s=4.0, measured_steps=20, drain_s=5.0),
    ]
    frame = read_tidy(csv_of(tmp_path, records))
    axes = draw_throughput(frame).axes[0]
    # 20 steps in 5 s and 5 s of drain: 4/s, and 2/s durable.
    heights = {bar.get_height() for bar in axes.patches if bar.get_y() == 0}
    assert heights == {2.0, 4.0}
    circles = next(line for line in axes.lines if line.get_marker() == "o")
    assert list(circles.get_ydata()) == [4.0, 4.0]
    none = next(line for line in axes.lines if line.get_marker() != "o")
    assert set(none.get_ydata()) == {9.0}
    # The whisker and the bound are sets of lines; the ceilings allow 1e9 / (100 * 2**20) checkpoints a second.
    levels = [segment[0][1] for lines in axes.collections for segment in lines.get_segments()]
    assert levels == pytest.approx([4.0, frame["bound_iterations_per_s"].iloc[-1]])
    assert levels[1] == pytest.approx(1e9 / (100 * 2**20), rel=0.1)
    assert "4.00" in [text.get_text() for text in axes.texts]


def test_a_cell_in_one_stretch_above_its_bound_is_marked_if_its_median_is(tmp_path: Path) -> None:
    records = [make_record("none", 0, number, iterations_per_s=9.0) for number in (0, 1)]
    for system, rates in (("pccheck", (9.2, 9.6)), ("gpm", (8.9, 9.4)), ("sync", (8.0, 9.1))):
        records += [
            make_record(system, 25, number, iterations_per_s=rate, proof=True) for number, rate in enumerate(rates)
        ]
    figure = draw_throughput(read_tidy(csv_of(tmp_path, records)))
    triangles = [line for line in figure.axes[0].lines if line.get_marker() == 6]
    assert [list(line.get_ydata()) for line in triangles] == [[9.4], [9.6]]
    told = " ".join(shown(figure)).replace("\n", " ")
    assert "PCcheck 25: measured in one stretch of time" in told and "GPM 25: the bound lies between its runs" in told


def test_the_band_of_training_without_checkpoints_lies_behind_the_bars(tmp_path: Path) -> None:
    axes = draw_throughput(read_tidy(csv_of(tmp_path, panel(("sync", "pccheck"), (1, 10), 2)))).axes[0]
    wide = axes.get_xlim()[1] - axes.get_xlim()[0]
    in_data = [(patch, patch.get_extents().transformed(axes.transData.inverted())) for patch in axes.patches]
    bands = [patch for patch, box in in_data if box.width > 0.99 * wide]
    bars = [patch for patch, box in in_data if box.width < 0.9 * wide]
    assert len(bands) == 1 and len(bars) == 3 * 4
    assert bands[0].get_zorder() < min(bar.get_zorder() for bar in bars)


def test_marks_for_few_checkpoints_and_missing_proofs(tmp_path: Path) -> None:
    records = [
        make_record("none"),
        make_record("sync", 10, proof=True),
        make_record("checkfreq", 10, durable=1, proof=True),
        make_record("gpm", 10),
        make_record("pccheck", 10, proof=False),
    ]
    texts = shown(draw_throughput(read_tidy(csv_of(tmp_path, records))))
    assert {"fewer than 2 checkpoints", "restore not proved", "RESTORE DIFFERS"} <= set(texts)
    clean = shown(draw_throughput(read_tidy(csv_of(tmp_path, panel(("sync",), (10,), 2)))))
    assert not {"fewer than 2 checkpoints", "restore not proved", "RESTORE DIFFERS"} & set(clean)


def test_the_caption_says_it_all(tmp_path: Path) -> None:
    frame = read_tidy(csv_of(tmp_path, panel(("sync", "pccheck"), (1, 10), 2)))
    caption = throughput_caption(frame).replace("\N{NO-BREAK SPACE}", " ")
    for part in (
        "Machine testbox (Example CPU, 2 cores; ext4 on /dev/sda1)",
        "scale laptop (compare shapes and ratios",
        "2 repetitions",
        "2 threads",
        "20 to 40 iterations after 3 of warm-up",
        "state 100 MiB",
        "99.5 ms per iteration",
        "is flushed to the disk (fsync, msync, or direct I/O and flush). Bound",
        "disk write 954 MiB/s, copy 9.31 GiB/s",
        "Revision 0123456789.",
    ):
        assert part in caption, caption


DISK = "flushed to the disk (fsync, msync, or direct I/O and flush)"
PEERS, SHADOWS = "in its peers' memory under Gemini", "in its shadows' memory under Checkmate"


@pytest.mark.parametrize(
    ("systems", "safe"),
    [
        (("sync", "pccheck"), DISK),
        (("gemini",), PEERS),
        (("checkmate",), SHADOWS),
        (("checkmate", "gemini"), f"{PEERS} or {SHADOWS}"),
        (("pccheck", "checkmate", "sync", "gemini"), f"{DISK}, or {PEERS}, or {SHADOWS}"),
        (("other", "dcp"), f"{DISK}, or durable by its own word under other"),
    ],
)
def test_the_caption_says_for_every_system_where_a_checkpoint_is_safe(
    tmp_path: Path, systems: tuple[str, ...], safe: str
) -> None:
    frame = read_tidy(csv_of(tmp_path, panel(systems, (1,), 1)))
    caption = throughput_caption(frame).replace("\N{NO-BREAK SPACE}", " ")
    assert f"the time until the last checkpoint is {safe}. Bound" in caption, caption
    assert ("Gemini, which writes to no disk, may pass it" in caption) == ("gemini" in systems)


def test_over_several_nodes_what_gemini_sends_has_a_bound_of_its_own() -> None:
    frame = read_tidy(ROOT / "figures" / "measured" / "amd-epyc-2c" / "fig8e_opt.csv")
    caption = throughput_caption(frame).replace("\N{NO-BREAK SPACE}", " ")
    assert f"is {DISK}, or {PEERS}. Bound" in caption and "on a disk or link)" in caption
    assert "may pass it" not in caption


def test_the_caption_knows_where_every_built_in_system_keeps_its_checkpoints(tmp_path: Path) -> None:
    systems = tuple(name for name in checkpointer_names() if name != "none")
    assert "by its own word" not in throughput_caption(read_tidy(csv_of(tmp_path, panel(systems, (1,), 1))))


def test_the_caption_of_a_mixed_gpu_panel(tmp_path: Path) -> None:
    gpu: dict[str, Any] = {"scale": "gpu", "device": "cuda", "gpu": "Example GPU"}
    records = [make_record("none", **gpu), make_record(git_dirty=True, **gpu)]
    path = tmp_path / "fig8.csv"
    ceilings = make_ceilings(device_to_host_pinned_bytes_per_s=5e10)
    collect("fig8", "vgg16", records, ceilings).write(path, tmp_path / "wide.csv")
    caption = throughput_caption(read_tidy(path))
    assert "(Example GPU; ext4" in caption
    assert "shapes and ratios" not in caption
    assert "One run each, no repetition" in caption
    assert "Revisions (MIXED) 0123456789, 0123456789 + uncommitted changes." in caption


def test_partial_figures_say_so_and_only_on_request(tmp_path: Path) -> None:
    records = panel(("sync", "pccheck"), (1, 10), 1)[:-1]
    path = csv_of(tmp_path, records, runs_expected=5, runs_missing=["vgg16 pccheck f10 r0"])
    with pytest.raises(LastgoodError, match="partial: 4 of 5 runs, missing: vgg16 pccheck f10 r0"):
        plot_throughput(path, tmp_path / "fig8")
    assert not (tmp_path / "fig8.pdf").exists()
    plot_throughput(path, tmp_path / "fig8", partial=True)
    texts = shown(draw_throughput(read_tidy(path)))
    assert any(text.startswith("partial: 4 of 5 runs") for text in texts)
    assert "-" in texts


def test_a_long_list_of_missing_runs_is_cut(tmp_path: Path) -> None:
    path = csv_of(tmp_path, [make_record("none")], runs_expected=41, runs_missing=[f"run {n}" for n in range(40)])
    assert partial_text(read_tidy(path)).endswith("run 11 and 28 more")


@pytest.mark.parametrize(
    "records",
    [[make_record("none")], [make_record("sync", 5)], [make_record("none"), make_record("mine", 5)]],
    ids=["only none", "no none", "unknown system"],
)
def test_odd_panels_are_drawn(tmp_path: Path, records: list[RunRecord]) -> None:
    assert len(plot_throughput(csv_of(tmp_path, records), tmp_path / "odd", width="single")) == 3


def test_a_user_style_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    path = csv_of(tmp_path, panel(("sync",), (1,), 1))
    plain = plot_throughput(path, tmp_path / "plain")[1].read_bytes()
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "black"}):
        assert plot_throughput(path, tmp_path / "styled")[1].read_bytes() == plain


@pytest.mark.parametrize(
    ("text", "message"),
    [("a,b\n1,2\n", "columns are missing: figure"), ("", "not a figure's CSV file"), (None, "cannot be read")],
)
def test_other_files_are_refused_by_name(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "x.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LastgoodError, match=f"x.csv: {message}"):
        read_tidy(path)


def test_revisions_made_of_digits_stay_text(tmp_path: Path) -> None:
    path = csv_of(tmp_path, [make_record("none", git_revision="1234567890e123456789")])
    assert read_tidy(path)["git_revision"].iloc[0] == "1234567890e123456789"


def test_styles_are_told_apart() -> None:
    styles = system_styles([*SYSTEMS, "mine"])
    assert list(styles) == [*SYSTEMS, "mine"]
    assert len({style.colour for style in styles.values()}) == len(styles)


@pytest.mark.parametrize(
    ("workload", "title"),
    [
        ("vgg16", "Figure 8a: VGG-16"),
        ("bert", "Figure 8b: BERT"),
        ("transformer_xl", "Figure 8c: Transformer-XL"),
        ("opt", "Figure 8d: OPT"),
        ("bloom", "Figure 8f: BLOOM"),
        ("resnet18", "Figure 8: ResNet-18"),
        ("resnet50", "Figure 8: ResNet-50"),
    ],
)
def test_titles_have_the_letters_of_the_papers_panels(workload: str, title: str) -> None:
    assert panel_title("fig8", workload) == title


def test_the_command(tmp_path: Path) -> None:
    from lastgood.cli import app

    path = csv_of(tmp_path, panel(("sync",), (1,), 1))
    arguments = ["plot", "fig8", path, "--out-stem", tmp_path / "out", "--width", "single"]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out.svg").exists()


def test_pairs_of_blocks_are_drawn_with_their_intervals_and_marks(tmp_path: Path) -> None:
    """Ratio and rate under each bar, the interval as whisker, dashed where it stayed wide, a triangle above a bound."""
    records = [
        make_paired("none", ratios=[1, 1, 1]),
        make_paired("sync", 10, [0.5, 0.51, 0.52], proof=True),
        make_paired("gpm", 10, [0.5, 0.7, 0.95], proof=True, ended_by="budget", disturbed=[0]),
        make_paired("pccheck", 10, [0.98, 1.01, 1.02], proof=True),
    ]
    figure = draw_throughput(read_tidy(csv_of(tmp_path, records)))
    texts = shown(figure)
    for expected in ("5.10\n51%", "10.1\n101%", "stayed noisy", "above its bound"):
        assert any(expected in text for text in texts), (expected, texts)
    dashed = [lines for lines in figure.axes[0].collections if lines.get_zorder() == 8 and lines.get_linestyle()[0][1]]
    assert len(dashed) == 1
    caption = " ".join(" ".join(texts).split())
    assert "2 to 3 pairs of blocks" in caption and "1 disturbed pair is not counted" in caption
    assert "(GPM 10)" in caption and "PCcheck 10: the bound lies in its interval" in caption


def test_one_cell_that_nobody_could_measure_does_not_make_all_bars_small(tmp_path: Path) -> None:
    records = [
        make_paired("none", ratios=[1, 1, 1]),
        make_paired("sync", 10, [0.5, 0.51, 0.52], proof=True),
        make_paired("gpm", 10, [0.5, 1.2, 9.0], proof=True, ended_by="budget"),
    ]
    axes = draw_throughput(read_tidy(csv_of(tmp_path, records))).axes[0]
    top = axes.get_ylim()[1]
    assert top < 20  # of 10 it/s without checkpoints
    (triangle,) = [line for line in axes.lines if line.get_marker() == 6 and len(line.get_xdata()) == 1]
    assert triangle.get_ydata()[0] == top
    ends = [y for lines in axes.collections if lines.get_zorder() == 8 for y in lines.get_segments()[0][:, 1]]
    assert max(ends) > top  # the whisker leaves the picture


def test_a_cell_that_nobody_could_measure_is_pale_and_has_no_share(tmp_path: Path) -> None:
    records = [
        make_paired("none", ratios=[1, 1, 1]),
        make_paired("sync", 10, [0.5, 0.51, 0.52], proof=True),
        make_paired("gpm", 10, [0.5, 1.2, 0.9], proof=True, ended_by="budget", disturbed=[0, 1, 2]),
    ]
    figure = draw_throughput(read_tidy(csv_of(tmp_path, records)))
    texts = shown(figure)
    assert any(text.endswith("\n?") for text in texts) and "all pairs disturbed" in texts
    solid = [bar for bar in figure.axes[0].patches if bar.get_alpha() is None and bar.get_fill() and bar.get_height()]
    assert len(solid) == 1  # that of sync


@pytest.mark.parametrize("mark", sorted(_MARKS))
def test_every_sign_can_be_a_marker_of_the_legend(mark: str) -> None:
    (handle,) = mark_handles({mark})
    path = handle.get_marker(), handle._marker.get_path()
    assert path[1].vertices.size, path
