"""One connection between a member and the coordinator: frames of bounded length, never blocking, and a mutual proof.

The frames and the proof are those of Gemini's peers (`wire.frames`). Both sides prove that they know the job's
token, which is not sent, so a foreign process on a port of ours, and ours on a foreign port, is refused by name. The
member proves first: whoever connects is shown nothing with which he could try tokens by himself.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

from lastgood.errors import CheckpointError, CorruptCheckpoint, MismatchError, WaitTimeout
from lastgood.wire.frames import (
    HEADER_BYTES,
    is_ready,
    message_frame,
    message_step,
    parse_header,
    parse_message,
    proof,
    reach,
)
from lastgood.wire.gate import Handshake, close_in_forks

__all__ = ["Channel", "coordinator_handshake", "open_channel", "whole_number"]

_GREETING = "lastgood agreement 2"
_NONCE_BYTES = 32
_ANOTHER_TOKEN = (
    "does not know this job's token: it is another job's, or the token is not the same on all ranks "
    "(LASTGOOD_JOB_TOKEN)"
)
_STRANGER_BYTES = 1024
"""Longest message of a side that has not proved itself."""
_MOST_UNSENT_BYTES = 4 << 20
_READ_BYTES = 1 << 16


class Channel:
    """Messages in and out of a non-blocking socket; for one thread.

    `other` names the other side in errors. Raises CheckpointError if the connection ends, CorruptCheckpoint if
    what arrives is no message.
    """

    def __init__(self, connection: socket.socket, other: str, *, proved: bool = False) -> None:
        self.other = other
        self.proved = proved
        """Whether the other side has shown that it knows the token."""
        self.heard_s = time.monotonic()
        """When the last byte came, on the monotonic clock."""
        self._socket = connection
        self._in = bytearray()
        self._out = bytearray()
        close_in_forks(connection)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether something still has to go out."""
        return bool(self._out)

    def send(self, **message: Any) -> None:
        """Send a message, or keep it until the connection takes it."""
        if len(self._out) > _MOST_UNSENT_BYTES:
            raise CheckpointError(f"{self.other} takes no messages any more")
        self._out += message_frame(message)
        self.push()

    def push(self) -> None:
        """Send what the connection takes now."""
        try:
            while self._out:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            return
        except OSError as error:
            raise CheckpointError(f"{self.other}: the connection broke: {error}") from error

    def receive(self) -> Iterator[dict[str, Any]]:
        """The messages that have arrived. One at a time: what the first says may decide what may follow it."""
        try:
            content = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise CheckpointError(f"{self.other}: the connection broke: {error}") from error
        if not content:
            raise CheckpointError(f"{self.other} closed the connection")
        self.heard_s = time.monotonic()
        self._in += content
        while len(self._in) >= HEADER_BYTES:
            frame = parse_header(self._in[:HEADER_BYTES], self.other, "a message")
            if frame.length > _STRANGER_BYTES and not self.proved:
                raise CorruptCheckpoint(f"{self.other} sent {frame.length} bytes before it proved itself")
            if len(self._in) < HEADER_BYTES + frame.length:
                break
            body = self._in[HEADER_BYTES : HEADER_BYTES + frame.length]
            del self._in[: HEADER_BYTES + frame.length]
            yield parse_message(frame, body, self.other)

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._socket.close()


def whole_number(message: dict[str, Any], key: str, below: int = 1 << 63) -> int:
    """A number of a message. Raises CorruptCheckpoint if it is none, or out of bounds."""
    value = message.get(key)
    if type(value) is not int or not 0 <= value < below:
        raise CorruptCheckpoint(f"{key} is {value!r:.80} in a message")
    return value


# -- proof -------------------------------------------------------------------------------------------------------------


def _hexadecimal(message: dict[str, Any], key: str) -> bytes:
    try:
        return bytes.fromhex(message[key])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"a proof of the token is due, and the message has no {key}") from error


def coordinator_handshake(other: str, token: bytes) -> Handshake[bool]:
    """The coordinator's side, at its gate; True once the other side has shown that it knows `token`.

    Raises MismatchError if it does not, and has told it so then; CorruptCheckpoint for what is no message of this
    protocol.
    """
    greeting = yield from message_step(other, "a greeting")
    if greeting.get("kind") != _GREETING:
        yield message_frame({"kind": "refused", "why": "another version of Lastgood, or no part of it"})
        raise MismatchError(f"{other} does not speak this protocol")
    nonces = _hexadecimal(greeting, "nonce"), secrets.token_bytes(_NONCE_BYTES)
    yield message_frame({"kind": "nonce", "nonce": nonces[1].hex()})
    answer = yield from message_step(other, "a proof")
    if not hmac.compare_digest(_hexadecimal(answer, "proof"), proof(token, b"member", *nonces)):
        yield message_frame({"kind": "refused", "why": "another token"})
        raise MismatchError(f"{other} does not know this job's token")
    yield message_frame({"kind": "proof", "proof": proof(token, b"coordinator", *nonces).hex()})
    return True


def open_channel(host: str, port: int, token: bytes, timeout_s: float) -> Channel:
    """The member's side: connect, and prove both ways, within `timeout_s`.

    Raises CheckpointError (not reachable), WaitTimeout, MismatchError (another job, or no coordinator at all).
    """
    where = f"the coordinator of rank 0 at {host}:{port}"
    deadline = time.monotonic() + timeout_s
    channel = Channel(reach(host, port, timeout_s, where), where)
    try:
        ours = secrets.token_bytes(_NONCE_BYTES)
        channel.send(kind=_GREETING, nonce=ours.hex())
        try:
            theirs = _hexadecimal(_answer(channel, deadline, timeout_s), "nonce")
            channel.send(kind="proof", proof=proof(token, b"member", ours, theirs).hex())
            shown = _hexadecimal(_answer(channel, deadline, timeout_s), "proof")
        except CorruptCheckpoint as error:
            raise MismatchError(f"{host}:{port} is not {where}: another program listens there ({error})") from error
        if not hmac.compare_digest(shown, proof(token, b"coordinator", ours, theirs)):
            raise MismatchError(f"{where} {_ANOTHER_TOKEN}")
        channel.proved = True
    except BaseException:
        channel.close()
        raise
    return channel


def _answer(channel: Channel, deadline: float, timeout_s: float) -> dict[str, Any]:
    """The next message of a side that has proved nothing yet. Raises MismatchError if it refuses us."""
    answer = _one_message(channel, deadline, timeout_s)
    if answer.get("kind") == "refused":
        if answer.get("why") == "another token":
            raise MismatchError(f"{channel.other} {_ANOTHER_TOKEN}")
        raise MismatchError(f"{channel.other} is of another version of Lastgood; all ranks need the same")
    return answer


def _one_message(channel: Channel, deadline: float, timeout_s: float) -> dict[str, Any]:
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise WaitTimeout(f"waited {timeout_s:g} s for {channel.other} to prove itself")
        if is_ready(channel, select.POLLIN, left):
            for message in channel.receive():
                return message
