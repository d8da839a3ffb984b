"""Frames on real connections: what is refused before any memory is taken for it."""

from __future__ import annotations

import socket

import pytest

from lastgood.errors import CorruptCheckpoint
from lastgood.wire.frames import MAX_CHUNK_BYTES, Kind, Wire


@pytest.mark.parametrize("kind", [Kind.CHUNK, Kind.ACK])
def test_what_is_no_message_is_refused_by_its_header(kind: Kind) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), 10)
        far, _ = server.accept()
    with near, far:
        length = MAX_CHUNK_BYTES if kind is Kind.CHUNK else 0
        far.sendall(b"LGM1" + bytes([kind]) + bytes(15) + length.to_bytes(8, "little"))
        # Nothing follows: it does not wait for 64 MiB either.
        with pytest.raises(
            CorruptCheckpoint, match=f"the other side sent a frame of kind {kind.name}, waiting for a message"
        ):
            Wire(near, "the other side", 1.0).receive_message("a word")
