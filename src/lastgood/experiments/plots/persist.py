"""The time until one checkpoint is durable, against its size: figure 11."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from lastgood.errors import LastgoodError
from lastgood.experiments.figures.axes import PERSIST
from lastgood.experiments.plots.canvas import (
    INK,
    LABEL_PT,
    OVER_WHISKERS,
    Width,
    draw_grid,
    draw_repetitions,
    line_look,
    mark_handles,
    mark_of,
    one_panel,
    plotter,
)
from lastgood.experiments.plots.captions import persist_caption
from lastgood.experiments.plots.style import BOUND_COLOUR, series_styles
from lastgood.experiments.systems.labels import panel_title, system_styles

__all__ = ["draw_persist", "plot_persist"]

_MOST_ASIDE = 0.02
"""How far from its size a point may stand, as a share of the axis: beside the other systems, and still at its value."""


def _title(frame: pd.DataFrame) -> str:
    return panel_title(str(frame["figure"].iloc[0]), "", "time until one checkpoint is durable")


@one_panel(persist_caption, title=_title)
def draw_persist(axes: Axes, frame: pd.DataFrame, _: Width) -> list[Any]:
    """A line for each system over logarithmic axes, from a tidy frame of one panel; the bound is size over disk rate.

    A marker is the median over runs of each run's median; circles are the runs, whiskers go from the fastest to the
    slowest checkpoint.
    """
    if str(frame["axis"].iloc[0]) != PERSIST.axis:
        raise LastgoodError(f"a CSV of axis {frame['axis'].iloc[0]!r} holds no persist times against sizes")
    timed = frame.dropna(subset=["persist_p50_s"])
    axes.set_xscale("log")
    axes.set_yscale("log")
    sizes_mb = sorted({float(value) for value in timed["axis_value"]})
    if sizes_mb:
        axes.set_xlim(sizes_mb[0] / 1.5, sizes_mb[-1] * 1.5)
    handles, marks = _draw_systems(axes, timed)
    handles += _draw_bound(axes, timed)
    _set_axes(axes, sizes_mb)
    return handles + mark_handles(marks)


plot_persist = plotter(draw_persist)


def _draw_systems(axes: Axes, timed: pd.DataFrame) -> tuple[list[Any], set[str]]:
    styles = system_styles(sorted(set(timed["system"])))
    left, right = axes.get_xlim()
    decades = math.log10(right / left)
    handles: list[Any] = []
    marks: set[str] = set()
    for number, ((system, style), shape) in enumerate(zip(styles.items(), series_styles(len(styles)), strict=True)):
        aside = _MOST_ASIDE * (2 * number / (len(styles) - 1) - 1) if len(styles) > 1 else 0.0
        shift = 10 ** (aside * decades)
        look = line_look(style.line_colour, shape.marker)
        xs, ys = [], []
        for megabytes, runs in timed[timed["system"] == system].groupby("axis_value"):
            x = float(str(megabytes)) * shift
            medians_ms = [1000 * float(value) for value in runs.sort_values("repetition")["persist_p50_s"]]
            xs.append(x)
            ys.append(1000 * float(runs["persist_p50_s"].median()))
            axes.vlines(
                x, 1000 * runs["persist_min_s"].min(), 1000 * runs["persist_max_s"].max(), color=INK, linewidth=0.8
            )
            if len(medians_ms) > 1:
                draw_repetitions(axes, [x] * len(medians_ms), medians_ms, 2.2)
            mark = mark_of(runs)
            if mark:
                marks.add(mark)
                top = (x, 1000 * float(runs["persist_max_s"].max()))
                axes.annotate(mark, top, (0, 3), textcoords="offset points", ha="center", fontsize=LABEL_PT)
        axes.plot(xs, ys, zorder=OVER_WHISKERS, **look)
        handles.append(Line2D([], [], label=style.label, **look))
    return handles, marks


def _draw_bound(axes: Axes, timed: pd.DataFrame) -> list[Any]:
    bound = timed.dropna(subset=["persist_bound_s"]).groupby("axis_value")["persist_bound_s"].median()
    if bound.empty:
        return []
    look: dict[str, Any] = {"color": BOUND_COLOUR, "linewidth": 1.8}
    xs, ys = [float(value) for value in bound.index], [1000 * float(value) for value in bound]
    axes.plot(xs, ys, zorder=3, **look)
    return [Line2D([], [], label="bound (disk)", **look)]


def _set_axes(axes: Axes, sizes_mb: list[float]) -> None:
    axes.xaxis.set_major_locator(FixedLocator(sizes_mb))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(base=10))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.set_xlabel("size of the checkpoint (MB)")
    axes.set_ylabel("time (ms)")
    draw_grid(axes)
