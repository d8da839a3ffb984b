"""Frames on real connections: what is refused before any memory is taken for it."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from lastgood.errors import CorruptCheckpoint, MismatchError, WaitTimeout
from lastgood.wire.frames import MAX_CHUNK_BYTES, PEER_GREETING, Kind, Wire, proof
from tests.wire.support.answering import prove_peer


@pytest.mark.parametrize("kind", [Kind.CHUNK, Kind.ACK])
def test_what_is_no_message_is_refused_by_its_header(kind: Kind) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), 60)
        far, _ = server.accept()
    with near, far:
        length = MAX_CHUNK_BYTES if kind is Kind.CHUNK else 0
        far.sendall(b"LGM1" + bytes([kind]) + bytes(15) + length.to_bytes(8, "little"))
        # Nothing follows: it does not wait for 64 MiB either.
        with pytest.raises(
            CorruptCheckpoint, match=f"the other side sent a frame of kind {kind.name}, waiting for a message"
        ):
            Wire(near, "the other side", 1.0).receive_message("a word")


@pytest.mark.parametrize(
    ("greeted", "oldest", "taken"), [(3, None, True), (4, None, False), (4, 3, True), (3, 3, True), (2, 3, False)]
)
def test_another_version_s_greeting_is_taken_only_where_the_caller_looks_at_it(
    greeted: int, oldest: int | None, taken: bool
) -> None:
    token, nonce = b"t" * 32, b"n" * 32
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), 60)
        far, _ = server.accept()

    def greet() -> None:
        near.sendall(b"lastgood test %d\n" % greeted + nonce)
        answer = near.recv(32, socket.MSG_WAITALL)
        with contextlib.suppress(OSError):  # where it was refused
            near.sendall(proof(token, b"trainer", nonce, answer[:32]))

    with near, far:
        trainer = threading.Thread(target=greet, daemon=True)
        trainer.start()
        wire = Wire(far, "the trainer", 60.0)
        if taken:
            assert prove_peer(wire, token, b"lastgood test 3\n", oldest=oldest) == greeted
        else:
            with pytest.raises(MismatchError, match="the trainer does not speak this protocol"):
                prove_peer(wire, token, b"lastgood test 3\n", oldest=oldest)
            far.shutdown(socket.SHUT_RDWR)
        trainer.join(60)
        assert not trainer.is_alive()


@pytest.mark.parametrize("guess", [b"x" * 32, b""])
def test_a_stranger_who_connects_is_shown_nothing_to_try_tokens_with(guess: bytes) -> None:
    """What comes back before his proof is random, and after it the same for every token."""
    answers = []
    for token in (b"t" * 32, b"u" * 32):
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname(), 60)
            far, _ = server.accept()
        with near, far:
            near.sendall(PEER_GREETING + b"n" * 32 + guess)
            wire = Wire(far, "a stranger", 60.0 if guess else 0.2)
            with pytest.raises(MismatchError if guess else WaitTimeout):
                prove_peer(wire, token)
            far.close()
            told = b""
            while part := near.recv(4096):
                told += part
            answers.append(told)
    assert {len(one) for one in answers} == {64 if guess else 32}
    for token, told in zip((b"t" * 32, b"u" * 32), answers, strict=True):
        for side in (b"peer", b"trainer"):
            assert proof(token, side, b"n" * 32, told[:32]) not in told
    assert not guess or answers[0][32:] == answers[1][32:] == bytes(32)
