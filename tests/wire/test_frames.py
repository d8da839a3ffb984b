"""Frames on real connections: what is refused before any memory is taken for it."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from lastgood.errors import CorruptCheckpoint, MismatchError
from lastgood.wire.frames import MAX_CHUNK_BYTES, Kind, Wire, proof, prove_peer


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


@pytest.mark.parametrize(("greeted", "any_version", "taken"), [(1, False, True), (2, False, False), (2, True, True)])
def test_another_version_s_greeting_is_taken_only_where_the_caller_looks_at_it(
    greeted: int, any_version: bool, taken: bool
) -> None:
    token, nonce = b"t" * 32, b"n" * 32
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), 60)
        far, _ = server.accept()

    def greet() -> None:
        near.sendall(b"lastgood test %d\n" % greeted + nonce)
        answer = near.recv(64, socket.MSG_WAITALL)
        with contextlib.suppress(OSError):  # where it was refused
            near.sendall(proof(token, b"trainer", nonce, answer[:32]))

    with near, far:
        trainer = threading.Thread(target=greet, daemon=True)
        trainer.start()
        wire = Wire(far, "the trainer", 60.0)
        if taken:
            assert prove_peer(wire, token, b"lastgood test 1\n", any_version=any_version) == greeted
        else:
            with pytest.raises(MismatchError, match="the trainer does not speak this protocol"):
                prove_peer(wire, token, b"lastgood test 1\n", any_version=any_version)
            far.shutdown(socket.SHUT_RDWR)
        trainer.join(60)
        assert not trainer.is_alive()
