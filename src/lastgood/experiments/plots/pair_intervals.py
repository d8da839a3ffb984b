"""Intervals of ratios that were measured in pairs of blocks, as whiskers; and triangles for what passes its bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from lastgood.experiments.formulas.pairs import Interval
from lastgood.experiments.plots.canvas import HALO, INK
from lastgood.experiments.tables.frames import pair_interval

__all__ = ["PairInterval", "draw_above_bound", "draw_pair_interval", "of_pairs", "pair_handles"]

_NOISY_DASHES: Any = (0, (1.5, 1.2))
_PASSES: dict[str, Any] = {"markersize": 3.5, "color": INK}
_UP: Final = 6
_DOWN: Final = 7
"""matplotlib's carets, whose tips are at the point."""


@dataclass(frozen=True)
class PairInterval:
    """What a cell has if it was measured in pairs."""

    ratio: Interval
    """Training with checkpoints to training without."""
    noisy: bool
    """It stayed wide until the time was used up."""


def of_pairs(runs: pd.DataFrame) -> PairInterval | None:
    """Of the repetitions of a cell; None if a run was measured in one stretch."""
    found = pair_interval(runs)
    if found is None:
        return None
    return PairInterval(found, noisy=bool((runs["rounds_ended_by"] == "budget").any()))


def draw_pair_interval(
    axes: Axes,
    x: float,
    half_width: float,
    found: PairInterval,
    on_axis: Callable[[float], float],
    *,
    limits: tuple[float, float] = (-math.inf, math.inf),
    zorder: float = 8,
) -> None:
    """A whisker, in dashes if it is noisy.

    Nothing if all pairs were disturbed. `on_axis` says where a ratio lies on the y axis. A whisker that goes beyond
    the `limits` of that has no end there.
    """
    if found.ratio.says_nothing:
        return
    worse, better = on_axis(found.ratio.low), on_axis(found.ratio.high)
    low, high = limits
    dashes = _NOISY_DASHES if found.noisy else "solid"
    look: dict[str, Any] = {"color": INK, "linewidth": 0.9, "path_effects": HALO, "zorder": zorder}
    axes.vlines(x, worse, better, linestyle=dashes, **look)
    axes.hlines([end for end in (worse, better) if low <= end <= high], x - half_width, x + half_width, **look)


def draw_above_bound(axes: Axes, x: float, y: float, *, better_is_lower: bool = False) -> None:
    """A triangle for a cell that passes its bound: at its better end, or the edge of the axes."""
    low, high = sorted(axes.get_ylim())
    look = _PASSES | {"marker": _DOWN if better_is_lower else _UP}
    axes.plot([x], [min(max(y, low), high)], linestyle="none", clip_on=False, zorder=8, **look)


def pair_handles(
    cells: Iterable[PairInterval | None], *, above_bound: bool, better_is_lower: bool = False
) -> list[Any]:
    """Legend entries for what is marked about intervals, and about a cell above its bound if there is one."""
    known = [cell for cell in cells if cell is not None]
    found: list[Any] = []
    if any(cell.noisy for cell in known):
        found.append(Line2D([], [], color=INK, linewidth=0.9, linestyle=_NOISY_DASHES, label="stayed noisy"))
    if above_bound:
        label = "better than its bound" if better_is_lower else "above its bound"
        look = _PASSES | {"marker": _DOWN if better_is_lower else _UP}
        found.append(Line2D([], [], linestyle="none", label=label, **look))
    return found
