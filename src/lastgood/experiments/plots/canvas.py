"""What all pictures share: reading a CSV, layout, legend, caption, and files that are the same at every drawing."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from lastgood.errors import LastgoodError
from lastgood.experiments.plots.style import BOUND_COLOUR, RC_PARAMS, WIDTHS_IN
from lastgood.experiments.systems.labels import NONE_COLOUR, panel_title
from lastgood.experiments.tables.columns import LATER_COLUMNS, TidyRow
from lastgood.experiments.tables.frames import pair_interval, read_panel
from lastgood.files import write_result
from lastgood.sinks import Sink

__all__ = [
    "BOUND_DASHES",
    "FORMATS",
    "GAP_IN",
    "HALO",
    "INK",
    "LABEL_PT",
    "LEFT_IN",
    "OVER_WHISKERS",
    "RIGHT_IN",
    "PageText",
    "Width",
    "bar_handle",
    "bound_handles",
    "draw_bar",
    "draw_bound",
    "draw_grid",
    "draw_none",
    "draw_published",
    "draw_repetitions",
    "heading",
    "is_false",
    "is_true",
    "line_look",
    "mark_handles",
    "mark_of",
    "name_places",
    "one_panel",
    "pale_handle",
    "partial_line",
    "partial_text",
    "plot_style",
    "plotter",
    "read_tidy",
    "save_figure",
    "text_width_in",
    "widest_legend",
    "wrap_text",
]

Width = Literal["single", "double"]
FORMATS = ("pdf", "png", "svg")
INK = "#222222"
BOUND_DASHES: dict[str, Any] = {
    Sink.DISK: "solid",
    Sink.LINK: (0, (2.5, 0.8, 0.6, 0.8)),
    Sink.MEMORY: (0, (5.0, 1.0)),
    Sink.OBJECT_STORE: (0, (5.0, 0.8, 0.6, 0.8, 0.6, 0.8)),
    "copy": (0, (2.5, 1.0)),
    "training": (0, (0.8, 0.8)),
}
HALO = [withStroke(linewidth=2.2, foreground="white")]
"""Round thin ink, so that it is seen on dark bars as well."""
OVER_WHISKERS = 5.5
"""Of markers: over whiskers (5), whose halo would cut them, and under the circles of single runs (6)."""
LABEL_PT = 7.0
LEFT_IN, RIGHT_IN, GAP_IN = 0.5, 0.06, 0.07
_PNG_DPI = 200
# Dates in a file's metadata would make every drawing differ.
_METADATA: dict[str, dict[str, Any]] = {
    "pdf": {"CreationDate": None, "ModDate": None},
    "png": {},
    "svg": {"Date": None},
}
_AXES_HEIGHT_IN = {"single": 1.7, "double": 2.1}
_XLABEL_IN = 0.5
_TITLE_PT = 8.5
_CAPTION_PT = 7.0
_MISSING_NAMED = 12
_BEHIND_BARS = 0.7
"""Above the grid (0.5), below bars (1)."""


@contextmanager
def plot_style() -> Iterator[None]:
    """Our settings on top of matplotlib's own, whatever a user's matplotlibrc says."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC_PARAMS)
        yield


def read_tidy(path: Path) -> pd.DataFrame:
    """Read a tidy CSV of runs. Raises LastgoodError, naming the file and what is wrong, if it is not one."""
    return read_panel(path, TidyRow, LATER_COLUMNS)


def partial_text(frame: pd.DataFrame) -> str:
    """``partial: 12 of 14 runs, missing: ...``, or nothing if no run is missing."""
    return partial_line(len(frame), int(frame["runs_expected"].max()), frame["runs_missing"].dropna())


def partial_line(there: int, expected: int, missing: pd.Series | None = None) -> str:
    """As `partial_text`, from numbers of runs; `missing` are texts that name those missing, all the same."""
    if there >= expected:
        return ""
    text = f"partial: {there} of {expected} runs"
    if missing is None or missing.empty:
        return text
    names = str(missing.iloc[0]).split("; ")
    more = f" and {len(names) - _MISSING_NAMED} more" if len(names) > _MISSING_NAMED else ""
    return f"{text}, missing: {', '.join(names[:_MISSING_NAMED])}{more}"


def save_figure(figure: Figure, out_stem: Path) -> list[Path]:
    """Write every format, each file complete or not at all."""
    written = []
    for kind in FORMATS:
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=_PNG_DPI, metadata=_METADATA[kind])
        path = out_stem.with_name(f"{out_stem.name}.{kind}")
        write_result(path, buffer.getvalue())
        written.append(path)
    return written


def plotter(
    draw: Callable[..., Figure],
    read: Callable[[Path], pd.DataFrame] = read_tidy,
    missing_runs: Callable[[pd.DataFrame], str] = partial_text,
) -> Callable[..., list[Path]]:
    """The function that draws a figure from its CSV file into `out_stem` + .pdf, .png and .svg.

    `draw` takes the frame, the width and whether there is a caption; `missing_runs` says what a frame lacks. With
    `partial`, a CSV that lacks runs is drawn with a line that states it; without, it is refused.
    """

    def plot(
        csv: Path, out_stem: Path, *, width: Width = "double", partial: bool = False, caption: bool = True
    ) -> list[Path]:
        frame = read(csv)
        missing = missing_runs(frame)
        if missing and not partial:
            raise LastgoodError(f"{csv}: {missing}; run what is missing, or use --partial")
        with plot_style():
            return save_figure(draw(frame, width, caption=caption), out_stem)

    return plot


def is_true(value: object) -> bool:
    """Columns with empty fields hold their booleans as objects or as text."""
    return str(value) == "True"


def is_false(value: object) -> bool:
    """See `is_true`; an empty field is neither."""
    return str(value) == "False"


def draw_grid(axes: Axes) -> None:
    """Horizontal lines below all that is drawn."""
    axes.grid(axis="y", linewidth=0.4, color="#DDDDDD")
    axes.set_axisbelow(True)


def name_places(axes: Axes, names: Sequence[str], label: str) -> None:
    """Write `names` at 0, 1, ... of the x axis, without ticks, and `label` under them."""
    axes.set_xticks(range(len(names)), names)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel(label)


def draw_bar(axes: Axes, x: float, width: float, median: float, durable: float, colour: str, hatch: str) -> None:
    """A bar up to `median`, pale above `durable`."""
    axes.bar(x, median, width, color=colour, alpha=0.35, linewidth=0)
    axes.bar(x, durable, width, color=colour, linewidth=0)
    axes.bar(x, median, width, fill=False, edgecolor=INK, linewidth=0.5, hatch=hatch)


def bar_handle(colour: str, label: str, hatch: str = "") -> Patch:
    """A legend entry for bars."""
    return Patch(facecolor=colour, edgecolor=INK, linewidth=0.5, hatch=hatch, label=label)


def pale_handle(label: str) -> Patch:
    """A legend entry for the pale tops of bars."""
    return Patch(facecolor="#777777", alpha=0.35, linewidth=0, label=label)


def draw_none(axes: Axes, values: pd.Series, middle: float | None = None, zorder: float = 4) -> list[Any]:
    """A black line at `middle` (the median) of training without checkpoints, in a band over its range."""
    if values.empty:
        return []
    axes.axhspan(values.min(), values.max(), color=NONE_COLOUR, alpha=0.12, linewidth=0, zorder=_BEHIND_BARS)
    axes.axhline(values.median() if middle is None else middle, color=NONE_COLOUR, linewidth=1.0, zorder=zorder)
    return [Line2D([], [], color=NONE_COLOUR, linewidth=1.0, label="no checkpoints")]


def line_look(colour: str, marker: str) -> dict[str, Any]:
    """A thin line through medians, which are marked."""
    return {
        "color": colour,
        "linewidth": 0.8,
        "marker": marker,
        "markersize": 5.0,
        "markeredgecolor": INK,
        "markeredgewidth": 0.4,
    }


def draw_published(axes: Axes, xs: Sequence[float], ys: Sequence[float], label: str) -> list[Any]:
    """Hollow diamonds at what a paper says; their legend entry."""
    if not len(xs):
        return []
    look: Any = {
        "linestyle": "none",
        "marker": "D",
        "markersize": 5.0,
        "markerfacecolor": "none",
        "markeredgecolor": INK,
        "markeredgewidth": 1.0,
    }
    axes.plot(xs, ys, zorder=8, path_effects=HALO, **look)
    return [Line2D([], [], label=label, **look)]


def draw_repetitions(axes: Axes, xs: Sequence[float], values: Sequence[float], size_pt: float) -> None:
    """A whisker over the range of `values`, in the middle of `xs`, and a circle for each."""
    if len(values) > 1:
        axes.vlines(sum(xs) / len(xs), min(values), max(values), color=INK, linewidth=0.8, path_effects=HALO, zorder=5)
    axes.plot(
        xs,
        values,
        linestyle="none",
        marker="o",
        markersize=size_pt,
        markerfacecolor="white",
        markeredgecolor=INK,
        markeredgewidth=0.5,
        zorder=6,
    )


_MARKS = {
    "\N{NOT EQUAL TO}": "RESTORE DIFFERS",
    "?": "restore not proved",
    "<2": "fewer than 2 checkpoints",
    "~": "all pairs disturbed",
}
"""Signs at points whose number needs a caveat."""
_TEX = {"~": r"\sim"}
"""In the mathematics that a marker is, it would be a blank, of which no marker can be made."""


def mark_of(runs: pd.DataFrame) -> str:
    """The sign for the repetitions of one cell, or nothing: the gravest that applies."""
    if runs["proof_equal"].map(is_false).any():
        return "\N{NOT EQUAL TO}"
    if not runs["proof_equal"].map(is_true).any():
        return "?"
    if not runs["enough_checkpoints"].map(is_true).all():
        return "<2"
    interval = pair_interval(runs)
    return "~" if interval is not None and interval.says_nothing else ""


def mark_handles(marks: set[str]) -> list[Any]:
    """Legend entries for the signs that were drawn."""
    return [
        Line2D([], [], linestyle="none", marker=f"${_TEX.get(mark, mark)}$", markersize=6, color=INK, label=meaning)
        for mark, meaning in _MARKS.items()
        if mark in marks
    ]


def draw_bound(
    axes: Axes, rows: pd.DataFrame, column: str, left: float, right: float, *, linewidth: float = 1.8, zorder: float = 7
) -> set[str]:
    """A line at the median bound of `rows`, and what sets it, for the legend; nothing if they have no bound."""
    known = rows.dropna(subset=[column])
    if known.empty:
        return set()
    binds = str(known["bound_binds"].mode().iloc[0])
    look: Any = {"color": BOUND_COLOUR, "linewidth": linewidth, "linestyle": BOUND_DASHES[binds], "zorder": zorder}
    axes.hlines(float(known[column].median()), left, right, **look)
    return {binds}


def bound_handles(seen: set[str]) -> list[Any]:
    """Legend entries for the bounds that were drawn, by what sets them."""
    return [
        Line2D([], [], color=BOUND_COLOUR, linewidth=1.8, linestyle=BOUND_DASHES[binds], label=f"bound ({binds})")
        for binds in BOUND_DASHES
        if binds in seen
    ]


class PageText:
    """Title and legend above the axes and the caption below: measured first, so that none touches another."""

    def __init__(
        self,
        figure: Figure,
        handles: list[Any],
        width: Width,
        *,
        title: str,
        caption: str,
        partial: str,
        legend_width_in: float | None = None,
    ) -> None:
        """With `legend_width_in` the legend is that wide and stands elsewhere: its corner is an argument of `place`."""
        self.width_in = WIDTHS_IN[width]
        self._figure = figure
        self._heading = figure.text(0, 0, title, weight="bold", va="top")
        self._heading.set_fontsize(_TITLE_PT)
        self._legend, legend_in = widest_legend(figure, handles, legend_width_in or self.width_in)
        self._lines = wrap_text(figure, caption, self.width_in - 2 * RIGHT_IN, _CAPTION_PT)
        self._partial_lines = wrap_text(figure, partial, self.width_in - 2 * RIGHT_IN, _CAPTION_PT)
        self._line_in = 1.3 * _CAPTION_PT / 72
        self._title_in = 1.3 * _TITLE_PT / 72
        self.above_in = GAP_IN + self._title_in + (0.0 if legend_width_in else legend_in)
        """From the top to where axes may begin."""
        self.below_in = GAP_IN + self._line_in * (len(self._lines) + len(self._partial_lines))
        """From the bottom to where they must end."""

    def place(self, height_in: float, legend_at_in: tuple[float, float] | None = None) -> None:
        """Make the picture this high, and put the texts at their places.

        `legend_at_in` is the upper left corner of a legend that stands elsewhere, from the left and from the top.
        """
        self._figure.set_size_inches(self.width_in, height_in)
        left = RIGHT_IN / self.width_in
        self._heading.set_position((left, 1 - GAP_IN / height_in))
        from_left_in, from_top_in = legend_at_in or (RIGHT_IN, GAP_IN + self._title_in)
        self._legend.set_bbox_to_anchor((from_left_in / self.width_in, 1 - from_top_in / height_in))
        for number, line in enumerate([*self._partial_lines, *self._lines]):
            self._figure.text(
                left,
                (self.below_in - number * self._line_in) / height_in,
                line,
                va="top",
                fontsize=_CAPTION_PT,
                color=BOUND_COLOUR if number < len(self._partial_lines) else INK,
            )


def heading(frame: pd.DataFrame, topic: str = "") -> str:
    """``Figure 8a: VGG-16`` of a panel's frame."""
    return panel_title(str(frame["figure"].iloc[0]), str(frame["workload"].iloc[0]), topic)


def one_panel(
    words: Callable[[pd.DataFrame], str],
    missing_runs: Callable[[pd.DataFrame], str] = partial_text,
    title: Callable[[pd.DataFrame], str] = heading,
    more_below_in: Callable[[pd.DataFrame], float] = lambda _: 0.0,
) -> Callable[[Callable[[Axes, pd.DataFrame, Width], list[Any]]], Callable[..., Figure]]:
    """Make a figure of a function that draws a frame on one pair of axes and returns the entries of the legend.

    The figure's own function takes the frame, the width, and whether there is a caption (`words`). Title, legend, axes
    and caption are stacked with their real heights; `more_below_in` is what stands below the axes beside one line of
    numbers and the names of places, in inches.
    """

    def figure_of(content: Callable[[Axes, pd.DataFrame, Width], list[Any]]) -> Callable[..., Figure]:
        @functools.wraps(content)
        def draw(frame: pd.DataFrame, width: Width = "double", *, caption: bool = True) -> Figure:
            with plot_style():
                figure = Figure(figsize=(WIDTHS_IN[width], 3.0))
                axes = figure.add_axes((0.1, 0.3, 0.8, 0.5))
                handles = content(axes, frame, width)
                said = words(frame) if caption else ""
                text = PageText(figure, handles, width, title=title(frame), caption=said, partial=missing_runs(frame))
                width_in, axes_in = text.width_in, _AXES_HEIGHT_IN[width]
                bottom_in = text.below_in + _XLABEL_IN + more_below_in(frame)
                height_in = text.above_in + GAP_IN + axes_in + bottom_in
                text.place(height_in)
                left, wide_in = LEFT_IN / width_in, width_in - LEFT_IN - RIGHT_IN
                axes.set_position((left, bottom_in / height_in, wide_in / width_in, axes_in / height_in))
                axes.yaxis.set_label_coords(-0.36 / wide_in, 0.5)
            return figure

        return draw

    return figure_of


def _renderer(figure: Figure) -> RendererBase:
    """What measures texts as they will be drawn."""
    return cast("RendererBase", FigureCanvasAgg(figure).get_renderer())  # type: ignore[no-untyped-call]


def widest_legend(figure: Figure, handles: list[Any], width_in: float) -> tuple[Legend, float]:
    """The legend with the most columns that fit, and its height in inches."""
    renderer = _renderer(figure)
    for columns in range(max(1, len(handles)), 0, -1):
        legend = figure.legend(
            handles=handles,
            loc="upper left",
            ncols=columns,
            frameon=False,
            borderaxespad=0,
            borderpad=0.2,
            columnspacing=1.2,
            handlelength=1.8,
            handletextpad=0.5,
            labelspacing=0.35,
        )
        extent = legend.get_window_extent(renderer)
        if extent.width / figure.dpi <= width_in - RIGHT_IN or columns == 1:
            return legend, extent.height / figure.dpi
        legend.remove()
    raise AssertionError("unreachable: one column is always taken")


def text_width_in(figure: Figure, text: str, size_pt: float) -> float:
    """How wide `text` is drawn, in inches."""
    probe = figure.text(0, 0, text, fontsize=size_pt)
    width = probe.get_window_extent(_renderer(figure)).width / figure.dpi
    probe.remove()
    return float(width)


def wrap_text(figure: Figure, text: str, width_in: float, size_pt: float) -> list[str]:
    """Break `text` at its spaces (not at no-break spaces) into lines that are drawn no wider than `width_in`."""
    renderer = _renderer(figure)
    probe = figure.text(0, 0, "", fontsize=size_pt)
    lines: list[str] = []
    for word in text.split(" ") if text else ():
        probe.set_text(f"{lines[-1]} {word}" if lines else word)
        if lines and probe.get_window_extent(renderer).width / figure.dpi <= width_in:
            lines[-1] = probe.get_text()
        else:
            lines.append(word)
    probe.remove()
    return lines
