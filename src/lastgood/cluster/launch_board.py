"""The launching end of all ranks' lifelines: TCP connections on which ranks say how they fare, and are told to end.

It is the same for all launchers, and stronger than what any of them promises: the kernel closes a connection however
its process ends, and probes find a host that is lost, so ranks end with their launch, and it hears of every rank's end.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lastgood.cluster.launch_ticket import MAX_MESSAGE_BYTES, greeting
from lastgood.errors import LaunchError
from lastgood.text import parse_json

__all__ = ["Board", "RankState", "keep_alive", "plain_address", "was_killed"]

_MAX_STRANGERS: Final = 256
_KEEP_ALIVE: Final = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 25_000))


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
    _hello: dict[str, Any] = field(default_factory=dict, repr=False)
    _local: str = ""
    _peer: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing more will be heard of it."""
        return self.status is not None or self.fault is not None


class _Line:
    """One connection and what has come over it so far."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.buffer = bytearray()
        self.rank: int | None = None


class Board:
    """Listens for the ranks of one launch. `hosts` names the host of each rank. Close it at the end.

    Ranks are told to meet at `address` and `port`; where they are not given, where rank 0 is, at a port that it chose.
    """

    def __init__(self, token: str, hosts: Sequence[str], address: str | None = None, port: int | None = None) -> None:
        self.ranks = [RankState(rank, host) for rank, host in enumerate(hosts)]
        self.first_failure: RankState | None = None
        self._token = token
        self._address, self._port = address, port
        self._stopped = False
        self._gone = False
        self._selector = selectors.DefaultSelector()
        self._lines: set[_Line] = set()
        if socket.has_dualstack_ipv6():
            self._server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        else:
            self._server = socket.create_server(("", 0), backlog=1024)
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)

    @property
    def port(self) -> int:
        """Where ranks connect to."""
        return int(self._server.getsockname()[1])

    @property
    def missing(self) -> list[RankState]:
        """Ranks that have not reported yet."""
        return [state for state in self.ranks if not state._hello and not state.over]

    @property
    def all_over(self) -> bool:
        """Whether every rank has ended, or is lost."""
        return all(state.over for state in self.ranks)

    @property
    def connected(self) -> int:
        """Ranks whose lifeline is open."""
        return sum(line.rank is not None for line in self._lines)

    def serve(self, timeout_s: float) -> None:
        """Handle what comes within `timeout_s`, at least once; returns after the first batch of events."""
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)

    def stop(self) -> None:
        """Tell all ranks to end their programs, now and when they come later."""
        self._stopped = True
        for line in list(self._lines):
            if line.rank is not None:
                self._send(line, {"stop": True})

    def lose(self, states: Sequence[RankState], fault: str) -> None:
        """Give up on ranks of which nothing more can come."""
        for state in states:
            if not state.over:
                state.fault = fault
                self._note(state)

    def close(self) -> None:
        """Close all connections; ranks that still live end by that."""
        for line in list(self._lines):
            self._drop(line)
        self._selector.unregister(self._server)
        self._server.close()
        self._selector.close()

    # -- one connection ------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            return  # it went away before we came to it
        if sum(line.rank is None for line in self._lines) >= _MAX_STRANGERS:
            connection.close()
            return
        connection.setblocking(False)
        keep_alive(connection)
        line = _Line(connection)
        self._lines.add(line)
        self._selector.register(connection, selectors.EVENT_READ, line)
        self._send(line, {"greeting": greeting(self._token)})

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
        while line in self._lines and (end := line.buffer.find(b"\n")) >= 0:
            text = bytes(line.buffer[:end])
            del line.buffer[: end + 1]
            self._take(line, text)
        if len(line.buffer) > MAX_MESSAGE_BYTES:
            self._drop(line, f"it sent a line of more than {MAX_MESSAGE_BYTES >> 10} KiB")

    def _take(self, line: _Line, text: bytes) -> None:
        try:
            message = parse_json(text, "a line", most_bytes=MAX_MESSAGE_BYTES, error=LaunchError)
            if line.rank is None:
                self._welcome(line, message)
                return
            state = self.ranks[line.rank]
            if "started" in message:
                state.pid = int(message["started"])
            elif "ended" in message and not state.over:
                state.status = int(message["ended"])
                state.tail = str(message["tail"])
                self._note(state)
            elif "fault" in message and not state.over:
                state.fault = str(message["fault"])
                self._note(state)
        except (LaunchError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
            self._drop(line, "it sent something that is no message")

    def _welcome(self, line: _Line, message: dict[str, Any]) -> None:
        rank = message["rank"]
        if message["token"] != self._token or not isinstance(rank, int) or not 0 <= rank < len(self.ranks):
            self._drop(line)
            return
        state = self.ranks[rank]
        if message["world"] != len(self.ranks) or state._hello:
            self.lose([state], f"it calls itself rank {rank} of {message['world']}; {len(self.ranks)} were asked for")
            self._drop(line)
            return
        line.rank = rank
        job = message["slurm_job"]
        state.slurm_job = None if job is None else str(job)
        state._local = plain_address(line.connection.getsockname()[0])
        state._peer = plain_address(line.connection.getpeername()[0])
        state._hello = {"port": int(message["port"])}
        if self._stopped:
            self._send(line, {"stop": True})
        elif not self.missing and not self._gone:
            self._gone = True
            go = {
                "address": self._address or self._meeting_address(),
                "port": self._port or self.ranks[0]._hello["port"],
            }
            for other in list(self._lines):
                if other.rank is not None:
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
            line.connection.send(json.dumps(message).encode() + b"\n")

    def _drop(self, line: _Line, fault: str | None = None) -> None:
        self._lines.discard(line)
        self._selector.unregister(line.connection)
        line.connection.close()
        if line.rank is not None and fault is not None:
            self.lose([self.ranks[line.rank]], fault)

    def _note(self, state: RankState) -> None:
        failed = state.fault is not None or state.status != 0
        # What ranks say after they were told to end is no failure of theirs.
        if not failed or self._stopped:
            return
        # Of several that are heard of together one that was killed is the cause: the others have lost touch with it.
        if self.first_failure is None or (was_killed(state.status) and not was_killed(self.first_failure.status)):
            self.first_failure = state


def was_killed(status: int | None) -> bool:
    """Whether an exit status tells of the kernel or of a bug, not of a launcher or a library that ends what is left.

    Launchers do that by SIGTERM, and NCCL's watchdog by SIGABRT.
    """
    return status is not None and -status in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel find out within half a minute that the other end is lost, with or without traffic."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def plain_address(address: str) -> str:
    """An address without the clothes that IPv4 wears in an IPv6 socket."""
    return address.removeprefix("::ffff:")
