"""A shadow's update against its threads, a line for each number of shadows: a panel of Checkmate's figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from lastgood.experiments.plots.canvas import (
    Width,
    draw_grid,
    draw_repetitions,
    one_panel,
    partial_line,
    plotter,
)
from lastgood.experiments.plots.captions import optimizer_caption
from lastgood.experiments.plots.style import series_styles
from lastgood.experiments.tables.frames import read_panel
from lastgood.experiments.tables.optimizer import UpdateRow

__all__ = ["draw_optimizer", "plot_optimizer", "read_updates"]

_ASIDE = 0.06


def read_updates(path: Path) -> pd.DataFrame:
    """Read the panel's tidy CSV. Raises LastgoodError, naming the file and what is wrong, if it is not one."""
    return read_panel(path, UpdateRow)


def _partial_text(frame: pd.DataFrame) -> str:
    return partial_line(frame["record"].nunique(), int(frame["runs_expected"].max()))


def _title(frame: pd.DataFrame) -> str:
    first = frame.iloc[0]
    return f"Checkmate: a shadow's update, {first['model']} by {first['optimizer']}"


@one_panel(optimizer_caption, _partial_text, _title)
def draw_optimizer(axes: Axes, frame: pd.DataFrame, _: Width) -> list[Any]:
    """Markers are medians over a run's updates, circles the runs' medians if there are several."""
    threads = sorted(set(frame["threads"]))
    counts = sorted(set(frame["shadows"]))
    handles: list[Any] = []
    factor, unit = (1.0, "s") if frame["update_max_s"].max() >= 1 else (1000.0, "ms")
    for number, (style, shadows) in enumerate(zip(series_styles(len(counts)), counts, strict=True)):
        rows = frame[frame["shadows"] == shadows]
        medians = factor * rows.groupby("threads")["update_s"].median()
        # Beside each other, so that no whisker hides another.
        aside = _ASIDE * (number - (len(counts) - 1) / 2)
        places = [threads.index(count) + aside for count in medians.index]
        look: Any = {"color": style.colour, "marker": style.marker, "markersize": 5, "linewidth": 1.2}
        axes.plot(places, list(medians), **look)
        for place, count in zip(places, medians.index, strict=True):
            of_point = rows[rows["threads"] == count]
            low, high = factor * of_point["update_min_s"].min(), factor * of_point["update_max_s"].max()
            axes.vlines(place, low, high, color=style.colour, linewidth=0.8)
            values = [factor * float(value) for value in of_point["update_s"]]
            if len(values) > 1:
                draw_repetitions(axes, [place] * len(values), values, 2.4)
        name = f"{shadows} shadow{'' if shadows == 1 else 's'}"
        handles.append(Line2D([], [], label=name, **look))
    axes.set_xlim(-0.5, len(threads) - 0.5)
    axes.set_xticks(range(len(threads)), [str(count) for count in threads])
    axes.set_xlabel("threads of each shadow")
    axes.set_ylabel(f"one whole update ({unit})")
    axes.set_ylim(0, None)
    draw_grid(axes)
    return handles


plot_optimizer = plotter(draw_optimizer, read_updates, _partial_text)
