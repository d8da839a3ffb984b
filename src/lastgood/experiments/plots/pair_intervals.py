"""Intervals of ratios that were measured in pairs of blocks, as whiskers."""

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

__all__ = ["PairInterval", "draw_pair_interval", "of_pairs", "pair_handles"]

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
    above_bound: bool


def of_pairs(runs: pd.DataFrame) -> PairInterval | None:
    """Of the repetitions of a cell; None if a run was measured in one stretch."""
    found = pair_interval(runs)
    if found is None:
        return None
    noisy, above = (runs["rounds_ended_by"] == "budget").any(), runs["above_bound"].notna().any()
    return PairInterval(found, noisy=bool(noisy), above_bound=bool(above))


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
    """A whisker, in dashes if it is noisy; a triangle at its better end if the cell passes its bound.

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
    if found.above_bound:
        marker = _UP if better >= worse else _DOWN
        axes.plot(
            [x], [min(max(better, low), high)], linestyle="none", clip_on=False, zorder=8, marker=marker, **_PASSES
        )


def pair_handles(cells: Iterable[PairInterval | None], *, better_is_lower: bool = False) -> list[Any]:
    """Legend entries for what is marked about intervals."""
    known = [cell for cell in cells if cell is not None]
    found: list[Any] = []
    if any(cell.noisy for cell in known):
        found.append(Line2D([], [], color=INK, linewidth=0.9, linestyle=_NOISY_DASHES, label="stayed noisy"))
    if any(cell.above_bound for cell in known):
        label = "better than its bound" if better_is_lower else "above its bound"
        look = _PASSES | {"marker": _DOWN if better_is_lower else _UP}
        found.append(Line2D([], [], linestyle="none", label=label, **look))
    return found
