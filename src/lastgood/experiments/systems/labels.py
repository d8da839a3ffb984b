"""How systems and workloads are named, ordered and coloured in all figures and tables. Needs no matplotlib."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lastgood.checkpointers.registry import BASELINE, all_traits, system_traits
from lastgood.experiments.formulas.goodput import IDEAL

__all__ = [
    "LINE_CONTRAST",
    "NONE_COLOUR",
    "SPARE_COLOURS",
    "SystemStyle",
    "contrast_with_white",
    "panel_letter",
    "panel_title",
    "system_label",
    "system_rank",
    "system_styles",
    "workload_label",
]

# Colours of systems were searched near those of Okabe and Ito (2008): twice as dark as paper at least, told apart by
# readers who lack a kind of cone, and those of figure 8 in print without colour as well (tests/experiments/
# test_colours.py). Black is for training without checkpoints, vermillion for the bound (plots/style.py).
NONE_COLOUR = "#000000"
SPARE_COLOURS = ("#91B791", "#0C2C39", "#420E62")
"""For systems that declare no colour, or one that another system of the figure has. After these come the colours of
systems that the figure does not show."""
LINE_CONTRAST = 3.0
"""Of lines with white paper, at least (WCAG 2.2, 1.4.11)."""

_IDEAL_ORDER = 100
"""After the systems that the papers compare."""

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
    """Of areas."""

    @property
    def line_colour(self) -> str:
        """Of lines: the same hue, darker if it must be to stand out on white."""
        return _darkened(self.colour)


def contrast_with_white(colour: str) -> float:
    """The contrast of ``#RRGGBB`` with white paper, from 1 to 21, as WCAG defines it."""
    return 1.05 / (_luminance(colour) + 0.05)


def _luminance(colour: str) -> float:
    coded = [channel / 255 for channel in bytes.fromhex(colour[1:])]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in coded]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _darkened(colour: str) -> str:
    while contrast_with_white(colour) < LINE_CONTRAST:
        colour = "#" + bytes(int(0.97 * channel) for channel in bytes.fromhex(colour[1:])).hex().upper()
    return colour


def system_rank(system: str) -> tuple[int, str]:
    """Sort key of systems: the order that each declares, then the name."""
    return (_IDEAL_ORDER if system == IDEAL else system_traits(system).order, system)


def system_label(system: str) -> str:
    """The name of `system` in print."""
    return "Ideal" if system == IDEAL else system_traits(system).label or system


def system_styles(systems: list[str]) -> dict[str, SystemStyle]:
    """A style for each of `systems`, in their order. No two have one colour, as long as there are colours."""
    ranked = sorted(systems, key=system_rank)
    own: dict[str, str] = {}
    for system in ranked:
        colour = (system_traits(system).colour or "").upper()
        if colour and colour not in own.values():
            own[system] = colour
    others = (traits.colour for name, traits in all_traits()[0].items() if name != BASELINE)
    free = [colour for colour in dict.fromkeys([*SPARE_COLOURS, *others]) if colour and colour not in own.values()]
    styles = {}
    for system in ranked:
        colour = own.get(system) or (free.pop(0) if free else SPARE_COLOURS[-1])
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
