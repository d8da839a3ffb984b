"""The gate of every listening socket: who connects is a stranger until a proof, and no stranger gets in the way.

Strangers are held without a thread each, by one selector. All of them have one deadline for the complete proof, however
slowly they send. When too many are held the oldest goes, never the new one, and never anybody proved: who knows the
token needs about one round trip. So many are held (thousands, if the process may have as many files) that those who
make their connections again as soon as they are dropped do not fill the kernel's queue of those who wait for us.
Whatever goes wrong with one connection ends that one, with a line in the log; of such lines there are few.

A handshake is a generator: it yields what it waits for (`Step`), gets the bytes, and returns what it has learnt of the
other side; whatever it raises drops the connection. This module needs Python's own library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = [
    "LOOPBACK",
    "MOST_LINES",
    "PROOF_S",
    "FewLines",
    "Gate",
    "Guest",
    "Handshake",
    "Line",
    "Ready",
    "Step",
    "close_in_forks",
    "connect",
    "open_listener",
]

LOOPBACK = "127.0.0.1"
PROOF_S = 10.0
"""For the complete proof."""
MOST_LINES = 20
"""About strangers: a port scan must not fill the log."""
_MOST_BYTES = 8 << 10
"""That a connection may send until it is proved."""
_MOST_STRANGERS = 16_384
_LEAST_STRANGERS = 16
_OWN_FILES = 4096
"""That a process keeps for itself, if it may have so many; else three quarters of what it may have."""
_BACKLOG = 4096
"""The kernel may cut it (net.core.somaxconn)."""
_BATCH = 64
"""Connections taken at once, before those that are held get their turn."""
_PAUSE_S = 0.1
_READ_BYTES = 4096
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_NO_LISTENER = {errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP}
_AT_ONCE = struct.pack("ii", 1, 0)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Line:
    """A step: the bytes up to and with `end`, at most `most_bytes` of them."""

    end: bytes
    most_bytes: int


@dataclass(frozen=True)
class Ready:
    """A step: until another, non-blocking socket of the handshake's own is ready for `events` (selectors.EVENT_*)."""

    socket: socket.socket
    events: int


Step = int | bytes | Line | Ready
"""An int: so many bytes, and none after them are read. Bytes: these are sent. The others as they say."""
Handshake = Generator[Step, bytes, _T]
"""Returns what is known of the other side then; None if there is nothing more to do: the connection is closed."""


@dataclass(frozen=True)
class Guest(Generic[_T]):
    """A connection that has proved itself. It is the caller's now, non-blocking."""

    connection: socket.socket
    other: str
    """Its address, for messages."""
    known: _T
    """What its handshake returned."""
    rest: bytes
    """What has been read after the last `Line`."""


class FewLines:
    """The first lines about connections that were dropped, and at the end a count of the others. For any thread.

    A log that takes no lines, a closed pipe say, is no reason for a service to end: they are lost then.
    """

    def __init__(self, say: Callable[[str], object], what: str, most: int = MOST_LINES) -> None:
        self._say, self._what, self._most = say, what, most
        self._lock = threading.Lock()
        self.count = 0

    def __call__(self, text: str) -> None:
        """Say this, or count it."""
        with self._lock:
            self.count += 1
            number = self.count
        if number <= self._most:
            more = "; others are counted only" if number == self._most else ""
            line = "".join(sign if sign.isprintable() else " " for sign in text[:500])
            self._tell(f"{self._what}: {line}{more}")

    def close(self) -> None:
        """Say how many there were beyond those that were named."""
        if self.count > self._most:
            self._tell(f"{self._what}: {self.count - self._most} more connections were dropped")
            self.count = 0

    def _tell(self, text: str) -> None:
        with contextlib.suppress(Exception):  # whatever is wrong with the log: see above
            self._say(text)


class _Stranger(Generic[_T]):
    def __init__(self, connection: socket.socket, other: str, handshake: Handshake[_T | None]) -> None:
        self.connection, self.other, self.handshake = connection, other, handshake
        self.deadline = time.monotonic()
        self.step: Step = b""
        self.held = bytearray()
        self.count = 0
        self.watched: tuple[socket.socket, int] | None = None


class Gate(Generic[_T]):
    """Takes connections of `listener`, which it closes at its end, and gives away those that prove themselves.

    For one thread, which calls `step` again and again; or, in a selector of the caller's, whenever this is readable
    (`fileno`), and no later than `patience` says. As a context it closes.

    Args:
        listener: bound; it listens from here on.
        handshake: makes the handshake of a connection from the other side's address.
        what: names the service in the log.
        say: takes a line for the log.
        proof_s: for the complete proof.
        most: strangers at a time. By default a part of the files that this process may have open (RLIMIT_NOFILE); the
            soft limit is raised once they are more.
        dropped: is told of each connection that is not proved: "full" (the oldest of too many), "late", or "refused".
    """

    def __init__(
        self,
        listener: socket.socket,
        handshake: Callable[[str], Handshake[_T | None]],
        what: str,
        say: Callable[[str], object],
        *,
        proof_s: float = PROOF_S,
        most: int | None = None,
        dropped: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._listener, self._handshake, self._dropped = listener, handshake, dropped
        self._proof_s = proof_s
        self._most = _room() if most is None else most
        self._may_grow = most is None
        self._strangers: OrderedDict[_Stranger[_T], None] = OrderedDict()
        self._proved: list[Guest[_T]] = []
        self._selector = selectors.DefaultSelector()
        self._paused_until: float | None = None
        self._port = listener.fileno()
        self.lines = FewLines(say, what)
        """For what goes wrong with a connection later as well."""
        close_in_forks(listener)
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> Gate[_T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """For a selector of the caller's."""
        return self._selector.fileno()

    @property
    def strangers(self) -> int:
        """Connections that have not proved themselves yet."""
        return len(self._strangers)

    def patience(self, timeout_s: float) -> float:
        """Seconds until it has something to do though nothing happens, `timeout_s` at most."""
        ends = [] if self._paused_until is None else [self._paused_until]
        if self._strangers:
            ends.append(next(iter(self._strangers)).deadline)
        return max(0.0, min([timeout_s, *(end - time.monotonic() for end in ends)]))

    def step(self, timeout_s: float) -> list[Guest[_T]]:
        """Wait up to `timeout_s` for something to happen; returns those that have proved themselves meanwhile.

        Raises OSError if the listening socket cannot be used any more.
        """
        if self._listener.fileno() != self._port:
            raise OSError(errno.EBADF, "the listening socket was closed")
        knocked = False
        for key, _ in self._selector.select(self.patience(timeout_s)):
            if key.data is None:
                knocked = True
            elif key.data in self._strangers:
                self._drive(key.data)
        if knocked:
            self._take_some()
        now = time.monotonic()
        while self._strangers and next(iter(self._strangers)).deadline <= now:
            oldest = next(iter(self._strangers))
            self._drop(oldest, "late", f"timed out: no proof came within {self._proof_s:g} s")
        if self._paused_until is not None and now >= self._paused_until:
            self._paused_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        proved, self._proved = self._proved, []
        return proved

    def serve_in_thread(self, guest: Guest[_T], serve: Callable[[Guest[_T]], None]) -> threading.Thread | None:
        """Call `serve` in a thread of its own, and close the connection after it. None if no thread can be had.

        Whatever it raises ends this connection only.
        """

        def run() -> None:
            try:
                serve(guest)
            except Exception as error:  # it is this connection's end, not the service's
                self.lines(f"{guest.other}: {error or repr(error)}")
            finally:
                guest.connection.close()

        try:
            thread = threading.Thread(target=run, name="guest", daemon=True)
            thread.start()
        except Exception as error:  # no thread or no memory for one, which may pass
            self.lines(f"{guest.other}: cannot be served now: {error or repr(error)}")
            guest.connection.close()
            return None
        return thread

    def close(self) -> None:
        """Close the listening socket and all strangers' connections. Safe to call twice."""
        while self._strangers:
            self._forget(next(iter(self._strangers)))
        for guest in self._proved:
            guest.connection.close()
        self._proved = []
        self._selector.close()
        self._listener.close()
        self.lines.close()

    # -- those who come ------------------------------------------------------------------------------------------------

    def _take_some(self) -> None:
        for _ in range(max(1, min(_BATCH, self._most // 8))):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except (OSError, MemoryError) as error:
                if isinstance(error, MemoryError) or error.errno in _NO_ROOM:
                    self._make_room(error)
                    return
                if error.errno in _NO_LISTENER:
                    raise
                self.lines(f"a connection was not taken: {error}")  # it went again at once
            else:
                self._begin(connection, address)

    def _make_room(self, error: Exception) -> None:
        """No descriptor, or no memory: that of strangers. If it is not they who have it, wait a moment."""
        self.lines(f"a connection was not taken: {error or repr(error)}")
        if not self._strangers:
            self._paused_until = time.monotonic() + _PAUSE_S
            self._selector.unregister(self._listener)
        for oldest in list(self._strangers)[: max(1, len(self._strangers) // 4)]:
            self._drop(oldest, "full", "files ran out, and it had no proof")

    def _begin(self, connection: socket.socket, address: object) -> None:
        other = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)
        while len(self._strangers) >= self._most:
            if self._may_grow:
                self._may_grow = False
                self._most = _more_room(self._most)
                continue
            oldest = next(iter(self._strangers))
            self._drop(oldest, "full", f"the oldest of {self._most} connections without a proof, and another one came")
        try:
            connection.setblocking(False)
            close_in_forks(connection)
            stranger = _Stranger(connection, other, self._handshake(other))
        except Exception as error:  # whatever it is, it is this connection's end only
            self._tell("refused", f"{other}: {error or repr(error)}")
            connection.close()
            return
        stranger.deadline += self._proof_s
        self._strangers[stranger] = None
        self._drive(stranger, first=True)

    # -- one of them ---------------------------------------------------------------------------------------------------

    def _drive(self, stranger: _Stranger[_T], *, first: bool = False) -> None:
        """Go on with a handshake as far as it goes now."""
        try:
            if first:
                stranger.step = next(stranger.handshake)
            elif isinstance(stranger.step, Ready):
                self._watch(stranger, None)  # the handshake may close it
                stranger.step = stranger.handshake.send(b"")
            while (given := self._perform(stranger)) is not None:
                stranger.step = stranger.handshake.send(given)
        except StopIteration as end:
            self._watch(stranger, None)
            del self._strangers[stranger]
            _not_shared.discard(stranger.connection)
            if end.value is None:
                stranger.connection.close()
            else:
                self._proved.append(Guest(stranger.connection, stranger.other, end.value, bytes(stranger.held)))
        except Exception as error:  # whatever it is, it is this connection's end only
            self._drop(stranger, "refused", str(error) or repr(error))

    def _perform(self, stranger: _Stranger[_T]) -> bytes | None:
        """What a step gives, or None while it has to wait."""
        step, connection = stranger.step, stranger.connection
        if isinstance(step, Ready):
            self._watch(stranger, (step.socket, step.events))
            return None
        try:
            if isinstance(step, bytes):
                while step:
                    stranger.step = step = step[connection.send(step) :]
                return b""
            while True:
                want, most = self._wanted(stranger, step)
                if want >= 0:
                    given = bytes(stranger.held[:want])
                    del stranger.held[:want]
                    return given
                if stranger.count + most > _MOST_BYTES:
                    raise ConnectionError(f"it sends more than {_MOST_BYTES >> 10} KiB before its proof")
                part = connection.recv(most)
                if not part:
                    raise ConnectionError("it closed the connection before its proof")
                stranger.held += part
                stranger.count += len(part)
        except BlockingIOError:
            self._watch(
                stranger, (connection, selectors.EVENT_WRITE if isinstance(step, bytes) else selectors.EVENT_READ)
            )
            return None

    def _wanted(self, stranger: _Stranger[_T], step: int | Line) -> tuple[int, int]:
        """How many of the bytes that are held make the step, -1 if it needs more; and how many may be read then."""
        held = stranger.held
        if isinstance(step, int):
            return (step, 0) if len(held) >= step else (-1, step - len(held))
        at = held.find(step.end)
        end = at + len(step.end)
        if at < 0:
            end = len(held) + 1
        if end > step.most_bytes:
            raise ConnectionError(f"it sent a line of more than {step.most_bytes} bytes")
        return (end, 0) if at >= 0 else (-1, min(_READ_BYTES, step.most_bytes - len(held)))

    def _watch(self, stranger: _Stranger[_T], wanted: tuple[socket.socket, int] | None) -> None:
        if stranger.watched == wanted:
            return
        if stranger.watched is not None:
            self._selector.unregister(stranger.watched[0])
            stranger.watched = None
        if wanted is not None:
            self._selector.register(wanted[0], wanted[1], stranger)
            stranger.watched = wanted

    def _drop(self, stranger: _Stranger[_T], cause: str, why: str) -> None:
        if cause != "refused":
            with contextlib.suppress(OSError):  # nothing remains of it, not even the kernel's wait after a close
                stranger.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self._tell(cause, f"{stranger.other}: {why}")
        self._forget(stranger)

    def _forget(self, stranger: _Stranger[_T]) -> None:
        del self._strangers[stranger]
        self._watch(stranger, None)
        with contextlib.suppress(Exception):  # a handshake that fails at its end is at its end
            stranger.handshake.close()
        stranger.connection.close()

    def _tell(self, cause: str, why: str) -> None:
        self.lines(why)
        self._dropped(cause)


def open_listener(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """A listening socket, on loopback unless told; ``""`` for all addresses of this machine, port 0 for a free one.

    Raises OSError.
    """
    if not 0 <= port < 1 << 16:
        raise OSError(errno.EINVAL, f"{port} is no port (0 to 65535)")
    if host == "" and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    try:
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    except UnicodeError as error:
        raise _no_name(host) from error
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """A connection. Raises OSError, for what no host can be called as well (Python says UnicodeError there)."""
    try:
        return socket.create_connection((host, port), timeout_s)
    except UnicodeError as error:
        raise _no_name(host) from error


def _no_name(host: str) -> OSError:
    return OSError(errno.EINVAL, f"{host!r:.80} is no name of a host")


def _room() -> int:
    """For strangers, of this process's files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MOST_STRANGERS
    return max(_LEAST_STRANGERS, min(_MOST_STRANGERS, max(files // 4, files - _OWN_FILES)))


def _more_room(most: int) -> int:
    """Raise the soft limit of files, as far as that is allowed and of use: all that is won is for strangers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most >= _MOST_STRANGERS or soft == resource.RLIM_INFINITY:
        return most
    wanted = soft + _MOST_STRANGERS - most
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    except (OSError, ValueError):
        return most
    return most + raised - soft


# -- forks -------------------------------------------------------------------------------------------------------------

_not_shared: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_forks(end: socket.socket) -> None:
    """A data loader's worker that outlives a killed training must hold neither its port nor its connections."""
    _not_shared.add(end)


def _close_in_child() -> None:
    for end in list(_not_shared):
        end.close()


os.register_at_fork(after_in_child=_close_in_child)
