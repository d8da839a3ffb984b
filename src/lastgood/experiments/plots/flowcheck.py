"""FlowCheck's figure: a panel for each part, a small picture for each of its measures, all from one kind of table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from lastgood.checkpointers.registry import all_traits
from lastgood.experiments.plots.canvas import (
    GAP_IN,
    INK,
    LABEL_PT,
    RIGHT_IN,
    PageText,
    Width,
    bar_handle,
    draw_grid,
    draw_published,
    draw_repetitions,
    partial_line,
    plot_style,
    plotter,
)
from lastgood.experiments.plots.captions import flowcheck_caption
from lastgood.experiments.plots.style import WIDTHS_IN, SeriesStyle, series_styles
from lastgood.experiments.systems.labels import system_styles
from lastgood.experiments.tables.flowcheck import FlowcheckRow
from lastgood.experiments.tables.flowcheck_numbers import GAP, LINK, UNRECOVERABLE
from lastgood.experiments.tables.frames import read_panel

__all__ = ["draw_flowcheck", "plot_flowcheck", "read_flowcheck"]

_Look = Literal["lines", "stacks", "bars"]
_LOOKS: Final[dict[str, _Look]] = {
    "training": "bars",
    "lives": "bars",
    "capture": "lines",
    "recovery": "lines",
    "stages": "stacks",
    "sizing": "stacks",
}
_DOTTED: Final = (LINK,)
"""Measures of places whose values are too far apart for bars."""
_OVER: Final = (GAP,)
"""Series that are a line over the stack of their place, and no part of it."""
_LOGARITHMIC: Final = (LINK, UNRECOVERABLE)
_TITLES: Final = {
    "training": "(a) iteration time with a checkpoint of every iteration",
    "lives": "(b) effective training time",
    "capture": "(c) frames lost",
    "recovery": "(d) iterations that survive a lossy mirror",
    "stages": "(e) time of the stages",
    "sizing": "(f) what a mirror node of a large training needs",
}
_XLABELS: Final = {
    "recovery": "share of mirrored packets lost",
    "capture": "offered (Gbit/s)",
    "stages": "parameters, and width of the model",
    "sizing": "parameters, and GPUs",
}
_DASHES: Final[tuple[Any, ...]] = ("solid", (0, (4, 1.2)), (0, (1, 1)), (0, (4, 1, 1, 1)), (0, (6, 2)), (0, (2, 2)))
_HATCHES: Final = ("", "////", "....", "\\\\\\\\", "xxxx", "----")
_COLUMNS: Final[dict[str, int]] = {"single": 1, "double": 3}
_HEIGHT_IN: Final = 1.6
_ABOVE_IN: Final = 0.24
_BELOW_IN: Final = 0.52
_YLABEL_IN: Final = 0.52
_BETWEEN_IN: Final = 0.08
_BAR: Final = 0.72
_LEAST_SHOWN: Final = 1e-13
"""Of a share on a logarithmic axis: less is as good as never."""


def read_flowcheck(path: Path) -> pd.DataFrame:
    """Read a panel's tidy CSV. Raises LastgoodError, naming the file and what is wrong, if it is not one."""
    return read_panel(path, FlowcheckRow)


def _partial_text(frame: pd.DataFrame) -> str:
    return partial_line(frame["record"].nunique(), int(frame["runs_expected"].max()), frame["runs_missing"].dropna())


def _styles(series: Sequence[str]) -> dict[str, SeriesStyle]:
    """Styles of all series; what is named as a system has the colour that it has in every figure."""
    systems = [*all_traits()[0]]
    known = {style.label: style.colour for style in system_styles(systems).values()}
    plain = zip(series, series_styles(len(series)), strict=True)
    return {name: replace(style, colour=known.get(name, style.colour)) for name, style in plain}


def draw_flowcheck(frame: pd.DataFrame, width: Width = "double", *, caption: bool = True) -> Figure:
    """One panel from its tidy frame; hollow diamonds are published, and of other machines."""
    panel = str(frame["panel"].iloc[0])
    own = frame[frame["source"] != "published"]
    series = list(dict.fromkeys(own["series"]))
    styles = _styles(series)
    with plot_style():
        figure = Figure()
        measures = list(dict.fromkeys(own["measure"]))
        panels = [figure.add_subplot() for _ in measures]
        handles: list[Any] = []
        for axes, measure in zip(panels, measures, strict=True):
            rows = frame[frame["measure"] == measure]
            axes.set_title(measure, loc="left", fontsize=LABEL_PT + 0.5)
            draw = _draw_lines if _LOOKS[panel] == "lines" else _draw_places
            draw(axes, rows, styles, panel)
            if measure in _LOGARITHMIC:
                _log_scale(axes, rows)
            draw_grid(axes)
        handles += _series_handles(own, styles, panel) + _source_handles(frame, panel)
        _lay_out(
            figure,
            panels,
            handles,
            width,
            title=f"FlowCheck {_TITLES[panel]}",
            caption=flowcheck_caption(frame) if caption else "",
            partial=_partial_text(frame),
        )
    return figure


plot_flowcheck = plotter(draw_flowcheck, read_flowcheck, _partial_text)


# -- lines over a number -----------------------------------------------------------------------------------------------


def _draw_lines(axes: Axes, rows: pd.DataFrame, styles: dict[str, SeriesStyle], panel: str) -> None:
    for number, (name, style) in enumerate(styles.items()):
        own = rows[rows["series"] == name]
        formula = own[own["source"] == "formula"].sort_values("x")
        dash = _DASHES[number % len(_DASHES)]
        axes.plot(formula["x"], formula["y"], color=style.colour, linewidth=1.1, linestyle=dash)
        for source, look in _MARKS.items():
            points = own[own["source"] == source]
            if points.empty:
                continue
            medians = points.groupby("x")["y"].median()
            filled: Any = {"markerfacecolor": style.colour} if look["filled"] else {"markerfacecolor": "white"}
            joined = "solid" if source == "measured" and formula.empty else "none"
            axes.plot(
                medians.index,
                list(medians),
                color=style.colour,
                linestyle=joined,
                linewidth=0.8,
                marker=style.marker,
                markersize=look["size"],
                markeredgecolor=INK if look["filled"] else style.colour,
                markeredgewidth=0.8,
                zorder=look["zorder"],
                **filled,
            )
            for _, group in points.groupby("x"):
                low, high = group["y_low"].min(), group["y_high"].max()
                if not (pd.isna(low) or pd.isna(high)):
                    axes.vlines(float(group["x"].iloc[0]), low, high, color=style.colour, linewidth=0.7)
    _draw_diamonds(axes, rows, list(rows["x"]))
    axes.set_xlabel(_XLABELS[panel])
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())
    most = 1.0 if panel == "recovery" else max(0.01, float(rows["y"].max()))
    axes.set_ylim(-0.04 * most, 1.04 * most)


_MARKS: Final[dict[str, dict[str, Any]]] = {
    "simulated": {"filled": False, "size": 6.5, "zorder": 5},
    "measured": {"filled": True, "size": 3.6, "zorder": 6},
}


def _draw_diamonds(axes: Axes, rows: pd.DataFrame, places: Sequence[float]) -> None:
    """Published numbers at their places."""
    found = rows[(rows["source"] == "published") & rows["x"].notna()]
    if len(found) and len(places):
        draw_published(axes, list(found["x"]), list(found["y"]), "")


def _log_scale(axes: Axes, rows: pd.DataFrame) -> None:
    """Logarithmic over all values, but for those that are as good as never."""
    shown = rows.loc[rows["y"] >= _LEAST_SHOWN, "y"]
    axes.set_yscale("log")
    if len(shown):
        axes.set_ylim(max(float(shown.min()) / 3, _LEAST_SHOWN), 3 * float(shown.max()))
    axes.yaxis.set_major_locator(LogLocator(numticks=8))
    axes.yaxis.set_minor_formatter(NullFormatter())


# -- bars and marks over places ----------------------------------------------------------------------------------------


def _draw_places(axes: Axes, rows: pd.DataFrame, styles: dict[str, SeriesStyle], panel: str) -> None:
    """Series of a place lie on each other (parts of a sum), beside it as marks, or have a place of their own."""
    own = rows[rows["source"] != "published"]
    places = list(dict.fromkeys(own["place"]))
    dotted = str(rows["measure"].iloc[0]) in _DOTTED
    over = bool(own["series"].isin(_OVER).any())
    for x, place in enumerate(places):
        base = 0.0
        for number, (name, style) in enumerate(styles.items()):
            there = own[(own["place"] == place) & (own["series"] == name)]
            if there.empty:
                continue
            value = float(there["y"].median())
            if name in _OVER:
                axes.hlines(value, x - _BAR / 2, x + _BAR / 2, color=INK, linewidth=1.4, zorder=5)
                continue
            if dotted:
                axes.plot([x], [value], linestyle="none", marker=style.marker, markersize=6, color=style.colour)
            else:
                hatch = _HATCHES[number % len(_HATCHES)] if _LOOKS[panel] == "stacks" else ""
                axes.bar(
                    x, value, _BAR, bottom=base, color=style.colour, edgecolor=INK, linewidth=0.5, hatch=hatch, zorder=2
                )
            if _LOOKS[panel] == "bars":
                _draw_range(axes, x, there)
            base += value
        if not dotted:
            tops = own.loc[own["place"] == place, ["y", "y_high"]].max().max() if _LOOKS[panel] == "bars" else base
            axes.annotate(
                f"{base:.3g}",
                (x, float(tops)),
                (0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=LABEL_PT - 0.5,
                zorder=6,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6} if over else None,
            )
    for _, line in rows[rows["source"] == "published"].iterrows():
        axes.axhline(float(line["y"]), color=INK, linewidth=0.9, linestyle=(0, (2, 1.2)))
    axes.set_xticks(range(len(places)), [str(place).replace(", ", "\n") for place in places], fontsize=LABEL_PT - 0.5)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel(_XLABELS.get(panel, ""))
    axes.set_xlim(-0.6, len(places) - 0.4)
    if not dotted:
        axes.set_ylim(0, axes.get_ylim()[1] * 1.08)


def _draw_range(axes: Axes, x: float, there: pd.DataFrame) -> None:
    low, high = there["y_low"].min(), there["y_high"].max()
    if not (pd.isna(low) or pd.isna(high)):
        axes.vlines(x, low, high, color=INK, linewidth=0.8, zorder=5)
    if len(there) > 1:
        draw_repetitions(axes, [x] * len(there), [float(value) for value in there["y"]], 2.4)


# -- legend and page ---------------------------------------------------------------------------------------------------


def _series_handles(own: pd.DataFrame, styles: dict[str, SeriesStyle], panel: str) -> list[Any]:
    if _LOOKS[panel] == "bars":
        return []  # names stand under the bars
    handles: list[Any] = []
    for number, (name, style) in enumerate(styles.items()):
        dotted = own[own["series"] == name]["measure"].isin(_DOTTED).all()
        if name in _OVER:
            handles.append(Line2D([], [], label=name, color=INK, linewidth=1.4))
        elif _LOOKS[panel] == "lines" or dotted:
            dash = "none" if dotted else _DASHES[number % len(_DASHES)]
            look: Any = {"color": style.colour, "linestyle": dash, "linewidth": 1.1, "markersize": 4.5}
            handles.append(Line2D([], [], label=name, marker=style.marker, **look))
        else:
            hatch = _HATCHES[number % len(_HATCHES)] if _LOOKS[panel] == "stacks" else ""
            handles.append(bar_handle(style.colour, name, hatch))
    return handles


def _source_handles(frame: pd.DataFrame, panel: str) -> list[Any]:
    """What lines and marks are."""
    sources = set(frame["source"])
    handles: list[Any] = []
    grey = "#777777"
    if _LOOKS[panel] == "lines":
        if "formula" in sources:
            handles.append(Line2D([], [], color=grey, linewidth=1.1, label="line: formula"))
        for source, look in _MARKS.items():
            if source in sources and len(sources - {"published"}) > 1:
                face = grey if look["filled"] else "white"
                handles.append(
                    Line2D(
                        [],
                        [],
                        linestyle="none",
                        marker="o",
                        markersize=look["size"],
                        markerfacecolor=face,
                        markeredgecolor=INK if look["filled"] else grey,
                        markeredgewidth=0.8,
                        label=source,
                    )
                )
        if "published" in sources:
            handles.append(
                Line2D(
                    [],
                    [],
                    linestyle="none",
                    marker="D",
                    markersize=5,
                    markerfacecolor="none",
                    markeredgecolor=INK,
                    label="published, other machines",
                )
            )
    elif "published" in sources:
        handles.append(
            Line2D([], [], color=INK, linewidth=0.9, linestyle=(0, (2, 1.2)), label="published, other machines")
        )
    return handles


def _lay_out(
    figure: Figure,
    panels: Sequence[Axes],
    handles: list[Any],
    width: Width,
    *,
    title: str,
    caption: str,
    partial: str,
) -> None:
    """Stack title, legend, rows of `panels` and caption with their real heights; the panels are of one size."""
    columns = min(len(panels), _COLUMNS[width])
    rows = math.ceil(len(panels) / columns)
    text = PageText(figure, handles, width, title=title, caption=caption, partial=partial)
    column_in = (WIDTHS_IN[width] - RIGHT_IN) / columns
    row_in = _ABOVE_IN + _HEIGHT_IN + _BELOW_IN
    height_in = text.above_in + GAP_IN + rows * row_in + text.below_in
    text.place(height_in)
    for number, axes in enumerate(panels):
        row, column = divmod(number, columns)
        top_in = height_in - text.above_in - GAP_IN - row * row_in - _ABOVE_IN
        axes.set_position(
            (
                (column * column_in + _YLABEL_IN) / text.width_in,
                (top_in - _HEIGHT_IN) / height_in,
                (column_in - _YLABEL_IN - _BETWEEN_IN) / text.width_in,
                _HEIGHT_IN / height_in,
            )
        )
