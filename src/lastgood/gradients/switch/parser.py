"""What a switch reads along a ring's link: who speaks, and which records are for the shadows. It changes nothing.

A link is `wire.ring_link`'s: greeting, proof, a hello, then gradient records. The switch knows the job's token, so it
relays only those who have shown that they know it as well.
"""

from __future__ import annotations

import errno
import hmac
import os
import selectors
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from lastgood.errors import CorruptCheckpoint, MismatchError
from lastgood.wire import frames
from lastgood.wire.frames import NONCE_BYTES, PROOF_BYTES
from lastgood.wire.gate import Handshake, Ready
from lastgood.wire.records import FINAL, HEADER_BYTES, Record, RecordKind, parse_header
from lastgood.wire.ring_link import RING_GREETING, Hello, parse_hello

__all__ = ["LinkParser", "relay_proof"]


def relay_proof(
    other: str,
    token: bytes,
    targets: Callable[[], Sequence[tuple[Any, ...]]],
    unreachable: Callable[[OSError], object],
) -> Handshake[socket.socket | None]:
    """Pass greeting, answer and proof of a rank on to the next one, unchanged, and look at them.

    The next one's own proof comes after that, and is passed on as all that follows.

    `targets` are where that one may be, as `socket.getaddrinfo` lists them. Returns the connection to it once the proof
    is right; nothing if it is not there (`unreachable` is told why): the rank tries again. Raises MismatchError for
    those who do not know the token, and are no rank.
    """
    opening = yield len(RING_GREETING) + NONCE_BYTES
    if not opening.startswith(RING_GREETING):
        raise MismatchError(f"{other}: no ring of Lastgood's speaks there")
    with ExitStack() as unproved:
        try:
            # Only for what has greeted as a rank does: the next one holds it as a stranger, and for as long.
            outer = unproved.enter_context((yield from _connect(targets)))
            outer.send(opening)
            answer = b""
            while len(answer) < NONCE_BYTES:
                yield Ready(outer, selectors.EVENT_READ)
                part = outer.recv(NONCE_BYTES - len(answer))
                if not part:
                    raise ConnectionError(errno.ECONNRESET, "it closed the connection before its answer")
                answer += part
        except OSError as error:
            unreachable(error)
            return None
        yield answer
        shown = yield PROOF_BYTES
        if not hmac.compare_digest(shown, frames.proof(token, b"trainer", opening[len(RING_GREETING) :], answer)):
            yield frames.NO_PROOF
            raise MismatchError(f"{other}: it does not know the token")
        outer.send(shown)
        unproved.pop_all()
    return outer


def _connect(targets: Callable[[], Sequence[tuple[Any, ...]]]) -> Handshake[socket.socket]:
    last: OSError = OSError(errno.EADDRNOTAVAIL, "it has no address")
    for family, kind, protocol, _, where in targets():
        with ExitStack() as unconnected:
            outer = unconnected.enter_context(socket.socket(family, kind, protocol))
            outer.setblocking(False)
            if outer.connect_ex(where) != 0:
                yield Ready(outer, selectors.EVENT_WRITE)
            if (number := outer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)) == 0:
                unconnected.pop_all()
                return outer
            last = OSError(number, os.strerror(number))
    raise last


class LinkParser:
    """Follows one connection, in pieces of any size, from the hello on.

    `on_hello` gets the rank's hello; `on_record` gets each marked gradient and each end of iteration, with the very
    bytes of header and payload. Memory: one such record at a time.
    """

    def __init__(
        self, name: str, on_hello: Callable[[Hello], None], on_record: Callable[[Record, bytes], None]
    ) -> None:
        self._name = name
        self._on_hello, self._on_record = on_hello, on_record
        self._held = bytearray()
        self._wanted = frames.HEADER_BYTES
        self._then: Callable[[], None] = self._framed
        self._skip = 0
        self._frame: frames.Frame | None = None
        self._record: Record | None = None

    def feed(self, data: memoryview) -> None:
        """Follow what the rank sends to the next one.

        Raises CorruptCheckpoint for what is no link of a ring; there is no going on after that.
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

    def lose(self, nbytes: int) -> tuple[Record | None, int]:
        """Bytes that will never come, of a link that is mirrored. Nothing is given of the record that they lie in.

        Returns the marked record that is lost with them, and how many of them lie in headers that are not known: if
        there are any, only `resume` goes on.
        """
        step = min(self._skip, nbytes)
        self._skip -= step
        nbytes -= step
        lost = self._record
        if lost is not None and nbytes:
            left = self._wanted - len(self._held)
            step = min(left, nbytes)
            nbytes -= step
            self._skip = left - step
            self._expect(HEADER_BYTES, self._headed)
            return lost, nbytes
        return None, nbytes

    def resume(self) -> None:
        """What comes next is the header of a record."""
        self._skip = 0
        self._expect(HEADER_BYTES, self._headed)

    # -- what comes in turn --------------------------------------------------------------------------------------------

    def _expect(self, wanted: int, then: Callable[[], None]) -> None:
        self._held = bytearray()
        self._record = None
        self._wanted, self._then = wanted, then

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
