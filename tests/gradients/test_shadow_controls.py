"""What a trainer is told on a control connection."""

from __future__ import annotations

import threading

import pytest

from lastgood.errors import CheckpointError
from lastgood.gradients.asking import Asker, connect_shadow
from lastgood.gradients.messages import Hello, Seeded, parse_message
from lastgood.gradients.token import read_token
from tests.gradients.shadow_processes import shadow_threads

JOB = "12" * 16


def test_nothing_is_missed_between_the_welcome_and_what_follows_it(tmp_path, monkeypatch):
    """A rank that connected while another one seeded waited for seeds that had come before it was listened to."""
    with shadow_threads(tmp_path, 1) as (shadow,):
        token = read_token(tmp_path / "token")
        with Asker(shadow.address, token, 20.0, JOB) as asker:
            asker.fence(1)
        service = shadow.service
        welcome = service.core.welcome
        teller = []

        def welcome_and_a_seed_at_once():
            found = welcome()

            def tell():
                with service.core.change:  # as all that is told
                    service._tell(Seeded(bucket=0, iteration=7, whole=True), everyone=True)

            teller.append(threading.Thread(target=tell))
            teller[0].start()
            teller[0].join(0.5)
            return found

        monkeypatch.setattr(service.core, "welcome", welcome_and_a_seed_at_once)
        hello = Hello(role="control", job=JOB, epoch=1, rank=0)
        wire, _ = connect_shadow(shadow.address, token, hello, 20.0)
        try:
            told = parse_message(wire.receive_message("what follows the welcome"), "the shadow")
        finally:
            wire.close()
            teller[0].join(20)
        assert isinstance(told, Seeded) and told.iteration == 7


def test_an_epoch_that_no_record_can_carry_is_refused(tmp_path):
    """One frame of it, and no training could ever use this shadow again."""
    with shadow_threads(tmp_path, 1) as (shadow,):
        token = read_token(tmp_path / "token")
        wire, _ = connect_shadow(shadow.address, token, Hello(role="asker", job=JOB), 20.0)
        wire.send_message(kind="fence", epoch=1 << 32)
        with pytest.raises(CheckpointError):
            wire.receive_message("an answer")
        wire.close()
        with Asker(shadow.address, token, 20.0, JOB) as asker:
            assert asker.status().epoch == 0
            assert asker.fence((1 << 32) - 1).epoch == (1 << 32) - 1
