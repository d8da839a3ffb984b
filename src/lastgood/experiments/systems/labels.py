"""How systems and workloads are named, ordered and coloured in all figures and tables. Needs no matplotlib."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = [
    "NONE_COLOUR",
    "SystemStyle",
    "panel_letter",
    "panel_title",
    "system_label",
    "system_rank",
    "system_styles",
    "workload_label",
]

# The colours of Okabe and Ito (2008), which people with any common colour vision tell apart; black is for training
# without checkpoints, vermillion for the bound (plots/style.py).
NONE_COLOUR = "#000000"
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


@dataclass(frozen=True)
class SystemStyle:
    """A system's name in print and its colour."""

    label: str
    colour: str


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
