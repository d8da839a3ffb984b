"""The connections of a ring: each rank connects to the next one, and both show that they know the job's token.

A link carries, in this direction only: greeting and proof (`frames`), one message (`Hello`), then gradient records.
What comes back is the other side's proof and its answer. A switch between two ranks reads along.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from lastgood.errors import CheckpointError, ConfigError, CorruptCheckpoint, HostError, MismatchError, WaitTimeout
from lastgood.wire.frames import Wire, message_step, peer_handshake, prove_trainer
from lastgood.wire.gate import PROOF_S, Gate, Guest, Handshake, connect, open_listener

__all__ = ["RING_GREETING", "Hello", "Link", "connect_ring", "listen_ring", "parse_address", "parse_hello"]

_log = logging.getLogger("lastgood")
RING_GREETING = b"lastgood ring 2\n"
_RETRY_S = 0.1
_LOOK_S = 0.2
_MAX_RANKS = 1 << 16


@dataclass(frozen=True)
class Hello:
    """Who a rank is. All but `rank` and `host` must be the same for the whole ring."""

    job: str
    """32 hex digits."""
    epoch: int
    rank: int
    ranks: int
    layout: str
    """Digest of the declared layout of gradients, 64 hex digits."""
    host: str

    def content(self) -> dict[str, Any]:
        """As `Wire.send_message` takes it."""
        return {"kind": "ring", **asdict(self)}


@dataclass(frozen=True)
class Link:
    """A connection to a neighbour, proved and greeted."""

    wire: Wire
    socket: socket.socket
    name: str
    """Rank, host and address, for messages."""


def parse_hello(content: dict[str, Any], other: str) -> Hello:
    """Check a hello that `other` sent. Raises CorruptCheckpoint for whatever is none."""
    try:
        if content.pop("kind") != "ring":
            raise ValueError("of another kind")
        hello = Hello(**content)
        texts = {"job": (hello.job, 32), "layout": (hello.layout, 64)}
        for what, (text, length) in texts.items():
            if not isinstance(text, str) or len(text) != length or set(text) - set("0123456789abcdef"):
                raise ValueError(f"{what} is not {length} hex digits")
        numbers = {
            "epoch": (hello.epoch, 1 << 32),
            "ranks": (hello.ranks, _MAX_RANKS + 1),
            "rank": (hello.rank, hello.ranks),
        }
        for what, (value, limit) in numbers.items():
            if type(value) is not int or not 0 <= value < limit:
                raise ValueError(f"{what} is not below {limit}")
        if not isinstance(hello.host, str) or len(hello.host) > 255:
            raise ValueError("host is no name")
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"{other} sent no hello of a ring: {error}") from error
    return hello


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[address]:port``. Raises ConfigError for anything else."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"not an address: {text!r} (HOST:PORT)")
    return host, int(port)


def listen_ring(host: str, port: int = 0) -> socket.socket:
    """A socket that waits for the previous rank; port 0 takes a free one (`getsockname` tells which).

    Raises HostError if this machine cannot listen there.
    """
    try:
        return open_listener(host, port)
    except OSError as error:
        raise HostError(
            f"this machine cannot listen on {host}:{port}: {error}; free the port or name another"
        ) from error


def connect_ring(
    own: Hello,
    listener: socket.socket,
    next_address: str,
    token: bytes,
    timeout_s: float,
    greeting: bytes = RING_GREETING,
) -> tuple[Link, Link]:
    """Connect to the next rank while waiting for the previous one. Returns (previous, next).

    `greeting` tells one protocol over such links from another.
    Raises WaitTimeout if one does not come within `timeout_s`, MismatchError if it is of another job, epoch or
    layout, or does not know the token, CorruptCheckpoint if the next one's answer is none, ConfigError for what is
    no address, HostError if this machine cannot wait at `listener` any more.
    """
    deadline = time.monotonic() + timeout_s
    parse_address(next_address)
    given_up = threading.Event()
    with ThreadPoolExecutor(1, "ring-accept") as pool, ExitStack() as failed:
        accepted = pool.submit(_accept, own, listener, token, greeting, deadline, timeout_s, given_up)
        # The accepting thread does not outlast this call, nor does its connection.
        failed.callback(accepted.add_done_callback, _close_accepted)
        failed.callback(given_up.set)
        following = _connect(own, next_address, token, greeting, deadline, timeout_s)
        failed.callback(following.wire.close)
        previous = accepted.result()
        failed.pop_all()
        return previous, following


def _close_accepted(accepted: Future[Link]) -> None:
    if accepted.exception() is None:
        accepted.result().wire.close()


def _connect(own: Hello, address: str, token: bytes, greeting: bytes, deadline: float, timeout_s: float) -> Link:
    """The next rank may not be there yet, nor a switch's other side: until then connections are refused or closed."""
    rank = (own.rank + 1) % own.ranks
    other = f"rank {rank} ({address})"
    why = "it was not tried"
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = connect(*parse_address(address), left)
        except OSError as error:
            why = str(error)
        else:
            wire = Wire(connection, other, left)
            try:
                prove_trainer(wire, token, greeting)
                wire.send_message(**own.content())
                name = _check_answer(wire.receive_message("the next rank's answer"), rank, address, other)
                wire.timeout_s = timeout_s
                return Link(wire, connection, name)
            except (MismatchError, CorruptCheckpoint):
                wire.close()
                raise
            except CheckpointError as error:
                wire.close()
                why = str(error)
        time.sleep(_RETRY_S)
    raise WaitTimeout(f"waited {timeout_s:g} s for {other} to take this rank's connection; at last: {why}")


def _check_answer(content: dict[str, Any], rank: int, address: str, other: str) -> str:
    if content.get("kind") == "refused":
        raise MismatchError(f"{other} refused this rank: {str(content.get('why'))[:500]}")
    hello = parse_hello(content, other)
    if hello.rank != rank:
        raise MismatchError(f"{other} is rank {hello.rank}: the ring's addresses are not in the order of ranks")
    return f"rank {rank} on {hello.host} ({address})"


def _accept(
    own: Hello,
    listener: socket.socket,
    token: bytes,
    greeting: bytes,
    deadline: float,
    timeout_s: float,
    given_up: threading.Event,
) -> Link:
    previous = (own.rank - 1) % own.ranks
    refused = "nobody connected"

    def note(line: str) -> None:
        nonlocal refused
        refused = line
        _log.warning("%s", line)

    try:
        with Gate(
            listener, lambda other: _hear_hello(other, token, greeting), f"rank {own.rank}'s ring port", note
        ) as gate:
            while not given_up.is_set() and (left := deadline - time.monotonic()) > 0:
                link = None
                for guest in gate.step(min(left, _LOOK_S)):
                    if link is None:
                        link = _take(own, guest, previous, min(left, PROOF_S), timeout_s, gate.lines)
                    else:
                        guest.connection.close()
                if link is not None:
                    return link
    except OSError as error:
        raise HostError(f"this rank cannot wait for rank {previous} any more: {error}") from error
    raise WaitTimeout(f"waited {timeout_s:g} s for rank {previous} to connect to this rank {own.rank}; {refused}")


def _hear_hello(other: str, token: bytes, greeting: bytes) -> Handshake[Hello]:
    yield from peer_handshake(other, token, greeting)
    return parse_hello((yield from message_step(other, "the previous rank's hello")), other)


def _take(
    own: Hello,
    guest: Guest[Hello],
    previous: int,
    answer_s: float,
    timeout_s: float,
    refuse: Callable[[str], None],
) -> Link | None:
    """Answer the hello of a rank; None if it is not the previous one, or has gone again."""
    try:
        wire = Wire(guest.connection, guest.other, answer_s)
        why = _why_not(own, guest.known, previous)
        if why is None:
            wire.send_message(**own.content())
            wire.timeout_s = timeout_s
            return Link(wire, guest.connection, f"rank {previous} on {guest.known.host} ({guest.other})")
        refuse(f"{guest.other} was refused: {why}")
        wire.send_message(kind="refused", why=why)
    except (CheckpointError, OSError) as error:
        refuse(str(error))
    guest.connection.close()
    return None


def _why_not(own: Hello, hello: Hello, previous: int) -> str | None:
    if hello.rank != previous:
        return f"it is rank {hello.rank}, and rank {own.rank} follows rank {previous}"
    for field in ("job", "epoch", "ranks", "layout"):
        theirs, ours = getattr(hello, field), getattr(own, field)
        if theirs != ours:
            return f"its {field} is {theirs}, that of rank {own.rank} is {ours}"
    return None
