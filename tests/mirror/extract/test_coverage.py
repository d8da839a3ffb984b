"""Ranges that are there, against a plain set of bytes."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from lastgood.mirror.extract.coverage import Coverage

RANGES = st.lists(st.tuples(st.integers(-3, 44), st.integers(-3, 44)), max_size=30)


def filled(ranges):
    coverage, held = Coverage(40), set()
    for begin, end in ranges:
        new = set(range(max(begin, 0), min(end, 40))) - held
        assert coverage.add(begin, end) == len(new)
        held |= new
    return coverage, held


@settings(max_examples=300, deadline=None)
@given(RANGES, RANGES)
def test_it_is_a_set_of_bytes(ranges, others):
    coverage, held = filled(ranges)
    assert coverage.held == len(held) and coverage.complete == (len(held) == 40)
    assert {at for begin, end in coverage.ranges() for at in range(begin, end)} == held
    assert {at for begin, end in coverage.missing() for at in range(begin, end)} == set(range(40)) - held
    ends = [edge for pair in coverage.ranges() for edge in pair]
    assert ends == sorted(set(ends)), "ranges are in order, and neighbours that touch are one"
    other, also = filled(others)
    assert coverage.overlap(other) == len(held & also)


def test_nothing_is_complete_at_once():
    assert Coverage(0).complete
