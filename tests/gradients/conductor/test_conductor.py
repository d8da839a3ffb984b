"""What a rank says of shadows that it waits for in vain, and what it says of iterations, in which order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lastgood.errors import WaitTimeout
from lastgood.gradients.conductor import conductor as conductor_module
from lastgood.gradients.conductor.conductor import Conductor, ConductorSettings
from lastgood.gradients.link.data_link import DataSettings
from lastgood.gradients.link.shadow_link import Identity
from lastgood.gradients.protocol.messages import Have, Torn, Welcome

JOB = "12" * 16
ADDRESSES = ["127.0.0.1:1", "127.0.0.1:2"]


def conductor_of(settled=lambda *_: None, slots=4):
    """Of two shadows that have taken the layout; they are the test's own."""
    settings = ConductorSettings(30.0, 30.0, DataSettings(1 << 20, 1 << 16, 1.0, 1.0))
    identity = Identity(JOB, 1, 0, None, None)
    conductor = Conductor(identity, 0, ADDRESSES, b"x" * 32, settings, lambda bucket: True, settled)
    for number in range(2):
        welcome = Welcome(shadow=number, shadows=2, job=JOB, epoch=1, layout=None, gradient_slots=slots)
        conductor.connected(number, welcome)
    return conductor


def test_a_shadow_that_is_gone_while_seeds_are_waited_for_is_named():
    conductor = conductor_of()
    conductor.wait_whole(0.1)
    conductor.disconnected(1, "it was closed")
    with pytest.raises(WaitTimeout, match=r"take their first seeds: 127\.0\.0\.1:2 \(it was closed\)$"):
        conductor.wait_whole(0.1)


def torn_at_2(settled):
    """Both hold iteration 0; shadow 1 holds 1 as well, and 2 is torn there."""
    conductor = conductor_of(lambda word: settled.append((word.iteration, word.lost)))
    for number in range(2):
        conductor.heard(number, Have(iteration=0))
    conductor.heard(1, Have(iteration=1))
    conductor.heard(1, Torn(iteration=2, buckets=(1,), why="bytes of it have not come"))
    return conductor


def test_what_all_hold_is_said_before_it_is_said_who_is_left_behind():
    settled = []
    conductor = torn_at_2(settled)
    for iteration in range(1, 5):
        conductor.closed(iteration)
    conductor.heard(0, Have(iteration=4))
    assert settled == [(0, ()), (1, ()), (3, (1,))]


def test_a_torn_shadow_is_given_up_only_once_the_training_waits_for_it(monkeypatch):
    now, settled = [0.0], []
    conductor = torn_at_2(settled)

    def goes_on():
        for iteration in range(1, 21):
            now[0] += 10.0
            conductor.closed(iteration)
            conductor.heard(0, Have(iteration=iteration))
            yield False
        assert not any(known.given_up for known in conductor._state.shadows), "200 s, and never 30 s with no progress"
        for _ in range(5):
            now[0] += 10.0
            yield False
        yield True

    ticks = goes_on()
    monkeypatch.setattr(conductor_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(conductor._stop, "wait", lambda seconds: next(ticks))
    conductor._tick()
    assert [known.given_up for known in conductor._state.shadows] == [False, True]
    assert settled[-1] == (20, (1,))
