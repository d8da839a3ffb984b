"""Choosing what to restore while shadows still move on."""

from __future__ import annotations

import itertools

import pytest

from lastgood.checkpointers import checkmate_restore
from lastgood.checkpointers.checkmate_options import CheckmateOptions
from lastgood.errors import NoCheckpoint
from lastgood.gradients.messages import Saved, Status


def status(shadow, *iterations):
    saved = tuple(Saved(epoch=1, iteration=one, step=10 * one) for one in iterations)
    return Status(
        shadow=shadow,
        shadows=2,
        job="ab" * 16,
        epoch=1,
        layout="cd" * 32,
        whole=True,
        applied=0,
        have=0,
        memory=saved,
        durable=(),
        refused={},
    )


@pytest.fixture
def look(monkeypatch):
    """Answers of two shadows, a pair for each look; the last one again and again. Returns how often they were asked."""

    def answer(*looks):
        asked = []
        turns = itertools.chain(looks, itertools.repeat(looks[-1]))

        def statuses(knobs, token):
            asked.append(next(turns))
            return [status(shadow, *held) for shadow, held in enumerate(asked[-1])]

        monkeypatch.setattr(checkmate_restore, "_statuses", statuses)
        return asked

    return answer


def test_shadows_that_answer_one_after_another_are_asked_again(look):
    look(([4], [5]), ([5, 6], [6]))
    assert checkmate_restore._choose(CheckmateOptions(), b"", None).step == 60


def test_shadows_that_stand_still_and_hold_nothing_together_are_believed(look):
    asked = look(([4], [5]))
    with pytest.raises(NoCheckpoint, match="held by all shadows"):
        checkmate_restore._choose(CheckmateOptions(), b"", None)
    assert len(asked) == 2


def test_a_step_that_a_moving_training_never_shows_is_refused_in_the_end(look):
    asked = look(*(([number], [number]) for number in range(1, 40)))
    with pytest.raises(NoCheckpoint, match="step 7"):
        checkmate_restore._choose(CheckmateOptions(), b"", 7)
    assert len(asked) < 40
