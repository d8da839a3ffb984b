"""Figures from tidy CSV files alone: PDF, PNG and SVG, the same bytes at every drawing of the same file."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
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

from lastgood.errors import LastgoodError
from lastgood.experiments.atomic import write_atomically
from lastgood.experiments.captions import throughput_caption
from lastgood.experiments.collect import TIDY_COLUMNS, TidyRow
from lastgood.experiments.style import (
    BOUND_COLOUR,
    NONE_COLOUR,
    RC_PARAMS,
    WIDTHS_IN,
    SystemStyle,
    panel_title,
    system_styles,
)

__all__ = ["FORMATS", "Width", "draw_throughput", "plot_fig8", "read_tidy"]

Width = Literal["single", "double"]
FORMATS = ("pdf", "png", "svg")
_PNG_DPI = 200
# Dates in a file's metadata would make every drawing differ.
_METADATA: dict[str, dict[str, Any]] = {
    "pdf": {"CreationDate": None, "ModDate": None},
    "png": {},
    "svg": {"Date": None},
}

_AXES_HEIGHT_IN = {"single": 1.7, "double": 2.1}
_LEFT_IN, _RIGHT_IN = 0.5, 0.06
_GAP_IN = 0.07
_XLABEL_IN = 0.5
_TITLE_PT = 8.5
_CAPTION_PT = 7.0
_LABEL_PT = 7.0
_GROUP_WIDTH = 0.84
_WIDEST_BAR_PT = 60.0
_MISSING_NAMED = 12

_HATCH_FEW = "////"
_HATCH_UNPROVED = "...."
_HATCH_WRONG = "xxxx"
_BOUND_DASHES: dict[str, Any] = {"disk": "solid", "copy": (0, (2.5, 1.0)), "training": (0, (0.8, 0.8))}


_TEXT = [field.name for field in fields(TidyRow) if "str" in str(field.type)]
"""Columns never to be taken for numbers, however a revision's digits fall."""


@dataclass(frozen=True)
class _Cell:
    """The repetitions of one system at one interval."""

    values: list[float]
    median: float
    durable: float
    hatch: str


@contextmanager
def _style() -> Iterator[None]:
    """Our settings on top of matplotlib's own, whatever a user's matplotlibrc says."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC_PARAMS)
        yield


def read_tidy(path: Path) -> pd.DataFrame:
    """Read a figure's tidy CSV. Raises LastgoodError, naming the file and what is wrong, if it is not one."""
    try:
        frame = pd.read_csv(path, dtype=dict.fromkeys(_TEXT, str), keep_default_na=False, na_values=[""])
    except (OSError, ValueError) as error:
        raise LastgoodError(f"{path}: not a figure's CSV file: {error}") from error
    lacking = [name for name in TIDY_COLUMNS if name not in frame.columns]
    if lacking:
        raise LastgoodError(f"{path}: columns are missing: {', '.join(lacking)}; make it with `lastgood collect`")
    if frame.empty:
        raise LastgoodError(f"{path}: holds no run")
    return frame


def plot_fig8(csv: Path, out_stem: Path, *, width: Width = "double", partial: bool = False) -> list[Path]:
    """Draw throughput against the checkpoint interval from `csv` into `out_stem` + .pdf, .png and .svg.

    With `partial`, a CSV that lacks runs is drawn with a line that says so; without, it is refused.
    """
    frame = read_tidy(csv)
    if len(frame) < int(frame["runs_expected"].max()) and not partial:
        raise LastgoodError(f"{csv}: {partial_text(frame)}; run what is missing, or use --partial")
    with _style():
        return save_figure(draw_throughput(frame, width), out_stem)


def partial_text(frame: pd.DataFrame) -> str:
    """``partial: 12 of 14 runs, missing: ...``, or nothing where no run is missing."""
    expected = int(frame["runs_expected"].max())
    if len(frame) >= expected:
        return ""
    text = f"partial: {len(frame)} of {expected} runs"
    named = frame["runs_missing"].dropna()
    if named.empty:
        return text
    missing = str(named.iloc[0]).split("; ")
    more = f" and {len(missing) - _MISSING_NAMED} more" if len(missing) > _MISSING_NAMED else ""
    return f"{text}, missing: {', '.join(missing[:_MISSING_NAMED])}{more}"


def save_figure(figure: Figure, out_stem: Path) -> list[Path]:
    """Write every format, each whole or not at all."""
    written = []
    for kind in FORMATS:
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=_PNG_DPI, metadata=_METADATA[kind])
        path = out_stem.with_name(f"{out_stem.name}.{kind}")
        write_atomically(path, buffer.getvalue())
        written.append(path)
    return written


def draw_throughput(frame: pd.DataFrame, width: Width = "double") -> Figure:
    """Grouped bars, one group per interval and one bar per system, from a tidy frame of one panel.

    A bar's solid part is the durable throughput, its pale top what the drain takes off; whiskers and circles are the
    repetitions. The black line is training without checkpoints, the short lines are the bound.
    """
    with _style():
        width_in = WIDTHS_IN[width]
        figure = Figure(figsize=(width_in, 3.0))
        axes = figure.add_axes((0.1, 0.3, 0.8, 0.5))
        bars = frame[(frame["system"] != "none") & (frame["interval_steps"] > 0)]
        styles = system_styles(sorted(set(bars["system"])))
        intervals = sorted({int(interval) for interval in bars["interval_steps"]})
        cells = {}
        for system in styles:
            for interval in intervals:
                runs = bars[(bars["system"] == system) & (bars["interval_steps"] == interval)]
                if len(runs):
                    cells[system, interval] = _cell(runs)
        axes_width_pt = 72 * (width_in - _LEFT_IN - _RIGHT_IN)
        bar_pt = _set_x_axis(axes, intervals, len(styles), axes_width_pt)
        _set_y_axis(axes, frame)
        handles = _draw_cells(axes, cells, styles, intervals, bar_pt)
        handles += _draw_none(axes, frame[frame["system"] == "none"])
        handles += _draw_bounds(axes, bars, intervals)
        handles += _mark_handles(list(cells.values()))
        _lay_out(figure, axes, handles, frame, width)
    return figure


def _cell(runs: pd.DataFrame) -> _Cell:
    hatch = ""
    if not runs["enough_checkpoints"].map(_is_true).all():
        hatch += _HATCH_FEW
    if runs["proof_equal"].map(_is_false).any():
        hatch += _HATCH_WRONG
    elif not runs["proof_equal"].map(_is_true).any():
        hatch += _HATCH_UNPROVED
    values = [float(value) for value in runs.sort_values("repetition")["iterations_per_s"]]
    median = float(runs["iterations_per_s"].median())
    return _Cell(values, median, min(median, float(runs["durable_iterations_per_s"].median())), hatch)


def _is_true(value: object) -> bool:
    """Columns with empty fields hold their booleans as objects or as text."""
    return str(value) == "True"


def _is_false(value: object) -> bool:
    return str(value) == "False"


def _set_x_axis(axes: Axes, intervals: Sequence[int], systems: int, axes_width_pt: float) -> float:
    """Place the groups so that bars are no wider than looks well; returns a bar's width in points."""
    groups = max(1, len(intervals))
    group_pt = min(axes_width_pt / groups, _WIDEST_BAR_PT * max(1, systems) / _GROUP_WIDTH)
    half_range = axes_width_pt / group_pt / 2
    middle = (groups - 1) / 2
    axes.set_xlim(middle - half_range, middle + half_range)
    axes.set_xticks(range(len(intervals)), [str(interval) for interval in intervals])
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("checkpoint interval (iterations)")
    return group_pt * _GROUP_WIDTH / max(1, systems)


def _set_y_axis(axes: Axes, frame: pd.DataFrame) -> None:
    top = max(frame["iterations_per_s"].max(), frame["bound_iterations_per_s"].fillna(0).max())
    axes.set_ylim(0, 1.13 * top)
    axes.set_ylabel("throughput (iterations/s)")
    axes.grid(axis="y", linewidth=0.4, color="#DDDDDD")
    axes.set_axisbelow(True)


def _draw_cells(
    axes: Axes,
    cells: dict[tuple[str, int], _Cell],
    styles: dict[str, SystemStyle],
    intervals: Sequence[int],
    bar_pt: float,
) -> list[Any]:
    bar_width = _GROUP_WIDTH / max(1, len(styles))
    texts = {key: _three_digits(cell.median) for key, cell in cells.items()}
    # A median is printed where all fit under their bars: some with and some without would look like a finding.
    labels_fit = bar_pt >= 0.62 * _LABEL_PT * max((len(text) for text in texts.values()), default=0)
    if labels_fit or len(cells) < len(styles) * len(intervals):
        axes.tick_params(axis="x", pad=_LABEL_PT + 5)
    for place, (system, style) in enumerate(styles.items()):
        for group, interval in enumerate(intervals):
            x = group + (place - (len(styles) - 1) / 2) * bar_width
            cell = cells.get((system, interval))
            # The medians stand below the bars, where no line or whisker crosses them.
            text = "-" if cell is None else texts[system, interval]
            if labels_fit or cell is None:
                axes.annotate(
                    text, (x, 0), (0, -2.5), textcoords="offset points", ha="center", va="top", fontsize=_LABEL_PT
                )
            if cell is None:
                continue
            drawn = 0.9 * bar_width
            axes.bar(x, cell.median, drawn, color=style.colour, alpha=0.35, linewidth=0)
            axes.bar(x, cell.durable, drawn, color=style.colour, linewidth=0)
            axes.bar(x, cell.median, drawn, fill=False, edgecolor="#222222", linewidth=0.5, hatch=cell.hatch)
            _draw_repetitions(axes, x, drawn, cell.values, bar_pt)
    handles: list[Any] = [
        Patch(facecolor=style.colour, edgecolor="#222222", linewidth=0.5, label=style.label)
        for style in styles.values()
    ]
    if any(cell.durable < 0.99 * cell.median for cell in cells.values()):
        handles.append(Patch(facecolor="#777777", alpha=0.35, linewidth=0, label="pale: lost to the drain"))
    return handles


def _three_digits(value: float) -> str:
    return f"{value:#.3g}".removesuffix(".") if value < 1000 else f"{value:.0f}"


def _draw_repetitions(axes: Axes, x: float, width: float, values: list[float], bar_pt: float) -> None:
    if len(values) > 1:
        axes.vlines(x, min(values), max(values), color="#222222", linewidth=0.8, zorder=5)
    # Side by side, so that equal repetitions are seen as several.
    step = min(0.22, 0.6 / len(values)) * width
    xs = [x + (number - (len(values) - 1) / 2) * step for number in range(len(values))]
    size_pt = min(2.6, 0.25 * bar_pt)
    axes.plot(
        xs,
        values,
        linestyle="none",
        marker="o",
        markersize=size_pt,
        markerfacecolor="white",
        markeredgecolor="#222222",
        markeredgewidth=0.5,
        zorder=6,
    )


def _draw_none(axes: Axes, none: pd.DataFrame) -> list[Any]:
    if none.empty:
        return []
    values = none["iterations_per_s"]
    axes.axhspan(values.min(), values.max(), color=NONE_COLOUR, alpha=0.12, linewidth=0, zorder=1)
    axes.axhline(values.median(), color=NONE_COLOUR, linewidth=1.0, zorder=4)
    return [Line2D([], [], color=NONE_COLOUR, linewidth=1.0, label="no checkpoints")]


def _draw_bounds(axes: Axes, bars: pd.DataFrame, intervals: Sequence[int]) -> list[Any]:
    """A short line over each group; where repetitions or systems differ in state size, the median."""
    bound = bars.dropna(subset=["bound_iterations_per_s"])
    seen: dict[str, Any] = {}
    for group, interval in enumerate(intervals):
        rows = bound[bound["interval_steps"] == interval]
        if rows.empty:
            continue
        binds = str(rows["bound_binds"].mode().iloc[0])
        axes.hlines(
            float(rows["bound_iterations_per_s"].median()),
            group - _GROUP_WIDTH / 2 - 0.05,
            group + _GROUP_WIDTH / 2 + 0.05,
            color=BOUND_COLOUR,
            linewidth=1.8,
            linestyle=_BOUND_DASHES[binds],
            zorder=7,
        )
        seen[binds] = Line2D(
            [], [], color=BOUND_COLOUR, linewidth=1.8, linestyle=_BOUND_DASHES[binds], label=f"bound ({binds})"
        )
    return [seen[binds] for binds in _BOUND_DASHES if binds in seen]


def _mark_handles(cells: Sequence[_Cell]) -> list[Any]:
    meanings = (
        (_HATCH_FEW, "fewer than 2 checkpoints"),
        (_HATCH_UNPROVED, "restore not proved"),
        (_HATCH_WRONG, "RESTORE DIFFERS"),
    )
    return [
        Patch(facecolor="white", edgecolor="#222222", linewidth=0.5, hatch=hatch, label=label)
        for hatch, label in meanings
        if any(hatch in cell.hatch for cell in cells)
    ]


def _lay_out(figure: Figure, axes: Axes, handles: list[Any], frame: pd.DataFrame, width: Width) -> None:
    """Stack title, legend, axes and caption with their real heights, so that none touches another."""
    width_in = WIDTHS_IN[width]
    title = figure.text(
        0, 0, panel_title(str(frame["figure"].iloc[0]), str(frame["workload"].iloc[0])), weight="bold", va="top"
    )
    title.set_fontsize(_TITLE_PT)
    legend, legend_in = _widest_legend(figure, handles, width_in)
    lines = wrap_text(figure, throughput_caption(frame), width_in - 2 * _RIGHT_IN, _CAPTION_PT)
    partial_lines = wrap_text(figure, partial_text(frame), width_in - 2 * _RIGHT_IN, _CAPTION_PT)
    line_in = 1.3 * _CAPTION_PT / 72
    title_in = 1.3 * _TITLE_PT / 72
    caption_in = line_in * (len(lines) + len(partial_lines))
    axes_in = _AXES_HEIGHT_IN[width]
    height_in = _GAP_IN + title_in + legend_in + _GAP_IN + axes_in + _XLABEL_IN + caption_in + _GAP_IN
    figure.set_size_inches(width_in, height_in)
    title.set_position((_RIGHT_IN / width_in, 1 - _GAP_IN / height_in))
    legend.set_bbox_to_anchor((_RIGHT_IN / width_in, 1 - (_GAP_IN + title_in) / height_in))
    bottom_in = _GAP_IN + caption_in + _XLABEL_IN
    axes.set_position(
        (_LEFT_IN / width_in, bottom_in / height_in, (width_in - _LEFT_IN - _RIGHT_IN) / width_in, axes_in / height_in)
    )
    axes.yaxis.set_label_coords(-0.36 / (width_in - _LEFT_IN - _RIGHT_IN), 0.5)
    top_in = _GAP_IN + caption_in
    for number, line in enumerate([*partial_lines, *lines]):
        colour = BOUND_COLOUR if number < len(partial_lines) else "#222222"
        figure.text(
            _RIGHT_IN / width_in,
            (top_in - number * line_in) / height_in,
            line,
            va="top",
            fontsize=_CAPTION_PT,
            color=colour,
        )


def _renderer(figure: Figure) -> RendererBase:
    """What measures texts as they will be drawn."""
    return cast("RendererBase", FigureCanvasAgg(figure).get_renderer())  # type: ignore[no-untyped-call]


def _widest_legend(figure: Figure, handles: list[Any], width_in: float) -> tuple[Legend, float]:
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
        if extent.width / figure.dpi <= width_in - _RIGHT_IN or columns == 1:
            return legend, extent.height / figure.dpi
        legend.remove()
    raise AssertionError("unreachable: one column is always taken")


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
