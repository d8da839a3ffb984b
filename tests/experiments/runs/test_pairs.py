"""Pairs of blocks: their order, when they end, and a real run of them."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest
from pydantic import ValidationError

from lastgood.experiments.formulas.pairs import estimate_pairs
from lastgood.experiments.records.blocks import PairPlan
from lastgood.experiments.records.run import RunRecord
from lastgood.experiments.runs.pairs import block_orders, rounds_are_enough
from lastgood.workloads.data.prepare import prepare_dataset
from tests.experiments.support.paired_records import make_blocks
from tests.experiments.support.run_specs import spec_of
from tests.experiments.support.warm_runs import WarmRun


def test_each_order_is_turned_round_in_the_next_round():
    for seed in range(20):
        orders = list(islice(block_orders(seed), 40))
        assert orders == list(islice(block_orders(seed), 40))
        assert all(first == second[::-1] for first, second in zip(orders[::2], orders[1::2], strict=True))
    assert len({next(block_orders(seed)) for seed in range(20)}) == 2


PLAN = PairPlan(rounds=3, half_width=0.05, budget_s=60)


@pytest.mark.parametrize(
    ("ratios", "disturbed", "spent_s", "expected"),
    [
        ([0.9, 0.9], [], 10, None),
        ([0.9, 0.9, 0.91], [], 10, "interval"),
        ([0.9, 0.5, 0.7], [], 10, None),
        ([0.9, 0.5, 0.7], [], 60, "budget"),
        ([0.9, 0.5], [], 600, None),
        # Disturbed rounds are measured again while there is time.
        ([0.9, 0.9, 0.91], [1], 10, None),
        ([0.9, 0.9, 0.91, 0.9], [1], 10, "interval"),
        ([0.9, 0.9, 0.91], [0, 1, 2], 10, None),
        ([0.9, 0.9, 0.91], [0, 1, 2], 60, None),
        ([0.9, 0.9, 0.91], [0, 1, 2], 90, "budget"),
        ([0.9, 0.5, 0.7], [1], 60, None),
    ],
)
def test_when_a_run_has_enough_rounds(ratios, disturbed, spent_s, expected):
    blocks = make_blocks(ratios, disturbed=disturbed)
    assert rounds_are_enough(PLAN, blocks, spent_s) == expected


def test_a_system_without_blocks_without_checkpoints_has_enough_by_their_own_spread():
    def blocks(ratios):
        return [block for block in make_blocks(ratios) if block.kind == "with"]

    assert rounds_are_enough(PLAN, blocks([0.9, 0.9, 0.91]), 10) == "interval"
    assert rounds_are_enough(PLAN, blocks([0.9, 0.5, 0.7]), 10) is None
    assert rounds_are_enough(PLAN, blocks([0.9, 0.5, 0.7]), 60) == "budget"


def test_a_run_without_checkpoints_has_enough_blocks():
    blocks = [block for block in make_blocks([1.0] * 3) if block.kind == "without"]
    assert rounds_are_enough(PLAN, blocks[:2], 10) is None
    assert rounds_are_enough(PLAN, blocks, 10) == "interval"


@pytest.mark.parametrize(
    "changes",
    [
        {"pairs": {"rounds": 1}},
        {"pairs": {}, "drain_each": True},
        {"pairs": {}, "ranks": 2, "parallel": "ddp", "interval": 3},
        {"pairs": {}, "interval": 3},
    ],
)
def test_what_makes_no_pairs_is_refused(changes):
    with pytest.raises(ValidationError, match=r"pairs|rounds|whole intervals"):
        spec_of("pccheck", **changes)


@pytest.mark.measures
@pytest.mark.parametrize("system", ["pccheck", pytest.param("none", marks=pytest.mark.slow)])
def test_a_run_in_pairs_is_recorded_block_by_block(tmp_path, system):
    prepare_dataset("images", tmp_path)
    plan = {"rounds": 2, "half_width": 0.5, "budget_s": 1.0}
    spec = spec_of(system, interval=0 if system == "none" else 2, pairs=plan)
    out, trace = tmp_path / "r0.json", tmp_path / "trace.json"
    arguments = ["run", "--spec", spec.canonical_json(), "--out", out, "--timeline", trace]
    run = WarmRun([*arguments, "--data-dir", tmp_path, "--scratch", tmp_path / "scratch"])
    output, _ = run.communicate(timeout=240)
    assert run.returncode == 0, output
    record = RunRecord.load(out)
    blocks = record.pairs.blocks
    rounds = blocks[-1].round + 1
    assert rounds >= 2 and record.pairs.ended_by in ("interval", "budget")
    assert len(record.workload.losses) == sum(block.steps for block in blocks)
    assert all(later.began_s >= one.began_s + one.elapsed_s for one, later in pairwise(blocks))
    assert all(block.drain_s == 0 for block in blocks if block.kind == "without")
    if system == "none":
        assert {block.kind for block in blocks} == {"without"} and not record.pairs.write_bursts_bytes_per_s
        return
    # A disturbed block is repeated.
    kinds = [list(dict.fromkeys(block.kind for block in blocks if block.round == number)) for number in range(rounds)]
    assert all(set(one) == {"with", "without"} for one in kinds) and kinds[0] == kinds[1][::-1]
    # A block of 4 steps at interval 2 has two checkpoints; its first is asked for as it begins.
    saving = sum(block.kind == "with" for block in blocks)
    assert saving >= rounds and record.counts.started == record.counts.durable == 2 * saving
    assert record.clocks.measured_steps == len(record.clocks.step_s) == 4 * saving
    assert len(record.pairs.write_bursts_bytes_per_s) == rounds and min(record.pairs.write_bursts_bytes_per_s) > 0
    assert estimate_pairs(blocks).ratio > 0
    assert record.proof.equal
