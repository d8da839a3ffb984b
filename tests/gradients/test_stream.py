"""What a rank's stream of gradients knows of what it has sent."""

from __future__ import annotations

from lastgood.gradients.data_link import DataLink, DataSettings
from lastgood.gradients.layout import plan_layout
from lastgood.gradients.pieces import Span
from lastgood.gradients.stream import GradientStream
from lastgood.wire.records import DType
from tests.gradients.test_data_link import LARGE, SETTINGS, address_of, connected


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


def test_what_nobody_asks_for_is_forgotten() -> None:
    absent = DataLink("10.9.8.7:6", 1, 1, 0, DataSettings(1 << 20, 1 << 18, 1.0, 1.0))
    layout = plan_layout([("p", (100,), "float32")], {}, ranks=1, shadows=1)
    stream = GradientStream(layout, [absent], 0, lambda: None)
    for _ in range(3000):
        iteration = stream.begin()
        stream.send(iteration, [], 0, borrowed=False)
        stream.phase = "closed"
    assert 0 < len(stream._sent) < 1100
