"""`lastgood collect`: run records to one figure's CSV files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lastgood.cli._output import console

__all__ = ["collect"]


def collect(
    figure: Annotated[str, typer.Argument(help="Name of the figure, for instance fig8.")],
    panel: Annotated[str, typer.Argument(help="Name of its panel, for instance vgg16.")],
    records: Annotated[list[Path], typer.Argument(metavar="RECORD...", help="Run records (JSON).", show_default=False)],
    ceilings: Annotated[Path, typer.Option(help="Record of the machine's ceilings.")],
    out_tidy: Annotated[Path, typer.Option(help="CSV with a row per run.")],
    out_wide: Annotated[Path, typer.Option(help="CSV with a row per series and a column per value of the axis.")],
    partial: Annotated[bool, typer.Option("--partial", help="Go on without the records that are not there.")] = False,
    expected: Annotated[
        int | None, typer.Option(min=1, help="Runs of the complete panel (default: the records named).")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Published numbers to show beside ours, as in figures/reference.")
    ] = None,
) -> None:
    """Put the run records of one panel into two CSV files; both are written complete or not at all.

    A record that does not lie where its own settings say is refused. Mixed revisions or machines are let through, with
    a warning here and a note in every row.
    """
    from lastgood.experiments.figures.registry import figure_kind

    found = figure_kind(figure).collector()(
        figure, panel, records, ceilings, partial=partial, expected=expected, reference=reference
    )
    found.write(out_tidy, out_wide)
    for warning in dict.fromkeys(found.warnings):
        console.print(f"warning: {warning}")
    console.print(f"{figure} {panel}: {found.summary} in {out_tidy}")
