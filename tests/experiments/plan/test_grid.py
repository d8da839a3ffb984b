"""The description of an experiment."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgood.errors import ConfigError
from lastgood.experiments.figures.registry import figure_names
from lastgood.experiments.plan.grid import find_root, load_grid
from lastgood.experiments.plan.variants import BLOB
from lastgood.workloads.registry import workload_names

ROOT = Path(__file__).resolve().parents[3]


def test_figure_8() -> None:
    grid = load_grid(ROOT, "fig8")
    assert grid.paper.figure == "8"
    assert set(grid.prediction) == {"laptop", "gpu", "paper"}
    for prediction in grid.prediction.values():
        assert set(prediction.step_s) == set(workload_names()) - {BLOB}


@pytest.mark.parametrize("figure", figure_names())
def test_every_figure_has_a_grid_and_a_page(figure: str) -> None:
    grid = load_grid(ROOT, figure)
    assert grid.paper.figure == ("6" if figure == "checkmate" else figure.removeprefix("fig"))
    assert set(grid.prediction) == {"laptop", "gpu", "paper"}
    assert (ROOT / "evaluation" / figure / "README.md").is_file()


def test_an_unknown_figure_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no figure 'fig99'; known: checkmate, dcp, fig11, fig12, fig13, fig14, fig8"):
        load_grid(ROOT, "fig99")


def test_a_wrong_grid_names_file_and_key(tmp_path: Path) -> None:
    folder = tmp_path / "evaluation" / "fig8"
    folder.mkdir(parents=True)
    text = (ROOT / "evaluation" / "fig8" / "grid.yaml").read_text(encoding="utf-8")
    (folder / "grid.yaml").write_text(text.replace("prediction:", "prediktion:"), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_grid(tmp_path, "fig8")
    assert f"{folder / 'grid.yaml'}: prediction: is missing" in str(caught.value)
    assert "prediktion: unknown key (did you mean prediction?)" in str(caught.value)


def test_the_checkout_is_found_from_anywhere(tmp_path: Path) -> None:
    assert find_root(ROOT / "evaluation" / "fig8") == ROOT
    assert (find_root(tmp_path) / "evaluation" / "fig8" / "grid.yaml").is_file()
