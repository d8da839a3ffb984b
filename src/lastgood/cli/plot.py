"""`lastgood plot`: a figure from its CSV file alone."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from lastgood.cli._output import console

__all__ = ["plot"]


class ColumnWidth(str, Enum):
    """Widths in a two-column paper."""

    SINGLE = "single"
    DOUBLE = "double"


class CaptionPlace(str, Enum):
    """Where the sentences stand that say what a picture shows."""

    BELOW = "below"
    NONE = "none"


def plot(
    figure: Annotated[str, typer.Argument(help="Name of the figure, for instance fig8.", show_default=False)],
    csv: Annotated[Path, typer.Argument(metavar="CSV", help="Its tidy CSV file.", show_default=False)],
    out_stem: Annotated[Path, typer.Option(help="Path of the pictures without .pdf, .png, .svg.")],
    width: Annotated[ColumnWidth, typer.Option(help="One column (3.4 in) or both (7 in).")] = ColumnWidth.DOUBLE,
    caption: Annotated[
        CaptionPlace, typer.Option(help="Under the picture, or none: a paper has its own.")
    ] = CaptionPlace.BELOW,
    partial: Annotated[bool, typer.Option("--partial", help="Draw it although runs are missing, and say so.")] = False,
) -> None:
    """Draw a figure as PDF, PNG and SVG. The same CSV always gives the same bytes."""
    from lastgood.experiments.figures.registry import figure_kind

    draw = figure_kind(figure).drawer()
    chosen = "single" if width is ColumnWidth.SINGLE else "double"
    for path in draw(csv, out_stem, width=chosen, partial=partial, caption=caption is CaptionPlace.BELOW):
        console.print(str(path))
