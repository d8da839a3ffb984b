"""The wide CSV of a figure: the layout of the files in PCcheck's artefact."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from lastgood.experiments.config.values import BASELINE
from lastgood.experiments.figures.axes import FigureAxes
from lastgood.experiments.systems.labels import system_label, system_rank
from lastgood.experiments.tables.columns import TidyRow
from lastgood.experiments.tables.csv_text import field_text, median_lines

__all__ = ["wide_table"]

_SIDE_NAMES = {"system": "system", "interval": "interval_steps"}


def wide_table(rows: Sequence[TidyRow], axes: FigureAxes) -> list[list[str]]:
    """Medians with a row per series and a column per place on the x axis, as in the files of PCcheck's artefact.

    Systems go by their printed names. If columns are intervals, column 0 (no checkpoints) is filled in every row
    with the one `none` run that all of them share; if rows are intervals, there is no such column.
    """
    values: dict[tuple[str, float], list[float]] = defaultdict(list)
    nones: list[float] = []
    series: dict[str, tuple[float, str]] = {}
    for row in rows:
        value = _wide_value(row, axes)
        if row.system == BASELINE:
            nones += [] if value is None else [value]
            continue
        name, order = _series(row, axes)
        series[name] = order
        place = _place(row, axes)
        if value is not None and place is not None:
            values[name, place].append(value)
    none = statistics.median(nones) if nones else None
    with_none = axes.columns == "interval" and none is not None
    places = sorted({place for _, place in values})
    table = [[_SIDE_NAMES.get(axes.rows, axes.axis), *(["0"] if with_none else []), *map(field_text, places)]]
    if not series and none is not None:
        return [*table, [system_label(BASELINE), field_text(none)]] if with_none else table
    names = {name: name for name in sorted(series, key=lambda name: series[name])}
    for name, *line in median_lines(names, places, values):
        table.append([name, *([field_text(none)] if with_none else []), *line])
    return table


def _wide_value(row: TidyRow, axes: FigureAxes) -> float | None:
    if axes.value == "iterations_per_s":
        return row.iterations_per_s
    if axes.value == "slowdown":
        return row.slowdown
    return None if row.persist_p50_s is None else 1000 * row.persist_p50_s


def _series(row: TidyRow, axes: FigureAxes) -> tuple[str, tuple[float, str]]:
    """The name of the series that a run belongs to, and what to sort it by."""
    if axes.rows == "system":
        return system_label(row.system), system_rank(row.system)
    value = row.interval_steps if axes.rows == "interval" else row.axis_value
    return field_text(value), (-1 if value is None else value, "")


def _place(row: TidyRow, axes: FigureAxes) -> int | float | None:
    return row.interval_steps if axes.columns == "interval" else row.axis_value
