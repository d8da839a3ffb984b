"""Saves by time: on one process by its clock, over ranks at one step that rank 0 names."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood import CheckFreq, Checkmate, PCcheck
from lastgood.checkpointers.steps.by_time import ByTime
from lastgood.errors import ConfigError
from tests.suggestions.following import advice, follows, refusal


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_one_process_saves_by_its_clock():
    clock = Clock()
    when = ByTime(10.0, clock=clock)
    saved = []
    for step in range(1, 30):
        clock.now += 3.0
        if when.due(step):
            saved.append(step)
    assert saved == [4, 8, 12, 16, 20, 24, 28]


@given(
    order=st.lists(st.integers(0, 2), min_size=20, max_size=120),
    elapsed=st.lists(st.floats(0.0, 3.0), min_size=40, max_size=40),
)
@settings(max_examples=60, deadline=None)
def test_ranks_save_at_the_same_steps(order, elapsed):
    """Whatever the order in which three ranks end their steps, as long as none begins one that others cannot join."""
    store, clock = torch.distributed.HashStore(), Clock()
    ranks = [ByTime(4.0, rank, 3, store, clock) for rank in range(3)]
    ended, saved = [0, 0, 0], [[], [], []]
    for rank in [*order, *[0, 1, 2] * 40]:
        if ended[rank] > min(ended) or ended[rank] == 40:
            continue  # it waits for the others in its next step
        if rank == 0:
            clock.now += elapsed[ended[0]]
        ended[rank] += 1
        if ranks[rank].due(ended[rank]):
            saved[rank].append(ended[rank])
    assert ended == [40] * 3
    assert saved[0] == saved[1] == saved[2]
    assert len(saved[0]) <= sum(elapsed) / 4.0


def test_a_rank_that_ran_ahead_is_told(caplog):
    store, clock = torch.distributed.HashStore(), Clock()
    first, ahead = (ByTime(4.0, rank, 2, store, clock) for rank in range(2))
    for step in range(1, 5):
        assert not ahead.due(step)
    clock.now += 5
    assert not first.due(1) and first.due(2)
    with caplog.at_level(logging.WARNING, "lastgood"):
        assert not ahead.due(5)
    assert "rank 1 heard at step 5 only that step 2 was to be saved" in caplog.text


def test_a_training_saves_by_time(tmp_path, monkeypatch):
    from lastgood.checkpointers.steps import by_time

    clock = Clock()
    monkeypatch.setattr(by_time, "ByTime", lambda *given: ByTime(*given, clock=clock))
    checkpointer = PCcheck(tmp_path, interval_s=60)
    checkpointer.attach(model=torch.nn.Linear(1, 1))
    for _ in range(6):
        clock.now += 25
        checkpointer.step()
        checkpointer.drain()
    checkpointer.close()
    assert [event.step for event in checkpointer.events] == [3, 6]


@follows("both say when to save; leave one of them out", "every step is a checkpoint; leave it out")
def test_two_intervals(tmp_path):
    message = refusal(lambda: PCcheck(tmp_path, interval_steps=3, interval_s=60))
    for name in ("interval_steps", "interval_s"):
        given = advice(message, rf"({name}=[\d.]+)")
        eval(f"PCcheck(where, {given})", {"PCcheck": PCcheck, "where": tmp_path})
    for bad in (0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="interval_s must be a number of seconds above 0"):
            PCcheck(tmp_path, interval_s=bad)
    with pytest.raises(ConfigError, match="overhead_budget chooses the interval"):
        CheckFreq(tmp_path, overhead_budget=0.1, interval_s=5)
    assert "interval_s=5 is of no use" in refusal(lambda: Checkmate(tmp_path, interval_s=5))
    Checkmate(tmp_path).close()


@follows("by which they hear when to save; call torch.distributed.init_process_group() before")
def test_ranks_that_cannot_hear(tmp_path):
    several = {"rank": 0, "world_size": 2, "control": "off"}
    message = refusal(lambda: PCcheck(tmp_path, interval_s=5, **several).attach(model=torch.nn.Linear(1, 1)))
    option = advice(message, r"or give (\w+) instead")
    checkpointer = PCcheck(tmp_path, **{option: 1}, **several)
    checkpointer.attach(model=torch.nn.Linear(1, 1))
    checkpointer.close()
