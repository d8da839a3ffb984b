"""Figure 9: goodput under failures against the checkpoint interval, lines by formula and bars as measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from lastgood.experiments.formulas.goodput import IDEAL
from lastgood.experiments.plots.canvas import (
    INK,
    Width,
    bar_handle,
    draw_bar,
    draw_grid,
    draw_published,
    draw_repetitions,
    name_places,
    one_panel,
    pale_handle,
    partial_line,
    plotter,
)
from lastgood.experiments.plots.captions import goodput_caption
from lastgood.experiments.plots.style import BOUND_COLOUR
from lastgood.experiments.systems.labels import NONE_COLOUR, SystemStyle, system_styles
from lastgood.experiments.tables.frames import read_panel
from lastgood.experiments.tables.goodput import FORMULA, MEASURED, GoodputRow

__all__ = ["draw_goodput", "plot_goodput", "read_goodput"]

_FORMULA_COLUMN, _MEASURED_COLUMN = "goodput_formula_iterations_per_s", "goodput_measured_iterations_per_s"
_GROUP_WIDTH = 0.8
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_HATCH_FAULT = "xxxx"


def read_goodput(path: Path) -> pd.DataFrame:
    """Read figure 9's tidy CSV. Raises LastgoodError, naming the file and what is wrong, if it is not one."""
    return read_panel(path, GoodputRow)


def _partial_text(frame: pd.DataFrame) -> str:
    there, expected = int(frame["runs_there"].max()), int(frame["runs_expected"].max())
    return partial_line(there, expected, frame["runs_missing"].dropna())


@one_panel(goodput_caption, _partial_text)
def draw_goodput(axes: Axes, frame: pd.DataFrame, width: Width) -> list[Any]:
    """Bars are measured (the solid part: what was durable), lines and markers are the formula; from one panel's frame.

    The black line is Ideal, whose checkpoints cost nothing; the short lines are the bound.
    """
    systems = frame[frame["system"] != IDEAL]
    styles = system_styles(sorted(set(systems["system"])))
    intervals = sorted({int(interval) for interval in frame["interval_steps"]})
    _set_axes(axes, intervals, frame)
    return [
        *_draw_bars(axes, systems[systems["source"] == MEASURED], styles, intervals, width),
        *_draw_formulas(axes, systems[systems["source"] == FORMULA], styles, intervals),
        *_draw_ideal(axes, frame[frame["system"] == IDEAL], intervals),
        *_draw_bounds(axes, frame, intervals),
        *_draw_published(axes, frame, intervals),
    ]


plot_goodput = plotter(draw_goodput, read_goodput, _partial_text)


def _set_axes(axes: Axes, intervals: Sequence[int], frame: pd.DataFrame) -> None:
    columns = [_FORMULA_COLUMN, _MEASURED_COLUMN, "bound_iterations_per_s", "paper_goodput_iterations_per_s"]
    axes.set_ylim(0, 1.13 * float(frame[columns].max().max()))
    axes.set_ylabel("goodput (iterations/s)")
    axes.set_xlim(-0.6, len(intervals) - 0.4)
    name_places(axes, [str(interval) for interval in intervals], "checkpoint interval (iterations)")
    draw_grid(axes)


def _draw_bars(
    axes: Axes, bars: pd.DataFrame, styles: dict[str, SystemStyle], intervals: Sequence[int], width: Width
) -> list[Any]:
    measured = [system for system in styles if (bars["system"] == system).any()]
    bar_width = min(0.25, _GROUP_WIDTH / max(1, len(measured)))
    pale = faulty = False
    for place, system in enumerate(measured):
        colour = styles[system].colour
        for group, interval in enumerate(intervals):
            runs = bars[(bars["system"] == system) & (bars["interval_steps"] == interval)]
            if runs.empty:
                continue
            x = group + (place - (len(measured) - 1) / 2) * bar_width
            median = float(runs[_MEASURED_COLUMN].median())
            durable = min(median, float(runs["durable_goodput_iterations_per_s"].median()))
            fault = bool(runs["faults"].notna().any())
            drawn = 0.9 * bar_width
            draw_bar(axes, x, drawn, median, durable, colour, _HATCH_FAULT if fault else "")
            values = [float(value) for value in runs.sort_values("repetition")[_MEASURED_COLUMN]]
            if len(values) > 1:
                step = min(0.22, 0.6 / len(values)) * drawn
                xs = [x + (number - (len(values) - 1) / 2) * step for number in range(len(values))]
                draw_repetitions(axes, xs, values, 2.4 if width == "double" else 1.8)
            pale = pale or durable < 0.99 * median
            faulty = faulty or fault
    handles: list[Any] = [bar_handle(styles[system].colour, f"{styles[system].label}, measured") for system in measured]
    if pale:
        handles.append(pale_handle("pale: not durable at the end"))
    if faulty:
        handles.append(bar_handle("white", "RESTORE DIFFERS", _HATCH_FAULT))
    return handles


def _draw_formulas(
    axes: Axes, rows: pd.DataFrame, styles: dict[str, SystemStyle], intervals: Sequence[int]
) -> list[Any]:
    handles: list[Any] = []
    for number, (system, style) in enumerate(styles.items()):
        found = rows[rows["system"] == system].groupby("interval_steps")[_FORMULA_COLUMN]
        medians, lows, highs = found.median().dropna(), found.min(), found.max()
        if medians.empty:
            continue
        xs = [intervals.index(int(interval)) for interval in medians.index]
        look: Any = {
            "color": style.line_colour,
            "linewidth": 1.2,
            "marker": _MARKERS[number % len(_MARKERS)],
            "markersize": 4.5,
            "markeredgecolor": INK,
            "markeredgewidth": 0.6,
        }
        axes.plot(xs, medians.to_numpy(), zorder=6, **look)
        axes.vlines(xs, lows[medians.index], highs[medians.index], color=INK, linewidth=0.8, zorder=5)
        handles.append(Line2D([], [], label=f"{style.label}, formula", **look))
    return handles


def _draw_ideal(axes: Axes, rows: pd.DataFrame, intervals: Sequence[int]) -> list[Any]:
    found = rows.dropna(subset=[_FORMULA_COLUMN]).sort_values("interval_steps")
    if found.empty:
        return []
    look: Any = {"color": NONE_COLOUR, "linewidth": 1.0}
    xs = [intervals.index(int(interval)) for interval in found["interval_steps"]]
    axes.plot(xs, found[_FORMULA_COLUMN].to_numpy(), zorder=4, marker="_", markersize=7, **look)
    return [Line2D([], [], label="Ideal, formula", marker="_", markersize=7, **look)]


def _draw_bounds(axes: Axes, frame: pd.DataFrame, intervals: Sequence[int]) -> list[Any]:
    found = frame.dropna(subset=["bound_iterations_per_s"]).groupby("interval_steps")["bound_iterations_per_s"].median()
    if found.empty:
        return []
    look: Any = {"color": BOUND_COLOUR, "linewidth": 1.8}
    for interval, bound in found.items():
        group = intervals.index(int(str(interval)))
        axes.hlines(float(bound), group - 0.45, group + 0.45, zorder=7, **look)
    return [Line2D([], [], label="bound", **look)]


def _draw_published(axes: Axes, frame: pd.DataFrame, intervals: Sequence[int]) -> list[Any]:
    """Where PCcheck would be with the gain that the paper has."""
    found = frame.groupby("interval_steps")["paper_goodput_iterations_per_s"].median().dropna()
    places = [intervals.index(int(str(interval))) for interval in found.index]
    return draw_published(axes, places, list(found), "paper's gain of PCcheck")
