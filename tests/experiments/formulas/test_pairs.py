"""The ratio of pairs of blocks, and its interval."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgood.experiments.formulas.pairs import estimate_pairs, pair_ratios
from tests.experiments.support.paired_records import make_blocks

RATIOS = st.lists(st.floats(0.05, 2.0), min_size=2, max_size=9)


def test_the_drain_counts_and_the_median_of_rounds_is_taken():
    found = estimate_pairs(make_blocks([0.8, 0.5, 0.9], none_step_s=0.25))
    assert found.ratio == pytest.approx(0.8)
    assert found.low < 0.5 and found.high > 0.9  # three values say little of what others would be
    assert found.none_iterations_per_s == pytest.approx(4.0)
    assert (found.rounds, found.disturbed_rounds, found.all_disturbed) == (3, 0, False)


def test_disturbed_blocks_are_left_out_while_two_others_are_left():
    found = estimate_pairs(make_blocks([0.8, 0.2, 0.82], disturbed=[1]))
    assert (found.rounds, found.disturbed_rounds, found.all_disturbed) == (2, 1, False)
    assert found.ratio == pytest.approx(0.81)
    every = estimate_pairs(make_blocks([0.8, 0.2, 0.82], disturbed=[0, 1]))
    assert (every.rounds, every.disturbed_rounds, every.all_disturbed) == (3, 3, True)
    assert every.ratio == pytest.approx(0.8) and every.low < 0.01 and every.high > 100


def test_a_block_whose_partner_was_disturbed_is_compared_with_the_nearest_other():
    """Rounds: with, without; without, with; with, without. The second one's block without checkpoints was disturbed."""
    blocks = make_blocks([0.8, 0.9, 0.7])
    slow = blocks[2].model_copy(update={"elapsed_s": 50.0, "disturbed": "somebody"})
    blocks[2] = slow
    blocks[1] = blocks[1].model_copy(update={"elapsed_s": 1.8})
    found = estimate_pairs(blocks)
    assert (found.rounds, found.disturbed_rounds) == (3, 0)
    # Its own step takes 0.1 / 0.9 s; the nearest block without took 0.09 s for one, the next nearest 0.1.
    assert pair_ratios([block for block in blocks if not block.disturbed]) == [
        pytest.approx(0.72),
        pytest.approx(0.81),
        pytest.approx(0.7),
    ]


def test_blocks_of_one_kind_give_no_ratio():
    blocks = make_blocks([0.8, 0.9])
    assert pair_ratios(blocks[:3]) == [pytest.approx(0.8)]
    assert estimate_pairs([block for block in blocks if block.kind == "without"]) is None
    assert estimate_pairs([]) is None


@given(RATIOS)
def test_the_interval_holds_the_estimate_and_is_above_0(ratios):
    found = estimate_pairs(make_blocks(ratios))
    assert found.ratio == pytest.approx(statistics.median(ratios))
    assert 0 < found.low <= found.ratio + 1e-9 <= found.high + 2e-9
    assert estimate_pairs(make_blocks(ratios)) == found


def test_one_round_says_nothing_of_its_spread():
    found = estimate_pairs(make_blocks([0.9]))
    assert found.ratio == pytest.approx(0.9) and found.low < 0.01 and found.high > 100


@pytest.mark.parametrize("rounds", [3, 4, 5, 6, 10])
def test_the_interval_covers_the_truth_as_often_as_it_says(rounds):
    drawn = random.Random(7)
    runs = 300
    covered = 0
    for _ in range(runs):
        found = estimate_pairs(make_blocks([0.9 * math.exp(drawn.gauss(0, 0.08)) for _ in range(rounds)]))
        covered += found.low <= 0.9 <= found.high
    assert covered / runs > 0.9


@given(st.floats(0.01, 100), RATIOS)
def test_a_machine_that_is_slower_throughout_has_the_same_ratio(slower, ratios):
    fast, slow = (estimate_pairs(make_blocks(ratios, none_step_s=step_s)) for step_s in (0.1, 0.1 * slower))
    assert slow.ratio == pytest.approx(fast.ratio) and slow.half_width == pytest.approx(
        fast.half_width, rel=1e-6, abs=1e-9
    )


def test_more_rounds_of_the_same_spread_are_known_better():
    drawn = random.Random(5)
    ratios = [drawn.gauss(0.9, 0.05) for _ in range(40)]
    widths = [estimate_pairs(make_blocks(ratios[:count])).half_width for count in (4, 12, 40)]
    assert widths == sorted(widths, reverse=True) and widths[2] < widths[0] / 2
