"""What a figure shows, as numbers: data of lines, areas and bars, limits, labels, and the numbers in its caption."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.golden.support.adapters import command

DATA = Path(__file__).resolve().parents[1] / "data"


def drawn_names() -> list[str]:
    """Stems of the kept CSV files, each named for its figure and panel."""
    return sorted(path.stem for path in (DATA / "tables").glob("*.csv") if not path.stem.endswith("_wide"))


def drawn_numbers(name: str) -> list[Any]:
    """The figures that `lastgood plot` saves for the kept CSV file `name`, the same one for each format told once."""
    figures: list[Figure] = []

    def keep(self: Figure, target: Any, **_: Any) -> None:
        target.write(b"nothing")
        if not any(one is self for one in figures):
            figures.append(self)

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(Figure, "savefig", keep):
        csv = DATA / "tables" / f"{name}.csv"
        command("plot", name.split("_")[0], str(csv), "--out-stem", str(Path(folder, name)), "--partial")
    return [_figure(figure) for figure in figures]


def _figure(figure: Figure) -> dict[str, Any]:
    # Where a text is broken into lines is a matter of fonts, and words of a caption may be mended: its numbers may not.
    texts = " ".join(text.get_text() for text in figure.texts)
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend() is not None)]
    return {
        "numbers": re.findall(r"\d+(?:[.,]\d+)*", texts),
        "legend": [text.get_text() for legend in legends for text in legend.get_texts()],
        "axes": [_axes(axes) for axes in figure.axes],
    }


def _axes(axes: Axes) -> dict[str, Any]:
    return {
        "title": [axes.get_title(), axes.get_title("left"), axes.get_xlabel(), axes.get_ylabel()],
        "limits": [*axes.get_xlim(), *axes.get_ylim(), axes.get_xscale(), axes.get_yscale()],
        "lines": [
            [numbers(line.get_xdata()), numbers(line.get_ydata()), str(line.get_marker()), line.get_linestyle()]
            for line in axes.lines
        ],
        "paths": [
            [numbers(path.vertices) for path in found.get_paths()] + [numbers(found.get_offsets())]
            for found in axes.collections
        ],
        "bars": [numbers(patch.get_path().transformed(patch.get_patch_transform()).vertices) for patch in axes.patches],
        "texts": [text.get_text() for text in axes.texts],
        "ticks": [
            [text.get_text() for text in axis.get_ticklabels()]
            for axis in (axes.xaxis, axes.yaxis)
            if axis.get_visible()
        ],
    }


def numbers(values: Any) -> list[Any]:
    """Nested lists of floats; what is no number, as text."""
    array = np.ma.filled(np.ma.asarray(values), np.nan)
    if array.dtype.kind not in "fiub":
        return [str(value) for value in array.ravel()]
    return [None if np.isnan(value) else float(value) for value in array.astype(float).ravel()]
