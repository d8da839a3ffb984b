"""What a trainer is told on a control connection."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from lastgood.errors import CheckpointError, WaitTimeout
from lastgood.gradients.layout.layout import plan_layout
from lastgood.gradients.protocol.client import ShadowClient
from lastgood.gradients.protocol.connection import connect_shadow
from lastgood.gradients.protocol.messages import Complete, Declare, Hello, Seeded, parse_message
from lastgood.optim.spec import OptimizerSpec
from lastgood.tokens import read_token
from tests.gradients.support.shadow_processes import shadow_threads

JOB = "12" * 16


def test_nothing_is_missed_between_the_welcome_and_what_follows_it(tmp_path, monkeypatch):
    """A rank that connected while another one seeded waited for seeds that had come before it was listened to."""
    with shadow_threads(tmp_path, 1) as (shadow,):
        token = read_token(tmp_path / "token")
        with ShadowClient(shadow.address, token, 60.0, JOB) as client:
            client.fence(1)
        service = shadow.service
        welcome = service.core.welcome
        teller = []

        def welcome_and_a_seed_at_once():
            found = welcome()

            def tell():
                with service.core.body.change:  # as all that is told
                    service._tell(Seeded(bucket=0, iteration=7, whole=True), everyone=True)

            teller.append(threading.Thread(target=tell))
            teller[0].start()
            teller[0].join(0.5)
            return found

        monkeypatch.setattr(service.core, "welcome", welcome_and_a_seed_at_once)
        hello = Hello(role="control", job=JOB, epoch=1, rank=0)
        wire, _ = connect_shadow(shadow.address, token, hello, 60.0)
        try:
            told = parse_message(wire.receive_message("what follows the welcome"), "the shadow")
        finally:
            wire.close()
            teller[0].join(60)
        assert isinstance(told, Seeded) and told.iteration == 7


def test_an_epoch_that_no_record_can_carry_is_refused(tmp_path):
    """One frame of it, and no training could ever use this shadow again."""
    with shadow_threads(tmp_path, 1) as (shadow,):
        token = read_token(tmp_path / "token")
        wire, _ = connect_shadow(shadow.address, token, Hello(role="asker", job=JOB), 60.0)
        wire.send_message(kind="fence", epoch=1 << 32)
        with pytest.raises(CheckpointError):
            wire.receive_message("an answer")
        wire.close()
        with ShadowClient(shadow.address, token, 60.0, JOB) as client:
            assert client.status().epoch == 0
            assert client.fence((1 << 32) - 1).epoch == (1 << 32) - 1


class Lingering:
    """A receiver one of whose threads gets no processor for a while."""

    def __init__(self, receiver):
        self.receiver = receiver
        self.asked = 0

    def close(self, timeout_s):
        self.asked += 1
        return self.receiver.close(timeout_s) and self.asked > 1

    def __getattr__(self, name):
        return getattr(self.receiver, name)


def test_a_rank_that_connects_again_hears_which_word_was_the_newest(tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(3))
    spec = OptimizerSpec.of(torch.optim.SGD([parameter], lr=0.1)).to_data()
    layout = plan_layout([("p", (3,), "float32")], spec, ranks=2, shadows=1)
    with shadow_threads(tmp_path, 1) as (shadow,):
        token = read_token(tmp_path / "token")
        core = shadow.service.core
        core.fence(JOB, 1)
        core.declare(1, Declare(layout=layout.to_data(), adopt=None), lambda welcome: None)
        hello = Hello(role="control", job=JOB, epoch=1, rank=1, layout=layout.digest)

        def connected():
            wire, welcome = connect_shadow(shadow.address, token, hello, 20.0)
            assert welcome.unseeded == (0,)
            return contextlib.closing(wire)

        with connected() as wire:
            assert not wire.wait_readable(0.2), "nothing has been said in this epoch"
        words = [Complete(iteration=3), Complete(iteration=5, lost=(0,), floor=6, spoiled=(2,))]
        for word in words:
            core.hear(1, 0, word)
        with connected() as wire:
            assert parse_message(wire.receive_message("the newest word"), "the shadow") == words[-1]
        core.hear(1, 0, words[-1])
        core.fence(JOB, 2)
        core.declare(2, Declare(layout=layout.to_data(), adopt=None), lambda welcome: None)
        hello = hello.model_copy(update={"epoch": 2})
        with connected() as wire:
            assert not wire.wait_readable(0.2), "that was another epoch's"


@pytest.mark.parametrize("size", [5, 3], ids=["the new layout again", "the old one again"])
def test_memory_is_not_given_back_while_a_thread_may_still_write_into_it(tmp_path, size):
    def declared(elements):
        parameter = torch.nn.Parameter(torch.zeros(elements))
        spec = OptimizerSpec.of(torch.optim.SGD([parameter], lr=0.1)).to_data()
        layout = plan_layout([("p", (elements,), "float32")], spec, ranks=1, shadows=1)
        return Declare(layout=layout.to_data(), adopt=None)

    with shadow_threads(tmp_path, 1) as (shadow,):
        core = shadow.service.core
        core.fence(JOB, 1)
        core.declare(1, declared(3), lambda welcome: None)
        core.fence(JOB, 2)
        memory, receiver = core.body.memory, Lingering(core.body.receiver)
        core.body.receiver = receiver
        with pytest.raises(WaitTimeout, match="threads that receive gradients"):
            core.declare(2, declared(5), lambda welcome: None)
        assert core.body.memory is memory
        core.declare(2, declared(size), lambda welcome: None)
        assert core.body.layout.parameters[0].shape == (size,)
        assert core.body.memory is not memory and core.body.receiver is not receiver, "an ended one receives nothing"
