"""The artefact's goodput formulas: values computed by hand, and what must hold for all terms."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgood.experiments.formulas.goodput import IDEAL, formula_of, goodput, lost_s

SYSTEMS = ("checkfreq", "gemini", "gpm", IDEAL, "pccheck", "sync", "dcp")
INTERVALS = st.integers(1, 1000)
SECONDS = st.floats(1e-4, 1e3)
FLIGHTS = st.integers(1, 16)


# f = 10, t = 0.5 s, L = 2 s, so f*t = 5 s and f*t/2 = 2.5 s.
@pytest.mark.parametrize(
    ("system", "write_s", "max_in_flight", "expected"),
    [
        ("checkfreq", 3.0, 2, 7.0),
        ("gemini", 3.0, 2, 7.0),
        ("dcp", 3.0, 2, 7.0),
        ("gpm", 3.0, 2, 4.5),
        ("sync", 3.0, 2, 4.5),
        (IDEAL, 3.0, 2, 4.5),
        # Tw/t = 6 iterations, f*N = 20: half of 6 iterations, 1.5 s, on top of 4.5 s.
        ("pccheck", 3.0, 2, 6.0),
        # Tw/t = 60 iterations, f*N = 20: half of 20 iterations, 5 s.
        ("pccheck", 30.0, 2, 9.5),
        ("pccheck", 30.0, 1, 7.0),
        ("pccheck", 0.0, 4, 4.5),
    ],
)
def test_work_lost_is_what_one_computes_by_hand(
    system: str, write_s: float, max_in_flight: int, expected: float
) -> None:
    assert lost_s(system, 10, 0.5, 2.0, write_s, max_in_flight) == pytest.approx(expected, rel=1e-12)


def test_goodput_is_what_one_computes_by_hand() -> None:
    # 1000 s, 10 failures of 20 s: 800 s are left; at 0.5 s an iteration 1600 iterations in 1000 s.
    assert goodput(1000.0, 10, 20.0, 0.5) == pytest.approx(1.6, rel=1e-12)
    assert goodput(1000.0, 0, 20.0, 0.5) == pytest.approx(2.0, rel=1e-12)
    # 60 failures of 20 s are more than the trace holds.
    assert goodput(1000.0, 60, 20.0, 0.5) == 0.0


@given(system=st.sampled_from(SYSTEMS), f=INTERVALS, t=SECONDS, load=SECONDS, write=SECONDS, n=FLIGHTS)
def test_no_system_loses_less_than_ideal(system: str, f: int, t: float, load: float, write: float, n: int) -> None:
    ideal = lost_s(IDEAL, f, t, load, write, n)
    assert lost_s(system, f, t, load, write, n) >= ideal >= load
    assert lost_s(system, f + 1, t, load, write, n) > lost_s(system, f, t, load, write, n)


@given(f=INTERVALS, t=SECONDS, load=SECONDS, write=SECONDS, n=FLIGHTS)
def test_more_in_flight_and_slower_writes_lose_more(f: int, t: float, load: float, write: float, n: int) -> None:
    lost = lost_s("pccheck", f, t, load, write, n)
    assert lost_s("pccheck", f, t, load, write, n + 1) >= lost
    assert lost_s("pccheck", f, t, load, 2 * write, n) >= lost
    assert lost <= load + f * t / 2 * (1 + n) * (1 + 1e-9)


@given(trace=SECONDS, failures=st.integers(0, 10), lost=SECONDS, t=SECONDS)
def test_goodput_lies_between_nothing_and_the_throughput(trace: float, failures: int, lost: float, t: float) -> None:
    found = goodput(trace, failures, lost, t)
    assert 0 <= found <= (1 / t) * (1 + 1e-9)
    assert goodput(trace, failures + 1, lost, t) <= found


def test_none_has_no_formula() -> None:
    with pytest.raises(ValueError, match="none"):
        formula_of("none")
    with pytest.raises(ValueError, match="none"):
        lost_s("none", 1, 1.0, 1.0, 1.0, 1)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_terms_outside_their_range_are_refused_by_name(bad: float) -> None:
    with pytest.raises(ValueError, match="load_s"):
        lost_s("gpm", 1, 1.0, bad, 1.0, 1)
    with pytest.raises(ValueError, match="iteration_s"):
        lost_s("gpm", 1, bad, 1.0, 1.0, 1)
    with pytest.raises(ValueError, match="write_s"):
        lost_s("pccheck", 1, 1.0, 1.0, bad, 1)
    with pytest.raises(ValueError, match="trace_s"):
        goodput(bad, 1, 1.0, 1.0)
    with pytest.raises(ValueError, match="failures"):
        goodput(1.0, bad, 1.0, 1.0)
    with pytest.raises(ValueError, match="interval_steps"):
        lost_s("gpm", 0, 1.0, 1.0, 1.0, 1)
    with pytest.raises(ValueError, match="max_in_flight"):
        lost_s("pccheck", 1, 1.0, 1.0, 1.0, 0)
