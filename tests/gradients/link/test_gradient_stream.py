"""What a rank's stream of gradients knows of what it has sent."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable
from functools import partial

import pytest

from lastgood import _native
from lastgood.gradients.layout.layout import plan_layout
from lastgood.gradients.layout.spans import Span
from lastgood.gradients.link import gradient_stream as stream_module
from lastgood.gradients.link.data_link import DataLink, DataSettings
from lastgood.gradients.link.gradient_stream import GradientStream
from lastgood.wire.records import DType
from tests.gradients.support.data_links import LARGE, SETTINGS, WAIT_S, Unending, address_of, connected, pair


def test_gradients_that_come_behind_their_step_are_counted_for_it() -> None:
    # From a device they arrive in the background, while the training is iterations ahead.
    link, far = connected(SETTINGS)
    layout = plan_layout([("p", (100,), "float32")], {}, ranks=1, shadows=1)
    stream = GradientStream(layout, [link], 0, lambda: None)
    try:
        first = stream.begin()
        stream.phase = "closed"
        assert stream.take_sent(first) == 0
        second = stream.begin()
        for iteration, nbytes in ((first, 400), (second, 100), (second, 60)):
            assert stream.send(iteration, [Span(0, DType.float32, 0, 0, nbytes)], address_of(LARGE), borrowed=False)
        assert (stream.take_sent(first), stream.take_sent(second), stream.take_sent(second)) == (400, 160, 0)
    finally:
        link.close()
        far.close()


class Memory:
    """That is lent."""


@pytest.mark.parametrize("ends", [True, False])
def test_lent_memory_that_a_thread_may_read_for_ever_is_never_freed(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "_kept_for_ever", [])
    link, far = connected(SETTINGS)
    stream = GradientStream(plan_layout([("p", (100,), "float32")], {}, ranks=1, shadows=1), [link], 0, lambda: None)
    iteration = stream.begin()
    if not ends:
        link._sender = Unending(link._sender)
    memory = Memory()
    stream.send(iteration, [Span(0, DType.float32, 0, 0, 400)], address_of(LARGE), borrowed=True, keep=memory)
    alive = weakref.ref(memory)
    del memory
    assert stream.lends
    stream.settle()
    assert not stream.lends and (alive() is None) == ends
    assert link.cuts == (not ends), "nothing more comes over that connection"
    link.close()
    far.close()


def test_what_nobody_asks_for_is_forgotten() -> None:
    absent = DataLink("10.9.8.7:6", 1, 1, 0, DataSettings(1 << 20, 1 << 18, 1.0, 1.0))
    layout = plan_layout([("p", (100,), "float32")], {}, ranks=1, shadows=1)
    stream = GradientStream(layout, [absent], 0, lambda: None)
    for _ in range(3000):
        iteration = stream.begin()
        stream.send(iteration, [], 0, borrowed=False)
        stream.phase = "closed"
    assert 0 < len(stream._sent) < 1100


@pytest.mark.parametrize("connects_before", [1, 2, 3])
def test_a_new_connection_is_used_behind_what_is_on_its_way_from_a_device(connects_before: int) -> None:
    """The training is ahead of the device's copies; the connection is made before one of its iterations begins."""
    slots = [ctypes.create_string_buffer(400) for _ in range(4)]
    receiver = _native.Receiver(1, 1, [(0, 400, int(DType.float32))], [[ctypes.addressof(slot)] for slot in slots])
    receiver.set_first(0, 1)
    near, far = pair()
    link = DataLink("10.9.8.7:6", 1, 1, 0, SETTINGS)
    stream = GradientStream(plan_layout([("p", (100,), "float32")], {}, ranks=1, shadows=1), [link], 0, lambda: None)
    waiting: list[Callable[[], None]] = []
    stream.in_order = waiting.append
    gradients = ctypes.create_string_buffer(bytes(range(200)) * 2, 400)

    def copied(iteration: int) -> None:
        stream.send(iteration, [Span(0, DType.float32, 0, 0, 400)], address_of(gradients), borrowed=False)

    for number in (1, 2, 3):
        if number == connects_before:
            receiver.add(far.fileno(), 0)
            link.connect(near.detach())
        iteration = stream.begin()
        waiting.append(partial(copied, iteration))
        stream.end()
        stream.phase = "closed"
    for call in waiting:
        call()
    try:
        events, deadline = [], time.monotonic() + WAIT_S
        while ("end", 3) not in events:
            assert time.monotonic() < deadline, f"waited {WAIT_S} s for the end of iteration 3: {events}"
            events += [(event.kind, event.iteration) for event in receiver.poll(0.2)]
    finally:
        link.close()
        receiver.close(WAIT_S)
        far.close()
    assert [one for one in events if one[1]] == [
        (kind, iteration) for iteration in (1, 2, 3) for kind in ("complete", "end")
    ], "each iteration ends behind its gradients, and none is given up that could still come"
    assert [slot.raw for slot in slots].count(gradients.raw) == 3
