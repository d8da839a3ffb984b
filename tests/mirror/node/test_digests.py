"""Digests that the agent tells of the trainer's weights, compared with those of what the node made of the packets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lastgood.checkpointers.flowcheck.system import FlowCheck
from lastgood.errors import CorruptCheckpoint
from lastgood.gradients.shadow.spill_store import SpillStore
from lastgood.mirror.agent.door import AgentDoor
from lastgood.mirror.agent.messages import weights_digest
from lastgood.mirror.agent.trainer import MirrorAgent
from lastgood.mirror.node.agents import AgentEar
from lastgood.mirror.node.states import given_state
from lastgood.wire.gate import open_listener
from tests.mirror.support.node_thread import NodeThread, node_thread
from tests.mirror.support.simulated_life import SimulatedLife, job_of, make_training, same_state
from tests.support.patience import wait_until

pytestmark = pytest.mark.timeout(120)
TOKEN = b"a token of a job, long enough"


def digest_of(life: SimulatedLife) -> str:
    return weights_digest(dict(life.model.named_parameters()))


def change_by_hand(life: SimulatedLife) -> None:
    with torch.no_grad():
        next(iter(life.model.parameters())).view(-1)[1] += 1e-3


def wait_compared(node: NodeThread, count: int, ear: AgentEar | None = None) -> None:
    def compared() -> int:
        if ear is not None:
            ear.turn()
        node.hear([])
        return int(node.follower.counters["digests_compared"])

    wait_until(lambda: compared() >= count, lambda: dict(node.follower.counters), 30)
    assert compared() == count


def follow_to_a_difference(node: NodeThread, life: SimulatedLife) -> None:
    """In step 2."""
    node.follower.digests.expect(2)
    node.hear(life.begin())
    for _ in range(2):
        node.hear(life.step())
    change_by_hand(life)
    node.follower.digests.tell(2, digest_of(life))
    wait_compared(node, 1)


@pytest.mark.parametrize("kind", ["norm", "adamw", "skipping"])
def test_equal_digests_change_nothing(kind: str, tmp_path: Path) -> None:
    """BatchNorm, a frozen part and channels_last; a clipping; parameters that are left out."""
    with node_thread(job_of(kind), tmp_path) as node:
        life = SimulatedLife(make_training(kind))
        node.follower.digests.expect(2)
        node.hear(life.begin())
        for step in range(1, 6):
            node.hear(life.step())
            if step % 2 == 0:
                node.follower.digests.tell(step, digest_of(life))
            else:
                wait_compared(node, step // 2)  # one forward later for a model with buffers
        assert node.follower.blind is None and not node.follower.counters["digests_different"]
        assert node.held()[-1] == 5 - (kind == "norm")


def test_without_an_agent_nothing_is_copied(tmp_path: Path) -> None:
    with node_thread(job_of("adamw"), tmp_path) as node:
        life = SimulatedLife(make_training("adamw"))
        node.hear(life.begin())
        for _ in range(2):
            node.hear(life.step())
        assert not node.follower.digests.is_due(2) and not node.follower.digests.busy


def test_another_digest_ends_the_service_of_that_step_until_a_state_comes(tmp_path: Path) -> None:
    with node_thread(job_of("adamw"), tmp_path) as node:
        life = SimulatedLife(make_training("adamw"))
        follow_to_a_difference(node, life)
        follower = node.follower
        assert follower.blind is not None and follower.blind.since == 2 and "another digest" in str(follower.blind)
        assert follower.wants_state and node.held() == []
        fresh = SimulatedLife(make_training("adamw"))
        with pytest.raises(CorruptCheckpoint, match="complete"):
            FlowCheck(tmp_path / "job", **node.options).restore(fresh.state)
        node.hear(life.step())
        follower.give(given_state(follower.layout, life.states[3], 3, "a checkpoint"))
        assert follower.blind is None
        node.hear(life.step())
        follower.digests.tell(4, digest_of(life))
        wait_compared(node, 2)
        assert follower.counters["digests_different"] == 1 and node.held() == [4]
        assert FlowCheck(tmp_path / "job", **node.options).restore(fresh.state) == 4
        assert same_state(fresh.copied(), life.states[4]) == []


def test_spills_from_that_step_on_are_not_given_back_either(tmp_path: Path) -> None:
    spills = tmp_path / "spills"
    with node_thread(job_of("adamw"), tmp_path, spills=spills, spill_every=1) as node:
        life = SimulatedLife(make_training("adamw"))
        core = node.service.core
        node.follower.digests.expect(2)
        node.hear(life.begin())
        for step in (1, 2):
            node.hear(life.step())
            wait_until(
                lambda at=step: core.status().durable[:1] and core.status().durable[0].step == at, core.status, 30
            )
        assert [saved.step for saved in core.status().durable] == [2, 1]
        change_by_hand(life)
        node.follower.digests.tell(2, digest_of(life))
        wait_compared(node, 1)
        assert [saved.step for saved in core.status().durable] == [1]
        job = core.status().job
    store = SpillStore(spills, job, 0)
    try:
        assert [spill.saved.step for spill in store.durable()] == [1], "nor after a new start of the node"
    finally:
        store.close()


def test_an_agent_is_heard_asked_and_believed(tmp_path: Path) -> None:
    listener = open_listener()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with (
        node_thread(job_of("adamw"), tmp_path) as node,
        AgentDoor(listener, TOKEN, most_bytes=64 << 20, timeout_s=10.0) as door,
    ):
        ear, follower = AgentEar(door, node.follower), node.follower
        life = SimulatedLife(make_training("adamw"))

        def step() -> Any:
            node.hear(life.step())
            agent.step(life.done)
            ear.turn()
            return follower.blind

        with MirrorAgent(life.state, address, TOKEN, digest_every=2, timeout_s=10.0) as agent:
            wait_until(lambda: ear.turn() or follower.digests.is_due(2), lambda: "no agent", 30)
            node.hear(life.begin())
            step()
            step()
            wait_compared(node, 1, ear)
            assert follower.blind is None
            change_by_hand(life)
            step()
            step()
            wait_compared(node, 2, ear)
            assert "after step 4" in str(follower.blind)
            link = agent._link
            assert link is not None
            wait_until(lambda: ear.turn() or link.asked is not None, lambda: "no question", 30)
            step()
            wait_until(lambda: ear.turn() or follower.blind is None, lambda: follower.blind, 30)
            step()
        wait_until(lambda: ear.turn() or not follower.digests.is_due(2), lambda: "an agent", 30)
        assert node.held()[-1] == life.done
        fresh = SimulatedLife(make_training("adamw"))
        assert FlowCheck(tmp_path / "job", **node.options).restore(fresh.state) == life.done
        assert same_state(fresh.copied(), life.states[life.done]) == []
