"""The bound: hand-computed values, and its shape in every argument."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgood.experiments.formulas.bound import Bound, throughput_bound

TERMS = {
    "iteration_s": st.floats(1e-4, 100),
    "interval_steps": st.integers(1, 10_000),
    "state_bytes": st.floats(1, 1e12),
    "copy_bytes_per_s": st.floats(1e6, 1e12),
    "persist_bytes_per_s": st.floats(1e6, 1e12),
    "hide_s": st.floats(0, 100),
}


def test_the_disk_binds_where_writes_take_longer_than_the_interval() -> None:
    # 1 GB at 0.5 GB/s is 2 s per checkpoint, one every 10 iterations: 5 iterations/s. Training alone would do 10.
    found = throughput_bound(
        iteration_s=0.1,
        interval_steps=10,
        state_bytes=1e9,
        copy_bytes_per_s=1e10,
        persist_bytes_per_s=0.5e9,
        hide_s=0.1,
    )
    assert found == Bound(5.0, "disk")


def test_the_copy_binds_where_it_does_not_hide_behind_the_pass() -> None:
    # 1 GB at 2 GB/s is 0.5 s, of which 0.1 s hide: 0.4 s every 4 iterations, on top of 0.1 s each, makes 0.2 s.
    found = throughput_bound(
        iteration_s=0.1,
        interval_steps=4,
        state_bytes=1e9,
        copy_bytes_per_s=2e9,
        persist_bytes_per_s=1e12,
        hide_s=0.1,
    )
    assert found.binds == "copy"
    assert found.iterations_per_s == pytest.approx(5.0, rel=1e-12)


def test_training_itself_binds_where_checkpoints_cost_nothing() -> None:
    found = throughput_bound(
        iteration_s=0.25,
        interval_steps=100,
        state_bytes=1e6,
        copy_bytes_per_s=1e10,
        persist_bytes_per_s=1e9,
        hide_s=0.1,
    )
    assert found == Bound(4.0, "training")


def test_no_checkpoints_and_no_state_leave_training_alone() -> None:
    common = {"iteration_s": 0.5, "copy_bytes_per_s": 1.0, "persist_bytes_per_s": 1.0, "hide_s": 0.0}
    assert throughput_bound(interval_steps=0, state_bytes=1e12, **common) == Bound(2.0, "training")
    assert throughput_bound(interval_steps=1, state_bytes=0, **common) == Bound(2.0, "training")


@given(**TERMS, factor=st.floats(1, 1000))
def test_it_moves_one_way_in_each_term(factor: float, **terms: float) -> None:
    def bound(**changed: float) -> float:
        return throughput_bound(**{**terms, **changed}).iterations_per_s

    slack = 1 + 1e-9
    here = bound()
    assert here <= slack / terms["iteration_s"]
    assert bound(iteration_s=terms["iteration_s"] * factor) <= here * slack
    assert bound(state_bytes=terms["state_bytes"] * factor) <= here * slack
    for helps in ("copy_bytes_per_s", "persist_bytes_per_s", "hide_s"):
        assert bound(**{helps: terms[helps] * factor}) * slack >= here
    assert bound(interval_steps=terms["interval_steps"] * math.ceil(factor)) * slack >= here


@pytest.mark.parametrize(
    ("term", "value"),
    [
        ("iteration_s", 0.0),
        ("copy_bytes_per_s", 0.0),
        ("persist_bytes_per_s", -1.0),
        ("hide_s", -0.1),
        ("state_bytes", math.nan),
        ("interval_steps", -1),
    ],
)
def test_impossible_terms_are_refused_by_name(term: str, value: float) -> None:
    terms = dict.fromkeys(TERMS, 1)
    with pytest.raises(ValueError, match=term):
        throughput_bound(**{**terms, term: value})
