"""Errors inside a shadow that no retry mends: the trainer says what it is, and the shadow's log stays short."""

import logging
import socket

import pytest

from lastgood.checkpointers.checkmate.system import Checkmate
from lastgood.errors import CheckpointError, MismatchError, WaitTimeout
from lastgood.gradients.conductor.conductor import Conductor
from lastgood.gradients.protocol.messages import GREETING, PROTOCOL_VERSION
from lastgood.tokens import read_token
from lastgood.wire.frames import Wire, prove_trainer
from tests.checkpointers.support.small_training import SmallTraining
from tests.gradients.support.shadow_processes import shadow_threads
from tests.support.patience import wait_until


@pytest.mark.parametrize("where", ["declare", "receive_from", "greet"])
def test_an_error_inside_a_shadow_is_said_to_the_trainer_and_logged_once(where, tmp_path, caplog, monkeypatch):
    calls = []
    wait = Conductor._wait

    def breaks(*arguments):
        calls.append(arguments)
        raise ZeroDivisionError("a fault of the shadow's own")

    def until_it_is_known(conductor, is_late, timeout_s, what):
        """Not so long as `timeout_s`, but until rank 0 has tried several times."""
        wait_until(
            lambda: len(calls) >= 4 and "an error inside" in conductor._why.get(1, ""),
            lambda: f"4 tries ({len(calls)} so far) and their reason: {conductor._why}",
            timeout_s,
        )
        wait(conductor, is_late, 0.1, what)

    monkeypatch.setattr(Conductor, "_wait", until_it_is_known)
    with shadow_threads(tmp_path, 2) as shadows:
        monkeypatch.setattr(shadows[1].service.core, where, breaks)
        knobs = {"shadows": [one.address for one in shadows], "token_file": str(tmp_path / "token"), "timeout_s": 60.0}
        checkpointer = Checkmate(tmp_path / "job", bucket_bytes=4096, **knobs)
        with (
            caplog.at_level(logging.INFO),
            pytest.raises(WaitTimeout, match=rf"{shadows[1].address} \(.*an error inside .*a fault of the shadow's"),
        ):
            checkpointer.start(SmallTraining().state)
        checkpointer.close()
    assert len([record for record in caplog.records if record.exc_info]) == 1
    assert 4 <= len(calls) < 12, "tried again, with growing pauses"


@pytest.mark.parametrize("version", [PROTOCOL_VERSION + 1])
def test_a_trainer_of_another_version_is_told_of_both(version, tmp_path, caplog):
    """It says a hello that nobody here knows, and gets an answer of fields that every version has."""
    with caplog.at_level(logging.INFO), shadow_threads(tmp_path, 1) as (shadow,):
        host, port = shadow.address.split(":")
        with socket.create_connection((host, int(port)), 60) as connection:
            wire = Wire(connection, "the shadow", 60.0)
            prove_trainer(wire, read_token(tmp_path / "token"), b"lastgood shadow %d\n" % version)
            wire.send_message(kind="hello", role="control", unheard_of=1)
            answer = wire.receive_message("an answer")
            assert wire.wait_readable(60.0) and wire.ended()
        refused = shadow.service.core.all_refused()
    assert set(answer) == {"kind", "why"} and answer["kind"] == "refused"
    said = f"speaks version {version} of the shadows' protocol, this shadow version {PROTOCOL_VERSION}: use the same"
    assert said in answer["why"] and said in caplog.text
    assert refused == {"hello": 1}


@pytest.mark.parametrize(
    ("greeting", "token"),
    [(GREETING, b"another token of 32 bytes length"), (b"lastgood shadow x\n", None),
     (GREETING[:-1] + b" ", None), (b"lastgood ghosts 3\n", None), (b"lastgood shadow 2\n", None)],
)  # fmt: skip
def test_another_greeting_gets_no_further_than_the_proof(greeting, token, tmp_path):
    with shadow_threads(tmp_path, 1) as (shadow,):
        host, port = shadow.address.split(":")
        with socket.create_connection((host, int(port)), 60) as connection:
            wire = Wire(connection, "the shadow", 60.0)
            with pytest.raises(MismatchError, match="token"):
                prove_trainer(wire, token or read_token(tmp_path / "token"), greeting)
            with pytest.raises(CheckpointError, match=r"closed|broke"):
                while True:
                    wire.read_into(memoryview(bytearray(1)), "more")
        assert shadow.service.core.all_refused() == {"no proof of the token": 1, "hello": 1}
