"""Ranks that send gradients of their own parameters: which of them had none is each rank's own to say."""

from __future__ import annotations

import threading

from lastgood.errors import ConfigError, CorruptCheckpoint, NoCheckpoint
from lastgood.optim.trainer import RuleMaker
from tests.gradients.support.fault_training import Life, on_all_ranks, raise_first, ranks_in_threads, restore_afresh
from tests.gradients.support.shadow_processes import shadow_threads


def without_gradients(step: int, rank: int) -> set[int]:
    """Parameters, by index: other ones on each rank, and in each step."""
    return {(step + rank) % 6} if step % 2 else {0, 3} if rank else set()


def knobs_of(folder, shadows, **more):
    where = {"shadows": [one.address for one in shadows], "token_file": str(folder / "token")}
    return {**where, "bucket_bytes": 256, "tap": "step", **more}


def test_parameters_without_gradients_stay_as_they_are_on_every_rank(tmp_path):
    with ranks_in_threads(), shadow_threads(tmp_path, 2) as shadows:
        knobs = knobs_of(tmp_path, shadows, verify_every=1)
        life = Life("adamw", 0, [knobs, knobs], tmp_path / "job")
        life.start(restore=False)

        def run(rank: int) -> str:
            training, checkpointer = life.trainings[rank], life.checkpointers[rank]
            for step in range(1, 7):
                training.backward(life.data)
                for index in without_gradients(step, rank):
                    training.parameters[index].grad = None
                training.update(checkpointer.clip_grad_norm_)
                if step != 3:  # that one is not saved
                    checkpointer.save(training.plain["step"])
            checkpointer.drain(60)
            assert [event.outcome.value for event in checkpointer.events] == ["durable"] * 5
            assert checkpointer.storage_facts()["diverged"] == 0
            return training.digest()

        raise_first(digests := on_all_ranks(run, life.meeting))
        assert restore_afresh("adamw", knobs, tmp_path / "job") == (6, digests)
        life.bury()


def test_a_step_that_one_rank_alone_cannot_tell_is_never_given_back(tmp_path, monkeypatch):
    make, calls = RuleMaker.make, []

    def fails_at_times(*arguments, **options):
        if threading.current_thread().name == "rank-1":
            calls.append(arguments)
            if len(calls) in (3, 4):
                raise ConfigError("too many different numbers of steps")
        return make(*arguments, **options)

    monkeypatch.setattr(RuleMaker, "make", fails_at_times)
    with ranks_in_threads(), shadow_threads(tmp_path, 2) as shadows:
        knobs = knobs_of(tmp_path, shadows, verify_every=0)
        life = Life("adamw", 0, [knobs, knobs], tmp_path / "job")
        life.start(restore=False)
        digests: dict[int, list[str]] = {}

        def run(rank: int) -> None:
            training, checkpointer = life.trainings[rank], life.checkpointers[rank]
            for step in range(1, 7):
                training.backward(life.data)
                training.update(checkpointer.clip_grad_norm_)
                checkpointer.save(training.plain["step"])
                digests.setdefault(step, ["", ""])[rank] = training.digest()

        raise_first(on_all_ranks(run, life.meeting))
        assert [event.outcome.value for event in life.checkpointers[1].events[2:4]] == ["failed"] * 2
        life.bury()
        try:
            step, found = restore_afresh("adamw", knobs, tmp_path / "job")
        except (CorruptCheckpoint, NoCheckpoint):
            return
        assert found == digests[step]
