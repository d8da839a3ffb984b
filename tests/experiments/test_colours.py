"""Colours of systems: all different, also for readers who lack one kind of cone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lastgood.checkpointers.registry import checkpointer_class, checkpointer_names, system_traits
from lastgood.experiments.plots.style import BOUND_COLOUR, series_styles
from lastgood.experiments.systems.labels import (
    LINE_CONTRAST,
    NONE_COLOUR,
    SPARE_COLOURS,
    SystemStyle,
    contrast_with_white,
    system_styles,
)
from tests.support.colours import VISIONS, apart, ciede2000, lightness

LEAST = 10.0
"""CIEDE2000: several times what two people call different, side by side."""
LEAST_CONTRAST = 2.0
"""Of an area with white paper."""
LEAST_STEP = 7.0
"""Of CIELAB's lightness, between two greys that can be told apart without lying side by side."""
FIGURE_8 = ("sync", "checkfreq", "gpm", "gemini", "dcp", "pccheck")
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


# Black on white is 21 to 1; the others are WebAIM's contrast checker's numbers.
@pytest.mark.parametrize(
    ("colour", "expected"), [("#000000", 21.0), ("#FFFFFF", 1.0), ("#767676", 4.54), ("#FF0000", 4.0)]
)
def test_the_contrast_is_that_of_known_examples(colour: str, expected: float) -> None:
    assert contrast_with_white(colour) == pytest.approx(expected, abs=0.005)


def test_areas_and_lines_stand_out_on_paper() -> None:
    areas = {name: style.colour for name, style in system_styles(BUILT_IN).items()}
    areas |= {f"spare {number}": colour for number, colour in enumerate(SPARE_COLOURS)}
    assert {name: colour for name, colour in areas.items() if contrast_with_white(colour) < LEAST_CONTRAST} == {}
    lines = {name: SystemStyle(name, colour).line_colour for name, colour in areas.items()}
    lines |= {style.marker: style.colour for style in series_styles(7)} | {"bound": BOUND_COLOUR, "none": NONE_COLOUR}
    assert {name: colour for name, colour in lines.items() if contrast_with_white(colour) < LINE_CONTRAST} == {}
    # A dark colour stays as it is, and a pale one keeps its hue.
    assert lines["pccheck"] == areas["pccheck"]
    assert SystemStyle("pale", "#FFFF00").line_colour.endswith("00")


def test_systems_of_figure_8_are_told_apart_without_colour() -> None:
    lights = {name: lightness(style.colour) for name, style in system_styles(list(FIGURE_8)).items()}
    alike = [
        pair for pair in itertools.combinations(FIGURE_8, 2) if abs(lights[pair[0]] - lights[pair[1]]) < LEAST_STEP
    ]
    assert alike == []
    # Checkmate, which joins them at interval 1, differs from those beside it.
    ranked = list(system_styles([*FIGURE_8, "checkmate"]).values())
    steps = [abs(lightness(one.colour) - lightness(other.colour)) for one, other in itertools.pairwise(ranked)]
    assert min(steps) >= LEAST_STEP
