"""Colours of systems: all different, also for readers who lack one kind of cone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lastgood.checkpointers.registry import checkpointer_class, checkpointer_names, system_traits
from lastgood.experiments.plots.style import BOUND_COLOUR
from lastgood.experiments.systems.labels import NONE_COLOUR, SPARE_COLOURS, system_styles
from tests.support.colours import VISIONS, apart, ciede2000

LEAST = 10.0
"""CIEDE2000: several times what two people call different, side by side."""
BUILT_IN = [name for name in checkpointer_names() if checkpointer_class(name).__module__.startswith("lastgood.")]


# Rows of the test data of Sharma, Wu and Dalal (2005), among them those at which hues wrap round.
@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, -1.0, 2.0), (50.0, 0.0, 0.0), 2.3669),
        ((50.0, 2.5, 0.0), (50.0, 0.0, -2.5), 4.3065),
        ((50.0, 2.5, 0.0), (73.0, 25.0, -18.0), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
        ((6.7747, -0.2908, -2.4247), (5.8714, -0.0985, -2.2286), 0.6377),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
    ],
)
def test_the_difference_is_that_of_the_published_examples(
    one: tuple[float, ...], other: tuple[float, ...], expected: float
) -> None:
    assert ciede2000(np.array(one), np.array(other)) == pytest.approx(expected, abs=5e-5)


def test_every_system_declares_a_colour_and_a_place() -> None:
    styles = system_styles(BUILT_IN)
    assert {name: style.colour for name, style in styles.items()} == {
        name: system_traits(name).colour for name in BUILT_IN
    }
    assert styles["none"].colour == NONE_COLOUR
    orders = [system_traits(name).order for name in BUILT_IN]
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("vision", VISIONS)
def test_no_two_colours_are_alike_to_any_reader(vision: str) -> None:
    colours = {name: style.colour for name, style in system_styles(BUILT_IN).items()}
    colours |= {"bound": BOUND_COLOUR, "paper": "#FFFFFF"}
    colours |= {f"spare {number}": colour for number, colour in enumerate(SPARE_COLOURS)}
    alike = [
        (one, other, round(apart(colours[one], colours[other], vision), 1))
        for one, other in itertools.combinations(colours, 2)
        if apart(colours[one], colours[other], vision) < LEAST
    ]
    assert alike == []
