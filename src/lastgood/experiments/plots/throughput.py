"""Throughput against the checkpoint interval, in bars: figure 8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from lastgood.checkpointers.registry import BASELINE
from lastgood.experiments.plots.canvas import (
    LABEL_PT,
    LEFT_IN,
    RIGHT_IN,
    Width,
    bar_handle,
    bound_handles,
    draw_bar,
    draw_bound,
    draw_grid,
    draw_none,
    draw_published,
    draw_repetitions,
    is_false,
    is_true,
    name_places,
    one_panel,
    pale_handle,
    plotter,
)
from lastgood.experiments.plots.captions import throughput_caption
from lastgood.experiments.plots.pair_intervals import (
    PairInterval,
    draw_above_bound,
    draw_pair_interval,
    of_pairs,
    pair_handles,
)
from lastgood.experiments.plots.style import WIDTHS_IN
from lastgood.experiments.systems.labels import SystemStyle, system_styles
from lastgood.experiments.tables.marked import above_bound

__all__ = ["draw_throughput", "plot_throughput"]

_GROUP_WIDTH = 0.84
_WIDEST_BAR_PT = 60.0
_BOUNDS_ALIKE = 0.05
_HATCH_FEW = "////"
_HATCH_UNPROVED = "...."
_HATCH_WRONG = "xxxx"
_HATCH_DISTURBED = "\\\\\\\\"

_MOST_ROOM = 1.25
"""For whiskers of intervals, of the room that bars and bounds need. Longer ones go out of the picture."""


@dataclass(frozen=True)
class _Cell:
    """The repetitions of one system at one interval."""

    values: list[float]
    median: float
    durable: float
    hatch: str
    published: float | None
    """Slowdown on another machine."""
    pairs: PairInterval | None
    none: float
    """Throughput without checkpoints beside it, in iterations per second; of interest with `pairs` only."""
    above_bound: bool

    @property
    def best(self) -> float:
        """Throughput at the better end of what is drawn of it."""
        return max(self.values) if self.pairs is None else self.none * self.pairs.ratio.high

    @property
    def unknown(self) -> bool:
        """Whether others disturbed all of it."""
        return self.pairs is not None and self.pairs.ratio.says_nothing


def _cells(frame: pd.DataFrame) -> dict[tuple[str, int], _Cell]:
    """By system and interval."""
    bars = frame[(frame["system"] != BASELINE) & (frame["interval_steps"] > 0)]
    cells = bars.groupby(["system", "interval_steps"])
    return {(str(system), int(float(str(interval)))): _cell(runs) for (system, interval), runs in cells}


def _line_of_ratios_in(frame: pd.DataFrame) -> float:
    """A second line of numbers below the bars, if there is one."""
    return (LABEL_PT + 2) / 72 if any(cell.pairs for cell in _cells(frame).values()) else 0.0


@one_panel(throughput_caption, more_below_in=_line_of_ratios_in)
def draw_throughput(axes: Axes, frame: pd.DataFrame, width: Width) -> list[Any]:
    """Grouped bars, one group per interval and one bar per system, from a tidy frame of one panel.

    A bar's solid part is the durable throughput, its pale top what the drain takes off; whiskers and circles are the
    repetitions. The black line is training without checkpoints, the short lines are the bound.
    """
    bars = frame[(frame["system"] != BASELINE) & (frame["interval_steps"] > 0)]
    none = frame[frame["system"] == BASELINE]
    cells = _cells(frame)
    styles = system_styles(sorted({system for system, _ in cells}))
    intervals = sorted({interval for _, interval in cells})
    bar_pt = _set_x_axis(axes, intervals, len(styles), 72 * (WIDTHS_IN[width] - LEFT_IN - RIGHT_IN))
    _set_y_axis(axes, frame)
    return [
        *_draw_cells(axes, cells, styles, intervals, bar_pt),
        *draw_none(axes, none["iterations_per_s"]),
        *_draw_bounds(axes, bars, intervals, list(styles)),
        *_mark_handles(list(cells.values())),
        *_draw_published(axes, cells, styles, intervals, none),
    ]


plot_throughput = plotter(draw_throughput)


def _cell(runs: pd.DataFrame) -> _Cell:
    hatch = ""
    if not runs["enough_checkpoints"].map(is_true).all():
        hatch += _HATCH_FEW
    if runs["proof_equal"].map(is_false).any():
        hatch += _HATCH_WRONG
    elif not runs["proof_equal"].map(is_true).any():
        hatch += _HATCH_UNPROVED
    values = [float(value) for value in runs.sort_values("repetition")["iterations_per_s"]]
    median = float(runs["iterations_per_s"].median())
    published = runs["paper_slowdown"].dropna()
    cell = _Cell(
        values,
        median,
        min(median, float(runs["durable_iterations_per_s"].median())),
        hatch,
        float(published.iloc[0]) if len(published) else None,
        of_pairs(runs),
        float(runs["none_iterations_per_s"].median()),
        bool(above_bound(runs)),
    )
    return replace(cell, hatch=hatch + _HATCH_DISTURBED) if cell.unknown else cell


def _set_x_axis(axes: Axes, intervals: Sequence[int], systems: int, axes_width_pt: float) -> float:
    """Place the groups so that bars are no wider than looks well; returns a bar's width in points."""
    groups = max(1, len(intervals))
    group_pt = min(axes_width_pt / groups, _WIDEST_BAR_PT * max(1, systems) / _GROUP_WIDTH)
    half_range = axes_width_pt / group_pt / 2
    middle = (groups - 1) / 2
    axes.set_xlim(middle - half_range, middle + half_range)
    name_places(axes, [str(interval) for interval in intervals], "checkpoint interval (iterations)")
    return group_pt * _GROUP_WIDTH / max(1, systems)


def _set_y_axis(axes: Axes, frame: pd.DataFrame) -> None:
    intervals = (frame["ratio_high"] * frame["none_iterations_per_s"]).fillna(0)
    top = max(frame["iterations_per_s"].max(), frame["bound_iterations_per_s"].fillna(0).max())
    # One cell that nobody could measure must not make all bars small.
    axes.set_ylim(0, 1.13 * max(top, min(intervals.max(), _MOST_ROOM * top)))
    axes.set_ylabel("throughput (iterations/s)")
    draw_grid(axes)


def _draw_cells(
    axes: Axes,
    cells: dict[tuple[str, int], _Cell],
    styles: dict[str, SystemStyle],
    intervals: Sequence[int],
    bar_pt: float,
) -> list[Any]:
    bar_width = _GROUP_WIDTH / max(1, len(styles))
    texts = {key: _number_text(cell) for key, cell in cells.items()}
    # Medians are printed if all fit under their bars: some with and some without would look like a finding.
    labels_fit = bar_pt >= 0.62 * LABEL_PT * max(
        (len(line) for text in texts.values() for line in text.split("\n")), default=0
    )
    if labels_fit or len(cells) < len(styles) * len(intervals):
        lines = max((text.count("\n") for text in texts.values()), default=0) + 1
        axes.tick_params(axis="x", pad=lines * (LABEL_PT + 2) + 3)
    for place, (system, style) in enumerate(styles.items()):
        for group, interval in enumerate(intervals):
            x = group + (place - (len(styles) - 1) / 2) * bar_width
            cell = cells.get((system, interval))
            # The medians stand below the bars, where no line or whisker crosses them.
            text = "-" if cell is None else texts[system, interval]
            if labels_fit or cell is None:
                axes.annotate(
                    text, (x, 0), (0, -2.5), textcoords="offset points", ha="center", va="top", fontsize=LABEL_PT
                )
            if cell is None:
                continue
            drawn = 0.9 * bar_width
            # What nobody could measure is pale: it must not look like a result.
            solid = 0.0 if cell.unknown else cell.durable
            draw_bar(axes, x, drawn, cell.median, solid, style.colour, cell.hatch)
            if cell.above_bound and not cell.unknown:
                draw_above_bound(axes, x, cell.best)
            if cell.pairs is not None:
                draw_pair_interval(axes, x, 0.2 * drawn, cell.pairs, cell.none.__mul__, limits=axes.get_ylim())
                continue
            dodged = _dodged(x, drawn, len(cell.values))
            draw_repetitions(axes, dodged, cell.values, min(2.6, 0.25 * bar_pt))
    handles: list[Any] = [bar_handle(style.colour, style.label) for style in styles.values()]
    if any(cell.durable < 0.99 * cell.median for cell in cells.values()):
        handles.append(pale_handle("pale: lost to the drain"))
    return handles


def _number_text(cell: _Cell) -> str:
    """The number under a bar; and its share of training without checkpoints, if that was measured beside it."""
    rate = _three_digits(cell.median)
    if cell.pairs is None:
        return rate
    return f"{rate}\n?" if cell.unknown else f"{rate}\n{cell.pairs.ratio.middle:.0%}"


def _three_digits(value: float) -> str:
    return f"{value:#.3g}".removesuffix(".") if value < 1000 else f"{value:.0f}"


def _dodged(x: float, width: float, count: int) -> list[float]:
    """Side by side, so that equal repetitions are seen as several."""
    step = min(0.22, 0.6 / count) * width
    return [x + (number - (count - 1) / 2) * step for number in range(count)]


def _draw_bounds(axes: Axes, bars: pd.DataFrame, intervals: Sequence[int], systems: Sequence[str]) -> list[Any]:
    """A short line over each group; over each bar if systems' bounds differ, as on several nodes.

    If repetitions differ in state size, the median.
    """
    bound = bars.dropna(subset=["bound_iterations_per_s"])
    seen: set[str] = set()
    bar_width = _GROUP_WIDTH / max(1, len(systems))
    for group, interval in enumerate(intervals):
        rows = bound[bound["interval_steps"] == interval]
        if rows.empty:
            continue
        of_systems = rows.groupby("system")["bound_iterations_per_s"].median()
        if of_systems.max() <= (1 + _BOUNDS_ALIKE) * of_systems.min():
            reach = _GROUP_WIDTH / 2 + 0.05
            seen |= draw_bound(axes, rows, "bound_iterations_per_s", group - reach, group + reach)
            continue
        for place, system in enumerate(systems):
            left = group + place * bar_width - _GROUP_WIDTH / 2
            own = rows[rows["system"] == system]
            seen |= draw_bound(axes, own, "bound_iterations_per_s", left, left + bar_width)
    return bound_handles(seen)


def _draw_published(
    axes: Axes,
    cells: dict[tuple[str, int], _Cell],
    styles: dict[str, SystemStyle],
    intervals: Sequence[int],
    none: pd.DataFrame,
) -> list[Any]:
    """Hollow diamonds where this machine would be with a published slowdown: rates of other machines do not compare."""
    if none.empty:
        return []
    rate = float(none["iterations_per_s"].median())
    bar_width = _GROUP_WIDTH / max(1, len(styles))
    xs, ys = [], []
    for place, system in enumerate(styles):
        for group, interval in enumerate(intervals):
            cell = cells.get((system, interval))
            if cell is not None and cell.published is not None:
                xs.append(group - _GROUP_WIDTH / 2 + (place + 0.5) * bar_width)
                ys.append(rate / cell.published)
    return draw_published(axes, xs, ys, "paper, other machine")


def _mark_handles(cells: Sequence[_Cell]) -> list[Any]:
    meanings = (
        (_HATCH_FEW, "fewer than 2 checkpoints"),
        (_HATCH_UNPROVED, "restore not proved"),
        (_HATCH_WRONG, "RESTORE DIFFERS"),
        (_HATCH_DISTURBED, "all pairs disturbed"),
    )
    found: list[Any] = [
        bar_handle("white", label, hatch) for hatch, label in meanings if any(hatch in cell.hatch for cell in cells)
    ]
    above = any(cell.above_bound and not cell.unknown for cell in cells)
    return found + pair_handles([cell.pairs for cell in cells], above_bound=above)
