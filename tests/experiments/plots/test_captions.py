"""`lastgood plot --caption`: a picture with its sentences below, or with none for a paper that has its own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.experiments.figures.registry import figure_names

ROOT = Path(__file__).resolve().parents[3]
KEPT = {
    "fig8": "amd-epyc-2c/fig8_vgg16.csv",
    "fig8e": "amd-epyc-2c/fig8e_opt.csv",
    "fig8f": "amd-epyc-2c/fig8e_opt.csv",
    "fig9": "amd-epyc-2c/fig9_opt.csv",
    "fig11": "amd-epyc-2c/fig11_blob.csv",
    "fig12": "amd-epyc-2c/fig12_vgg16.csv",
    "fig13": "amd-epyc-2c/fig13_vgg16.csv",
    "fig14": "amd-epyc-2c/fig14_vgg16.csv",
    "checkmate": "intel-xeon-2c/checkmate_opt.csv",
    "dcp": "amd-epyc-2c/dcp_dcp.csv",
    "flowcheck": "amd-epyc-2c/flowcheck_training.csv",
    "remote": "amd-epyc-2c/remote_training.csv",
    "stellatrain": "amd-epyc-2c/stellatrain_links.csv",
}


def drawn(figure: str, csv: Path, *options: str) -> Figure:
    """The figure that `lastgood plot` saves, without the files' cost."""
    kept: list[Figure] = []

    def keep(self: Figure, target: Any, **_: Any) -> None:
        target.write(b"nothing")
        kept.append(self)

    with mock.patch.object(Figure, "savefig", keep), tempfile.TemporaryDirectory() as folder:
        done = CliRunner().invoke(app, ["plot", figure, str(csv), "--out-stem", f"{folder}/picture", *options])
    assert done.exit_code == 0, done.output
    return kept[0]


def test_every_figure_is_among_them() -> None:
    assert set(KEPT) == set(figure_names())


@pytest.mark.parametrize(
    ("figure", "csv"), [*KEPT.items(), ("checkmate", "intel-xeon-2c/checkmate_optimizer.csv")], ids=str
)
def test_without_a_caption_a_picture_is_lower_and_otherwise_the_same(figure: str, csv: str) -> None:
    path = ROOT / "figures" / "measured" / csv
    below, none = drawn(figure, path), drawn(figure, path, "--caption", "none")
    assert "Revision" in " ".join(text.get_text() for text in below.texts)
    (heading,) = [text.get_text() for text in none.texts]
    assert heading == below.texts[0].get_text()
    assert none.get_figheight() < below.get_figheight() - 0.3
    sizes = [[axes.get_window_extent().size.round(6).tolist() for axes in picture.axes] for picture in (below, none)]
    assert sizes[0] == sizes[1]


def test_a_line_that_names_missing_runs_stays(tmp_path: Path) -> None:
    path = tmp_path / "fig8_vgg16.csv"
    lines = (ROOT / "figures" / "measured" / KEPT["fig8"]).read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    texts = [text.get_text() for text in drawn("fig8", path, "--partial", "--caption", "none").texts]
    assert len(texts) == 2 and texts[1].startswith("partial: ")
