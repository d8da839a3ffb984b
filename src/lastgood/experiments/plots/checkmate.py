"""Checkmate's figure: throughput, frequency at equal throughput, lost work, and what both sides spend, of one model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from lastgood.experiments.config.values import BASELINE
from lastgood.experiments.plots.canvas import (
    GAP_IN,
    INK,
    LABEL_PT,
    RIGHT_IN,
    PageText,
    Width,
    bar_handle,
    bound_handles,
    draw_bar,
    draw_bound,
    draw_grid,
    draw_none,
    draw_repetitions,
    is_false,
    is_true,
    partial_text,
    plot_style,
    plotter,
    text_width_in,
)
from lastgood.experiments.plots.captions import checkmate_caption
from lastgood.experiments.plots.checkmate_numbers import (
    Lost,
    Reach,
    costs,
    lost_work,
    published_ranges,
    reaches,
    subject_of,
)
from lastgood.experiments.plots.optimizer import plot_optimizer
from lastgood.experiments.plots.style import WIDTHS_IN
from lastgood.experiments.systems.labels import NONE_COLOUR, SystemStyle, panel_title, system_styles
from lastgood.units import MIB

__all__ = ["draw_checkmate", "plot_checkmate"]

_BAR: Final = 0.72
_HATCH_SHADOWS: Final = "////"
_HATCH_WRONG: Final = "xxxx"
_HATCH_UNPROVED: Final = "...."
_PAPER: Final[dict[str, Any]] = {"facecolor": "none", "edgecolor": INK, "linewidth": 0.9, "linestyle": (0, (2, 1.2))}
_PAPER_PLACE: Final = "paper"
_HATCH_OPEN: Final = "\\\\"
"""Of a bar that ends only if the measurement did."""
_NAME_PT: Final = LABEL_PT
_NAME_DEGREES: Final = 35.0
_NUMBERS_PT: Final = 8.5
"""A line of numbers between the axis and the names."""
_COLUMNS: Final[dict[str, int]] = {"single": 1, "double": 3}
_PANEL_HEIGHT_IN: Final = 1.25
_ABOVE_IN: Final = 0.26
"""Over each row, for the panels' own titles."""
_YLABEL_IN: Final = 0.52
_BETWEEN_IN: Final = 0.1


def plot_checkmate(
    csv: Path, out_stem: Path, *, width: Width = "double", partial: bool = False, caption: bool = True
) -> list[Path]:
    """As every figure's; a CSV of a shadow's updates is drawn as that."""
    plot = plot_optimizer if _is_updates(csv) else plotter(draw_checkmate)
    return plot(csv, out_stem, width=width, partial=partial, caption=caption)


def _is_updates(csv: Path) -> bool:
    """By its columns; one that cannot be read is named by whoever reads it next."""
    try:
        with csv.open(encoding="utf-8") as file:
            return "update_s" in file.readline().rstrip("\n").split(",")
    except (OSError, UnicodeDecodeError):
        return False


def draw_checkmate(frame: pd.DataFrame, width: Width = "double", *, caption: bool = True) -> Figure:
    """Five small panels, a bar for each system in each, from a tidy frame of one model.

    Hollow dashed boxes are the paper's ranges, which were measured on other machines.
    """
    with plot_style():
        systems = sorted(set(frame["system"]) - {BASELINE})
        styles = system_styles(systems)
        ranges = published_ranges(frame)
        subject = subject_of(frame)
        figure = Figure()
        panels = [figure.add_subplot() for _ in range(5)]
        handles: list[Any] = _throughput(panels[0], frame, styles, ranges.get("throughput_gain"))
        _frequency(panels[1], subject, reaches(frame), styles, ranges.get("frequency_gain"))
        _lost(panels[2], subject, lost_work(frame), styles, ranges.get("repeated_work_less"))
        found = costs(frame)
        _bytes(panels[3], {name: cost.handed_bytes for name, cost in found.items() if name in styles}, styles)
        handles += _cpu(panels[4], found, styles)
        if ranges:
            handles.append(Patch(label="paper's range, other machines", **_PAPER))
        _lay_out(
            figure,
            panels,
            handles,
            width,
            title=panel_title(str(frame["figure"].iloc[0]).capitalize(), str(frame["workload"].iloc[0])),
            caption=checkmate_caption(frame) if caption else "",
            partial=partial_text(frame),
            below_in=_below_in(figure, [*(style.label for style in styles.values()), _PAPER_PLACE]),
        )
    return figure


def _lay_out(
    figure: Figure,
    panels: Sequence[Axes],
    handles: list[Any],
    width: Width,
    *,
    title: str,
    caption: str,
    partial: str,
    below_in: float,
) -> None:
    """Stack title, legend, rows of `panels` and caption with their real heights; the panels are of one size.

    `below_in` is what stands under each panel, in inches. If the last row has a place that no panel takes, the legend
    stands there.
    """
    columns = _COLUMNS[width]
    column_in = (WIDTHS_IN[width] - RIGHT_IN) / columns
    rows, free = -(-len(panels) // columns), -len(panels) % columns
    text = PageText(
        figure,
        handles,
        width,
        title=title,
        caption=caption,
        partial=partial,
        legend_width_in=column_in if free else None,
    )
    width_in = text.width_in
    row_in = _ABOVE_IN + _PANEL_HEIGHT_IN + below_in
    height_in = text.above_in + rows * row_in + text.below_in + GAP_IN
    corner_in = ((columns - free) * column_in + GAP_IN, text.above_in + (rows - 1) * row_in + _ABOVE_IN)
    text.place(height_in, corner_in if free else None)
    for number, axes in enumerate(panels):
        row, column = divmod(number, columns)
        top_in = height_in - text.above_in - row * row_in - _ABOVE_IN
        axes.set_position(
            (
                (column * column_in + _YLABEL_IN) / width_in,
                (top_in - _PANEL_HEIGHT_IN) / height_in,
                (column_in - _YLABEL_IN - _BETWEEN_IN) / width_in,
                _PANEL_HEIGHT_IN / height_in,
            )
        )
        axes.yaxis.set_label_coords(-0.38 / (column_in - _YLABEL_IN - _BETWEEN_IN), 0.5)


def _below_in(figure: Figure, names: Sequence[str]) -> float:
    """Numbers, and the longest of `names`, under a panel."""
    longest_in = max(text_width_in(figure, name, _NAME_PT) for name in names)
    turned_in = (
        math.sin(math.radians(_NAME_DEGREES)) * longest_in + math.cos(math.radians(_NAME_DEGREES)) * _NAME_PT / 72
    )
    return (2 * _NUMBERS_PT + 4) / 72 + turned_in + 0.08


def _places(
    axes: Axes,
    styles: dict[str, SystemStyle],
    title: str,
    unit: str,
    more: Sequence[str] = (),
    *,
    lines: int = 1,
) -> None:
    """Systems' names below the bars, under `lines` lines of their numbers."""
    axes.set_title(title, loc="left", fontsize=LABEL_PT + 0.5)
    axes.set_ylabel(unit)
    axes.set_xlim(-0.6, len(styles) + len(more) - 0.4)
    names = [*(style.label for style in styles.values()), *more]
    turned: Any = {"rotation": _NAME_DEGREES, "ha": "right", "va": "top", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(names)), names, fontsize=_NAME_PT, **turned)
    axes.tick_params(axis="x", length=0, pad=lines * _NUMBERS_PT + 4)
    draw_grid(axes)


def _bar(axes: Axes, x: float, height: float, style: SystemStyle, **more: Any) -> None:
    axes.bar(x, height, _BAR, color=style.colour, edgecolor=INK, linewidth=0.5, **more)


def _below(axes: Axes, x: float, text: str) -> None:
    axes.annotate(
        text,
        (x, 0),
        (0, -2.5),
        textcoords="offset points",
        ha="center",
        va="top",
        fontsize=LABEL_PT,
        xycoords=("data", "axes fraction"),
    )


def _throughput(
    axes: Axes, frame: pd.DataFrame, styles: dict[str, SystemStyle], published: tuple[float, float] | None
) -> list[Any]:
    least = int(frame.loc[frame["system"] != BASELINE, "interval_steps"].min())
    each = "a checkpoint every iteration" if least == 1 else f"a checkpoint every {least} iterations"
    own: float | None = None
    bounds: set[str] = set()
    hatches: set[str] = set()
    none = frame.loc[frame["system"] == BASELINE, "iterations_per_s"]
    _places(axes, styles, f"(a) {each}", "iterations/s", [_PAPER_PLACE] if published else [])
    for place, (system, style) in enumerate(styles.items()):
        rows = frame[(frame["system"] == system) & (frame["interval_steps"] == least)]
        if rows.empty:
            _below(axes, place, "-")
            continue
        values = [float(value) for value in rows["iterations_per_s"]]
        median = float(rows["iterations_per_s"].median())
        durable = min(median, float(rows["durable_iterations_per_s"].median()))
        hatch = _hatch(rows)
        hatches.add(hatch)
        draw_bar(axes, place, _BAR, median, durable, style.colour, hatch)
        if len(values) > 1:
            draw_repetitions(axes, [float(place)] * len(values), values, 2.2)
        _below(axes, place, f"{median:.3g}")
        own = median if system == subject_of(frame) else own
        bounds |= draw_bound(axes, rows, "bound_iterations_per_s", place - 0.48, place + 0.48, linewidth=1.6)
    handles = draw_none(axes, none)
    if published and own is not None:
        # Where the other systems would be, had the subject the published gain over them here.
        low, high = own / published[1], own / published[0]
        axes.bar(len(styles), high - low, _BAR, bottom=low, **_PAPER)
    axes.set_ylim(0, None)
    meanings = ((_HATCH_UNPROVED, "restore not proved"), (_HATCH_WRONG, "RESTORE DIFFERS"))
    handles += [bar_handle("white", label, hatch) for hatch, label in meanings if hatch in hatches]
    return handles + bound_handles(bounds)


def _hatch(rows: pd.DataFrame) -> str:
    """What a proof of the state, or losses after a kill, say of the restores of a cell."""
    if rows["proof_equal"].map(is_false).any() or (rows["lives_unlike"] > 0).any():
        return _HATCH_WRONG
    # After a kill that took nothing there is no loss to compare with. Files without the number are from before it.
    compared = rows["lost_steps"].notna() & (rows["losses_compared"] != 0)
    proved = rows["proof_equal"].map(is_true).any() or compared.any()
    return "" if proved else _HATCH_UNPROVED


def _frequency(
    axes: Axes,
    subject: str | None,
    found: dict[str, Reach],
    styles: dict[str, SystemStyle],
    published: tuple[float, float] | None,
) -> None:
    whose = "at equal throughput" if subject is None else f"at {styles[subject].label}'s throughput"
    _places(axes, styles, f"(b) {whose}", "iterations per checkpoint", [_PAPER_PLACE] if published else [])
    for place, (system, style) in enumerate(styles.items()):
        reach = found.get(system)
        if system == subject and found:
            _bar(axes, place, 1, style)
            _below(axes, place, "1")
        elif reach is None:
            _below(axes, place, "-")
        elif reach.interval_steps is None:
            # Not reached: an open bar as far as was measured.
            axes.bar(place, reach.longest_steps, _BAR, color=style.colour, alpha=0.25, linewidth=0)
            outline: Any = {"fill": False, "edgecolor": style.line_colour, "linewidth": 0.5, "hatch": _HATCH_OPEN}
            axes.bar(place, reach.longest_steps, _BAR, **outline)
            axes.plot([place], [reach.longest_steps], marker="^", color=INK, markersize=4, clip_on=False)
            _below(axes, place, f">{reach.longest_steps}")
        else:
            _bar(axes, place, reach.interval_steps, style)
            _below(axes, place, str(reach.interval_steps))
    if published and found:
        axes.bar(len(styles), published[1] - published[0], _BAR, bottom=published[0], **_PAPER)
    axes.set_ylim(0, None)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _lost(
    axes: Axes,
    subject: str | None,
    found: dict[str, Lost],
    styles: dict[str, SystemStyle],
    published: tuple[float, float] | None,
) -> None:
    _places(
        axes, styles, "(c) lost by a failure", "iterations done again", [_PAPER_PLACE] if published else [], lines=2
    )
    for place, (system, style) in enumerate(styles.items()):
        lost = found.get(system)
        if lost is None:
            _below(axes, place, "-")
            continue
        _bar(axes, place, lost.mean, style)
        draw_repetitions(axes, [float(place)] * len(lost.steps), [float(step) for step in lost.steps], 2.6)
        _below(axes, place, f"{lost.mean:.3g}\nf{lost.interval_steps}")
    others = [lost.mean for system, lost in found.items() if system != subject]
    if published and others:
        # Where the subject would be, had it the published saving over the mean of the others here.
        mean = sum(others) / len(others)
        low, high = mean * (1 - published[1] / 100), mean * (1 - published[0] / 100)
        axes.bar(len(styles), high - low, _BAR, bottom=low, **_PAPER)
    # If nothing was lost at all, an axis of fractions would say nothing either.
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _bytes(axes: Axes, handed: dict[str, float], styles: dict[str, SystemStyle]) -> None:
    _places(axes, styles, "(d) handed on by trainers", "MiB per iteration")
    for place, (system, style) in enumerate(styles.items()):
        if system in handed:
            _bar(axes, place, handed[system] / MIB, style)
            _below(axes, place, f"{handed[system] / MIB:.3g}")
    axes.set_ylim(0, None)


def _cpu(axes: Axes, found: dict[str, Any], styles: dict[str, SystemStyle]) -> list[Any]:
    _places(axes, styles, "(e) CPU time", "CPU seconds per iteration")
    shadows = False
    for place, (system, style) in enumerate(styles.items()):
        cost = found.get(system)
        if cost is None:
            continue
        _bar(axes, place, cost.trainer_cpu_s, style)
        if cost.shadow_cpu_s:
            _bar(axes, place, cost.shadow_cpu_s, style, bottom=cost.trainer_cpu_s, hatch=_HATCH_SHADOWS, alpha=0.6)
            shadows = True
        _below(axes, place, f"{cost.trainer_cpu_s + cost.shadow_cpu_s:.2g}")
    if BASELINE in found:
        axes.axhline(found[BASELINE].trainer_cpu_s, color=NONE_COLOUR, linewidth=1.0, zorder=4)
    axes.set_ylim(0, None)
    if not shadows:
        return []
    return [bar_handle("white", "shadows (CPU time)", _HATCH_SHADOWS)]
