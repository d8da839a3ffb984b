"""What a rank says of shadows that it waits for in vain."""

from __future__ import annotations

import pytest

from lastgood.errors import WaitTimeout
from lastgood.gradients.conductor import Conductor, Settings
from lastgood.gradients.data_link import DataSettings
from lastgood.gradients.links import Identity
from lastgood.gradients.messages import Welcome

JOB = "12" * 16


def test_a_shadow_that_is_gone_while_seeds_are_waited_for_is_named():
    settings = Settings(30.0, 30.0, DataSettings(1 << 20, 1 << 16, 1.0, 1.0))
    identity = Identity(JOB, 1, 0, None, None)
    addresses = ["127.0.0.1:1", "127.0.0.1:2"]
    conductor = Conductor(identity, 0, addresses, b"x" * 32, settings, lambda bucket: True, lambda *_: None)
    for number in range(2):
        welcome = Welcome(shadow=number, shadows=2, job=JOB, epoch=1, layout=None, gradient_slots=2)
        conductor.connected(number, welcome)
    conductor.wait_whole(0.1)
    conductor.disconnected(1, "it was closed")
    with pytest.raises(WaitTimeout, match=r"take their first seeds: 127\.0\.0\.1:2 \(it was closed\)$"):
        conductor.wait_whole(0.1)
