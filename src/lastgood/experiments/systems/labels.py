"""How systems and workloads are named, ordered and coloured, alike in every figure and table. Needs no matplotlib."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

__all__ = [
    "BOUND_COLOUR",
    "NONE_COLOUR",
    "RC_PARAMS",
    "WIDTHS_IN",
    "SeriesStyle",
    "SystemStyle",
    "panel_letter",
    "panel_title",
    "series_styles",
    "system_label",
    "system_rank",
    "system_styles",
    "workload_label",
]

# The colours of Okabe and Ito (2008), which people with any common colour vision tell apart; black and vermillion are
# kept for the two lines that every figure has.
NONE_COLOUR = "#000000"
BOUND_COLOUR = "#D55E00"
_SPARE_COLOURS = ("#CC79A7", "#F0E442", "#56B4E9", "#999999", "#009E73", "#E69F00", "#0072B2")

_SYSTEMS = {
    "none": ("no checkpoints", NONE_COLOUR),
    "sync": ("sync", "#999999"),
    "checkfreq": ("CheckFreq", "#E69F00"),
    "gpm": ("GPM", "#56B4E9"),
    "gemini": ("Gemini", "#CC79A7"),
    "dcp": ("PyTorch DCP", "#F0E442"),
    "checkmate": ("Checkmate", "#009E73"),
    "flowcheck": ("FlowCheck", "#009E73"),
    "pccheck": ("PCcheck", "#0072B2"),
    "ideal": ("Ideal", NONE_COLOUR),
}
"""Every system that has a place of its own, in the order of bars and rows: baselines first, the papers' own last."""

_WORKLOADS = {
    "vgg16": ("a", "VGG-16"),
    "bert": ("b", "BERT"),
    "transformer_xl": ("c", "Transformer-XL"),
    "opt": ("d", "OPT"),
    "bloom": ("f", "BLOOM"),
    "resnet18": ("", "ResNet-18"),
    "resnet50": ("", "ResNet-50"),
    "blob": ("", "blob"),
}
"""The panel letter of PCcheck's figure 8, and the name to print."""

WIDTHS_IN = {"single": 3.4, "double": 7.0}
"""One column and the full width of a two-column paper, in inches."""

RC_PARAMS: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 7.5,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 7.0,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "hatch.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    # TrueType in PDF, as publishers ask; outlines in SVG, so that it looks the same without the font.
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    # Names inside the SVG come from this and not from a clock, so that a second drawing is the same file.
    "svg.hashsalt": "lastgood",
}


@dataclass(frozen=True)
class SystemStyle:
    """A system's name in print and its colour."""

    label: str
    colour: str


@dataclass(frozen=True)
class SeriesStyle:
    """Colour and marker of one line among several: told apart without colour too."""

    colour: str
    marker: str


_SERIES = (
    SeriesStyle("#0072B2", "o"),
    SeriesStyle("#E69F00", "s"),
    SeriesStyle("#009E73", "^"),
    SeriesStyle("#CC79A7", "v"),
    SeriesStyle("#56B4E9", "D"),
    SeriesStyle("#999999", "P"),
    SeriesStyle("#F0E442", "p"),
)


def series_styles(count: int) -> list[SeriesStyle]:
    """Styles of `count` lines, in order; they begin again where there are more lines than styles."""
    return [_SERIES[number % len(_SERIES)] for number in range(count)]


def system_rank(system: str) -> tuple[int, str]:
    """Sort key of systems: the fixed order, then all others by name."""
    order = list(_SYSTEMS)
    return (order.index(system) if system in order else len(order), system)


def system_label(system: str) -> str:
    """The name of `system` in print."""
    return _SYSTEMS[system][0] if system in _SYSTEMS else system


def system_styles(systems: list[str]) -> dict[str, SystemStyle]:
    """A style for each of `systems`, in the fixed order; systems from other packages get the colours that are left."""
    known = {system: _SYSTEMS[system][1] for system in systems if system in _SYSTEMS}
    spare = [colour for colour in _SPARE_COLOURS if colour not in known.values()]
    styles = {}
    for system in sorted(systems, key=system_rank):
        colour = known.get(system)
        if colour is None:
            colour = spare.pop(0) if spare else _SPARE_COLOURS[-1]
        styles[system] = SystemStyle(system_label(system), colour)
    return styles


def panel_letter(workload: str) -> str:
    """The letter of the single-node panel of figure 8 that shows `workload`, or nothing."""
    return _WORKLOADS.get(workload, ("", ""))[0]


def workload_label(workload: str) -> str:
    """The name of `workload` in print."""
    return _WORKLOADS.get(workload, ("", workload))[1]


def panel_title(figure: str, workload: str, topic: str = "") -> str:
    """``Figure 8a: VGG-16``, or with a topic ``Figure 12: writer threads, VGG-16``."""
    number = figure.removeprefix("fig")
    letter = panel_letter(workload) if number == "8" else ""
    heading = f"Figure {number}{letter}" if re.fullmatch(r"\d+[a-z]?", number) else figure
    return f"{heading}: {', '.join(part for part in (topic, workload and workload_label(workload)) if part)}"
