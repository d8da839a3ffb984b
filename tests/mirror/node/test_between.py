"""What comes between two states of a follower: before the weights, as it goes blind, as a state is given."""

from __future__ import annotations

import threading
import time

import pytest

from lastgood.checkpointers.flowcheck.system import FlowCheck
from lastgood.errors import CheckpointError, WaitTimeout
from lastgood.mirror.conversation.places import Contradiction
from lastgood.mirror.extract.slots import Filled, Gone
from lastgood.mirror.node.life import Life
from lastgood.mirror.node.receiver import MirrorReceiver
from lastgood.mirror.node.states import given_state
from tests.mirror.support.node_thread import node_thread
from tests.mirror.support.simulated_life import SimulatedLife, job_of, make_training, same_state
from tests.support.patience import wait_until

pytestmark = pytest.mark.timeout(120)


def filled(event, kind):
    return isinstance(event, Filled) and event.expected.kind == kind


def follow(node, life, steps):
    for _ in range(steps):
        node.hear(life.step())


def lost_step(life):
    gradients = [one for one in life.step() if filled(one, "gradient")]
    return Gone(gradients[0].expected, "lost")


def give(node, life, step):
    node.follower.give(given_state(node.follower.layout, life.states[step], step, "a checkpoint"))


def holds_the_state(node, life, kind, folder, step):
    """Whether the newest that the node gives back is that step of that life, to the bit."""
    assert node.held()[-1] == step
    fresh = SimulatedLife(make_training(kind))
    assert FlowCheck(folder / "job", **node.options).restore(fresh.state) == step
    return same_state(fresh.copied(), life.states[step]) == []


@pytest.mark.parametrize(("kind", "buckets"), [("norm", 1), ("norm", 2), ("norm", 3), ("adamw", 2), ("adamw", 14)])
def test_gradients_that_are_complete_before_the_weights_are_not_lost(kind, buckets, tmp_path):
    """One bucket in step 0, two in each later one: half a step as well, and more than the shadow has slots for."""
    with node_thread(job_of(kind), tmp_path) as node:
        life = SimulatedLife(make_training(kind))
        events = list(life.begin())
        while sum(filled(one, "gradient") for one in events) <= buckets:
            events += life.step()
        weights = [one for one in events if filled(one, "parameters")]
        others = [one for one in events if not filled(one, "parameters")]
        last = [place for place, one in enumerate(others) if filled(one, "gradient")][buckets - 1]
        node.hear(others[: last + 1])
        assert not node.follower.following
        node.hear([*weights, *others[last + 1 :]])
        assert node.follower.blind is None
        follow(node, life, 6)
        assert holds_the_state(node, life, kind, tmp_path, life.done - (kind == "norm"))


def test_a_first_step_that_is_lost_before_the_weights_are_there_makes_it_blind(tmp_path):
    with node_thread(job_of("adamw"), tmp_path) as node:
        life = SimulatedLife(make_training("adamw"))
        begin, step = list(life.begin()), list(life.step())
        lost = [Gone(one.expected, "4 of 9 bytes never came") if filled(one, "gradient") else one for one in step]
        node.hear([one for one in begin if not filled(one, "parameters")])
        node.hear(lost)
        node.hear([one for one in begin if filled(one, "parameters")])
        assert node.follower.blind is not None and node.follower.blind.since == 1
        assert "never came" in node.follower.blind.why
        follow(node, life, 2)
        give(node, life, 2)
        assert node.follower.blind is None
        follow(node, life, 1)
        assert holds_the_state(node, life, "adamw", tmp_path, 4)


def test_a_first_step_that_finds_no_room_before_the_weights_makes_it_blind(tmp_path):
    with node_thread(job_of("adamw"), tmp_path, log_bytes=300) as node:
        life = SimulatedLife(make_training("adamw"))
        begin = list(life.begin())
        node.hear([one for one in begin if not filled(one, "parameters")])
        node.hear(life.step())
        node.hear([one for one in begin if filled(one, "parameters")])
        assert "no room" in str(node.follower.blind)


def test_a_state_that_is_given_in_the_middle_of_a_step_is_gone_on_from(tmp_path):
    with node_thread(job_of("adamw"), tmp_path) as node:
        life = SimulatedLife(make_training("adamw"))
        node.hear(life.begin())
        follow(node, life, 3)
        node.hear([lost_step(life)])
        follow(node, life, 1)
        events = list(life.step())
        first = next(place for place, one in enumerate(events) if filled(one, "gradient"))
        node.hear(events[: first + 1])
        give(node, life, 5)
        assert node.follower.blind is None
        node.hear(events[first + 1 :])
        follow(node, life, 6)
        assert holds_the_state(node, life, "adamw", tmp_path, 12)


def test_a_step_that_is_half_in_the_slots_as_it_goes_blind_is_not_gone_on_from(tmp_path):
    with node_thread(job_of("adamw"), tmp_path) as node:
        life = SimulatedLife(make_training("adamw"))
        node.hear(life.begin())
        follow(node, life, 3)
        node.settle()
        events = list(life.step())
        first = next(place for place, one in enumerate(events) if filled(one, "gradient"))
        node.hear(events[: first + 1])
        core = node.service.core
        core.fence(None, core.status().epoch + 1)
        node.hear([])
        assert "a restore has begun" in str(node.follower.blind)
        give(node, life, 3)
        assert node.follower.blind is not None and not node.follower.waits_for_state
        node.hear(events[first + 1 :])
        give(node, life, 3)
        assert node.follower.blind is not None and not node.follower.waits_for_state
        give(node, life, 4)
        assert node.follower.blind is None
        follow(node, life, 6)
        assert holds_the_state(node, life, "adamw", tmp_path, 10)


def test_gradients_that_the_shadow_does_not_take_are_a_lost_step(tmp_path, monkeypatch):
    with node_thread(job_of("adamw"), tmp_path) as node:
        life = SimulatedLife(make_training("adamw"))
        node.hear(life.begin())
        follow(node, life, 3)
        node.settle()

        def put(*_):
            raise WaitTimeout("no room came")

        with monkeypatch.context() as patched:
            patched.setattr(MirrorReceiver, "put", put)
            follow(node, life, 1)
        assert node.follower.blind is not None and node.follower.blind.since == 4
        follow(node, life, 1)
        give(node, life, 5)
        assert node.follower.blind is None, "it does not wait for step 4"
        follow(node, life, 1)
        assert holds_the_state(node, life, "adamw", tmp_path, 6)


def test_a_state_that_cannot_be_taken_does_not_end_the_node(tmp_path, monkeypatch):
    with node_thread(job_of("adamw"), tmp_path) as node:
        life = SimulatedLife(make_training("adamw"))
        node.hear(life.begin())
        follow(node, life, 2)
        node.hear([lost_step(life)])

        def begin(_):
            raise CheckpointError("the shadow takes no seed")

        with monkeypatch.context() as patched:
            patched.setattr(Life, "begin", begin)
            give(node, life, 3)
        assert node.follower.blind is not None
        give(node, life, 3)
        assert node.follower.blind is None
        follow(node, life, 1)
        assert holds_the_state(node, life, "adamw", tmp_path, 4)


def test_a_state_does_not_heal_traffic_of_another_job(tmp_path):
    with node_thread(job_of("adamw"), tmp_path) as node:
        life = SimulatedLife(make_training("adamw"))
        node.hear(life.begin())
        follow(node, life, 2)
        node.hear([Contradiction("three ranks")])
        give(node, life, 2)
        assert "three ranks" in str(node.follower.blind)


def test_a_restore_ends_the_wait_for_room(tmp_path):
    with node_thread(job_of("adamw"), tmp_path, wait_s=100.0) as node:
        life = SimulatedLife(make_training("adamw"))
        node.hear(life.begin())
        core = node.service.core
        slots = core.settings.slots
        with core.body.change:
            core.body.paused += 1  # nothing is applied
        events = [event for _ in range(slots + 1) for event in life.step()]
        began = time.monotonic()
        hearing = threading.Thread(target=node.hear, args=(events,), daemon=True)
        hearing.start()
        wait_until(lambda: node.follower.iteration == slots, lambda: node.follower.iteration, 30)
        core.fence(None, core.status().epoch + 1)
        hearing.join(60)
        assert not hearing.is_alive() and time.monotonic() - began < 60
        assert node.follower.blind is not None and node.follower.blind.since == slots + 1
        with core.body.change:
            core.body.paused -= 1
            core.body.change.notify_all()


def test_what_is_idle_is_held_however_late_the_shadow_hears_of_gradients(tmp_path, monkeypatch):
    heard = MirrorReceiver.poll

    def late(receiver, timeout_s):
        events = heard(receiver, timeout_s)
        time.sleep(0.2 if events else 0.0)
        return events

    monkeypatch.setattr(MirrorReceiver, "poll", late)
    with node_thread(job_of("adamw"), tmp_path) as node:
        life = SimulatedLife(make_training("adamw"))
        node.hear(life.begin())
        follow(node, life, 2)
        assert node.held() == [2], "it is held, and the one before is applied"


def test_steps_after_a_seed_that_is_not_in_its_place_yet_are_not_lost_at_a_fence(tmp_path, monkeypatch):
    """Their gradients are in the slots; the worker and the receiver's events are late."""
    heard, on_their_way = MirrorReceiver.poll, threading.Event()
    monkeypatch.setattr(
        MirrorReceiver, "poll", lambda *args: () if (events := heard(*args)) and on_their_way.is_set() else events
    )
    with node_thread(job_of("adamw"), tmp_path) as node:
        life = SimulatedLife(make_training("adamw"))
        node.hear(life.begin())
        follow(node, life, 10)
        node.hear([lost_step(life)])
        node.settle()
        core = node.service.core
        with core.body.change:
            core.body.paused += 1
        on_their_way.set()
        give(node, life, 11)
        assert node.follower.blind is None
        follow(node, life, 1)
        said = threading.Event()
        node.follower._life.link.call(said.set)
        assert said.wait(30)
        core.fence(None, core.status().epoch + 1)
        assert [saved.step for saved in core.status().memory] == [12]
        with core.body.change:
            core.body.paused -= 1
        fresh = SimulatedLife(make_training("adamw"))
        assert FlowCheck(tmp_path / "job", **node.options).restore(fresh.state) == 12
        assert same_state(fresh.copied(), life.states[12]) == []
