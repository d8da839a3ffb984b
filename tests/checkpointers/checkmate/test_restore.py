"""Choosing what to restore while shadows still move on, and what ranks do with it."""

from __future__ import annotations

import itertools
import time

import pytest

from lastgood.checkpointers.checkmate.options import CheckmateOptions
from lastgood.checkpointers.checkmate.system import Checkmate
from lastgood.checkpointers.shadows import restore as checkmate_restore
from lastgood.errors import CheckpointError, NoCheckpoint
from lastgood.gradients.layout.entries import Saved
from lastgood.gradients.protocol import client as asking
from lastgood.gradients.protocol.messages import Status
from lastgood.gradients.shadow.spill_store import SpillStore
from tests.checkpointers.support.small_training import SmallTraining
from tests.gradients.support.fault_training import Life, ranks_in_threads, restore_afresh
from tests.gradients.support.shadow_processes import shadow_threads
from tests.support.patience import wait_until


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


def test_shadows_that_answer_one_after_another_are_asked_again(look, tmp_path):
    look(([4], [5]), ([5, 6], [6]))
    assert checkmate_restore._choose(tmp_path, CheckmateOptions(), b"", None).step == 60


def test_shadows_that_stand_still_and_hold_nothing_together_are_believed(look, tmp_path):
    asked = look(([4], [5]))
    with pytest.raises(NoCheckpoint, match="held by all shadows"):
        checkmate_restore._choose(tmp_path, CheckmateOptions(), b"", None)
    assert len(asked) == 2


def test_a_step_that_a_moving_training_never_shows_is_refused_in_the_end(look, tmp_path):
    asked = look(*(([number], [number]) for number in range(1, 40)))
    with pytest.raises(NoCheckpoint, match="step 7"):
        checkmate_restore._choose(tmp_path, CheckmateOptions(), b"", 7)
    assert len(asked) < 40


# -- restoring ---------------------------------------------------------------------------------------------------------


def knobs_of(folder, shadows, **more):
    where = {"shadows": [one.address for one in shadows], "token_file": str(folder / "token")}
    return {**where, "bucket_bytes": 256, **more}


def test_a_rank_that_gets_nothing_leaves_every_rank_as_it_was(tmp_path, monkeypatch):
    with ranks_in_threads(), shadow_threads(tmp_path, 2) as shadows:
        knobs = knobs_of(tmp_path, shadows)
        life = Life("sgd", 0, [knobs, knobs], tmp_path / "job")
        life.start(restore=False)
        life.train(2, 0.0)
        life.join()
        for checkpointer in life.checkpointers:
            checkpointer.drain(120)
        life.bury()
        fetch = asking.fetch

        def fetch_on_rank_0(*arguments, **options):
            if checkmate_restore.world_of_torch()[0] == 1:
                raise CheckpointError("its link is cut")
            return fetch(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(asking, "fetch", fetch_on_rank_0)
            with pytest.raises(CheckpointError, match="its link is cut"):
                restore_afresh("sgd", knobs, tmp_path / "job")  # which looks at the states, too
        assert restore_afresh("sgd", knobs, tmp_path / "job")[0] == 2


def test_a_spill_that_takes_longer_to_read_than_an_answer_may_is_waited_for(tmp_path, monkeypatch):
    spills = tmp_path / "spills"
    training = SmallTraining()
    with shadow_threads(tmp_path, 2, spill_directory=spills) as shadows:
        checkpointer = Checkmate(tmp_path / "job", **knobs_of(tmp_path, shadows, spill_every=1))
        checkpointer.start(training.state)
        training.step()
        checkpointer.save(1)
        checkpointer.drain(120)
        wait_until(lambda: checkpointer._incarnation.conductor.spilled is not None, "the spill", 60)
        checkpointer.close()
    read = SpillStore.read

    def slowly(*arguments):
        time.sleep(3.5)  # a disk that takes longer than a shadow is given for an answer
        read(*arguments)

    monkeypatch.setattr(SpillStore, "read", slowly)
    monkeypatch.setattr(checkmate_restore, "_SLOWEST_READ_BYTES_PER_S", 1e4)
    with shadow_threads(tmp_path, 2, spill_directory=spills) as shadows:
        fresh = SmallTraining(seed=1)
        assert Checkmate(tmp_path / "job", **knobs_of(tmp_path, shadows, timeout_s=2.0)).restore(fresh.state) == 1
        assert fresh.digest() == training.digest()
