"""Pairs of blocks over several ranks: all do the same, none before the others are through; threads stand for ranks."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.experiments.machine.disturbance import Look
from lastgood.experiments.records.blocks import PairPlan
from lastgood.experiments.runs import pairs as pairs_module
from lastgood.experiments.runs import watch as watch_module
from lastgood.experiments.runs.pairs import PairedSegments, measure_pairs
from tests.experiments.support.rank_runs import spec_of
from tests.experiments.support.thread_ranks import FakeLoop, ThreadPart, on_threads

DISK_BYTES_PER_S = 1e9


@contextlib.contextmanager
def steady_disk(scratch: Path):
    del scratch
    yield lambda: DISK_BYTES_PER_S


class Machines:
    """Each rank's machine: when somebody else was busy on it, by numbers of looks."""

    def __init__(self, busy: list[set[int]]) -> None:
        self._busy = busy
        self.looks = [0] * len(busy)

    def look(self, roots: frozenset[int], scratch: Path, *, device: bool = False) -> Look:
        (rank,) = roots
        number = self.looks[rank]
        self.looks[rank] += 1
        others_s = sum(5.0 for one in self._busy[rank] if one <= number)
        # A second of each look passes, of which the run itself has a half on every machine.
        return Look(float(number), others_s + number / 2, number / 2, 0.0, None, None, 0, None, None)


def measure(monkeypatch: Any, busy: list[set[int]], spec: Any, plan: PairPlan) -> tuple[list[FakeLoop], list[Any]]:
    """`measure_pairs` of ranks that each have a machine of their own."""
    machines = Machines(busy)
    flying = [0] * len(busy)
    loops = [FakeLoop(rank, flying, seed=rank) for rank in range(len(busy))]
    with monkeypatch.context() as patch:
        patch.setattr(watch_module, "look", machines.look)
        patch.setattr(watch_module.time, "sleep", lambda seconds: None)
        patch.setattr(pairs_module, "disk_bursts", steady_disk)
        patch.setattr(watch_module, "merge_seen", _each_a_machine(watch_module.merge_seen))

        def act(part: ThreadPart) -> PairedSegments:
            return measure_pairs(spec, plan, loops[part.rank], Path("/nowhere/run"), lambda text: None, part)  # type: ignore[arg-type]

        return loops, list(on_threads(len(busy), act))


def _each_a_machine(merge: Any) -> Any:
    """Threads have one boot id: each is given a kernel of its own."""

    def merged(seen: Any) -> Any:
        return merge([replace(one, kernel=f"k{rank}", host=f"vm{rank}", cores=1) for rank, one in enumerate(seen)])

    return merged


@settings(max_examples=8, deadline=None)
@given(
    ranks=st.integers(1, 4),
    interval=st.sampled_from([0, 2, 5]),
    seed=st.integers(0, 1000),
    busy=st.lists(st.sets(st.integers(1, 12), max_size=2), min_size=4, max_size=4),
    half_width=st.sampled_from([0.01, 0.9]),
)
def test_all_ranks_do_the_same_and_begin_with_nothing_in_progress(ranks, interval, seed, busy, half_width):
    system = "pccheck" if interval else "none"
    spec = spec_of(system, interval_steps=interval, measured_steps=10, seed=seed, ranks=max(2, ranks), proof=False)
    plan = PairPlan(rounds=2, half_width=half_width, budget_s=0.2)
    loops, found = measure(pytest.MonkeyPatch(), busy[:ranks], spec, plan)
    first = found[0].pairs
    for loop, one in zip(loops, found, strict=True):
        assert loop.trained == loops[0].trained
        # But for the steps by which the length of a block is chosen.
        assert loop.begun_with == [0] * len(loop.begun_with)
        assert loop.first_step == loop.step and not loop.saves_first
        kept = [(block.round, block.kind, block.steps, block.disturbed) for block in one.pairs.blocks]
        assert kept == [(block.round, block.kind, block.steps, block.disturbed) for block in first.blocks]
        assert len(one.segments) == len(first.blocks) and len(one.drains) == sum(k == "with" for _, k, _, _ in kept)
        assert (one.pairs.ended_by, one.pairs.write_bursts_bytes_per_s) == (
            first.ended_by,
            first.write_bursts_bytes_per_s,
        )
    for number, block in enumerate(first.blocks):
        # The slowest rank's.
        assert block.elapsed_s == max(loop.took_s[number + 1] for loop in loops) and block.drain_s >= 0
    orders = [tuple(dict.fromkeys(b.kind for b in first.blocks if b.round == n)) for n in (0, 1)]
    assert orders[0] == orders[1][::-1] if interval else set(orders) == {("without",)}
    assert len(first.write_bursts_bytes_per_s) == (first.blocks[-1].round + 1 if interval else 0)


def test_a_block_that_is_disturbed_on_one_machine_is_measured_again_on_all(monkeypatch):
    # Rank 1's second look is the end of the first block, its next two find a pause.
    loops, found = measure(
        monkeypatch, [set(), {1}], spec_of(interval_steps=2, proof=False), PairPlan(rounds=2, half_width=0.9)
    )
    blocks = found[0].pairs.blocks
    assert blocks[0].disturbed == "vm1: other processes took 5.00 s of CPU time"
    assert blocks[0].disturbance.others_cpu_s == 5.0
    assert [block.disturbed for block in blocks[1:]] == [None] * (len(blocks) - 1)
    assert (blocks[1].round, blocks[1].kind) == (0, blocks[0].kind)
    assert loops[0].trained == loops[1].trained


def test_blocks_of_a_system_that_takes_gradients_are_all_with_checkpoints(monkeypatch):
    spec = spec_of("checkmate", interval_steps=1, shadows=2, proof=False)
    _, found = measure(monkeypatch, [set(), set()], spec, PairPlan(rounds=3, half_width=0.9))
    assert {block.kind for block in found[0].pairs.blocks} == {"with"}
    assert found[0].pairs.ended_by == "interval"
    assert len(found[0].pairs.blocks) >= 3


def test_a_rank_that_fails_ends_the_others_wait(monkeypatch):
    original = FakeLoop.train

    def train(self, steps):
        if self.rank == 1 and len(self.trained) == 3:
            raise RuntimeError("of rank 1")
        return original(self, steps)

    monkeypatch.setattr(FakeLoop, "train", train)
    with pytest.raises(RuntimeError, match="of rank 1"):
        measure(monkeypatch, [set(), set()], spec_of(proof=False), PairPlan(rounds=2))
