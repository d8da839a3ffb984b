"""The rule of the loss watch: spikes are found, levels that stay are learnt, and doubt speaks for a checkpoint."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lastgood.checkpointers.pccheck.loss_watch import HABIT, HORIZON, MIN_LOSSES, STAYS, WINDOW, LossWatch


def bad_after(losses, spike=8.0, first=1) -> set[int]:
    """Steps of the checkpoints that stand judged bad after these losses, of iterations `first` and so on."""
    watch, bad = LossWatch(spike), set()
    for iteration, loss in enumerate(losses, first):
        for one in watch.observe(iteration, loss):
            assert one.reason.startswith("the loss of iteration "), one
            (bad.discard if one.ok else bad.add)(one.step)
    return bad


scales = st.sampled_from([1e-30, 1e-6, 0.1, 1.0, 50.0, 1e6])


@st.composite
def noisy(draw, least, most, noise=0.2):
    """Losses around 1, by up to `noise` of it."""
    return [1 + noise * one for one in draw(st.lists(st.floats(-1, 1), min_size=least, max_size=most))]


@given(
    scales,
    noisy(MIN_LOSSES, 100),
    st.integers(1, STAYS - 1),
    st.sampled_from([10.0, 1e9, math.inf, math.nan]),
    noisy(0, 30),
)
def test_spikes_are_found_and_only_they(scale, before, length, height, after):
    losses = [scale * one for one in (*before, *[height] * length, *after)]
    begin = len(before) + 1
    assert bad_after(losses) == set(range(begin - 1, begin + length))


@given(scales, noisy(0, 100), st.floats(1.0, 1e9), noisy(STAYS, 100))
def test_a_level_that_stays_is_the_norm_after_as_many_losses_as_are_said(scale, before, factor, after):
    """Whatever the factor is; if noise carries it over and under the limit, after a window more."""
    losses = [scale * one for one in before] + [scale * factor * one for one in after]
    changed = len(before)
    late = {step for step in bad_after(losses) if step > changed + WINDOW}
    assert not late
    if factor > 20 and changed >= MIN_LOSSES:
        assert not bad_after(losses), "what was judged meanwhile is taken back"
        assert not bad_after(losses[: changed + STAYS])


@given(st.lists(st.tuples(st.floats(1.0, 3.0), st.integers(STAYS, 60)), min_size=1, max_size=8))
@example([(2.0, 16), (1.25, 16), (1.125, 17), (2.0, 16)])  # the spread shrinks within the last level
def test_a_curriculum_of_several_levels(levels):
    level, losses = 1.0, [1.0] * 30
    for factor, stays in levels:
        level *= factor
        losses += [level] * stays
    assert not bad_after(losses)


@pytest.mark.parametrize(
    "losses",
    [
        [0.0] * 50 + [1e-6 * number for number in range(100)],
        [0.02 if number % 10 == 9 else 0.0 for number in range(400)],
        [0.0] * 200 + [3.0] + [0.0] * 200,
        [0.0] * 400,
        [5.0] * 400,
        [-1.0, 1.0] * 200,
        [2.0 - number / 200 for number in range(400)],
        [0.5] * 100 + [1.2] * 200,
    ],
    ids=["zero-then-tiny", "hinge", "hinge-once", "zero", "constant", "around-zero", "falling", "step"],
)
def test_what_is_no_spike(losses):
    assert not bad_after(losses)


def test_what_comes_often_is_how_this_loss_is():
    """A part of the data with a loss of its own, whose batches may fall on the checkpoints' steps."""
    losses = [1.0, 1.1, 0.9, 1.0, 1.05, 1.0, 0.95, 1.0, 1.0, 5.0] * 40
    bad = bad_after(losses)
    assert len(bad) == 2 * HABIT and max(bad) < 10 * (HABIT + 2)
    longer = losses + [1.0] * 5 + [5.0] * 3
    assert {step for step in bad_after(longer) if step > len(losses)} == {len(longer) - 2, len(longer) - 1, len(longer)}
    higher = [*losses, 50.0]
    assert bad_after(higher) - bad == {len(losses), len(higher)}
    assert bad_after([*losses, *[1.0] * (HORIZON + 50), 5.0]) - bad, "long ago is no habit"


def test_a_loss_that_is_not_finite_never_becomes_the_norm():
    assert bad_after([1.0] * 20 + [math.nan] * 500) == set(range(20, 521))
    assert bad_after([1.0] * 20 + [9.0] * (STAYS - 1) + [math.inf]) == set(range(20, 20 + STAYS + 1))
    # What NaN said stands, though the level after it is taken for the norm: step 21 is of both.
    assert bad_after([1.0] * 20 + [math.nan] + [9.0] * STAYS) == {20, 21}
    assert bad_after([math.nan]) == {0, 1}


def test_the_rule_in_numbers():
    watch = LossWatch(8.0)
    for step in range(MIN_LOSSES - 1):
        assert not watch.observe(step, 1.0 + 0.01 * (step % 3))
    assert not watch.observe(50, 30.0), "too few losses to know a spike"
    watch = LossWatch(8.0)
    for step in range(MIN_LOSSES):
        assert not watch.observe(step, 1.0 + 0.01 * (step % 3))
    # The spread is 5 % of the median, 0.05: a spike is above 1.01 + 8 x 0.0505.
    assert not watch.observe(60, 1.40)
    bad = watch.observe(61, 1.45)
    assert [one.step for one in bad] == [60, 61] and "1.45" in bad[0].reason and "8 x" in bad[0].reason
    assert not watch.observe(62, -50.0), "losses may fall"
    assert watch.observe(63, float("-inf"))
    quiet = LossWatch(None)
    for step in range(40):
        assert not quiet.observe(step, 1.0)
    assert not quiet.observe(41, 1e9)
    assert quiet.observe(42, torch.tensor([float("nan")]))
    wide = LossWatch(8.0)
    for step in range(60):
        assert not wide.observe(step, 5.0 * (step % 5 - 2))
    assert not wide.observe(61, 50.0), "a wide spread makes a wide limit: 8 x 1.4826 x 7.5"
    assert wide.observe(62, 200.0)
