"""A mirror node whose capture began in the middle: it sees again once two states prove which step is which."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lastgood.checkpointers.flowcheck.system import FlowCheck
from lastgood.mirror.conversation.places import Buckets, Incarnation, LostStep
from lastgood.mirror.extract.slots import Filled, Gone
from lastgood.mirror.node import late as late_module
from lastgood.mirror.node.late import leads_to
from lastgood.mirror.node.states import given_state
from tests.mirror.support.node_thread import NodeThread, node_thread
from tests.mirror.support.simulated_life import SimulatedLife, job_of, make_training, same_state

pytestmark = pytest.mark.timeout(120)


def give(node: NodeThread, life: SimulatedLife, step: int) -> None:
    node.follower.give(given_state(node.follower.layout, life.states[step], step, "a checkpoint"))


def late(life: SimulatedLife, unseen: int, buckets: Any = None) -> Iterator[Any]:
    """What is told of a life whose first steps nobody saw; its own steps then are numbered from 1."""
    list(life.begin())
    for _ in range(unseen):
        list(life.step())
    life.first = life.done - 1
    order = list(reversed(range(len(life._trainable))))
    yield Incarnation(0, False)
    yield LostStep(0, "the capture began in the middle of the training")
    yield Buckets(1, buckets or (tuple(order[:1]), tuple(order[1:])), False)


def one_step(life: SimulatedLife) -> list[Any]:
    """`late` has told of the buckets."""
    return [one for one in life.step() if not isinstance(one, Buckets)]


def follow(node: NodeThread, life: SimulatedLife, steps: int) -> None:
    for _ in range(steps):
        node.hear(one_step(life))


def holds_the_state(node: NodeThread, life: SimulatedLife, kind: str, folder: Path, step: int) -> bool:
    assert node.held()[-1] == step
    fresh = SimulatedLife(make_training(kind))
    assert FlowCheck(folder / "job", **node.options).restore(fresh.state) == step
    return same_state(fresh.copied(), life.states[step]) == []


@pytest.mark.parametrize(("kind", "apart"), [("norm", 1), ("norm", 3), ("adamw", 3), ("scaled", 1), ("skipping", 2)])
def test_two_states_heal_a_late_start(kind: str, apart: int, tmp_path: Path) -> None:
    with node_thread(job_of(kind), tmp_path) as node:
        life = SimulatedLife(make_training(kind))
        node.hear(late(life, 4))
        follow(node, life, 2)
        give(node, life, 6)
        assert node.follower.blind is not None and not node.follower.waits_for_state
        follow(node, life, apart)
        give(node, life, 6 + apart)
        assert node.follower.blind is None, node.follower.blind
        follow(node, life, 3)
        assert holds_the_state(node, life, kind, tmp_path, life.done - (kind == "norm"))


def test_a_state_whose_step_is_still_to_come_is_kept_until_it_has(tmp_path: Path) -> None:
    with node_thread(job_of("adamw"), tmp_path) as node:
        life = SimulatedLife(make_training("adamw"))
        node.hear(late(life, 5))
        follow(node, life, 1)
        give(node, life, 6)
        two = [one_step(life) for _ in range(2)]
        node.hear(two[0])
        give(node, life, 8)
        assert node.follower.blind is not None and node.follower.waits_for_state
        node.hear(two[1])
        assert node.follower.blind is None
        follow(node, life, 2)
        assert holds_the_state(node, life, "adamw", tmp_path, 10)


def test_the_first_state_may_be_older_than_the_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_module, "_PATIENCE_STEPS", 4)
    with node_thread(job_of("adamw"), tmp_path) as node:
        life = SimulatedLife(make_training("adamw"))
        node.hear(late(life, 5))
        give(node, life, 3)
        follow(node, life, 2)
        give(node, life, 6)
        follow(node, life, 5)
        assert not node.follower.waits_for_state, "it is not waited for without an end"
        assert node.follower.blind is not None
        give(node, life, 11)
        assert node.follower.blind is None, "the second state has become the first one"
        follow(node, life, 1)
        assert holds_the_state(node, life, "adamw", tmp_path, 13)


def test_other_buckets_than_the_true_ones_are_never_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parameters of one size in the wrong order: all sizes are right, and the bits are not."""
    monkeypatch.setattr(late_module, "_PATIENCE_STEPS", 2)
    with node_thread(job_of("twins"), tmp_path) as node:
        life = SimulatedLife(make_training("twins"))
        node.hear(late(life, 4, buckets=((3,), (2, 0, 1))))  # in truth (3,), (2, 1, 0)
        for step in (6, 8, 12, 16):
            follow(node, life, step - life.done)
            give(node, life, step)
            follow(node, life, 3)
        assert node.follower.blind is not None and node.held() == []
        assert not node.follower.wants_state, "no agent is asked again and again"


def test_the_true_buckets_of_the_same_model_are_followed(tmp_path: Path) -> None:
    with node_thread(job_of("twins"), tmp_path) as node:
        life = SimulatedLife(make_training("twins"))
        node.hear(late(life, 4))
        follow(node, life, 2)
        give(node, life, 6)
        follow(node, life, 2)
        give(node, life, 8)
        assert node.follower.blind is None


def test_gradients_that_tell_nothing_prove_nothing(tmp_path: Path) -> None:
    """Zeros lead from a state to the same one, wherever they lie."""
    with node_thread(job_of("twins"), tmp_path) as node:
        life = SimulatedLife(make_training("twins"))
        node.hear(late(life, 4))
        for step in range(1, 6):
            for number, parameters in enumerate(((3,), (2, 1, 0))):
                nbytes = 4 * sum(life._trainable[one].numel() for one in parameters)
                zeros = np.zeros(nbytes, np.uint8)
                node.hear([life._filled("gradient", zeros, "float32", step=step, bucket=number)])
        layout = node.follower.layout
        node.follower.give(given_state(layout, life.states[4], 4, "a checkpoint"))
        node.follower.give(given_state(layout, life.states[4], 6, "the same, two steps later"))
        assert node.follower.blind is not None
        # The whole log is one window: nothing beside it could be taken for it, and the buckets are still not proven.
        node.follower.give(given_state(layout, life.states[4], 9, "the same, five steps later"))
        assert node.follower.blind is not None


def test_a_lost_step_between_two_states_is_no_way_from_one_to_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_module, "_PATIENCE_STEPS", 4)
    with node_thread(job_of("adamw"), tmp_path) as node:
        life = SimulatedLife(make_training("adamw"))
        node.hear(late(life, 4))
        follow(node, life, 2)
        give(node, life, 6)
        lost = [one for one in life.step() if isinstance(one, Filled)]
        node.hear([Gone(lost[0].expected, "4 of 9 bytes never came")])
        follow(node, life, 1)
        give(node, life, 8)
        follow(node, life, 5)
        assert node.follower.blind is not None and "never came" in str(node.follower.blind)
        give(node, life, life.done)
        assert node.follower.blind is None
        follow(node, life, 1)
        assert holds_the_state(node, life, "adamw", tmp_path, life.done)


def test_a_restart_from_a_checkpoint_that_is_no_held_step_is_known_by_its_weights(tmp_path: Path) -> None:
    with node_thread(job_of("adamw"), tmp_path) as node:
        life = SimulatedLife(make_training("adamw"))
        node.hear(life.begin())
        for _ in range(3):
            node.hear(life.step())
        node.settle()
        other = SimulatedLife(make_training("adamw"), number=1)
        for _ in range(7):  # nobody saw these; from a checkpoint of the last one the training goes on
            list(other.step())
        other.first = other.done
        node.hear(list(other.begin()))
        for _ in range(2):
            node.hear(other.step())
        assert "those of no step that is held here" in str(node.follower.blind)
        give(node, other, 8)
        assert node.follower.blind is not None, "not what it began with"
        give(node, other, 7)
        assert node.follower.blind is None
        for _ in range(2):
            node.hear(other.step())
        assert holds_the_state(node, other, "adamw", tmp_path, 11)


def test_the_proof_is_of_every_bit(tmp_path: Path) -> None:
    with node_thread(job_of("adamw"), tmp_path) as node:
        life = SimulatedLife(make_training("adamw"))
        node.hear(late(life, 4))
        follow(node, life, 2)
        layout, log = node.follower.layout, node.follower._log
        before = given_state(layout, life.states[4], 4, "before")
        steps = log.since(1, 3)
        assert steps is not None
        assert leads_to(layout, before, steps, given_state(layout, life.states[6], 6, "after"))
        assert not leads_to(layout, before, steps[:1], given_state(layout, life.states[6], 6, "after"))
        wrong = given_state(layout, life.states[6], 6, "after")
        some = wrong.tensors[2, "exp_avg_sq"].view(-1)
        some[3] = torch.nextafter(some[3], torch.tensor(1.0))
        assert not leads_to(layout, before, steps, wrong)
