"""How systems and workloads are named, ordered and coloured in all figures and tables. Needs no matplotlib."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lastgood.checkpointers.registry import BASELINE, all_traits, system_traits
from lastgood.experiments.formulas.goodput import IDEAL

__all__ = [
    "NONE_COLOUR",
    "SPARE_COLOURS",
    "SystemStyle",
    "panel_letter",
    "panel_title",
    "system_label",
    "system_rank",
    "system_styles",
    "workload_label",
]

# Most colours of systems are those of Okabe and Ito (2008). Black is for training without checkpoints, vermillion for
# the bound (plots/style.py).
NONE_COLOUR = "#000000"
SPARE_COLOURS = ("#A8F0A8", "#184860", "#300030")
"""For systems that declare no colour, or one that another system of the figure has. After these come the colours of
systems that the figure does not show."""

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
