"""The launching end of all ranks' lifelines: TCP connections on which ranks say how they fare, and are told to end.

It is the same for all launchers, and stronger than what any of them promises: the kernel closes a connection however
its process ends, and probes find a host that is lost, so ranks end with their launch, and it hears of every rank's end.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import secrets
import selectors
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lastgood.cluster.launch.order import MAX_MESSAGE_BYTES, is_nonce, launch_proof
from lastgood.errors import LaunchError, MismatchError
from lastgood.text import is_whole, parse_json
from lastgood.wire.frames import keep_alive
from lastgood.wire.gate import LOOPBACK, Gate, Guest, Handshake, Line, open_listener

__all__ = ["Board", "RankState", "notice_loss", "plain_address", "was_killed"]

_log = logging.getLogger("lastgood")
_MAX_HELLO_BYTES: Final = 4096
_MAX_WORLD: Final = 1 << 20
_MAX_PID: Final = 1 << 22
_MAX_STATUS: Final = 255


@dataclass
class RankState:
    """What is known of a rank."""

    rank: int
    host: str
    pid: int | None = None
    """Of the rank's program on its host, once it runs."""
    status: int | None = None
    """Its exit status, negative for a signal; None while it runs."""
    tail: str = ""
    """Its last lines."""
    fault: str | None = None
    """Why it cannot be heard of any more, or could not be started."""
    slurm_job: str | None = None
    _hello: _Hello | None = field(default=None, repr=False)
    _local: str = ""
    _peer: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing more will be heard of it."""
        return self.status is not None or self.fault is not None


@dataclass(eq=False)
class _Line:
    """The lifeline of a rank and what has come over it so far."""

    connection: socket.socket
    rank: int
    buffer: bytearray


@dataclass(frozen=True)
class _Hello:
    """Who a rank is, which has shown that it knows the token."""

    rank: int
    world: int
    port: int
    slurm_job: str | None


class Board:
    """Listens for the ranks of one launch. `hosts` names the host of each rank. Close it at the end.

    Ranks are told to meet at `address` and `port`; if they are not given, at rank 0's host, at a port that it chose.
    It listens on `listen`, ``""`` for all addresses of this machine. Whatever one connection brings ends that one.
    """

    def __init__(
        self,
        token: str,
        hosts: Sequence[str],
        address: str | None = None,
        port: int | None = None,
        *,
        listen: str = LOOPBACK,
    ) -> None:
        self.ranks = [RankState(rank, host) for rank, host in enumerate(hosts)]
        self.first_failure: RankState | None = None
        self._token = token
        self._address, self._port = address, port
        self._stopped = False
        self._gone = False
        self._selector = selectors.DefaultSelector()
        self._lines: set[_Line] = set()
        server = open_listener(listen)
        self.port = int(server.getsockname()[1])
        """Where ranks connect to."""
        self._gate = Gate(server, lambda other: _hear_hello(other, token), "the launch's port", _log.warning)
        self._selector.register(self._gate, selectors.EVENT_READ)

    @property
    def missing(self) -> list[RankState]:
        """Ranks that have not reported yet."""
        return [state for state in self.ranks if state._hello is None and not state.over]

    @property
    def all_over(self) -> bool:
        """Whether every rank has ended, or is lost."""
        return all(state.over for state in self.ranks)

    @property
    def connected(self) -> int:
        """Ranks whose lifeline is open."""
        return len(self._lines)

    def serve(self, timeout_s: float) -> None:
        """Handle what comes within `timeout_s`, at least once; returns after the first batch of events."""
        for key, _ in self._selector.select(self._gate.patience(timeout_s)):
            if key.data in self._lines:
                self._guarded(key.data, self._read)
        for guest in self._gate.step(0.0):
            self._welcome(guest)

    def stop(self) -> None:
        """Tell all ranks to end their programs, now and when they come later."""
        self._stopped = True
        for line in list(self._lines):
            self._send(line, {"stop": True})

    def close(self) -> None:
        """Close all connections; ranks that still live end by that."""
        for line in list(self._lines):
            self._drop(line)
        self._gate.close()
        self._selector.close()

    # -- one connection ------------------------------------------------------------------------------------------------

    def _guarded(self, line: _Line, act: Callable[[_Line], None]) -> None:
        """Whatever happens with a rank's connection, it is the end of that one, and of no other."""
        try:
            act(line)
        except Exception as error:  # see above
            what = "it sent something that is no message"
            self._gate.lines(f"rank {line.rank}: {what}: {error or repr(error)}")
            self._drop(line, what)

    def _read(self, line: _Line) -> None:
        try:
            part = line.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(line, f"its connection failed: {error.strerror}")
            return
        if not part:
            self._drop(line, "its connection closed without a word: its wrapper was killed, or its host went down")
            return
        line.buffer += part
        self._take_lines(line)

    def _take_lines(self, line: _Line) -> None:
        while line in self._lines and (end := line.buffer.find(b"\n")) >= 0:
            text = bytes(line.buffer[:end])
            del line.buffer[: end + 1]
            self._take(line, text)
        if len(line.buffer) > MAX_MESSAGE_BYTES:
            self._drop(line, f"it sent a line of more than {MAX_MESSAGE_BYTES >> 10} KiB")

    def _take(self, line: _Line, text: bytes) -> None:
        message = _parse(text, "a rank's message", MAX_MESSAGE_BYTES)
        state = self.ranks[line.rank]
        if "started" in message:
            state.pid = _number(message, "started", 1, _MAX_PID)
        elif "ended" in message and not state.over:
            status, tail = _number(message, "ended", -_MAX_STATUS, _MAX_STATUS), str(message["tail"])
            state.status, state.tail = status, tail
            self._note(state)
        elif "fault" in message and not state.over:
            state.fault = str(message["fault"])
            self._note(state)

    def _welcome(self, guest: Guest[_Hello]) -> None:
        hello = guest.known
        if hello.rank >= len(self.ranks):
            self._gate.lines(f"{guest.other}: it calls itself rank {hello.rank} of {len(self.ranks)}")
            guest.connection.close()
            return
        state = self.ranks[hello.rank]
        if hello.world != len(self.ranks) or state._hello is not None:
            fault = f"it calls itself rank {hello.rank} of {hello.world}; {len(self.ranks)} were asked for"
            self._lose(state, fault)
            guest.connection.close()
            return
        line = _Line(guest.connection, hello.rank, bytearray(guest.rest))
        try:
            local = line.connection.getsockname()[0]
            notice_loss(line.connection)
            self._selector.register(line.connection, selectors.EVENT_READ, line)
        except (OSError, ValueError) as error:  # it was reset just after its hello
            guest.connection.close()
            self._lose(state, f"its connection failed: {error}")
            return
        self._lines.add(line)
        state.slurm_job = hello.slurm_job
        state._local, state._peer = plain_address(local), plain_address(guest.other.rpartition(":")[0])
        state._hello = hello
        self._greet(line)
        self._guarded(line, self._take_lines)

    def _greet(self, line: _Line) -> None:
        if self._stopped:
            self._send(line, {"stop": True})
            return
        # A rank that was lost before it came does not come any more: then nobody begins.
        first = self.ranks[0]._hello
        if first is not None and not self._gone and all(state._hello is not None for state in self.ranks):
            self._gone = True
            go = {"address": self._address or self._meeting_address(), "port": self._port or first.port}
            for other in list(self._lines):
                self._send(other, {"go": go})

    def _meeting_address(self) -> str:
        """Where the other hosts reach rank 0: as we see it, or, if it is on this machine, as others see us."""
        seen = self.ranks[0]._peer
        if seen in {"127.0.0.1", "::1"}:
            elsewhere = [state._local for state in self.ranks if state._peer not in {"127.0.0.1", "::1"}]
            return elsewhere[0] if elsewhere else seen
        return seen

    def _send(self, line: _Line, message: dict[str, Any]) -> None:
        # A few bytes on a connection of our own: they fit into its buffer, or it is broken, which its reading shows.
        with contextlib.suppress(OSError):
            line.connection.send(_line(message))

    def _drop(self, line: _Line, fault: str | None = None) -> None:
        if line not in self._lines:
            return
        self._lines.discard(line)
        self._selector.unregister(line.connection)
        line.connection.close()
        if fault is not None:
            self._lose(self.ranks[line.rank], fault)

    def _lose(self, state: RankState, fault: str) -> None:
        """Nothing more can come of a rank."""
        if not state.over:
            state.fault = fault
            self._note(state)

    def _note(self, state: RankState) -> None:
        failed = state.fault is not None or state.status != 0
        # What ranks say after they were told to end is no failure of theirs.
        if not failed or self._stopped:
            return
        # Of several that are heard of together one that was killed is the cause: the others have lost touch with it.
        if self.first_failure is None or (was_killed(state.status) and not was_killed(self.first_failure.status)):
            self.first_failure = state


def _hear_hello(other: str, token: str) -> Handshake[_Hello]:
    """The launch's side of the proof, and the hello that comes with the rank's."""
    ours = secrets.token_hex(32)
    yield _line({"nonce": ours})
    message = _parse((yield Line(b"\n", _MAX_HELLO_BYTES)), other, _MAX_HELLO_BYTES)
    theirs, shown = message.get("nonce"), message.get("proof")
    if (
        not is_nonce(theirs)
        or not is_nonce(shown)
        or not hmac.compare_digest(str(shown), launch_proof(token, "rank", str(theirs), ours))
    ):
        yield _line({"refused": "another token"})
        raise MismatchError(f"{other}: it does not know the launch's token")
    job = message.get("slurm_job")
    hello = _Hello(
        _number(message, "rank", 0, _MAX_WORLD),
        _number(message, "world", 1, _MAX_WORLD),
        _number(message, "port", 0, 65535),
        None if job is None else str(job)[:100],
    )
    yield _line({"proof": launch_proof(token, "launch", str(theirs), ours)})
    return hello


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _parse(text: bytes, what: str, most_bytes: int) -> dict[str, Any]:
    message = parse_json(text, what, most_bytes=most_bytes, error=LaunchError)
    if not isinstance(message, dict):
        raise LaunchError(f"{what}: not a JSON object")
    return message


def _number(message: dict[str, Any], key: str, least: int, most: int) -> int:
    value: Any = message.get(key)
    if not is_whole(value, least, most):
        raise LaunchError(f"{key} is {value!r:.40}, and no number from {least} to {most}")
    return int(value)


def was_killed(status: int | None) -> bool:
    """Whether an exit status tells of the kernel or of a bug, not of a launcher or a library that ends what is left.

    Launchers do that by SIGTERM, and NCCL's watchdog by SIGABRT.
    """
    return status is not None and -status in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)


def notice_loss(connection: socket.socket) -> None:
    """Have the kernel find out within half a minute that the other end is lost, with or without traffic."""
    keep_alive(connection, idle_s=10, probes=3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000)


def plain_address(address: str) -> str:
    """An address without the clothes that IPv4 wears in an IPv6 socket."""
    return address.removeprefix("::ffff:")
