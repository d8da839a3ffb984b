"""Ranks agree on the step after which all of them save and end."""

from __future__ import annotations

import json
import logging
import signal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.checkpointers.attach.agreed_end import AgreedEnd, Estimate
from tests.support.warm import WarmProcess

WAIT_S = 120


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def made(ranks, estimates):
    store, clock = torch.distributed.HashStore(), Clock()
    return [AgreedEnd(rank, ranks, store, lambda rank=rank: estimates[rank], clock) for rank in range(ranks)]


FITS = Estimate(0.1, 1.0, 20.0)
UNASKED = Estimate(0.1, 1.0, None)


@given(
    order=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["step", "look"])), min_size=20, max_size=150),
    asked=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 2)), min_size=1, max_size=3),
)
@settings(max_examples=80, deadline=None)
def test_ranks_end_after_the_same_step(order, asked):
    """Whoever is asked when, and whatever the order of steps and looks: no rank begins a step that others cannot."""
    ranks = made(3, [FITS] * 3)
    ended, last = [0, 0, 0], {}
    fair = [(rank, what) for _ in range(12) for what in ("look", "step") for rank in range(3)]
    for turn, (rank, what) in enumerate([*order, *fair]):
        for when, who in asked:
            if when == turn:
                ranks[who].ask("SIGTERM")
        if what == "look":
            ranks[rank].look()
            continue
        if rank in last or ended[rank] > min(ended):
            continue  # it waits for the others in its next step
        ended[rank] += 1
        how = ranks[rank].step_over(ended[rank])
        if how is not None:
            assert (how.why, how.saves) == ("SIGTERM", True)
            last[rank] = ended[rank]
        if len(last) == 3:
            break
    assert len(set(last.values())) <= 1, last
    if max(when for when, _ in asked) < len(order):
        assert len(last) == 3, "all of them hear of it"


@pytest.mark.parametrize(
    ("answers", "saves"),
    [
        ([FITS, UNASKED], True),
        ([UNASKED, FITS], True),
        ([FITS, Estimate(None, None, None)], False),  # nothing is durable there yet
        ([FITS, Estimate(0.1, 30.0, None)], False),
        ([FITS, Estimate(12.0, 1.0, None)], False),
        ([FITS, Estimate(0.1, 1.0, 0.5)], False),
    ],
)
def test_the_slowest_rank_says_whether_a_checkpoint_fits(answers, saves):
    ranks = made(2, answers)
    ranks[[one.left_s for one in answers].index(20.0)].ask("SIGUSR1")
    for _ in range(2):
        for rank in ranks:
            rank.look()
    how = {}
    for step in range(1, 5):
        for number, rank in enumerate(ranks):
            if number not in how and (found := rank.step_over(step)) is not None:
                how[number] = (found.why, found.saves)
    assert how == dict.fromkeys((0, 1), ("SIGUSR1", saves))


def test_a_deadline_is_kept_also_if_nothing_was_measured():
    ranks = made(2, [Estimate(None, None, 25.0)] * 2)
    ranks[0].ask("deadline")
    for _ in range(2):
        for rank in ranks:
            rank.look()
    assert [ranks[0].step_over(1), ranks[1].step_over(1)] == [None, None]
    assert all(rank.step_over(2).saves for rank in ranks)


def test_a_training_that_caught_its_end_may_be_asked_again():
    ranks = made(2, [FITS] * 2)
    for first in (0, 10):
        ranks[1].ask("SIGTERM")
        for _ in range(2):
            for rank in reversed(ranks):
                rank.look()
        assert [rank.step_over(first + 1) for rank in ranks] == [None, None]
        assert all(rank.step_over(first + 2) for rank in ranks)
        assert [rank.step_over(first + 3) for rank in ranks] == [None, None]


def test_a_rank_that_ran_ahead_is_told(caplog):
    ranks = made(2, [FITS] * 2)
    ranks[0].ask("SIGTERM")
    for _ in range(2):
        for rank in ranks:
            rank.look()
    ranks[0].step_over(1)
    with caplog.at_level(logging.WARNING, "lastgood"):
        assert ranks[1].step_over(7)
    assert "rank 1 heard after step 7 only that the training ends after step 2" in caplog.text


@pytest.mark.parametrize("note", [b"", b"[]", b"[1, 2, 3]", b"x" * 10_000])
def test_a_note_that_is_none_of_ours_ends_no_rank(note, caplog):
    ranks = made(2, [FITS] * 2)
    ranks[1].ask("SIGTERM")
    ranks[1].look()
    ranks[1]._store.set("0/end", note)
    assert ranks[1].step_over(3) is None
    assert ranks[1].step_over(4) is None
    assert caplog.text.count("rank 1 cannot agree with the others on a last step (SIGTERM)") == 1
    assert ranks[1].lost


def test_a_store_that_is_gone_is_worth_a_warning_only_if_somebody_asked(monkeypatch, caplog):
    (idle, asked) = made(2, [FITS] * 2)
    asked.ask("SIGUSR1")

    def gone(*_):
        raise RuntimeError("connection reset by peer")

    for rank in (idle, asked):
        rank._store = type("Gone", (), {"check": gone, "set": gone})()
        rank.look()
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == 1 and "rank 1" in warned[0] and "connection reset by peer" in warned[0]
    assert idle.lost and asked.lost


def test_a_signal_to_one_rank_saves_the_present_step_of_both(tmp_path):
    """Real ranks over gloo."""
    words = ["tests/checkpointers/support/last_step_rank.py", tmp_path / "job", tmp_path / "meeting"]
    ranks = [WarmProcess([*words, rank]) for rank in range(2)]
    try:
        for line in ranks[1].stdout:
            if line.split() == ["step", "13"]:
                ranks[1].send_signal(signal.SIGUSR1)
                break
        texts = [rank.communicate(WAIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(30)
    assert [rank.returncode for rank in ranks] == [128 + signal.SIGUSR1] * 2, texts
    found = [json.loads(text.splitlines()[-1]) for text in texts]
    last = found[0]["step"]
    assert 13 <= last < 3000, found
    assert found == [{"step": last, "latest": last, "outcome": "durable", "why": "SIGUSR1"}] * 2
