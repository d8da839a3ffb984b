"""A rank's control connection to a shadow: what it says again after it broke, and what it still says at its end."""

import secrets
import threading

import torch

from lastgood.gradients.layout.entries import Saved, Side
from lastgood.gradients.layout.layout import plan_layout
from lastgood.gradients.link import shadow_link as links
from lastgood.gradients.link.data_link import DataSettings
from lastgood.gradients.link.shadow_link import Identity, ShadowLink, _again, _Outgoing
from lastgood.gradients.protocol.client import ShadowClient
from lastgood.gradients.protocol.messages import Step
from lastgood.optim.spec import OptimizerSpec
from lastgood.tokens import read_token
from tests.gradients.support.shadow_processes import shadow_threads

JOB = "34" * 16
WAIT_S = 60.0


def test_a_step_that_is_sent_again_asks_for_no_spill():
    keep = Saved(epoch=1, iteration=2, step=2)
    step = Step(iteration=4, rule={}, saved=True, step=4, spill=True, keep=keep)
    again = _again(_Outgoing(step, 4, memoryview(b"")))
    assert again == _Outgoing(step.model_copy(update={"spill": False, "keep": None}), 4, memoryview(b""))


class Listening:
    """Notes that a connection is open."""

    def __init__(self):
        self.open = threading.Event()

    def connected(self, shadow, welcome):
        self.open.set()

    def __getattr__(self, name):
        return lambda *_: None


def test_what_is_posted_still_goes_out_when_a_link_ends(tmp_path, monkeypatch):
    parameter = torch.nn.Parameter(torch.zeros(3))
    spec = OptimizerSpec.of(torch.optim.SGD([parameter], lr=0.1)).to_data()
    layout = plan_layout([("p", (3,), "float32")], spec, ranks=1, shadows=1)
    arrived = threading.Event()
    with shadow_threads(tmp_path, 1) as (shadow,):
        token = read_token(tmp_path / "token")
        with ShadowClient(shadow.address, token, WAIT_S, JOB) as client:
            client.fence(1)
        receive = shadow.service._receive_side

        def after_a_while(control, message):
            threading.Event().wait(0.6)
            receive(control, message)
            arrived.set()

        monkeypatch.setattr(shadow.service, "_receive_side", after_a_while)
        monkeypatch.setattr(links, "_END_S", WAIT_S)  # a busy machine may take long for 20 MiB
        listening = Listening()
        settings = DataSettings(1 << 20, 1 << 18, WAIT_S, WAIT_S)
        link = ShadowLink(0, shadow.address, token, Identity(JOB, 1, 0, layout, None), listening, WAIT_S, settings)
        link.start()
        assert listening.open.wait(WAIT_S)
        content = secrets.token_bytes(20 << 20)  # more than a connection holds
        side = Side(rank=0, iteration=1, step=1, layout={}, nbytes=len(content))
        link.post(side, 1, memoryview(content))
        link.close()
        assert arrived.wait(WAIT_S)
