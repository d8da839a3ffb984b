"""StellaTrain's figure: iterations per second over links of several rates, and what optimizers and compressors take."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from lastgood.experiments.plots.canvas import (
    HALO,
    INK,
    LABEL_PT,
    Width,
    bar_handle,
    draw_bar,
    draw_grid,
    draw_repetitions,
    name_places,
    one_panel,
    partial_line,
    plotter,
)
from lastgood.experiments.plots.stellatrain_caption import stellatrain_caption
from lastgood.experiments.plots.style import BOUND_COLOUR, series_styles
from lastgood.experiments.records.stellatrain import ALONE, READ
from lastgood.experiments.tables.frames import read_panel
from lastgood.experiments.tables.stellatrain import StellatrainRow

__all__ = ["draw_stellatrain", "plot_stellatrain", "read_stellatrain"]

_GROUP: Final = 0.86
_NUMBER: Final = 0.17
"""Of the axis: the height of a number that stands upright."""
_STALE: Final = "////"
_DASHES: Final[Any] = (0, (2.5, 0.8))
_TITLES: Final = {
    "links": "StellaTrain: one training on two nodes, by rate of their links",
    "kernels": "StellaTrain: updates of what was sent, and compressors",
}


def read_stellatrain(path: Path) -> pd.DataFrame:
    """Read a panel's tidy CSV. Raises LastgoodError, naming the file and what is wrong, if it is not one."""
    return read_panel(path, StellatrainRow)


def _partial_text(frame: pd.DataFrame) -> str:
    return partial_line(frame["record"].nunique(), int(frame["runs_expected"].max()), frame["runs_missing"])


def _title(frame: pd.DataFrame) -> str:
    return _TITLES[str(frame["part"].iloc[0])]


def _more_below(frame: pd.DataFrame) -> float:
    lines = 0 if str(frame["part"].iloc[0]) == "links" else 2
    return lines * (LABEL_PT + 3) / 72


def draw_stellatrain(frame: pd.DataFrame, width: Width = "double", *, caption: bool = True) -> Figure:
    """The panel of the part that the rows are of."""
    return _PANELS[str(frame["part"].iloc[0])](frame, width, caption=caption)


@one_panel(stellatrain_caption, _partial_text, _title, _more_below)
def _draw_links(axes: Axes, frame: pd.DataFrame, _: Width) -> list[Any]:
    """A group for each rate; a bar for each way, in the frame of its bound; the number stands over it."""
    rates = list(dict.fromkeys(frame["rate_bits_per_s"]))
    shown = frame[frame["way"] != ALONE]
    looks = _looks(list(dict.fromkeys(shown["way"])))
    bar = _GROUP / len(looks)
    top = float(
        shown[["steps_per_s", "bound_steps_per_s"]].groupby([shown["way"], shown["rate_bits_per_s"]]).max().max().max()
    )
    for group, rate in enumerate(rates):
        for place, (way, (colour, hatch)) in enumerate(looks.items()):
            rows = shown[(shown["way"] == way) & (shown["rate_bits_per_s"] == rate)]
            if rows.empty:
                continue
            x = group + (place - (len(looks) - 1) / 2) * bar
            median = float(rows["steps_per_s"].median())
            draw_bar(axes, x, 0.9 * bar, median, median, colour, hatch)
            draw_repetitions(axes, [x] * len(rows), list(rows["steps_per_s"]), 1.8)
            highest = float(rows["steps_per_s"].max())
            if rows["bound_steps_per_s"].notna().any():
                bound = float(rows["bound_steps_per_s"].median())
                axes.hlines(bound, x - 0.5 * bar, x + 0.5 * bar, color=BOUND_COLOUR, linewidth=1.4, zorder=7)
                if bound - highest < _NUMBER * top:  # else the number stands between bar and bound
                    highest = max(highest, bound)
            _write_over(axes, x, highest, _three_digits(median))
    name_places(axes, [f"{rate / 1e6:g} Mbit/s" for rate in rates], "rate of each node's link")
    axes.set_xlim(-0.5, len(rates) - 0.5)
    axes.set_ylabel("iterations/s")
    axes.set_ylim(0, 1.2 * top)
    draw_grid(axes)
    names = shown.drop_duplicates("way").set_index("way")["label"]
    handles: list[Any] = [bar_handle(colour, str(names[way]), hatch) for way, (colour, hatch) in looks.items()]
    return [*handles, Line2D([], [], color=BOUND_COLOUR, linewidth=1.4, label="bound: compute alone, or bytes/link")]


def _looks(ways: list[str]) -> dict[str, tuple[str, str]]:
    """Colour and hatch: a compressor has one colour, and staleness 1 a hatch."""
    names = {way: way if way.startswith("powersgd") else way.removesuffix("-0").removesuffix("-1") for way in ways}
    different = list(dict.fromkeys(names.values()))
    colours = {name: style.colour for name, style in zip(different, series_styles(len(different)), strict=True)}
    return {way: (colours[name], _STALE if way == f"{name}-1" else "") for way, name in names.items()}


@one_panel(stellatrain_caption, _partial_text, _title, _more_below)
def _draw_kernels(axes: Axes, frame: pd.DataFrame, _: Width) -> list[Any]:
    """A marker for each kernel, over the times of its rounds; a compressor's name with the energy that it keeps."""
    milliseconds = 1000 * frame["seconds"]
    shown = [way for way in dict.fromkeys(frame["way"]) if way != READ]
    families = {way: "compressor" if _keeps(frame, way) else way.partition("-")[0] for way in shown}
    kinds = list(dict.fromkeys(families.values()))
    styles = dict(zip(kinds, series_styles(len(kinds)), strict=True))
    names = []
    for place, way in enumerate(shown):
        rows = frame["way"] == way
        style, values = styles[families[way]], milliseconds[rows]
        axes.vlines(place, values.min(), values.max(), color=INK, linewidth=0.8, path_effects=HALO, zorder=5)
        look: Any = {"color": style.colour, "marker": style.marker, "markersize": 6, "markeredgecolor": INK}
        axes.plot([place], [float(values.median())], markeredgewidth=0.5, zorder=6, **look)
        text = _three_digits(float(values.median()))
        axes.annotate(text, (place, values.max()), (0, 5), textcoords="offset points", ha="center", fontsize=LABEL_PT)
        label = str(frame[rows]["label"].iloc[0])
        if "\n" not in label:
            label += "\n"
        kept = frame[rows]["energy_kept"].iloc[0]
        names.append(f"{label}\n{kept:.0%}" if pd.notna(kept) else label)
    read = float(milliseconds[frame["way"] == READ].median())
    axes.axhline(read, color=BOUND_COLOUR, linewidth=1.2, linestyle=_DASHES, zorder=2)
    axes.set_yscale("log")
    axes.set_ylim(0.6 * float(milliseconds.min()), 2.2 * float(milliseconds.max()))
    axes.yaxis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    name_places(axes, names, "")
    axes.set_xlim(-0.6, len(shown) - 0.4)
    axes.set_ylabel("ms")
    draw_grid(axes)
    line = Line2D([], [], color=BOUND_COLOUR, linewidth=1.2, linestyle=_DASHES, label=f"one read ({read:.3g} ms)")
    texts = {"sgd": "SGD with momentum", "adam": "Adam", "compressor": "compressor, and the energy that it keeps"}
    marks = [
        Line2D([], [], color=style.colour, marker=style.marker, linestyle="none", markersize=6, label=texts[kind])
        for kind, style in styles.items()
    ]
    return [*marks, line]


def _keeps(frame: pd.DataFrame, way: str) -> bool:
    return bool(frame[frame["way"] == way]["energy_kept"].notna().any())


def _three_digits(value: float) -> str:
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:.0f}"


def _write_over(axes: Axes, x: float, y: float, text: str) -> None:
    look: Any = {"ha": "center", "va": "bottom", "rotation": 90, "fontsize": 0.9 * LABEL_PT}
    axes.annotate(text, (x, y), (0, 3), textcoords="offset points", **look)


_PANELS: Final = {"links": _draw_links, "kernels": _draw_kernels}
plot_stellatrain = plotter(draw_stellatrain, read_stellatrain, _partial_text)
