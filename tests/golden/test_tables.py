"""From kept records to a CSV file to the byte, and from kept CSV files to the numbers that figures show.

Most records were measured, small; those over several ranks are made up. Files in data/tables that end in ``_kept`` are
what `lastgood collect` gave; the others lay in figures/measured. data/drawn has the data of lines, areas and bars, the
limits and the labels. Colours, and words of captions, are no part of it. Remade by
``python -m tests.golden.support.remake tables drawn``.
"""

from __future__ import annotations

import json
import math

import matplotlib
import pytest
from packaging.version import Version

from tests.golden.support.adapters import figure_names
from tests.golden.support.drawing import drawn_names, drawn_numbers
from tests.golden.support.tables import DATA, PANELS, collected


@pytest.mark.parametrize(("figure", "panel"), PANELS)
def test_records_give_the_kept_csv_to_the_byte(figure, panel, tmp_path):
    for name, content in collected(figure, panel, tmp_path).items():
        assert content == (DATA / "tables" / name).read_bytes()


@pytest.mark.parametrize("name", drawn_names())
def test_a_csv_gives_the_kept_picture(name):
    if name.startswith("fig11") and Version(matplotlib.__version__) < Version("3.11"):
        pytest.skip("before 3.11 (Python 3.10 has no newer one) matplotlib chose limits of logarithmic axes otherwise")
    expected = json.loads((DATA / "drawn" / f"{name}.json").read_text(encoding="utf-8"))
    assert len(expected) == 1
    assert list(differences(drawn_numbers(name), expected)) == []


def test_every_figure_is_among_them():
    # Figure 8f is drawn as 8e is.
    assert {name.split("_")[0] for name in drawn_names()} == {*figure_names()} - {"fig8f"}


def differences(found, expected, place=""):
    """Where the two differ; numbers may by one in 1e9."""
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        for key, value in expected.items():
            yield from differences(found[key], value, f"{place}.{key}")
    elif isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        for number, value in enumerate(expected):
            yield from differences(found[number], value, f"{place}[{number}]")
    elif isinstance(expected, float) and isinstance(found, float):
        if not math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-12):
            yield f"{place}: {found} is not {expected}"
    elif found != expected:
        yield f"{place}: {found!r} is not {expected!r}"


def test_differences_are_seen():
    kept = {"a": [1.0, None, "x"]}
    assert list(differences({"a": [1.0 + 1e-11, None, "x"]}, kept)) == []
    assert list(differences({"a": [1.001, None, "x"]}, kept)) == [".a[0]: 1.001 is not 1.0"]
    assert list(differences({"a": [1.0, None]}, kept)) and list(differences({}, kept))
