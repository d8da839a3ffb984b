"""FlowCheck in a training: it counts, asks what the node holds, restores before DDP, and refuses what it cannot do."""

from __future__ import annotations

import pytest
import torch

from lastgood import FlowCheck
from lastgood.checkpointers.events import Outcome
from lastgood.errors import CheckpointError, ConfigError, NoCheckpoint
from tests.mirror.support.node_thread import node_thread
from tests.mirror.support.simulated_life import SimulatedLife, job_of, make_training, same_state

pytestmark = pytest.mark.timeout(120)


def attached(node, folder, kind, **more):
    """A training that begins, or goes on, and what its packets show."""
    life = SimulatedLife(make_training(kind), **more)
    checkpointer = FlowCheck(folder / "job", **node.options)
    life.done = life.first = checkpointer.attach(**life.state)
    node.hear(life.begin())
    return life, checkpointer


def train(node, life, checkpointer, steps):
    for _ in range(steps):
        node.hear(life.step())
        assert checkpointer.step() == life.done


def outcomes(checkpointer):
    return {event.step: event.outcome for event in checkpointer.events}


def test_outcomes_are_asked_for_in_drain_and_a_restart_goes_on(tmp_path):
    with node_thread(job_of("adamw"), tmp_path) as node:
        life, checkpointer = attached(node, tmp_path, "adamw")
        train(node, life, checkpointer, 4)
        assert set(outcomes(checkpointer).values()) == {Outcome.PENDING}, "save only counts"
        checkpointer.drain(30)
        assert outcomes(checkpointer) == dict.fromkeys(range(1, 5), Outcome.DURABLE)
        assert checkpointer.latest() == 4
        checkpointer.close()
        again, other = attached(node, tmp_path, "adamw", number=1)
        assert again.done == 4 and same_state(again.copied(), life.states[4]) == []
        train(node, again, other, 2)
        other.drain(30)
        assert outcomes(other) == dict.fromkeys((5, 6), Outcome.DURABLE)
        other.close()


def test_the_last_step_of_a_model_with_buffers_is_said_to_have_failed(tmp_path):
    with node_thread(job_of("norm"), tmp_path) as node:
        life, checkpointer = attached(node, tmp_path, "norm")
        train(node, life, checkpointer, 3)
        checkpointer.drain(60)
        assert outcomes(checkpointer) == {1: Outcome.DURABLE, 2: Outcome.DURABLE, 3: Outcome.FAILED}
        assert "holds no step after 2" in checkpointer.events[-1].error
        checkpointer.close()


def test_steps_of_another_training_are_none_of_this_one(tmp_path):
    with node_thread(job_of("adamw"), tmp_path) as node:
        life, checkpointer = attached(node, tmp_path, "adamw")
        train(node, life, checkpointer, 3)
        checkpointer.drain(30)
        checkpointer.close()
        stranger = SimulatedLife(make_training("adamw"))
        unseen = FlowCheck(tmp_path / "another", **node.options)
        unseen.start(stranger.state)
        for step in (1, 2):
            unseen.save(step)
        unseen.drain(30)
        assert outcomes(unseen) == {1: Outcome.FAILED, 2: Outcome.FAILED}
        unseen.close()


def test_nothing_is_restored_where_nothing_was_seen(tmp_path):
    with node_thread(job_of("adamw"), tmp_path) as node:
        checkpointer = FlowCheck(tmp_path / "job", **node.options)
        assert checkpointer.latest() is None
        with pytest.raises(NoCheckpoint):
            checkpointer.restore(SimulatedLife(make_training("adamw")).state)


def test_a_model_that_ddp_has_wrapped_is_refused(tmp_path, monkeypatch):
    class Wrapped(torch.nn.Module):
        """Stands for DDP, which needs a process group."""

    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", Wrapped)
    life = SimulatedLife(make_training("adamw"))
    state = {**life.state, "model": Wrapped()}
    with pytest.raises(ConfigError, match="give the bare model, and wrap it after"):
        FlowCheck(tmp_path / "job", nodes=["127.0.0.1:1"], token_file="x").restore(state)


def test_a_running_training_is_not_restored(tmp_path):
    with node_thread(job_of("adamw"), tmp_path) as node:
        life, checkpointer = attached(node, tmp_path, "adamw")
        train(node, life, checkpointer, 1)
        with pytest.raises(CheckpointError, match="restore before the training starts"):
            checkpointer.restore(life.state)
        checkpointer.close()


def test_what_cannot_be_is_refused_before_anything_is_asked(tmp_path):
    with pytest.raises(ConfigError, match="one mirror node"):
        FlowCheck(tmp_path, nodes=["a:1", "b:1"], token_file="x")
    with pytest.raises(ConfigError, match="every step"):
        FlowCheck(tmp_path, interval_steps=5)
    with pytest.raises(ConfigError, match="mirror run"):
        FlowCheck(tmp_path).latest()
