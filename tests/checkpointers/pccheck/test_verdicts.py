"""Really the last good state: what was judged bad is passed over, kept apart, and cannot loop for ever."""

from __future__ import annotations

import math
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lastgood import PCcheck
from lastgood.checkpointers.pccheck.judging import DOUBTED_STEPS, Judging
from lastgood.errors import CheckpointError, NoCheckpoint, NoGoodCheckpoint
from lastgood.storage import SlotStore, Verdict, VerdictBook


class Life:
    def __init__(self, directory, device="cpu", interval_steps=1, **knobs) -> None:
        self.model = torch.nn.Linear(3, 3, device=device)
        self.checkpointer = PCcheck(directory, interval_steps=interval_steps, **knobs)
        self.step_number = self.checkpointer.attach(model=self.model)

    def steps(self, *losses) -> None:
        for loss in losses:
            with torch.no_grad():
                self.model.weight += 1
            self.step_number = self.checkpointer.step(loss)
            self.checkpointer.drain()

    def killed(self) -> None:
        """Let go as a killed process does: nothing is noted as ended."""
        self.checkpointer._store.close()
        self.checkpointer._store = None
        self.checkpointer.close()


def restored(directory, **how) -> int:
    return PCcheck(directory).restore({"model": torch.nn.Linear(3, 3), **OTHERS}, **how)


OTHERS = {"rng": {}, "progress": {}}


def test_a_bad_checkpoint_is_passed_over_unless_asked_for(tmp_path, caplog):
    life = Life(tmp_path, keep=3)
    life.steps(None, None, None)
    assert life.checkpointer.verdict(3, ok=False, reason="evaluation fell")
    assert "step 3 is judged bad: evaluation fell" in caplog.text
    assert not life.checkpointer.verdict(99, ok=False)
    assert life.checkpointer.latest() == 2
    life.checkpointer.close()
    assert PCcheck(tmp_path).latest() == 2
    again = Life(tmp_path, keep=3)
    assert again.step_number == 2
    again.checkpointer.close()
    overridden = PCcheck(tmp_path, interval_steps=1, keep=3)
    assert overridden.attach(model=torch.nn.Linear(3, 3), resume_step=3) == 3
    assert overridden.restore(overridden.state, good_only=False) == 3
    assert overridden.restore(overridden.state) == 2
    assert overridden.verdict(3, ok=True)
    assert overridden.restore(overridden.state) == 3
    overridden.close()


def test_retention_never_drops_the_newest_good_one(tmp_path):
    for keep in (1, 2):
        directory = tmp_path / str(keep)
        life = Life(directory, keep=keep)
        life.steps(None, None)
        for step in range(3, 12):
            life.steps(None)
            life.checkpointer.verdict(step, ok=False, reason="bad luck")
        assert life.checkpointer.latest() == 2
        life.checkpointer.close()
        again = Life(directory, keep=keep)
        assert again.step_number == 2
        again.steps(None)
        assert again.checkpointer.latest() == 3
        again.checkpointer.close()


def test_all_bad_is_an_error_and_no_new_start(tmp_path):
    life = Life(tmp_path)
    life.steps(None, None)
    for step in (1, 2):
        life.checkpointer.verdict(step, ok=False, reason="poison")
    life.checkpointer.close()
    with pytest.raises(NoGoodCheckpoint, match=r"step 2 is judged bad \(poison\); step 1 is.*good_only=False"):
        Life(tmp_path)
    assert not issubclass(NoGoodCheckpoint, NoCheckpoint), "attach() would begin anew"


def test_a_loss_that_is_not_finite_judges_both_its_checkpoints(tmp_path):
    life = Life(tmp_path, keep=4)
    life.steps(1.0, 1.1, 1.0, math.nan)
    assert life.checkpointer.latest() == 2, "the loss of iteration 4 came from the weights of step 3"
    life.steps(torch.tensor(1.0))
    assert life.checkpointer.latest() == 5
    life.checkpointer.close()


@pytest.mark.gpu
def test_losses_on_a_device_are_judged_when_they_arrive(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    life = Life(tmp_path, device="cuda", keep=4)
    life.steps(*(torch.tensor(value, device="cuda") for value in (1.0, 1.0, 1.0, math.inf)))
    life.checkpointer.close()
    assert PCcheck(tmp_path).latest() == 2


def test_a_verdict_on_a_checkpoint_under_way_holds(tmp_path):
    with SlotStore(tmp_path, slots=3, keep=2, chunk_bytes=4096, pool_bytes=65536) as store:
        write = store.begin(7, 0)
        store.judge(write.sequence, Verdict(7, ok=False, reason="early"))
        write.commit(0, 0, bytes(32))
    with SlotStore(tmp_path, slots=3, keep=2, chunk_bytes=4096, pool_bytes=65536) as store:
        (info,) = store.committed()
        assert store.book().is_bad(info.sequence)


def test_a_poisonous_checkpoint_cannot_loop_for_ever(tmp_path):
    life = Life(tmp_path, keep=3)
    life.steps(None, None, None)
    life.checkpointer.close()
    begun = []
    for _ in range(7):
        life = Life(tmp_path, keep=3, max_failed_restarts=2)
        begun.append(life.step_number)
        life.killed()
        if len(begun) == 6:
            break
    assert begun == [3, 3, 2, 2, 1, 1]
    with pytest.raises(NoGoodCheckpoint, match="2 restarts from step 3 failed"):
        Life(tmp_path, keep=3, max_failed_restarts=2)
    life = Life(tmp_path, keep=3, max_failed_restarts=None)
    assert life.step_number == 3
    life.steps(None)  # a newer checkpoint: training got on
    life.killed()
    for _ in range(2):
        life = Life(tmp_path, keep=3, max_failed_restarts=2)
        assert life.step_number == 4
        life.killed()
    life = Life(tmp_path, keep=3, max_failed_restarts=2)
    assert life.step_number == 3


@pytest.mark.parametrize("limit", [1, 3, 5])
def test_a_training_that_fails_whatever_it_begins_with_ends(tmp_path, limit):
    """A fall back to an older step writes the newer one anew, which is no progress."""
    life = Life(tmp_path)
    life.steps(None, None)
    life.killed()
    begun = []
    with pytest.raises(NoGoodCheckpoint, match=rf"{limit} restarts from step 2 failed.*{limit} restarts from step 1"):
        while len(begun) < 30:
            life = Life(tmp_path, max_failed_restarts=limit)
            begun.append(life.step_number)
            if life.step_number == 1:
                life.steps(None)
            life.killed()
    assert begun == [2] * limit + [1] * limit


def test_a_step_never_reached_before_is_progress_again(tmp_path):
    life = Life(tmp_path)
    life.steps(None, None)
    life.killed()
    for _ in range(2):
        Life(tmp_path, max_failed_restarts=2).killed()
    life = Life(tmp_path, max_failed_restarts=2)
    life.steps(None)
    assert VerdictBook(tmp_path).restarts, "step 2 was there before"
    life.steps(None)
    assert not VerdictBook(tmp_path).restarts
    life.killed()
    again = Life(tmp_path, max_failed_restarts=2)
    assert again.step_number == 3
    again.killed()


def test_a_life_that_ends_in_order_is_no_failure(tmp_path):
    life = Life(tmp_path)
    life.steps(None)
    life.checkpointer.close()
    for _ in range(4):
        life = Life(tmp_path, max_failed_restarts=1)
        assert life.step_number == 1
        life.checkpointer.close()


def test_a_life_that_ends_by_an_error_is_one_though_it_was_closed(tmp_path):
    life = Life(tmp_path, keep=2)
    life.steps(None, None)
    life.checkpointer.close()
    for _ in range(2):
        life = Life(tmp_path, keep=2, max_failed_restarts=2)
        assert life.step_number == 2
        with pytest.raises(FloatingPointError):
            try:
                raise FloatingPointError("the loss is not a number")
            finally:
                life.checkpointer.close()
    life = Life(tmp_path, keep=2, max_failed_restarts=2)
    assert life.step_number == 1
    with pytest.raises(KeyboardInterrupt):
        try:
            raise KeyboardInterrupt
        finally:
            life.checkpointer.close()
    life = Life(tmp_path, keep=2, max_failed_restarts=2)
    assert life.step_number == 2, "an end that was asked for resets the count"
    life.checkpointer.close()


def test_an_uncaught_error_counts_as_a_failed_restart(tmp_path):
    script = Path(__file__).parents[1] / "support" / "ending_script.py"
    for slow_life in range(2):
        done = subprocess.run(
            [sys.executable, str(script), str(tmp_path), "at-once", "0", "60"],
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 1, done.stderr
        book = VerdictBook(tmp_path)
        assert list(book.restarts.values()) == ([(1, slow_life)] if slow_life else [])


def test_a_checkpoint_that_failed_cannot_be_judged(tmp_path):
    checkpointer = PCcheck(tmp_path, interval_steps=1, writer_threads=1)
    checkpointer.attach(values={"x": torch.zeros(1 << 16)})
    checkpointer.step()
    checkpointer.drain()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        checkpointer.step()
        checkpointer.drain()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [event.outcome.value for event in checkpointer.events] == ["durable", "failed"]
    assert checkpointer.verdict(1, ok=True) and not checkpointer.verdict(2, ok=False)
    checkpointer.close()


def test_verdicts_need_an_open_store(tmp_path):
    with pytest.raises(CheckpointError, match="call start"):
        PCcheck(tmp_path).verdict(1, ok=True)


def judged(life) -> set[int]:
    """Steps of the checkpoints that are there and bad."""
    store = life.checkpointer._store
    return {info.step for info in store.committed() if store.book().is_bad(info.sequence)}


def test_a_level_of_the_loss_that_stays_takes_no_checkpoint(tmp_path, caplog):
    """A term that is switched on, a curriculum: the checkpoints of the change are good again once it is the norm."""
    life = Life(tmp_path)
    life.steps(*[0.5] * 20, *[1.2] * 4)
    assert life.checkpointer.latest() == 19 and judged(life) >= {23, 24}
    life.steps(*[1.2] * 12)
    assert life.checkpointer.latest() == 36 and not judged(life)
    assert "the checkpoint of step 35 is good again" in caplog.text
    life.checkpointer.close()
    again = Life(tmp_path)
    assert again.step_number == 36
    again.checkpointer.close()


def test_what_somebody_else_said_is_not_taken_back(tmp_path):
    life = Life(tmp_path, keep=30)
    life.steps(*[0.5] * 20, *[1.2] * 4)
    life.checkpointer.verdict(22, ok=False, reason="evaluation fell")
    life.steps(*[1.2] * 12)
    assert judged(life) == {22}
    life.checkpointer.close()


def test_spikes_cannot_take_the_newest_good_one_back_without_limit(tmp_path, caplog):
    """Each is higher than all before, so none becomes a habit; and each comes at a checkpoint."""
    life = Life(tmp_path, interval_steps=3)
    life.steps(*[1.0] * 21)
    back = []
    for height in range(2, 40):
        life.steps(1.0, 1.0, 10.0**height)
        back.append(life.step_number - life.checkpointer.latest())
    assert 20 < max(back) <= DOUBTED_STEPS and back[-1] < max(back)
    first = next(one.message for one in caplog.records if "a restart would begin at" in one.message)
    assert "a restart would begin at step 21: the 2 checkpoints after it, up to step 27, are judged bad" in first
    assert "is not judged, though the loss of iteration" in caplog.text
    life.checkpointer.close()


def test_a_checkpoint_that_lands_before_its_loss_is_seen_begins_no_count_again(tmp_path, caplog):
    """A fast disk, a slow loss: the newest checkpoint is durable, and nobody has judged it yet."""
    life = Life(tmp_path)
    life.steps(1.0, 1.0, *[math.nan] * 5)
    life.checkpointer.save(life.step_number + 1)
    life.checkpointer.drain()
    life.checkpointer._judging.tell_fall_back(life.checkpointer._store)
    told = [one.message for one in caplog.records if "a restart would begin at step 1:" in one.message]
    assert len(told) == 2 and "the 4 checkpoints after it" in told[-1]
    life.checkpointer.close()


def test_a_flight_that_lands_between_a_loss_and_its_verdict_begins_no_count_again(tmp_path, caplog, monkeypatch):
    """The flight's thread asks while the loss has been looked at, and its verdict is not written yet."""
    life = Life(tmp_path)
    judging, store = life.checkpointer._judging, life.checkpointer._store
    judge = Judging._judge

    def asked_before(*arguments):
        judging.tell_fall_back(store)
        return judge(*arguments)

    monkeypatch.setattr(Judging, "_judge", asked_before)
    life.steps(1.0, 1.0, *[math.nan] * 30)
    told = [one.message for one in caplog.records if "a restart would begin at step 1:" in one.message]
    assert 3 <= len(told) <= 6, "at growing distances"
    life.checkpointer.close()


def test_a_loss_that_is_never_finite_again_is_told_with_both_steps(tmp_path, caplog):
    life = Life(tmp_path)
    life.steps(1.0, 1.0, *[math.nan] * 30)
    told = [one.message for one in caplog.records if "a restart would begin at step 1:" in one.message]
    assert 3 <= len(told) <= 6, "at growing distances"
    assert life.checkpointer.latest() == 1
    life.checkpointer.close()
