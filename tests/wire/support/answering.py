"""The other side of a proof, for tests that play a peer with a thread of its own. The product's are all at a gate."""

from __future__ import annotations

from lastgood.wire.frames import PEER_GREETING, Wire, peer_handshake
from lastgood.wire.gate import Step


def prove_peer(wire: Wire, token: bytes, greeting: bytes = PEER_GREETING, *, oldest: int | None = None) -> int:
    """`peer_handshake` on a connection that waits. Raises as that, and as `Wire`."""
    handshake = peer_handshake(wire.other, token, greeting, oldest=oldest)
    given = b""
    step: Step = next(handshake)
    while True:
        try:
            if isinstance(step, int):
                content = bytearray(step)
                wire.read_into(memoryview(content), "a proof")
                given = bytes(content)
            elif isinstance(step, bytes):
                wire.write("a proof to go out", step)
            step = handshake.send(given)
        except StopIteration as end:
            return int(end.value)
