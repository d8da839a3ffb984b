"""What a switch reads along a ring's link: who speaks, and which records are for the shadows. It changes nothing.

A link is `wire.ring_link`'s: greeting, proof, a hello, then gradient records. The switch knows the job's token, so it
believes only those who have shown that they know it as well.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

from lastgood.errors import CorruptCheckpoint, MismatchError
from lastgood.wire import frames
from lastgood.wire.records import FINAL, HEADER_BYTES, Record, RecordKind, parse_header
from lastgood.wire.ring_link import RING_GREETING, Hello, parse_hello

__all__ = ["LinkParser"]

_NONCE_BYTES = _PROOF_BYTES = 32


class LinkParser:
    """Follows one connection, in pieces of any size.

    `on_hello` gets the rank's hello once its proof is right; `on_record` gets each marked gradient and each end of
    iteration, with the very bytes of header and payload. Memory: one such record at a time.
    """

    def __init__(
        self,
        name: str,
        token: bytes,
        on_hello: Callable[[Hello], None],
        on_record: Callable[[Record, bytes], None],
    ) -> None:
        self._name, self._token = name, token
        self._on_hello, self._on_record = on_hello, on_record
        self._answer = bytearray()
        self._held = bytearray()
        self._wanted = len(RING_GREETING) + _NONCE_BYTES
        self._then: Callable[[], None] = self._greeted
        self._skip = 0
        self._nonce = b""
        self._frame: frames.Frame | None = None
        self._record: Record | None = None

    def feed_back(self, data: memoryview) -> None:
        """Follow what the next rank sends back. Call it before those bytes go on."""
        missing = _NONCE_BYTES + _PROOF_BYTES - len(self._answer)
        if missing > 0:
            self._answer += data[:missing]

    def feed(self, data: memoryview) -> None:
        """Follow what the rank sends to the next one.

        Raises CorruptCheckpoint or MismatchError for what is no link of this job; there is no going on behind that.
        """
        at = 0
        while at < len(data):
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
            else:
                step = min(self._wanted - len(self._held), len(data) - at)
                self._held += data[at : at + step]
                if len(self._held) == self._wanted:
                    self._then()
            at += step

    # -- what comes in turn --------------------------------------------------------------------------------------------

    def _expect(self, wanted: int, then: Callable[[], None]) -> None:
        self._held = bytearray()
        self._wanted, self._then = wanted, then

    def _greeted(self) -> None:
        if not self._held.startswith(RING_GREETING):
            raise MismatchError(f"{self._name}: no ring of Lastgood's speaks there")
        self._nonce = bytes(self._held[len(RING_GREETING) :])
        self._expect(_PROOF_BYTES, self._proved)

    def _proved(self) -> None:
        theirs = bytes(self._answer[:_NONCE_BYTES])
        if not hmac.compare_digest(self._held, frames.proof(self._token, b"trainer", self._nonce, theirs)):
            raise MismatchError(f"{self._name}: its rank does not know the token")
        self._expect(frames.HEADER_BYTES, self._framed)

    def _framed(self) -> None:
        header = frames.parse_header(self._held, self._name, "a hello")
        self._frame = frames.check_message(header, self._name, "a hello")
        if self._frame.length == 0:
            raise CorruptCheckpoint(f"{self._name}: an empty hello")
        self._expect(self._frame.length, self._hello)

    def _hello(self) -> None:
        assert self._frame is not None
        self._on_hello(parse_hello(frames.parse_message(self._frame, self._held, self._name), self._name))
        self._expect(HEADER_BYTES, self._headed)

    def _headed(self) -> None:
        record = parse_header(self._held, self._name)
        wanted = record.kind is RecordKind.END or record.flags & FINAL
        if not wanted:
            self._skip = record.length
            self._expect(HEADER_BYTES, self._headed)
            return
        self._record = record
        if record.length == 0:
            self._whole()
        else:
            self._wanted, self._then = HEADER_BYTES + record.length, self._whole

    def _whole(self) -> None:
        assert self._record is not None
        self._on_record(self._record, bytes(self._held))
        self._expect(HEADER_BYTES, self._headed)
