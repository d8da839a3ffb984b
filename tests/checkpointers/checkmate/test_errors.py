"""Errors in the training's own process: the save they are in fails, and nothing behind it."""

from __future__ import annotations

import time

import pytest
import torch

from lastgood.checkpointers.checkmate.system import Checkmate
from lastgood.checkpointers.events import Outcome
from lastgood.errors import NoCheckpoint, StateError
from lastgood.gradients.conductor.conductor import Conductor
from lastgood.gradients.link.gradient_stream import GradientStream
from lastgood.gradients.link.shadow_link import ShadowLink
from lastgood.gradients.tap.step import StepTap
from tests.checkpointers.support.small_training import SmallTraining
from tests.gradients.support.shadow_processes import shadow_threads
from tests.support.patience import wait_until

WAIT_S = 100
PATIENCE_S = 300.0
"""With a shadow that lacks something: what was only over because that is over would take longer than any wait here."""


@pytest.fixture
def make(tmp_path):
    made = []
    with shadow_threads(tmp_path, 2) as shadows:

        def checkpointer(**knobs):
            where = {"shadows": [one.address for one in shadows], "token_file": str(tmp_path / "token")}
            one = Checkmate(tmp_path / "job", **{**where, "bucket_bytes": 4096, "patience_s": PATIENCE_S, **knobs})
            made.append(one)
            return one

        yield checkpointer
        for one in made:
            one.close()


def outcomes(checkpointer):
    return [event.outcome for event in checkpointer.events]


def steps(training, checkpointer, count):
    for _ in range(count):
        training.step()
        checkpointer.save(training.step_number)


def test_a_last_save_whose_side_record_finds_no_room_fails_without_waiting(tmp_path):
    training = SmallTraining()
    with shadow_threads(tmp_path, 2, side_limit_bytes=100_000) as shadows:
        where = {"shadows": [one.address for one in shadows], "token_file": str(tmp_path / "token")}
        checkpointer = Checkmate(tmp_path / "job", **{**where, "bucket_bytes": 4096, "patience_s": PATIENCE_S})
        try:
            checkpointer.start(training.state)
            steps(training, checkpointer, 2)
            checkpointer.drain(WAIT_S)
            training.plain["large"] = torch.zeros(100_000, dtype=torch.uint8)
            steps(training, checkpointer, 1)
            checkpointer.drain(WAIT_S)
            assert outcomes(checkpointer) == [Outcome.DURABLE] * 2 + [Outcome.FAILED]
            assert "side record" in checkpointer.events[2].error
        finally:
            checkpointer.close()
        fresh = SmallTraining(seed=1)
        again = Checkmate(tmp_path / "job", **{**where, "bucket_bytes": 4096})
        assert again.restore(fresh.state) == 2
        again.close()


def test_a_state_that_cannot_be_stored_fails_that_save_and_shadows_go_on(make):
    training = SmallTraining()
    checkpointer = make(verify_every=1)
    checkpointer.start(training.state)
    steps(training, checkpointer, 2)
    training.plain["strange"] = object()
    steps(training, checkpointer, 2)
    del training.plain["strange"]
    steps(training, checkpointer, 2)
    checkpointer.drain(WAIT_S)
    assert outcomes(checkpointer) == [Outcome.DURABLE] * 2 + [Outcome.FAILED] * 2 + [Outcome.DURABLE] * 2
    assert checkpointer.events[2].error.startswith(StateError.__name__)
    fresh = SmallTraining(seed=1)
    assert make().restore(fresh.state) == 6
    assert fresh.digest() == training.digest()


def test_a_seed_that_cannot_be_copied_fails_no_save_and_comes_later(make, monkeypatch, caplog):
    training = SmallTraining()
    checkpointer = make()
    checkpointer.start(training.state)
    steps(training, checkpointer, 1)
    life = checkpointer._incarnation
    copies = []
    copy = type(life).copy_bucket

    def broken(life, bucket, iteration):
        copies.append(iteration)
        if len(copies) == 1:
            raise MemoryError("no room for a copy")
        return copy(life, bucket, iteration)

    monkeypatch.setattr(type(life), "copy_bucket", broken)
    with life.conductor._changed:
        life.conductor._state.diverged(0, 0)
    steps(training, checkpointer, 3)
    checkpointer.drain(WAIT_S)
    assert outcomes(checkpointer)[-1] is Outcome.DURABLE
    assert "no seed could be copied" in caplog.text
    assert not [one for one in caplog.messages if "the checkpoint of step" in one and "no room" in one]
    assert len(copies) >= 2


def test_an_unexpected_error_in_a_link_costs_a_connection_and_not_the_shadow(make, monkeypatch, caplog):
    training = SmallTraining()
    checkpointer = make()
    checkpointer.start(training.state)
    steps(training, checkpointer, 1)
    checkpointer.drain(WAIT_S)
    write, calls = ShadowLink._write, []

    def breaks_once(link, wire, outgoing):
        if link.shadow == 1:
            calls.append(outgoing)
            if len(calls) == 1:
                raise ZeroDivisionError("a fault of the link's own")
        write(link, wire, outgoing)

    monkeypatch.setattr(ShadowLink, "_write", breaks_once)
    deadline = time.monotonic() + WAIT_S
    while len(calls) < 2 or outcomes(checkpointer)[-1] is not Outcome.DURABLE:
        assert time.monotonic() < deadline, f"waited {WAIT_S} s for a durable save"
        steps(training, checkpointer, 1)
        checkpointer.drain(WAIT_S)
    assert "a fault of the link's own" in caplog.text


def test_shadows_that_hold_nothing_together_are_said_before_a_training_begins_anew(make, caplog):
    training = SmallTraining()
    checkpointer = make()
    checkpointer.start(training.state)
    steps(training, checkpointer, 2)
    checkpointer.drain(WAIT_S)
    checkpointer.close()
    with pytest.raises(NoCheckpoint):
        make().restore(training.state, step=7)
    assert "no iteration of step 7 is held by all shadows (shadow 0: in memory step 2" in caplog.text


def test_a_restore_of_what_nobody_holds_costs_a_running_training_nothing(make):
    training = SmallTraining()
    checkpointer = make()
    checkpointer.start(training.state)
    steps(training, checkpointer, 3)
    life = checkpointer._incarnation
    with pytest.raises(NoCheckpoint, match="step 99"):
        checkpointer.restore(training.state, step=99)
    assert checkpointer._incarnation is life and checkpointer.latest() == 3
    steps(training, checkpointer, 1)
    checkpointer.drain(WAIT_S)
    assert outcomes(checkpointer) == [Outcome.DURABLE] * 4


@pytest.mark.parametrize("trouble", ["a rule that cannot be told", "gradients that cannot be sent"])
def test_a_step_that_shadows_cannot_repeat_fails_its_save_and_the_training_goes_on(trouble, make, monkeypatch):
    training = SmallTraining()
    checkpointer = make()
    checkpointer.start(training.state)
    steps(training, checkpointer, 2)
    with monkeypatch.context() as patch:
        if trouble.startswith("a rule"):
            training.optimizer.param_groups[0]["weight_decay"] = float("inf")
            frozen = [parameter.detach().clone() for parameter in training.model.parameters()]
            why = "shadows cannot repeat this step: weight_decay of a parameter group is inf"
        else:

            def no_memory(tap, parameters):
                raise MemoryError("no room for zeros")

            patch.setattr(StepTap, "send", no_memory)
            why = "no room for zeros"
        steps(training, checkpointer, 1)
    if trouble.startswith("a rule"):
        training.optimizer.param_groups[0]["weight_decay"] = 0.01
        with torch.no_grad():
            for parameter, value in zip(training.model.parameters(), frozen, strict=True):
                parameter.copy_(value)
    assert checkpointer.events[-1].outcome is Outcome.FAILED and why in checkpointer.events[-1].error
    deadline = time.monotonic() + WAIT_S
    while outcomes(checkpointer)[-1] is not Outcome.DURABLE:
        assert time.monotonic() < deadline, f"waited {WAIT_S} s for a durable save"
        steps(training, checkpointer, 1)
        checkpointer.drain(WAIT_S)
    fresh = SmallTraining(seed=1)
    assert make().restore(fresh.state) == training.step_number
    assert fresh.digest() == training.digest()


def test_the_last_step_is_made_whole_in_drain_where_all_others_have_no_room_left(make, monkeypatch):
    """What is torn is heard of behind the last save: too late for all steps before it."""
    training = SmallTraining()
    checkpointer = make()
    checkpointer.start(training.state)
    steps(training, checkpointer, 2)
    checkpointer.drain(WAIT_S)
    conductor = checkpointer._incarnation.conductor
    send, heard, late = GradientStream.send, Conductor.heard, []

    def lose_some(stream, iteration, spans, address, **how):
        return send(stream, iteration, [span for span in spans if span.bucket != 0], address, **how)

    def hear_later(conductor, shadow, message):
        with conductor._changed:
            late.append((shadow, message))

    with monkeypatch.context() as patch:
        patch.setattr(GradientStream, "send", lose_some)
        patch.setattr(Conductor, "heard", hear_later)
        steps(training, checkpointer, 3)
        wait_until(
            lambda: {("torn", 3, 0), ("have", 5, 1)} <= {(one.kind, one.iteration, shadow) for shadow, one in late},
            lambda: f"shadows to say what they lack: {late}",
            WAIT_S,
        )
    with conductor._changed:
        for shadow, message in sorted(late, key=lambda one: -one[0]):  # what shadow 0 says comes last
            heard(conductor, shadow, message)
    checkpointer.drain(WAIT_S)
    checkpointer.close()
    assert outcomes(checkpointer) == [Outcome.DURABLE] * 2 + [Outcome.FAILED] * 2 + [Outcome.DURABLE]
    fresh = SmallTraining(seed=1)
    assert make().restore(fresh.state) == training.step_number
    assert fresh.digest() == training.digest()


def test_in_drain_seeds_come_at_once_however_often_gradients_could_not_be_sent_before(make, monkeypatch):
    training = SmallTraining()
    checkpointer = make()
    checkpointer.start(training.state)
    with monkeypatch.context() as patch:

        def no_memory(tap, parameters):
            raise MemoryError("no room for zeros")

        patch.setattr(StepTap, "send", no_memory)
        steps(training, checkpointer, 4)
    steps(training, checkpointer, 1)
    checkpointer.drain(WAIT_S)
    assert outcomes(checkpointer) == [Outcome.FAILED] * 4 + [Outcome.DURABLE]
    fresh = SmallTraining(seed=1)
    assert make().restore(fresh.state) == training.step_number
    assert fresh.digest() == training.digest()


def test_parameters_that_the_optimizer_gets_later_fail_saves_with_the_reason(make):
    training = SmallTraining()
    checkpointer = make()
    checkpointer.start(training.state)
    steps(training, checkpointer, 2)
    checkpointer.drain(WAIT_S)
    training.model.append(torch.nn.Linear(64, 64))
    training.optimizer.add_param_group({"params": training.model[-1].parameters()})
    steps(training, checkpointer, 6)
    checkpointer.drain(WAIT_S)
    assert outcomes(checkpointer)[2:] == [Outcome.FAILED] * 6
    assert "parameters that it had not when checkpointing began" in checkpointer.events[-1].error
