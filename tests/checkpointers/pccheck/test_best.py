"""The best checkpoints by a metric stay beside the newest ones, whatever comes after them."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from lastgood import PCcheck
from lastgood.checkpointers.kept.prune import held_for_pruning, plan_prune
from lastgood.errors import CheckpointError
from tests.suggestions.following import advice, follows, hear, refusal


@pytest.fixture
def make(tmp_path):
    made = []

    def training(**options):
        checkpointer = PCcheck(tmp_path / "job", interval_steps=1, **{"keep_best": 2, "chunk_bytes": 4096, **options})
        made.append(checkpointer)
        checkpointer.attach(model=torch.nn.Linear(2, 2))
        return checkpointer

    yield training
    for one in made:
        one.close()


def train(checkpointer, losses):
    """A step for each loss, which is what its checkpoint is worth; None: nobody says."""
    for loss in losses:
        step = checkpointer.step()
        checkpointer.drain()
        if loss is not None:
            assert checkpointer.metric(step, loss=loss)


def steps(checkpointer):
    return {info.step for info in checkpointer._store.committed()}


def test_the_best_outlive_the_newest(make):
    checkpointer = make()
    train(checkpointer, [5.0, 1.0, 3.0, 2.0, 9.0, 8.0, 7.0, 6.0, 6.5, 8.0])
    assert checkpointer.best() == [2, 4]
    assert {2, 4, 9, 10} <= steps(checkpointer)
    # A restart knows them, and goes on to keep them.
    checkpointer.close()
    again = make()
    assert again.best() == [2, 4]
    train(again, [None] * 6)
    assert {2, 4, 15, 16} <= steps(again)
    train(again, [0.5])
    assert again.best() == [17, 2]
    again.close()
    assert (
        PCcheck(again.directory, interval_steps=1, keep_best=2).attach(model=torch.nn.Linear(2, 2), resume_step=2) == 2
    )


def test_more_may_be_better(make):
    checkpointer = make(best_metric="accuracy", best_is="max", keep_best=1)
    for accuracy in (0.5, 0.9, 0.7):
        step = checkpointer.step()
        checkpointer.drain()
        assert checkpointer.metric(step, accuracy=torch.tensor([accuracy]), loss=0.0)
    assert checkpointer.best() == [2]


def test_a_bad_one_is_not_the_best_and_nan_never_is(make):
    checkpointer = make()
    train(checkpointer, [1.0, 2.0, math.nan, math.inf])
    assert checkpointer.best() == [1, 2]
    checkpointer.verdict(1, False, "it is of no use")
    assert checkpointer.best() == [2]


def test_a_metric_that_comes_too_late(make):
    checkpointer = make()
    train(checkpointer, [None] * 12)
    assert not checkpointer.metric(1, loss=0.1)
    assert checkpointer.best() == []


def test_another_metric_begins_the_choice_again(make):
    checkpointer = make()
    train(checkpointer, [1.0, 2.0])
    checkpointer.close()
    again = make(best_metric="accuracy")
    assert again.best() == []


def test_prune_leaves_the_best(make):
    checkpointer = make()
    train(checkpointer, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    checkpointer.close()
    with held_for_pruning(checkpointer.directory):
        plan = plan_prune(checkpointer.directory, 1, held=True)
    doomed = {one.what for one in plan.doomed}
    assert not doomed & {"step 1", "step 2", "step 6"}
    assert "step 5" in doomed


@follows(
    "and no metric came for the last",
    "metric() is of use if the best checkpoints are kept; give keep_best=3",
    "or make the checkpointer with best_metric=",
)
def test_a_metric_that_never_comes(make, caplog):
    checkpointer = make(keep=1, keep_best=1)
    with caplog.at_level(logging.WARNING, "lastgood"):
        train(checkpointer, [None] * 6)
    assert caplog.text.count("no metric came for the last 4 checkpoints") == 1
    call = advice(hear(caplog.messages[-1]), r"call (metric\(.*?\))")
    assert eval(f"checkpointer.{call.replace('...', '0.5')}", {"checkpointer": checkpointer, "step": 6})
    message = refusal(lambda: checkpointer.metric(6, accuracy=0.5))
    assert "metric() was given accuracy, and the best checkpoints are those of loss" in message
    checkpointer.close()
    other = make(best_metric="accuracy")
    assert other.metric(6, accuracy=0.5)
    other.close()
    without = make(keep_best=0)
    given = advice(refusal(lambda: without.metric(6, loss=1.0)), r"give (keep_best=\d)")
    without.close()
    assert eval(f"make({given})", {"make": make}).best() == []


def test_it_is_for_attached_trainings(tmp_path):
    with pytest.raises(CheckpointError):
        PCcheck(tmp_path, interval_steps=1, keep_best=1).metric(1, loss=1.0)
