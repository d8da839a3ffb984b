"""Rates of saves and loads through torch.distributed.checkpoint: groups of bars by operation and number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from lastgood.experiments.plots.canvas import (
    LABEL_PT,
    Width,
    bar_handle,
    draw_bar,
    draw_grid,
    is_false,
    is_true,
    name_places,
    one_panel,
    partial_line,
    plotter,
)
from lastgood.experiments.plots.captions import dcp_caption
from lastgood.experiments.plots.style import series_styles
from lastgood.experiments.tables.dcp import DcpRow
from lastgood.experiments.tables.frames import read_panel

__all__ = ["draw_dcp", "plot_dcp", "read_dcp"]

_GROUP_WIDTH: Final = 0.8
_NOT_FLUSHED: Final = "////"
_WRONG: Final = "xxxx"
_LATER: Final = {
    "medium": "disk",
    **dict.fromkeys(("cpu_s_per_gib", "server_cpu_s_per_gib", "requests", "failed_requests", "requests_usd"), None),
}
"""Columns that CSVs from before S3 lack."""
_Group = tuple[str, str, int]
"""Operation, medium and number of ranks."""


def read_dcp(path: Path) -> pd.DataFrame:
    """Read the panel's tidy CSV. Raises LastgoodError, naming the file and what is wrong, if it is not one."""
    return read_panel(path, DcpRow, _LATER)


def _partial_text(frame: pd.DataFrame) -> str:
    return partial_line(frame["record"].nunique(), int(frame["runs_expected"].max()), frame["runs_missing"])


def _title(frame: pd.DataFrame) -> str:
    first = frame.iloc[0]
    return f"torch.distributed.checkpoint: {first['model']}, {first['spread']}"


@one_panel(dcp_caption, _partial_text, _title, lambda _: (LABEL_PT + 2) / 72)
def draw_dcp(axes: Axes, frame: pd.DataFrame, _: Width) -> list[Any]:
    """Bars are medians, whiskers go from the slowest iteration to the fastest; lines over groups are the bounds."""
    operations = [name for name in ("save", "load") if name in set(frame["operation"])]
    groups: list[_Group] = [
        (operation, medium, ranks)
        for operation in operations
        for medium in ("disk", "s3")
        for ranks in sorted(set(frame[(frame["operation"] == operation) & (frame["medium"] == medium)]["ranks"]))
    ]
    labels = list(dict.fromkeys(frame["label"]))
    styles = dict(zip(labels, series_styles(len(labels)), strict=True))
    own = {medium: list(dict.fromkeys(rows["label"])) for medium, rows in frame.groupby("medium")}
    width = _GROUP_WIDTH / max(map(len, own.values()))
    hatches: set[str] = set()
    for place, group in enumerate(groups):
        there = _rows_of(frame, group)
        for number, label in enumerate(own[group[1]]):
            rows = there[there["label"] == label]
            if rows.empty:
                continue
            hatch = _hatch(rows)
            hatches.add(hatch)
            x = place + (number - (len(own[group[1]]) - 1) / 2) * width
            median = float(rows["mib_per_s"].median())
            draw_bar(axes, x, width, median, median, styles[label].colour, hatch)
            low, high = float(rows["mib_per_s_min"].min()), float(rows["mib_per_s_max"].max())
            axes.vlines(x, low, high, color="black", linewidth=0.8, zorder=5)
            axes.annotate(
                f"{median:.0f}",
                (x, high),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=LABEL_PT - 1,
            )
    handles = [bar_handle(styles[label].colour, label) for label in labels]
    handles += _draw_bounds(axes, frame, groups)
    if _NOT_FLUSHED in hatches:
        handles.append(bar_handle("white", "never flushed: ends in the page cache", _NOT_FLUSHED))
    if _WRONG in hatches:
        handles.append(bar_handle("white", "a load was different", _WRONG))
    words = {"disk": "", "s3": " S3"}
    name_places(axes, [f"{operation}{words[medium]}\n{ranks}" for operation, medium, ranks in groups], "ranks")
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.set_ylabel("MiB/s of the job")
    axes.set_ylim(0, None)
    draw_grid(axes)
    return handles


def _rows_of(frame: pd.DataFrame, group: _Group) -> pd.DataFrame:
    operation, medium, ranks = group
    return frame[(frame["operation"] == operation) & (frame["medium"] == medium) & (frame["ranks"] == ranks)]


def _hatch(rows: pd.DataFrame) -> str:
    if rows["equal"].map(is_false).any():
        return _WRONG
    flushed = rows["operation"].iloc[0] == "load" or rows["durable"].map(is_true).all()
    return "" if flushed else _NOT_FLUSHED


def _draw_bounds(axes: Axes, frame: pd.DataFrame, groups: list[_Group]) -> list[Any]:
    """A line over each group at the median of its runs' bounds; none if it is far above all bars."""
    top = 1.6 * float(frame["mib_per_s_max"].max())
    names: dict[str, None] = {}
    for place, group in enumerate(groups):
        rows = _rows_of(frame, group).dropna(subset=["bound_mib_per_s"])
        if rows.empty:
            continue
        bound = float(rows["bound_mib_per_s"].median())
        if bound <= top:
            axes.hlines(
                bound, place - 0.46, place + 0.46, color="black", linewidth=1.4, linestyle=(0, (4, 2)), zorder=6
            )
            names[str(rows["bound_of"].iloc[0])] = None
    if not names:
        return []
    return [Line2D([], [], color="black", linewidth=1.4, linestyle=(0, (4, 2)), label=f"bound: {', '.join(names)}")]


plot_dcp = plotter(draw_dcp, read_dcp, _partial_text)
