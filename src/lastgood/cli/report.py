"""`lastgood report`: one HTML file with figures, numbers, claims and machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lastgood.cli._output import console
from lastgood.units import format_bytes

__all__ = ["report"]


def report(
    figures_dir: Annotated[Path, typer.Option(help="Folder of the pictures (and of the CSV files, if none is named).")],
    out: Annotated[Path, typer.Option(help="The HTML file.")],
    csvs: Annotated[
        list[Path] | None, typer.Argument(metavar="[CSV...]", help="Tidy CSV files of figures.", show_default=False)
    ] = None,
    ceilings: Annotated[Path | None, typer.Option(help="Record of the machine's ceilings.")] = None,
    claims: Annotated[Path | None, typer.Option(help="What `lastgood claims` wrote (CSV).")] = None,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Checkpointing systems side by side",
) -> None:
    """Build one HTML file that a person opens in a browser; it holds everything and loads nothing."""
    from lastgood.experiments.ceilings.record import load_ceilings
    from lastgood.experiments.claims.judge import load_claims
    from lastgood.experiments.report.page import build_report
    from lastgood.experiments.tables.files import find_csvs, load_csvs
    from lastgood.files import write_result

    page = build_report(
        load_csvs(csvs or find_csvs(figures_dir)),
        figures_dir,
        ceilings=load_ceilings(ceilings) if ceilings else None,
        claims=load_claims(claims) if claims else None,
        title=title,
    )
    write_result(out, page)
    console.print(f"report: {format_bytes(len(page))}; {out}")
