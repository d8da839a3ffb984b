"""The CSV files of Checkmate's figure: figure 8's columns, and the ranges that its paper states."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lastgood.errors import LastgoodError
from lastgood.experiments.records.optimizer import OPTIMIZER_PANEL
from lastgood.experiments.systems.papers import CHECKMATE
from lastgood.experiments.tables.columns import TidyRow
from lastgood.experiments.tables.csv_text import Collected
from lastgood.experiments.tables.optimizer import UpdateRow, collect_updates_files
from lastgood.experiments.tables.published import load_ranges
from lastgood.experiments.tables.runs import collect_files

__all__ = ["collect_checkmate_files"]


def collect_checkmate_files(
    figure: str,
    panel: str,
    paths: Sequence[Path],
    ceilings_path: Path,
    *,
    partial: bool = False,
    expected: int | None = None,
    reference: Path | None = None,
) -> Collected[TidyRow] | Collected[UpdateRow]:
    """As `collect_files`; Checkmate's rows carry the published ranges, so that a picture needs no other file.

    The panel on a shadow's updates has columns of its own.
    """
    if panel == OPTIMIZER_PANEL:
        return collect_updates_files(figure, panel, paths, ceilings_path, partial=partial, expected=expected)
    found = collect_files(figure, panel, paths, ceilings_path, partial=partial, expected=expected)
    if reference is None:
        return found
    values: dict[str, list[float]] = defaultdict(list)
    sources = set()
    for metric, value, source in load_ranges(reference):
        values[metric].append(value)
        sources.add(source)
    single = sorted(metric for metric, both in values.items() if len(both) != 2)
    if single:
        raise LastgoodError(f"{reference}: {', '.join(single)}: a range has one value `from` and one `to`")
    text = ";".join(f"{metric}:{min(both):g}:{max(both):g}" for metric, both in sorted(values.items()))
    rows = [
        replace(row, paper_ranges=text, paper_source="; ".join(sorted(sources))) if row.system == CHECKMATE else row
        for row in found.tidy
    ]
    return replace(found, tidy=rows)
