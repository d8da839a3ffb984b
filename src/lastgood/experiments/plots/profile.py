"""A profile of the loss's lag: the surface, how sure it is, and the points that were probed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from lastgood.errors import ConfigError
from lastgood.experiments.plots.canvas import HALO, INK, LABEL_PT, plot_style, save_figure
from lastgood.experiments.plots.style import WIDTHS_IN
from lastgood.sparse.control.profile import Profile, Surface

__all__ = ["draw_profile", "plot_profile"]

_HEIGHT_IN = 3.1
_LEVELS = 8


def plot_profile(profile: Profile, source: str, out_stem: Path) -> list[Path]:
    """Into `out_stem` + .pdf, .png and .svg. Raises ConfigError, which names `source`, without a surface."""
    if profile.surface is None:
        raise ConfigError(f"{source}: too few probes for a surface so far: {len(profile.probes)}")
    with plot_style():
        return save_figure(draw_profile(profile, profile.surface), out_stem)


def draw_profile(profile: Profile, surface: Surface) -> Figure:
    """Two panels over batch size and compression: the lag, and its standard deviation."""
    wanted = profile.wanted
    figure = Figure(figsize=(WIDTHS_IN["double"], _HEIGHT_IN), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, rows, title in (
        (left, surface.lags, "lag of the loss"),
        (right, surface.uncertainties, "standard deviation of it"),
    ):
        _panel(axes, profile, surface, np.array(rows), title)
    left.set_ylabel("compression")
    repeats = "" if wanted.repeats == 1 else f", mean of {wanted.repeats} repetitions"
    figure.suptitle(
        f"{wanted.workload}, {wanted.compressor}, staleness {wanted.staleness}: the loss after {wanted.part_samples} "
        f"samples less that of batches of {wanted.least_samples}\nwithout compression and staleness{repeats}; "
        f"circles: the {len(profile.probes)} probes, with their own lags",
        fontsize=LABEL_PT,
        x=0.01,
        ha="left",
    )
    return figure


def _panel(axes: Axes, profile: Profile, surface: Surface, values: Any, title: str) -> None:
    across = np.log2(surface.samples)
    up = [-np.log10(1 - one) for one in surface.compressions]
    drawn = axes.contourf(across, up, values.T, _LEVELS, cmap="cividis")
    axes.figure.colorbar(drawn, ax=axes)
    for probe in profile.probes:
        x, y = np.log2(probe.samples), -np.log10(1 - probe.compression)
        axes.plot(x, y, "o", markersize=3.5, markerfacecolor="white", markeredgecolor=INK, clip_on=False, zorder=5)
        axes.annotate(
            f"{probe.lag:.2g}", (x, y), (2, 3), textcoords="offset points", fontsize=5.5, path_effects=HALO, zorder=6
        )
    octaves = range(int(np.ceil(across[0])), int(np.floor(across[-1])) + 1)
    axes.xaxis.set_major_locator(FixedLocator(list(octaves)))
    axes.xaxis.set_major_formatter(FixedFormatter([str(2**one) for one in octaves]))
    axes.yaxis.set_major_locator(FixedLocator(up[:: max(1, len(up) // 4)]))
    axes.yaxis.set_major_formatter(
        FixedFormatter([f"{one:.4g}" for one in surface.compressions[:: max(1, len(up) // 4)]])
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("samples of the batch")
    axes.set_title(title, fontsize=LABEL_PT + 1)
