"""`lastgood plot`: a figure from its CSV file alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from lastgood.cli._output import console

__all__ = ["plot"]


def plot(
    figure: Annotated[str, typer.Argument(help="Name of the figure, for instance fig8.", show_default=False)],
    csv: Annotated[Path, typer.Argument(metavar="CSV", help="Its tidy CSV file.", show_default=False)],
    out_stem: Annotated[Path, typer.Option(help="Path of the pictures without .pdf, .png, .svg.")],
    width: Annotated[Literal["single", "double"], typer.Option(help="One column (3.4 in) or both (7 in).")] = "double",
    caption: Annotated[
        Literal["below", "none"], typer.Option(help="Under the picture, or none: a paper has its own.")
    ] = "below",
    partial: Annotated[bool, typer.Option("--partial", help="Draw it although runs are missing, with a note.")] = False,
) -> None:
    """Draw a figure as PDF, PNG and SVG. The same CSV always gives the same bytes."""
    from lastgood.experiments.figures.registry import figure_kind

    draw = figure_kind(figure).drawer()
    for path in draw(csv, out_stem, width=width, partial=partial, caption=caption == "below"):
        console.print(str(path))
