"""Slowdown against an option or the interval, a line for each value of the other: figures 12, 13 and 14."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from lastgood.errors import LastgoodError
from lastgood.experiments.config.values import BASELINE
from lastgood.experiments.figures.axes import CONCURRENCY, MEMORY, THREADS, FigureAxes
from lastgood.experiments.plots.canvas import (
    LABEL_PT,
    OVER_WHISKERS,
    Width,
    bound_handles,
    draw_bound,
    draw_grid,
    draw_none,
    draw_repetitions,
    heading,
    line_look,
    mark_handles,
    mark_of,
    name_places,
    one_panel,
    plotter,
)
from lastgood.experiments.plots.captions import sweep_caption
from lastgood.experiments.plots.pair_intervals import (
    PairInterval,
    draw_above_bound,
    draw_pair_interval,
    of_pairs,
    pair_handles,
)
from lastgood.experiments.plots.style import series_styles
from lastgood.experiments.tables.marked import above_bound

__all__ = ["draw_sweep", "plot_sweep"]

_MOST_ASIDE = 0.02
"""How far from its place a point may stand, as a share of the axis: beside the other series, and still at its value."""
_BOUND_HALF = 0.018
"""Half of a bound's line, as a share of the axis."""
_BOUNDS_ALIKE = 0.05
_LOG_FROM = 3.0
"""Slowdowns that differ by more than this factor are drawn on a logarithmic axis."""
_MANTISSAS = (1, 1.5, 2, 3, 5, 7)
_MOST_TICKS = 8


@dataclass(frozen=True)
class _Words:
    """How one axis is written."""

    topic: str
    place: str
    """The x axis's name."""
    series: str
    """A line's name, with its value in the place of ``{}``."""


_INTERVAL_SERIES = "interval {}"
_WORDS = {
    CONCURRENCY.axis: (
        CONCURRENCY,
        _Words("checkpoints in flight", "checkpoint interval (iterations)", "{} in flight"),
    ),
    THREADS.axis: (THREADS, _Words("writer threads", "writer threads of each checkpoint", _INTERVAL_SERIES)),
    MEMORY.axis: (
        MEMORY,
        _Words("memory for copies", "host memory for copies (m: one checkpoint)", _INTERVAL_SERIES),
    ),
}


def _sides(frame: pd.DataFrame) -> tuple[FigureAxes, _Words]:
    axis = str(frame["axis"].iloc[0])
    if axis not in _WORDS:
        raise LastgoodError(f"a CSV of axis {axis!r} is no sweep; known: {', '.join(_WORDS)}")
    return _WORDS[axis]


@one_panel(sweep_caption, title=lambda frame: heading(frame, _sides(frame)[1].topic))
def draw_sweep(axes: Axes, frame: pd.DataFrame, _: Width) -> list[Any]:
    """A marker for each cell, joined by a line for each series, from a tidy frame of one panel.

    Whiskers and circles are the repetitions. The black line at 1 is training without checkpoints, its band the range of
    those runs; the short lines are the bound.
    """
    sides, words = _sides(frame)
    swept = frame[frame["system"] != BASELINE].dropna(subset=["slowdown"])
    places = _values(swept, sides.columns)
    series = _values(swept, sides.rows)
    axes.set_xlim(-0.5, max(1, len(places)) - 0.5)
    name_places(axes, [_name(place, sides) for place in places], words.place)
    handles, marks = _draw_series(axes, swept, sides, places, series, words.series)
    rates = frame.loc[frame["system"] == BASELINE, "iterations_per_s"]
    handles += draw_none(axes, rates.median() / rates, middle=1.0, zorder=2)
    handles += _draw_bounds(axes, swept, sides, places, series)
    _set_y_axis(axes)
    return handles + mark_handles(marks)


plot_sweep = plotter(draw_sweep)


def _column(side: str) -> str:
    return "interval_steps" if side == "interval" else "axis_value"


def _values(swept: pd.DataFrame, side: str) -> list[float]:
    return sorted({float(value) for value in swept[_column(side)]})


def _name(value: float, sides: FigureAxes) -> str:
    """A value of the x axis: shares of the state as m/4, m, 2m."""
    if sides is not MEMORY:
        return f"{value:g}"
    share = Fraction(value).limit_denominator(16)
    if abs(float(share) - value) > 1e-3 or share == 0:
        return f"{value:g}m"
    top = "m" if share.numerator == 1 else f"{share.numerator}m"
    return top if share.denominator == 1 else f"{top}/{share.denominator}"


def _aside(number: int, series: int, places: int) -> float:
    """Series stand side by side at each place, so that none covers another. The axis is as long as it has places."""
    return _MOST_ASIDE * places * (2 * number / (series - 1) - 1) if series > 1 else 0.0


def _cell(swept: pd.DataFrame, sides: FigureAxes, place: float, one: float) -> pd.DataFrame:
    chosen = (swept[_column(sides.columns)] == place) & (swept[_column(sides.rows)] == one)
    return swept[chosen].sort_values("repetition")


def _draw_series(
    axes: Axes,
    swept: pd.DataFrame,
    sides: FigureAxes,
    places: Sequence[float],
    series: Sequence[float],
    label: str,
) -> tuple[list[Any], set[str]]:
    handles: list[Any] = []
    marks: set[str] = set()
    intervals: list[PairInterval | None] = []
    above = False
    for number, (one, style) in enumerate(zip(series, series_styles(len(series)), strict=True)):
        xs, ys = [], []
        for group, place in enumerate(places):
            runs = _cell(swept, sides, place, one)
            if runs.empty:
                continue
            x = group + _aside(number, len(series), len(places))
            values = [float(value) for value in runs["slowdown"]]
            xs.append(x)
            ys.append(float(runs["slowdown"].median()))
            pairs = of_pairs(runs)
            intervals.append(pairs)
            if pairs is not None:
                draw_pair_interval(axes, x, 0.008 * len(places), pairs, lambda ratio: 1 / ratio, zorder=5)
                values += [] if pairs.ratio.says_nothing else [1 / pairs.ratio.low]
            elif len(values) > 1:
                draw_repetitions(axes, [x] * len(values), values, 2.2)
            if above_bound(runs) and not (pairs is not None and pairs.ratio.says_nothing):
                above = True
                best = min(values) if pairs is None else 1 / pairs.ratio.high
                draw_above_bound(axes, x, best, better_is_lower=True)
            mark = mark_of(runs)
            if mark:
                marks.add(mark)
                axes.annotate(
                    mark,
                    (x, max(values)),
                    (0, 4),
                    textcoords="offset points",
                    ha="center",
                    fontsize=LABEL_PT,
                    annotation_clip=False,
                )
        axes.plot(xs, ys, **line_look(style.colour, style.marker), zorder=OVER_WHISKERS)
        handles.append(Line2D([], [], label=label.format(f"{one:g}"), **line_look(style.colour, style.marker)))
    return handles + pair_handles(intervals, above_bound=above, better_is_lower=True), marks


def _draw_bounds(
    axes: Axes, swept: pd.DataFrame, sides: FigureAxes, places: Sequence[float], series: Sequence[float]
) -> list[Any]:
    """At each place a line for all series, or for each if their bounds differ."""
    seen: set[str] = set()
    half = _BOUND_HALF * len(places)
    for group, place in enumerate(places):
        cells = [_cell(swept, sides, place, one).dropna(subset=["slowdown_bound"]) for one in series]
        levels = [float(cell["slowdown_bound"].median()) for cell in cells if len(cell)]
        if not levels:
            continue
        if max(levels) <= (1 + _BOUNDS_ALIKE) * min(levels):
            reach = half + _MOST_ASIDE * len(places)
            seen |= draw_bound(axes, pd.concat(cells), "slowdown_bound", group - reach, group + reach, zorder=3)
            continue
        for number, cell in enumerate(cells):
            middle = group + _aside(number, len(series), len(places))
            seen |= draw_bound(axes, cell, "slowdown_bound", middle - half, middle + half, zorder=3)
    return bound_handles(seen)


def _log_ticks(low: float, high: float) -> list[float]:
    """Round numbers in the range, 1 among them, so far from each other that their labels do not touch."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    numbers = sorted({mantissa * 10.0**decade for decade in decades for mantissa in _MANTISSAS})
    apart = (high / low) ** (1 / _MOST_TICKS)
    chosen = [1.0]
    for number in numbers:
        if number <= high and number >= 0.999 * chosen[-1] * apart:
            chosen.append(number)
    for number in reversed(numbers):
        if number >= low and number <= 1.001 * chosen[0] / apart:
            chosen.insert(0, number)
    return chosen


def _set_y_axis(axes: Axes) -> None:
    low, high = axes.dataLim.y0, axes.dataLim.y1
    # matplotlib knows no data if nothing was drawn.
    low, high = (min(low, 1.0), max(high, 1.0)) if low <= high else (1.0, 1.0)
    if high > _LOG_FROM * low:
        axes.set_yscale("log")
        axes.set_ylim(0.85 * low, 1.3 * high)
        axes.yaxis.set_major_locator(FixedLocator(_log_ticks(0.85 * low, 1.3 * high)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        margin = 0.12 * max(high - low, 0.1)
        axes.set_ylim(low - margin, high + 1.5 * margin)
    axes.set_ylabel("slowdown")
    draw_grid(axes)
