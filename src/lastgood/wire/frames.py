"""Frames of bounded length over TCP, and a proof that both sides know a token.

A frame is a header of 28 bytes (magic, kind, CRC32C of the payload, offset, length; little-endian) and its payload.
Messages carry JSON; chunks carry bytes of a checkpoint at `offset`, and their checksum begins with the checkpoint's
sequence and the offset, so that a chunk in a wrong place is noticed.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import psutil

from lastgood import _native
from lastgood.errors import CheckpointError, CorruptCheckpoint, MismatchError, WaitTimeout
from lastgood.text import parse_json
from lastgood.wire.gate import Handshake, connect

__all__ = [
    "HEADER_BYTES",
    "MAX_CHUNK_BYTES",
    "MAX_MESSAGE_BYTES",
    "NONCE_BYTES",
    "NO_PROOF",
    "PEER_GREETING",
    "PROOF_BYTES",
    "Frame",
    "Kind",
    "Wire",
    "available_memory_bytes",
    "check_message",
    "chunk_checksum",
    "is_ready",
    "keep_alive",
    "message_frame",
    "message_step",
    "parse_header",
    "parse_message",
    "peer_handshake",
    "proof",
    "prove_trainer",
    "reach",
    "shut_down",
]

MAX_CHUNK_BYTES = 64 << 20
MAX_MESSAGE_BYTES = 64 << 10
"""Of a message, if a connection allows no more."""
_HEADER = struct.Struct("<4sB3xIQQ")
HEADER_BYTES = _HEADER.size
_MAGIC = b"LGM1"
PEER_GREETING = b"lastgood peer 2\n"
"""What opens a connection to a peer of Gemini's; another protocol has another one."""
NONCE_BYTES = PROOF_BYTES = 32
"""The peer's answer to a greeting is its nonce; the trainer's proof follows it, and then the peer's."""
_MAX_HELLO_BYTES = 4096
NO_PROOF = bytes(PROOF_BYTES)
"""What the other side gets for a proof that is none: it is refused, and not only lost."""
_MAX_PIECES = 1024
"""Of one call: the kernel's own limit (IOV_MAX)."""


class Kind(enum.IntEnum):
    """What a frame is."""

    MESSAGE = 1
    CHUNK = 2
    ACK = 3
    """The chunk at `offset` has arrived completely; no payload."""


@dataclass(frozen=True)
class Frame:
    """A header that was read; the payload of a chunk is still to be read."""

    kind: Kind
    checksum: int
    offset: int
    length: int


def reach(host: str, port: int, timeout_s: float, what: str) -> socket.socket:
    """A connection to `what`, as errors call it. Raises WaitTimeout, or CheckpointError if it cannot be reached."""
    try:
        return connect(host, port, timeout_s)
    except TimeoutError:
        raise WaitTimeout(f"waited {timeout_s:g} s for {what} to take a connection") from None
    except OSError as error:
        raise CheckpointError(f"{what} cannot be reached: {error}") from error


def keep_alive(connection: socket.socket, *, idle_s: int = 20, probes: int = 6) -> None:
    """Let the kernel end a TCP connection when its host is lost (cut off, without power), though nothing is sent on it.

    After `idle_s` seconds of silence it sends a probe each 5 s, and gives up after `probes` without an answer.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def is_ready(connection: _HasDescriptor, event: int, seconds: float) -> bool:
    """Whether `event` (select.POLLIN, POLLOUT), an error or the end is there within `seconds`.

    It takes descriptors from 1024 on as well, which select does not, and which a training may well have.
    """
    poll = select.poll()
    poll.register(connection, event)
    return bool(poll.poll(max(seconds, 0.0) * 1e3))


def shut_down(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """End one direction of a connection, or both, for whichever thread uses it; one that is closed stays so."""
    with contextlib.suppress(OSError):
        connection.shutdown(how)


def chunk_checksum(data: memoryview, sequence: int, offset: int) -> int:
    """CRC32C of a chunk, going on from its checkpoint's `sequence` and its `offset` in it."""
    return _native.crc32c(data, _native.chunk_seed(sequence, offset))


def available_memory_bytes() -> int:
    """Memory that this machine could give out now (MemAvailable of /proc/meminfo)."""
    return psutil.virtual_memory().available


def message_frame(content: dict[str, Any]) -> bytes:
    """Header and body of a message."""
    body = json.dumps(content, separators=(",", ":")).encode()
    return _HEADER.pack(_MAGIC, Kind.MESSAGE, _native.crc32c(body), 0, len(body)) + body


def parse_header(
    content: bytes | bytearray, other: str, what: str, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> Frame:
    """Read HEADER_BYTES that `other` sent. Raises CorruptCheckpoint if they are none, or declare too much."""
    magic, kind, checksum, offset, length = _HEADER.unpack(content)
    limits = {Kind.MESSAGE: max_message_bytes, Kind.CHUNK: MAX_CHUNK_BYTES, Kind.ACK: 0}
    if magic != _MAGIC or kind not in limits:
        raise CorruptCheckpoint(f"{other} sent no frame of this protocol, waiting for {what}")
    if length > limits[Kind(kind)]:
        raise CorruptCheckpoint(
            f"{other} declared {length} bytes, over the limit of {limits[Kind(kind)]}, waiting for {what}"
        )
    return Frame(Kind(kind), checksum, offset, length)


def check_message(frame: Frame, other: str, what: str) -> Frame:
    """The header of a message. Raises CorruptCheckpoint for another frame's, which may be a thousand times longer."""
    if frame.kind is not Kind.MESSAGE:
        raise CorruptCheckpoint(f"{other} sent a frame of kind {frame.kind.name}, waiting for {what}")
    return frame


def parse_message(frame: Frame, body: bytes | bytearray, other: str) -> dict[str, Any]:
    """The content of a message. Raises CorruptCheckpoint if it cannot be read."""
    if frame.kind is not Kind.MESSAGE or _native.crc32c(body) != frame.checksum:
        raise CorruptCheckpoint(f"{other} sent a message that cannot be read: no message, or damaged")
    content = parse_json(body, f"a message of {other}", most_bytes=frame.length)
    if not isinstance(content, dict):
        raise CorruptCheckpoint(f"{other} sent a message that is no JSON object")
    return content


class Wire:
    """One connection. Every read and write ends within `timeout_s`, with an error that names what it was for.

    Buffer sizes are left to the kernel: a fixed one turns its own adaption off, and is cut to 208 KiB by default.
    """

    def __init__(
        self, connection: socket.socket, other: str, timeout_s: float, max_message_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        self.other = other
        self.timeout_s = timeout_s
        self._max_message_bytes = max_message_bytes
        self._socket = connection
        # One thread may read while another one writes; a timeout of the socket's own would be shared by both.
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    # -- bytes -----------------------------------------------------------------------------------------------------

    def read_into(self, view: memoryview, what: str) -> None:
        """Fill `view`. Raises WaitTimeout, or CheckpointError if the other side closes before."""
        deadline = time.monotonic() + self.timeout_s
        filled = 0
        while filled < len(view):
            rest = view[filled:]
            count = self._bounded(partial(self._socket.recv_into, rest), select.POLLIN, deadline, what)
            if count == 0:
                raise CheckpointError(f"{self.other} closed the connection before {what}")
            filled += count

    def write(self, what: str, *buffers: bytes | memoryview) -> None:
        """Send buffers one after another, without copying them together.

        Raises WaitTimeout, or CheckpointError if the connection breaks; some of them may have gone out then.
        """
        deadline = time.monotonic() + self.timeout_s
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        first = 0
        while first < len(views):
            next_ones = views[first : first + _MAX_PIECES]
            count = self._bounded(partial(self._socket.sendmsg, next_ones), select.POLLOUT, deadline, what)
            while first < len(views) and count >= len(views[first]):
                count -= len(views[first])
                first += 1
            if count:
                views[first] = views[first][count:]

    def _bounded(self, operation: Callable[[], int], event: int, deadline: float, what: str) -> int:
        while True:
            try:
                return operation()
            except BlockingIOError:
                if not is_ready(self._socket, event, deadline - time.monotonic()):
                    raise WaitTimeout(f"waited {self.timeout_s:g} s for {what}, {self.other}") from None
            except OSError as error:
                raise CheckpointError(f"{self.other}: the connection broke at {what}: {error}") from error

    # -- frames ----------------------------------------------------------------------------------------------------

    def send_message(self, **content: Any) -> None:
        """Send one message."""
        self.write("a message", message_frame(content))

    def send_chunk(self, data: memoryview, offset: int, checksum: int) -> None:
        """Send the bytes of a checkpoint from `offset` on."""
        header = _HEADER.pack(_MAGIC, Kind.CHUNK, checksum, offset, len(data))
        self.write(f"the chunk at byte {offset} to go out", header, data)

    def send_ack(self, offset: int) -> None:
        """Say that the chunk at `offset` has arrived completely."""
        self.write("an acknowledgement to go out", _HEADER.pack(_MAGIC, Kind.ACK, 0, offset, 0))

    def receive_frame(self, what: str) -> Frame:
        """Read a header. Raises CorruptCheckpoint if it is none, or declares more than a frame may hold."""
        content = bytearray(_HEADER.size)
        self.read_into(memoryview(content), what)
        return parse_header(content, self.other, what, self._max_message_bytes)

    def read_message(self, frame: Frame) -> dict[str, Any]:
        """The content of a message whose header is `frame`. Raises CorruptCheckpoint if that is another frame's."""
        check_message(frame, self.other, "a message")
        body = bytearray(frame.length)
        self.read_into(memoryview(body), "a message")
        return parse_message(frame, body, self.other)

    def receive_message(self, what: str) -> dict[str, Any]:
        """Read a complete message."""
        return self.read_message(self.receive_frame(what))

    # -- ends ------------------------------------------------------------------------------------------------------

    def wait_readable(self, seconds: float) -> bool:
        """Whether something (or the end) arrives within `seconds`."""
        return is_ready(self._socket, select.POLLIN, seconds)

    def ended(self) -> bool:
        """Whether the other side has closed the connection, and all that it sent is read."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def abort(self) -> None:
        """Make every call that another thread is in fail at once."""
        shut_down(self._socket)

    def detach(self) -> int:
        """Give the file descriptor away; this object is done."""
        return self._socket.detach()

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._socket.close()


# -- proof -------------------------------------------------------------------------------------------------------------


def prove_trainer(wire: Wire, token: bytes, greeting: bytes = PEER_GREETING, unwelcome: str | None = None) -> None:
    """The trainer's side: show that it knows `token`, then make the peer show it as well. The token is not sent.

    Whoever connects proves first: a stranger who does is shown nothing with which he could try tokens by himself.

    Raises MismatchError if the peer is another one (its port was given to another process, say). `unwelcome` is what
    it is said to be if it answers this greeting by a frame, in place of its proof.
    """
    ours = secrets.token_bytes(NONCE_BYTES)
    wire.write("a greeting to go out", greeting, ours)
    theirs, shown = bytearray(NONCE_BYTES), bytearray(PROOF_BYTES)
    wire.read_into(memoryview(theirs), "the peer's greeting")
    if unwelcome is not None and theirs.startswith(_MAGIC):
        raise MismatchError(f"{wire.other} {unwelcome}")
    wire.write("a proof to go out", proof(token, b"trainer", ours, bytes(theirs)))
    wire.read_into(memoryview(shown), "the peer's proof")
    if not hmac.compare_digest(shown, proof(token, b"peer", ours, bytes(theirs))):
        raise MismatchError(f"{wire.other} does not know this job's token: it is not the peer that was started here")


def peer_handshake(
    other: str, token: bytes, greeting: bytes = PEER_GREETING, *, oldest: int | None = None
) -> Handshake[int]:
    """The peer's side, at a gate. Returns the version that the other side greeted with, the digit before the newline.

    Raises MismatchError if the other side does not know `token`, or greets otherwise. With `oldest` the digits from
    that on are taken, so that the caller can say what is wrong to a side that is known.
    """
    opening = yield len(greeting) + NONCE_BYTES
    version = opening[len(greeting) - 2 : len(greeting) - 1]
    any_version = oldest is not None and version.isdigit() and int(version) >= oldest
    expected = greeting[:-2] + version + greeting[-1:] if any_version else greeting
    if not hmac.compare_digest(opening[: len(greeting)], expected):
        raise MismatchError(f"{other} does not speak this protocol")
    theirs, ours = opening[len(greeting) :], secrets.token_bytes(NONCE_BYTES)
    yield ours
    answer = yield PROOF_BYTES
    if not hmac.compare_digest(answer, proof(token, b"trainer", theirs, ours)):
        yield NO_PROOF
        raise MismatchError(f"{other} does not know the token")
    yield proof(token, b"peer", theirs, ours)
    return int(version)


def message_step(other: str, what: str) -> Handshake[dict[str, Any]]:
    """A message, as a part of a handshake. Raises CorruptCheckpoint if it is none, or longer than a hello may be."""
    header = yield HEADER_BYTES
    frame = check_message(parse_header(header, other, what, _MAX_HELLO_BYTES), other, what)
    return parse_message(frame, (yield frame.length), other)


def proof(token: bytes, side: bytes, trainer_nonce: bytes, peer_nonce: bytes) -> bytes:
    """What shows that `side` knows `token`, for one connection only."""
    return hmac.new(token, side + trainer_nonce + peer_nonce, hashlib.sha256).digest()
