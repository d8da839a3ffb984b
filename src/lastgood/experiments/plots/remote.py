"""Checkpoints that leave the machine: what they cost a training, how a job comes back from them, and what is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lastgood.experiments.plots.canvas import (
    INK,
    LABEL_PT,
    Width,
    bar_handle,
    draw_bar,
    draw_grid,
    draw_none,
    draw_repetitions,
    is_false,
    name_places,
    one_panel,
    pale_handle,
    partial_line,
    plotter,
)
from lastgood.experiments.plots.captions import remote_caption
from lastgood.experiments.plots.style import series_styles
from lastgood.experiments.tables.frames import read_panel
from lastgood.experiments.tables.remote import RemoteRow
from lastgood.units import MIB

__all__ = ["draw_remote", "plot_remote", "read_remote"]

_BAR: Final = 0.6
_WRONG: Final = "xxxx"
_DASHES: Final[Any] = (0, (4, 2))
_KNOWN_FROM: Final = 3
"""The first checkpoint of which it is known what did not change."""
_TITLES: Final = {
    "training": "Checkpoints to S3: throughput of the training, and remote lag",
    "return": "Time to the first step after coming back",
    "bytes": "Bytes sent to S3 for each checkpoint",
}


def read_remote(path: Path) -> pd.DataFrame:
    """Read a panel's tidy CSV. Raises LastgoodError, naming the file and what is wrong, if it is not one."""
    return read_panel(path, RemoteRow)


def _partial_text(frame: pd.DataFrame) -> str:
    return partial_line(frame["record"].nunique(), int(frame["runs_expected"].max()), frame["runs_missing"])


def _title(frame: pd.DataFrame) -> str:
    return _TITLES[str(frame["part"].iloc[0])]


def _more_below(frame: pd.DataFrame) -> float:
    lines = 1 + max(_name_of(rows).count("\n") for _, rows in frame.groupby("way"))
    return (lines - 1) * (LABEL_PT + 3) / 72


def draw_remote(frame: pd.DataFrame, width: Width = "double", *, caption: bool = True) -> Figure:
    """The panel of the part that the rows are of."""
    return _PANELS[str(frame["part"].iloc[0])](frame, width, caption=caption)


@one_panel(remote_caption, _partial_text, _title, _more_below)
def _draw_training(axes: Axes, frame: pd.DataFrame, _: Width) -> list[Any]:
    """A bar for each way, pale where the last checkpoints were waited for; the lag stands under its name."""
    bars = frame[frame["way"] != "alone"]
    ways = list(dict.fromkeys(bars["way"]))
    colours = [style.colour for style in series_styles(len(ways))]
    for place, (way, colour) in enumerate(zip(ways, colours, strict=True)):
        rows = bars[bars["way"] == way]
        median = float(rows["steps_per_s"].median())
        draw_bar(axes, place, _BAR, median, min(median, float(rows["durable_steps_per_s"].median())), colour, "")
        draw_repetitions(axes, [place] * len(rows), list(rows["steps_per_s"]), 2.4)
        label = f"{float(rows['ratio'].median()):.2f}"
        _write_over(axes, place, float(rows["steps_per_s"].max()), label)
    handles = draw_none(axes, frame[frame["way"] == "alone"]["steps_per_s"])
    name_places(axes, [_name_of(bars[bars["way"] == way]) for way in ways], "")
    axes.set_xlim(-0.6, len(ways) - 0.4)
    axes.set_ylabel("steps/s")
    axes.set_ylim(0, 1.15 * float(frame["steps_per_s"].max()))
    draw_grid(axes)
    return [*handles, pale_handle("lost if the last checkpoints are waited for")]


@one_panel(remote_caption, _partial_text, _title, _more_below)
def _draw_return(axes: Axes, frame: pd.DataFrame, _: Width) -> list[Any]:
    """A bar for each way: attach, and pale the first step; a dashed line is the bound."""
    ways = list(dict.fromkeys(frame["way"]))
    colours = [style.colour for style in series_styles(len(ways))]
    handles: list[Any] = [pale_handle("the first step")]
    wrong = False
    for place, (way, colour) in enumerate(zip(ways, colours, strict=True)):
        rows = frame[frame["way"] == way]
        total, attach = float(rows["back_s"].median()), float(rows["attach_s"].median())
        unequal = bool(rows["equal"].map(is_false).any())
        wrong = wrong or unequal
        draw_bar(axes, place, _BAR, total, min(total, attach), colour, _WRONG if unequal else "")
        draw_repetitions(axes, [place] * len(rows), list(rows["back_s"]), 2.4)
        _write_over(axes, place, float(rows["back_s"].max()), f"{total:.2f}")
        _draw_bound(axes, place, rows["bound_s"].median())
    if frame["bound_s"].notna().any():
        handles.append(_bound_handle("bound: plain reads of the disk or plain gets, and the step"))
    if wrong:
        handles.append(bar_handle("white", "not what was saved", _WRONG))
    name_places(axes, [_name_of(frame[frame["way"] == way]) for way in ways], "")
    axes.set_xlim(-0.6, len(ways) - 0.4)
    axes.set_ylabel("s")
    axes.set_ylim(0, 1.15 * float(frame["back_s"].max()))
    draw_grid(axes)
    return handles


@one_panel(remote_caption, _partial_text, _title, _more_below)
def _draw_bytes(axes: Axes, frame: pd.DataFrame, _: Width) -> list[Any]:
    """A bar for each state: what is sent, in the frame of the complete state; a dashed line is what changes."""
    ways = list(dict.fromkeys(frame["way"]))
    colours = [style.colour for style in series_styles(len(ways))]
    known = frame[frame["checkpoint"] >= _KNOWN_FROM]
    for place, (way, colour) in enumerate(zip(ways, colours, strict=True)):
        rows = known[known["way"] == way]
        sent = float(rows["sent_bytes"].median()) / MIB
        complete = float(rows["state_bytes"].median()) / MIB
        axes.bar(place, complete, _BAR, fill=False, edgecolor=INK, linewidth=0.7, linestyle=(0, (1, 2)))
        draw_bar(axes, place, _BAR, sent, sent, colour, "")
        draw_repetitions(axes, [place] * len(rows), [value / MIB for value in rows["sent_bytes"]], 2.4)
        _write_over(axes, place, sent, f"{sent:.0f}")
        _draw_bound(axes, place, rows["changed_bytes"].median() / MIB)
    name_places(axes, [_name_of(frame[frame["way"] == way]) for way in ways], "")
    axes.set_xlim(-0.6, len(ways) - 0.4)
    axes.set_ylabel("MiB")
    axes.set_ylim(0, 1.15 * float(frame["state_bytes"].max()) / MIB)
    draw_grid(axes)
    dotted = Line2D([], [], color=INK, linewidth=0.7, linestyle=(0, (1, 2)), label="the complete state")
    return [dotted, _bound_handle("bound: what a step changes")]


def _name_of(rows: pd.DataFrame) -> str:
    """The way's name; of one that leaves the machine, with how far its newest checkpoint there is from the training."""
    name = str(rows["label"].iloc[0])
    if rows["lag_steps"].isna().all():
        return name
    steps, longest = float(rows["lag_steps"].median()), float(rows["lag_steps_max"].max())
    return f"{name}\nlag {steps:.0f} steps ({rows['lag_s'].median():.2g} s), at most {longest:.0f}"


def _write_over(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=LABEL_PT)


def _draw_bound(axes: Axes, place: float, value: float) -> None:
    if pd.notna(value):
        axes.hlines(value, place - 0.42, place + 0.42, color="black", linewidth=1.4, linestyle=_DASHES, zorder=6)


def _bound_handle(label: str) -> Line2D:
    return Line2D([], [], color="black", linewidth=1.4, linestyle=_DASHES, label=label)


_PANELS: Final = {"training": _draw_training, "return": _draw_return, "bytes": _draw_bytes}
plot_remote = plotter(draw_remote, read_remote, _partial_text)
