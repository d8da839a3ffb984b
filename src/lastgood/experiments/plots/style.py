"""How figures are drawn: sizes, fonts, and the colours and markers of lines that are no system's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["BOUND_COLOUR", "RC_PARAMS", "WIDTHS_IN", "SeriesStyle", "series_styles"]

BOUND_COLOUR = "#D55E00"
"""Vermillion, which no system has (systems/labels.py)."""

WIDTHS_IN = {"single": 3.4, "double": 7.0}
"""One column and the full width of a two-column paper, in inches."""

RC_PARAMS: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 7.5,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 7.0,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "hatch.linewidth": 0.45,
    "axes.spines.top": False,
    "axes.spines.right": False,
    # TrueType in PDF, as publishers ask; outlines in SVG, so that it looks the same without the font.
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    # Names inside the SVG come from this and not from a clock, so that a second drawing is the same file.
    "svg.hashsalt": "lastgood",
}


@dataclass(frozen=True)
class SeriesStyle:
    """Colour and marker of one line among several: told apart without colour too."""

    colour: str
    marker: str


_SERIES = (
    SeriesStyle("#0072B2", "o"),
    SeriesStyle("#C07A00", "s"),
    SeriesStyle("#009E73", "^"),
    SeriesStyle("#A8488A", "v"),
    SeriesStyle("#2E8FD0", "D"),
    SeriesStyle("#6E6E6E", "P"),
    SeriesStyle("#5C5300", "p"),
    SeriesStyle("#B5302A", "X"),
)


def series_styles(count: int) -> list[SeriesStyle]:
    """Styles of `count` lines, in order; they begin again if there are more lines than styles."""
    return [_SERIES[number % len(_SERIES)] for number in range(count)]
