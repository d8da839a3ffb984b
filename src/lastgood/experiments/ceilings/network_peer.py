"""Plain TCP streams between two processes that share a token: what `lastgood ceilings` measures networks with.

The server answers on one machine, the client measures from the other. On each connection both sides prove that they
know the token (`wire.frames`), so neither sends bytes to a stranger. Then one side sends complete messages for the time
asked for, the other reads to the end and answers with its count. Nothing that is received is kept. Every length is
bounded and every wait has a timeout.

Sender and receiver are two processes, also on loopback: two threads of one interpreter would take turns at its lock
between system calls, and the number would be Python's instead of the kernel's.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, Literal

from lastgood.errors import CheckpointError, ConfigError, LastgoodError, MismatchError
from lastgood.processes import die_with_parent
from lastgood.wire.frames import Wire, peer_handshake, prove_trainer
from lastgood.wire.gate import Gate, Guest, connect, open_listener

__all__ = [
    "DEFAULT_PORT",
    "MAX_MESSAGE_BYTES",
    "MAX_SECONDS",
    "MAX_STREAMS",
    "MIN_TOKEN_LENGTH",
    "Direction",
    "PeerClient",
    "PeerServer",
    "parse_address",
    "serve_for_parent",
]

DEFAULT_PORT = 7471
MAX_STREAMS = 16
MAX_MESSAGE_BYTES = 16 << 20
MAX_SECONDS = 10.0
MIN_TOKEN_LENGTH = 16

Direction = Literal["send", "receive", "both"]
"""As the client sees it; ``both``: at the same time, over as many connections each way."""

_GREETING = b"lastgood measure 2\n"
_MAX_REQUEST_BYTES = 4096
_HANDSHAKE_TIMEOUT_S = 10.0
_GRACE_S = 15.0
"""How much longer than asked a stream may take before it counts as stuck."""
_SESSION_LIMIT_S = 600.0
_HAND_OVER_S = 5.0
"""A client that has closed its session is noticed within this, and the next one comes right after it."""
_MAX_CONNECTIONS = 2 * MAX_STREAMS + 8
"""That know the token: both ways at once, the session, and a few clients that wait for their turn."""
_POLL_S = 0.2
_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.%\w]{2,64})\]|(?P<host>[^\s:\[\]]{1,253}))(?::(?P<port>[0-9]{1,5}))?")


def parse_address(text: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Read ``HOST``, ``HOST:PORT`` or ``[IPV6]:PORT``. Raises ConfigError for anything else."""
    found = _ADDRESS.fullmatch(text)
    port = int(found["port"] or default_port) if found else 0
    if found is None or not 1 <= port <= 65535:
        raise ConfigError(f"not an address: {text[:80]!r}; write HOST, HOST:PORT or [IPV6]:PORT, port 1 to 65535")
    return found["ipv6"] or found["host"], port


def _check_token(token: str) -> bytes:
    if len(token) < MIN_TOKEN_LENGTH:
        raise ConfigError(
            f"the peer's token has {len(token)} characters; at least {MIN_TOKEN_LENGTH} are needed, "
            "the same token on both machines"
        )
    return token.encode()


# -- bytes on a socket ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _message(size_bytes: int) -> bytes:
    """Random bytes, so that no layer below can compress them away."""
    return secrets.token_bytes(size_bytes)


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise EOFError(f"the other side closed after {len(parts)} of {count} bytes")
        parts += part
    return bytes(parts)


def _pump(connection: socket.socket, message_bytes: int, seconds: float) -> int:
    """Send complete messages for `seconds`, say that this was all, and check the reader's count. Returns bytes."""
    message = _message(message_bytes)
    sent = 0
    end = time.monotonic() + seconds
    while True:
        connection.sendall(message)
        sent += message_bytes
        if time.monotonic() >= end:
            break
    connection.shutdown(socket.SHUT_WR)
    (received,) = struct.unpack("<Q", _receive_exactly(connection, 8))
    if received != sent:
        raise ValueError(f"{sent} bytes were sent and {received} arrived")
    return sent


def _sink(connection: socket.socket, message_bytes: int, seconds: float) -> int:
    """Read and forget until the sender says that this was all; answer with the count. Returns bytes."""
    buffer = bytearray(message_bytes)
    received = 0
    end = time.monotonic() + seconds + _GRACE_S
    while moved := connection.recv_into(buffer):
        received += moved
        if time.monotonic() > end:
            raise TimeoutError(f"the other side still sends {_GRACE_S:g} s after its {seconds:g} s")
    connection.sendall(struct.pack("<Q", received))
    return received


# -- the side that answers -----------------------------------------------------------------------------------------


class PeerServer:
    """Answers measurements of clients that know the token, one client at a time, until `stop`.

    `turn` makes a context that is entered for each client's session, for instance this machine's measuring lock; if it
    raises LastgoodError, the client is told why it is refused.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        *,
        turn: Callable[[], AbstractContextManager[object]] = nullcontext,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._key = _check_token(token)
        self._turn = turn
        self._report = report
        self._stopping = threading.Event()
        self._slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._session_lock = threading.Lock()
        self._session: str | None = None
        try:
            listener = open_listener(host, port)
        except OSError as error:
            raise LastgoodError(
                f"cannot listen on {host} port {port}: {error.strerror or error}; choose another --listen"
            ) from error
        self.port: int = listener.getsockname()[1]

        self._gate = Gate(
            listener,
            lambda other: peer_handshake(other, self._key, _GREETING),
            "a measured port",
            report,
            proof_s=_HANDSHAKE_TIMEOUT_S,
        )

    def serve(self, seconds: float) -> None:
        """Answer for `seconds`, or until `stop` is called from another thread. The port is closed at the end."""
        end = time.monotonic() + seconds
        with self._gate as gate:
            while not self._stopping.is_set() and time.monotonic() < end:
                for guest in gate.step(_POLL_S):
                    if self._slots.acquire(blocking=False):
                        if gate.serve_in_thread(guest, self._answer) is None:
                            self._slots.release()
                    else:
                        guest.connection.close()
        self._stopping.set()

    def stop(self) -> None:
        """End `serve` within a fraction of a second."""
        self._stopping.set()

    def _answer(self, guest: Guest[int]) -> None:
        wire = Wire(guest.connection, guest.other, _HANDSHAKE_TIMEOUT_S, _MAX_REQUEST_BYTES)
        try:
            request = wire.receive_message("a request")
            if request.get("kind") == "session":
                self._hold_session(wire)
            else:
                self._stream(wire, guest.connection, request)
        except LastgoodError as error:
            wire.send_message(error=str(error)[:500])
            raise
        finally:
            self._slots.release()

    def _hold_session(self, wire: Wire) -> None:
        """Keep this machine's turn until the client closes the connection, or for `_SESSION_LIMIT_S`."""
        if not self._session_lock.acquire(timeout=_HAND_OVER_S):
            raise LastgoodError("it is being measured by another client")
        try:
            with self._turn():
                self._session = secrets.token_hex(16)
                self._report(f"{wire.other}: measuring")
                wire.send_message(session=self._session)
                end = time.monotonic() + _SESSION_LIMIT_S
                while not self._stopping.is_set() and time.monotonic() < end:
                    if wire.wait_readable(_POLL_S):
                        break
                self._report(f"{wire.other}: done")
        finally:
            self._session = None
            self._session_lock.release()

    def _stream(self, wire: Wire, connection: socket.socket, request: dict[str, Any]) -> None:
        message_bytes, seconds = int(request["message_bytes"]), float(request["seconds"])
        session = self._session
        if session is None or not hmac.compare_digest(str(request["session"]).encode(), session.encode()):
            raise LastgoodError("this session is over")
        # "not within" refuses NaN as well.
        if not (1 <= message_bytes <= MAX_MESSAGE_BYTES and 0 < seconds <= MAX_SECONDS):
            raise LastgoodError(f"a message has 1 to {MAX_MESSAGE_BYTES} bytes, a pass up to {MAX_SECONDS:g} s")
        work = {"send": _sink, "receive": _pump}[str(request["direction"])]
        # Made before the clock starts: a first message costs more than a pass.
        _message(message_bytes)
        wire.send_message()
        wire.read_into(memoryview(bytearray(1)), "the start of a pass")
        connection.settimeout(seconds + _GRACE_S)
        work(connection, message_bytes, seconds)


def serve_for_parent(parent_pid: int, seconds: float) -> None:
    """Be the other end of loopback for the process that started this one; ends with it, or after `seconds`.

    The token comes as a line on stdin, where no other user can read it; the port goes out as a line on stdout.
    """
    die_with_parent(parent_pid)
    server = PeerServer("127.0.0.1", 0, sys.stdin.readline().strip())
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    server.serve(seconds)


# -- the side that measures ----------------------------------------------------------------------------------------


class PeerClient:
    """Measures against a `PeerServer`. Use it inside `session`."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._host, self._port = host, port
        self._key = _check_token(token)
        self._session = ""

    @contextmanager
    def session(self) -> Iterator[PeerClient]:
        """Take the server's turn to be measured; it ends with this context. Raises LastgoodError if it is refused."""
        connection, answer = self._connect({"kind": "session"}, answer_timeout_s=_SESSION_LIMIT_S)
        with connection:
            self._session = str(answer.get("session"))
            yield self

    def measure(self, direction: Direction, streams: int, message_bytes: int, seconds: float) -> float:
        """Bytes per second over `streams` connections each way, from the common start to the last byte's arrival.

        Raises LastgoodError if a connection fails, and ConfigError for arguments outside the bounds of this module.
        """
        if not (1 <= streams <= MAX_STREAMS and 1 <= message_bytes <= MAX_MESSAGE_BYTES and 0 < seconds <= MAX_SECONDS):
            raise ConfigError(
                f"a pass has 1 to {MAX_STREAMS} streams, messages of 1 to {MAX_MESSAGE_BYTES} bytes and up to "
                f"{MAX_SECONDS:g} s, not {streams}, {message_bytes} and {seconds:g}"
            )
        _message(message_bytes)
        one_way = ("send", "receive") if direction == "both" else (direction,)
        moved: list[int] = []
        failures: list[Exception] = []
        go = threading.Event()

        def work(connection: socket.socket, way: str) -> None:
            try:
                if not go.wait(_HANDSHAKE_TIMEOUT_S):
                    raise TimeoutError("the other streams were not ready")
                connection.sendall(b"G")
                moved.append((_pump if way == "send" else _sink)(connection, message_bytes, seconds))
            except (OSError, EOFError, ValueError) as error:
                failures.append(error)

        with ExitStack() as opened:
            threads = []
            for way in one_way:
                for _ in range(streams):
                    request = {
                        "kind": "stream",
                        "session": self._session,
                        "direction": way,
                        "message_bytes": message_bytes,
                        "seconds": seconds,
                    }
                    connection, _ = self._connect(request)
                    opened.enter_context(connection)
                    connection.settimeout(seconds + _GRACE_S)
                    threads.append(threading.Thread(target=work, args=(connection, way), daemon=True))
            for thread in threads:
                thread.start()
            begin = time.perf_counter()
            go.set()
            for thread in threads:
                thread.join(seconds + 2 * _GRACE_S)
            elapsed_s = time.perf_counter() - begin
            stuck = sum(thread.is_alive() for thread in threads)
        if failures or stuck:
            why = failures[0] if failures else f"{stuck} of {len(threads)} streams did not end in time"
            raise LastgoodError(f"{self._where()}: measuring ({direction}, {streams} streams) failed: {why}; try again")
        return sum(moved) / elapsed_s

    def _where(self) -> str:
        return f"peer {self._host} port {self._port}"

    def _connect(
        self, request: dict[str, Any], answer_timeout_s: float = _HANDSHAKE_TIMEOUT_S
    ) -> tuple[socket.socket, dict[str, Any]]:
        """A connection on which both sides know each other, and the server's answer to `request`."""
        try:
            connection = connect(self._host, self._port, _HANDSHAKE_TIMEOUT_S)
        except OSError as error:
            raise LastgoodError(
                f"{self._where()}: cannot connect: {error}; start `lastgood ceilings --serve-peer` there first"
            ) from error
        wire = Wire(connection, self._where(), _HANDSHAKE_TIMEOUT_S, _MAX_REQUEST_BYTES)
        try:
            prove_trainer(wire, self._key, _GREETING)
            wire.send_message(**request)
            wire.timeout_s = answer_timeout_s
            answer = wire.receive_message("its answer")
            if "error" in answer:
                raise LastgoodError(f"{self._where()} refuses: {answer['error']}")
        except MismatchError as error:
            connection.close()
            raise LastgoodError(
                f"{self._where()} refuses this token, or does not know the token: both machines need the same one "
                "(LASTGOOD_PEER_TOKEN)"
            ) from error
        except CheckpointError as error:
            connection.close()
            raise LastgoodError(
                f"{error}: no answer to a request; try again, with the same Lastgood on both machines"
            ) from error
        except BaseException:
            connection.close()
            raise
        return connection, answer
