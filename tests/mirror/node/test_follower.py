"""What a mirror node holds of a training that it sees only the collectives of: to the bit, over several lives."""

from __future__ import annotations

import pytest

from lastgood.checkpointers.flowcheck.system import FlowCheck
from lastgood.errors import CheckpointError, NoCheckpoint
from lastgood.mirror.conversation.places import Incarnation, LostStep
from lastgood.mirror.extract.slots import Filled, Gone
from lastgood.mirror.node.states import given_state
from tests.mirror.support.node_thread import node_thread
from tests.mirror.support.simulated_life import SimulatedLife, job_of, make_training, same_state

pytestmark = pytest.mark.timeout(120)


def life_of(kind, hook="", **more):
    return SimulatedLife(make_training(kind, hook), hook, **more)


def follow(node, life, steps):
    for _ in range(steps):
        node.hear(life.step())


def restored(node, kind, hook="", folder=None, step=None):
    """A new training that goes on from what the node holds."""
    training = make_training(kind, hook)
    life = SimulatedLife(training, hook)
    node.settle()  # a restore takes what is held, and no step that is on its way
    found = FlowCheck(folder / "job", **node.options).restore(life.state, step)
    life.done = life.first = found
    return life, found


@pytest.mark.parametrize(
    ("kind", "hook"),
    [("norm", ""), ("norm", "bf16"), ("adamw", ""), ("adamw", "bf16"), ("adamw", "fp16"), ("scaled", "")],
)
def test_every_step_is_restored_to_the_bit(kind, hook, tmp_path):
    overflows = (3, 6) if kind == "scaled" else ()
    with node_thread(job_of(kind, hook), tmp_path) as node:
        life = life_of(kind, hook, overflows=overflows)
        node.hear(life.begin())
        follow(node, life, 7)
        buffered = kind == "norm"
        newest = 6 if buffered else 7
        assert node.held()[-1] == newest, "a model with buffers is held one forward later"
        fresh, step = restored(node, kind, hook, tmp_path)
        assert step == newest
        assert same_state(fresh.copied(), life.states[step]) == []


@pytest.mark.parametrize(("kind", "hook"), [("norm", "bf16"), ("adamw", "")])
def test_lives_go_on_as_an_undisturbed_one(kind, hook, tmp_path):
    undisturbed = life_of(kind, hook)
    list(undisturbed.begin())
    for _ in range(14):
        list(undisturbed.step())
    with node_thread(job_of(kind, hook), tmp_path) as node:
        life = life_of(kind, hook)
        for number, killed_after in enumerate((3, 8, 11)):
            life.number = number
            node.hear(life.begin())
            while life.done < killed_after:
                node.hear(life.step())
            part = list(life.step())
            node.hear(part[:-1])  # killed in the middle of a step
            assert {step: loss for step, loss in undisturbed.losses.items() if step in life.losses} == life.losses
            life, step = restored(node, kind, hook, tmp_path)
            assert step in (killed_after - 1, killed_after)
            assert same_state(life.copied(), undisturbed.states[step]) == []


def test_a_training_that_begins_with_other_weights_than_any_held_step_makes_the_node_blind(tmp_path):
    with node_thread(job_of("adamw"), tmp_path) as node:
        life = life_of("adamw")
        node.hear(life.begin())
        follow(node, life, 3)
        other = life_of("adamw", number=1)
        node.settle()
        node.hear(other.begin())
        follow(node, other, 2)
        assert "those of no step that is held here" in str(node.follower.blind)
        assert node.held() == [3], "what was held can still be given back"
        fresh, step = restored(node, "adamw", folder=tmp_path)
        assert step == 3 and same_state(fresh.copied(), life.states[3]) == []
        node.hear([*fresh.begin()])
        assert node.follower.blind is None, "a restart from what is held heals"
        follow(node, fresh, 2)
        assert node.held()[-1] == 5


def test_a_lost_step_makes_it_blind_and_a_state_from_elsewhere_heals(tmp_path):
    job = job_of("norm")
    with node_thread(job, tmp_path) as node:
        life = life_of("norm")
        node.hear(life.begin())
        follow(node, life, 4)
        for event in life.step():
            gone = isinstance(event, Filled) and event.expected.kind == "gradient" and event.expected.bucket == 1
            node.hear([Gone(event.expected, "4 of 9 bytes never came") if gone else event])
        assert node.follower.blind is not None and node.follower.blind.since == 5
        follow(node, life, 2)
        assert node.held()[-1] == 4
        node.follower.give(given_state(node.follower.layout, life.states[6], 6, "a checkpoint"))
        assert node.follower.blind is None
        follow(node, life, 1)
        assert node.held()[-1] == 7, "step 7 was logged while it was blind"
        follow(node, life, 2)
        fresh, step = restored(node, "norm", folder=tmp_path)
        assert step == 9 and same_state(fresh.copied(), life.states[9]) == []


def test_a_state_before_the_lost_step_is_of_no_use(tmp_path):
    with node_thread(job_of("adamw"), tmp_path) as node:
        life = life_of("adamw")
        node.hear(life.begin())
        follow(node, life, 3)
        list(life.step())
        node.hear([LostStep(3, "a hole")])
        follow(node, life, 1)
        node.follower.give(given_state(node.follower.layout, life.states[3], 3, "a checkpoint"))
        assert node.follower.blind is not None
        node.follower.give(given_state(node.follower.layout, life.states[6 - 1], 5, "a checkpoint"))
        assert node.follower.blind is None


def test_lost_buffers_cost_one_step_only(tmp_path):
    with node_thread(job_of("norm"), tmp_path) as node:
        life = life_of("norm")
        node.hear(life.begin())
        follow(node, life, 3)
        events = list(life.step())
        first = next(one for one in events if isinstance(one, Filled) and one.expected.kind == "buffers")
        node.hear([Gone(one.expected, "lost") if one is first else one for one in events])
        assert 3 not in node.held()
        follow(node, life, 2)
        assert node.follower.blind is None
        fresh, step = restored(node, "norm", folder=tmp_path)
        assert step == 5 and same_state(fresh.copied(), life.states[5]) == []


def test_a_capture_that_begins_in_the_middle_says_so(tmp_path):
    with node_thread(job_of("adamw"), tmp_path) as node:
        life = life_of("adamw")
        list(life.begin())
        node.hear([Incarnation(0, False), *life.step()])
        assert "in the middle" in str(node.follower.blind)
        with pytest.raises(NoCheckpoint):
            restored(node, "adamw", folder=tmp_path)


def test_a_node_started_anew_gives_back_its_spill_and_follows_a_restart_from_it(tmp_path):
    spills = tmp_path / "spills"
    job = job_of("norm")
    with node_thread(job, tmp_path, spills=spills, spill_every=2) as node:
        life = life_of("norm")
        node.hear(life.begin())
        follow(node, life, 6)
        node.settle()
        store = node.service.core.body.store
        assert store is not None and store.wait(30)
    for _ in range(2):  # nobody sees these; a spill that is made a step late is gone on from to step 7
        list(life.step())
    with node_thread(job, tmp_path, spills=spills, spill_every=2) as node:
        fresh, step = restored(node, "norm", folder=tmp_path)
        assert 2 <= step <= 5 and same_state(fresh.copied(), life.states[step]) == []
        node.hear(fresh.begin())
        assert node.follower.blind is None
        follow(node, fresh, 3)
        again, later = restored(node, "norm", folder=tmp_path)
        assert later == step + 2 and same_state(again.copied(), life.states[later]) == []


def test_no_trainer_joins_a_mirror_node(tmp_path):
    from lastgood.gradients.protocol.connection import connect_shadow
    from lastgood.gradients.protocol.messages import Hello
    from lastgood.tokens import read_token

    with node_thread(job_of("adamw"), tmp_path) as node:
        token = read_token(node.token_file)
        with pytest.raises(CheckpointError, match="follows a training from its packets"):
            connect_shadow(node.address, token, Hello(role="control", job="ab" * 16, epoch=1), 10.0)
