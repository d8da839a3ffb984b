"""`lastgood claims`: what papers claim, against our CSV files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lastgood.cli._output import console

__all__ = ["claims"]


def claims(
    csvs: Annotated[
        list[Path], typer.Argument(metavar="CSV...", help="Tidy CSV files of figures.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="CSV with a row for each claim.")],
    markdown: Annotated[Path | None, typer.Option(help="The same as a Markdown page.")] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Folder of published numbers (default: figures/reference of the checkout).")
    ] = None,
) -> None:
    """Say of each published claim whether these runs reproduce it, refute it, or cannot test it, with the numbers."""
    from collections import Counter

    from lastgood.experiments.claims.judge import VERDICTS, claims_csv, claims_markdown, judge_claims, load_reference
    from lastgood.experiments.plan.grid import find_root
    from lastgood.experiments.tables.files import load_csvs
    from lastgood.files import write_result

    rows = judge_claims(load_csvs(csvs), load_reference(reference or find_root() / "figures" / "reference"))
    if markdown is not None:
        write_result(markdown, claims_markdown(rows).encode())
    write_result(out, claims_csv(rows))
    counts = Counter(row.verdict for row in rows)
    console.print(f"claims: {', '.join(f'{counts[verdict]} {verdict}' for verdict in VERDICTS)}; {out}")
