"""Published slowdowns beside ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lastgood.errors import LastgoodError
from lastgood.experiments.plots.canvas import read_tidy
from lastgood.experiments.plots.throughput import draw_throughput
from lastgood.experiments.tables.published import load_published, published_slowdown
from lastgood.experiments.tables.runs import collect
from tests.experiments.support.records import make_ceilings, make_record, place_record

REFERENCE = Path(__file__).resolve().parents[3] / "figures" / "reference" / "fig8.csv"
HEADER = "figure,panel,workload,system,interval_steps,metric,value,unit,qualifier,setting,kind,source\n"


def slowdown(workload: str, system: str, interval: int) -> float | None:
    spec = make_record(system, interval, workload=workload).spec
    found = published_slowdown(load_published(REFERENCE), spec)
    return None if found is None else found.slowdown


def test_slowdowns_as_printed_and_from_the_artefacts_rates() -> None:
    assert slowdown("opt", "pccheck", 50) == 1.02
    assert slowdown("opt", "checkfreq", 50) == 1.17
    assert slowdown("vgg16", "pccheck", 10) == pytest.approx(15.769409833983385 / 6.3503108341382175)
    assert slowdown("vgg16", "gpm", 25) == pytest.approx(15.756049145422713 / 10.387977578704326)


def test_several_nodes_bounds_and_our_own_numbers_are_left_out() -> None:
    assert slowdown("opt", "pccheck", 10) is None, "OPT-2.7B on several nodes"
    assert slowdown("bloom", "pccheck", 10) is None
    assert slowdown("vgg16", "dcp", 10) is None, "measured by us on another machine"
    assert slowdown("bert", "pccheck", 10) is None, "said of no model"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "columns are missing: panel"),
        (f"{HEADER}fig8,a,vgg16,sync,x,slowdown,2,ratio,equal,,paper,me\n", ":2: 'x' is no number"),
        (f"{HEADER}fig8,a,vgg16,sync,1,slowdown,-2,ratio,equal,,paper,me\n", ":2: '-2' is no number"),
        (f"{HEADER}fig8,a,vgg16,sync,1,slowdown,nan,ratio,equal,,paper,me\n", ":2: 'nan' is no number"),
        (None, "cannot be read"),
    ],
)
def test_bad_files_are_refused_by_line(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "fig8.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LastgoodError, match=message):
        load_published(path)


def test_a_diamond_stands_where_this_machine_would_be(tmp_path: Path) -> None:
    records = [make_record("none", iterations_per_s=12.0), make_record("pccheck", 10), make_record("sync", 10)]
    found = collect("fig8", "vgg16", records, make_ceilings(), published=load_published(REFERENCE))
    found.write(tmp_path / "t.csv", tmp_path / "w.csv")
    figure = draw_throughput(read_tidy(tmp_path / "t.csv"))
    (diamonds,) = [line for line in figure.axes[0].lines if line.get_marker() == "D"]
    assert list(diamonds.get_ydata()) == pytest.approx([12.0 * 6.3503108341382175 / 15.769409833983385])  # type: ignore[call-overload]
    assert diamonds.get_markerfacecolor() == "none"
    assert "paper, other machine" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert "eth-easl/pccheck" in "".join(text.get_text() for text in figure.texts)
    # The numbers are in the CSV: the picture needs no other file.
    assert found.tidy[-1].paper_slowdown == pytest.approx(15.769409833983385 / 6.3503108341382175)
    assert [row.paper_slowdown for row in found.tidy[:-1]] == [None, None]


def test_the_command_takes_the_file(tmp_path: Path) -> None:
    from lastgood.cli import app

    make_ceilings().write(tmp_path / "ceilings.json")
    paths = [place_record(make_record(system, 50), tmp_path / "results") for system in ("none", "pccheck")]
    arguments = ["collect", "fig8", "vgg16", "--ceilings", tmp_path / "ceilings.json", "--reference", REFERENCE]
    arguments += ["--out-tidy", tmp_path / "t.csv", "--out-wide", tmp_path / "w.csv", *paths]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    assert read_tidy(tmp_path / "t.csv")["paper_slowdown"].iloc[1] == pytest.approx(
        15.769409833983385 / 15.52581113138962
    )
