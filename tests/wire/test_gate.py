"""The gate of listening sockets: strangers of all kinds get in nobody's way, and whatever they do ends nothing else."""

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
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lastgood.wire import gate as gate_module
from lastgood.wire.gate import Gate, Guest, Handshake, Line, Ready, close_in_forks, connect, open_listener

WAIT_S = 60.0
SECRET = b"open sesame"


def secret(other: str) -> Handshake[str]:
    """Says hello, and lets those in who say the word."""
    del other
    yield b"hello"
    if (yield len(SECRET)) != SECRET:
        raise ValueError("the word is another one")
    return "a friend"


class Door:
    """A gate and what came through it."""

    def __init__(self, handshake: Callable[[str], Handshake[Any]] = secret, **options: Any) -> None:
        self.said: list[str] = []
        self.dropped: list[str] = []
        self.guests: list[Guest[Any]] = []
        listener = open_listener()
        self.where = listener.getsockname()
        say = options.pop("say", self.said.append)
        self.gate = Gate(listener, handshake, "the door", say, dropped=self.dropped.append, **options)

    def until(self, found: Callable[[], object], what: str = "what was waited for") -> None:
        deadline = time.monotonic() + WAIT_S
        while not found():
            assert time.monotonic() < deadline, f"{what} did not come: {self.said}"
            self.guests += self.gate.step(0.05)

    def knock(self) -> socket.socket:
        return socket.create_connection(self.where, WAIT_S)

    def lets_in(self) -> None:
        """Somebody who knows the word comes in."""
        before = len(self.guests)
        with self.knock() as friend:
            friend.sendall(SECRET)
            self.until(lambda: len(self.guests) > before, "a friend")
            assert friend.recv(5, socket.MSG_WAITALL) == b"hello"

    def close(self) -> None:
        for guest in self.guests:
            guest.connection.close()
        self.gate.close()


@pytest.fixture
def door() -> Iterator[Callable[..., Door]]:
    made: list[Door] = []

    def make(*arguments: Any, **options: Any) -> Door:
        made.append(Door(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_who_knows_the_word_comes_in_and_nothing_behind_it_is_read(door: Callable[..., Door]) -> None:
    one = door()
    with one.knock() as friend:
        for part in (b"ope", b"n sesam", b"e and more"):
            friend.sendall(part)
            one.guests += one.gate.step(0.05)
        one.until(lambda: one.guests)
        (guest,) = one.guests
        assert (guest.known, guest.rest, guest.other.split(":")[0]) == ("a friend", b"", "127.0.0.1")
        guest.connection.settimeout(WAIT_S)
        assert guest.connection.recv(100) == b" and more"
    assert not one.gate.strangers and not one.said and not one.dropped


def test_a_line_may_bring_more_with_it(door: Callable[..., Door]) -> None:
    def lines(_: str) -> Handshake[bytes]:
        first = yield Line(b"\n", 8)
        return first + (yield 2)

    one = door(lines)
    with one.knock() as friend, one.knock() as endless:
        friend.sendall(b"line\nxyz")
        endless.sendall(b"12345678\n")
        one.until(lambda: one.guests and one.said)
    assert (one.guests[0].known, one.guests[0].rest) == (b"line\nxy", b"z")
    assert "a line of more than 8 bytes" in one.said[0]


def test_when_too_many_are_silent_the_oldest_goes_and_never_the_new_one_or_a_guest(door: Callable[..., Door]) -> None:
    one = door(most=8)
    one.lets_in()
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(one.knock()) for _ in range(20)]
        one.until(lambda: one.dropped.count("full") == 12)
        assert one.gate.strangers == 8
        for silent in held[12:]:
            silent.sendall(SECRET)
        one.until(lambda: len(one.guests) == 9)
        for silent in held[:12]:
            with contextlib.suppress(ConnectionResetError):
                assert silent.recv(5) in (b"", b"hello")
        guest = one.guests[0].connection
        assert guest.fileno() >= 0 and guest.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0


def test_one_deadline_is_for_the_complete_proof_however_slowly_it_trickles(door: Callable[..., Door]) -> None:
    def long(_: str) -> Handshake[str]:
        yield 8000
        return "patient"

    one = door(long, proof_s=0.5)
    with one.knock() as slow, one.knock() as silent:
        deadline = time.monotonic() + WAIT_S
        while one.dropped.count("late") < 2:
            assert time.monotonic() < deadline and not one.guests
            with contextlib.suppress(OSError):
                slow.sendall(b"x")
            one.guests += one.gate.step(0.001)
            time.sleep(0.001)
        with contextlib.suppress(ConnectionResetError):
            assert silent.recv(5) == b""
    assert all("no proof came within 0.5 s" in line for line in one.said), one.said


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOTCONN, "Transport endpoint is not connected"),
        RecursionError(),
        MemoryError(),
        ValueError("odd"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "odd"),
        KeyError("key"),
        RuntimeError("can't start new thread"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("when", ["made", "begun", "in progress", "at its end"])
def test_whatever_goes_wrong_with_one_ends_that_one(door: Callable[..., Door], error: Exception, when: str) -> None:
    failing = True

    def odd(other: str) -> Handshake[str]:
        if failing and when == "made":
            raise error

        def inner() -> Handshake[str]:
            try:
                if failing and when == "begun":
                    raise error
                known = yield from secret(other)
                if failing and when == "in progress":
                    raise error
                return known
            finally:
                if failing and when == "at its end":
                    raise error

        return inner()

    one = door(odd)
    with one.knock() as unlucky:
        unlucky.sendall(SECRET if when == "in progress" else SECRET[:3])
        if when == "at its end":
            unlucky.shutdown(socket.SHUT_WR)
        one.until(lambda: one.dropped)
    assert len(one.said) == 1 and not one.gate.strangers
    failing = False
    one.lets_in()


def test_a_connection_that_is_reset_at_any_moment_ends_nothing(door: Callable[..., Door]) -> None:
    one = door()
    for sent in (b"", b"x", SECRET[:-1], b"another wrd", SECRET):
        for turns in range(3):
            with one.knock() as dying:
                for _ in range(turns):
                    one.guests += one.gate.step(0.01)
                dying.sendall(sent)
                dying.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            for _ in range(2):
                one.guests += one.gate.step(0.01)
    one.until(lambda: not one.gate.strangers)
    one.lets_in()


def test_twenty_lines_then_a_count(door: Callable[..., Door]) -> None:
    one = door()
    for number in range(30):
        with one.knock() as wrong:
            wrong.sendall(b"\nx\x1b[31m" + b"%04d" % number)
            one.until(lambda number=number: len(one.dropped) > number)
    assert len(one.said) == 20 and "others are counted only" in one.said[-1]
    assert all(line.isprintable() for line in one.said)
    one.close()
    assert one.said[20:] == ["the door: 10 more connections were dropped"]
    one.close()
    assert len(one.said) == 21


def test_a_log_that_takes_no_lines_ends_nothing() -> None:
    """What is printed goes to a pipe that somebody closes, say: `lastgood netbench --serve | head`."""

    def broken(line: str) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    one = Door(say=broken)
    try:
        for number in range(21):
            with one.knock() as wrong:
                wrong.sendall(b"another word")
                one.until(lambda number=number: len(one.dropped) > number)
        one.lets_in()
    finally:
        one.close()


def test_nobody_may_send_much_before_the_proof(door: Callable[..., Door]) -> None:
    def hungry(_: str) -> Handshake[str]:
        yield 1 << 30
        return "full"

    one = door(hungry)
    with one.knock() as big:
        one.until(lambda: one.dropped)
        with contextlib.suppress(OSError):
            big.sendall(bytes(1 << 20))
    assert "more than 8 KiB before its proof" in one.said[0]


def test_a_service_may_answer_everybody_and_a_slow_reader_holds_up_nobody(door: Callable[..., Door]) -> None:
    content = bytes(8 << 20)

    def answer(_: str) -> Handshake[None]:
        yield Line(b"\n", 100)
        yield content

    one = door(answer)
    with one.knock() as slow, one.knock() as quick:
        for asking in (slow, quick):
            asking.sendall(b"?\n")
        got = bytearray()
        reader = threading.Thread(target=lambda: [got.extend(part) for part in iter(lambda: quick.recv(1 << 20), b"")])
        reader.start()
        one.until(lambda: not reader.is_alive(), "the whole answer")
        assert bytes(got) == content and one.gate.strangers == 1 and not one.guests


def test_a_handshake_may_wait_for_a_connection_of_its_own(door: Callable[..., Door]) -> None:
    with open_listener() as beyond:
        opened: list[socket.socket] = []

        def relay(_: str) -> Handshake[bytes]:
            asked = yield 3
            outer = socket.create_connection(beyond.getsockname(), WAIT_S)
            opened.append(outer)
            with outer:
                outer.setblocking(False)
                outer.send(asked)
                yield Ready(outer, selectors.EVENT_READ)
                return outer.recv(3)

        one = door(relay, proof_s=1.0)
        with one.knock() as friend, one.knock() as unlucky:
            friend.sendall(b"abc")
            one.until(lambda: opened)
            answering, _ = beyond.accept()
            with answering:
                answering.sendall(answering.recv(3)[::-1])
                one.until(lambda: one.guests)
            unlucky.sendall(b"abc")
            one.until(lambda: one.dropped == ["late"])
    assert one.guests[0].known == b"cba"
    assert [outer.fileno() for outer in opened] == [-1, -1], "what a handshake opened ends with it"


def test_when_files_run_out_strangers_make_room_and_it_does_not_spin(
    door: Callable[..., Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = door()
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(one.knock())
        one.until(lambda: one.gate.strangers == 8)
        calls = 0

        class Empty:
            """A listening socket on a machine without descriptors."""

            def __getattr__(self, name: str) -> Any:
                return getattr(listener, name)

            def accept(self) -> Any:
                nonlocal calls
                calls += 1
                raise OSError(errno.EMFILE, "Too many open files")

        listener = one.gate._listener
        stack.enter_context(one.knock())
        with monkeypatch.context() as patched:
            patched.setattr(one.gate, "_listener", Empty())
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                one.gate.step(0.05)
            assert one.dropped.count("full") == 8 and one.gate.strangers == 0
            # Eight to make room, and from then on one every tenth of a second.
            assert calls <= 40, calls
            assert one.gate._paused_until is not None or calls > 8
    one.lets_in()


def test_a_connection_that_was_aborted_is_only_counted(
    door: Callable[..., Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = door()
    errors: list[Exception] = [ConnectionAbortedError(), MemoryError(), OSError(errno.EPROTO, "Protocol error")]
    accept = socket.socket.accept

    def unlucky(listener: socket.socket) -> Any:
        if errors:
            raise errors.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", unlucky)
    one.lets_in()
    assert not errors and len(one.said) == 3


def test_without_its_listening_socket_there_is_no_gate(door: Callable[..., Door]) -> None:
    one = door()
    one.gate._listener.close()
    with pytest.raises(OSError, match="was closed"):
        one.gate.step(0.0)


@pytest.mark.parametrize("fails", [False, True])
def test_a_guest_is_served_in_a_thread_or_let_go(
    door: Callable[..., Door], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    one = door()
    with one.knock() as friend:
        friend.sendall(SECRET)
        one.until(lambda: one.guests)
        guest = one.guests[0]

        def serve(guest: Guest[str]) -> None:
            guest.connection.send(b"!")
            raise RecursionError("deep")

        with monkeypatch.context() as patched:
            if fails:

                def no_thread(_: threading.Thread) -> None:
                    raise RuntimeError("can't start new thread")

                patched.setattr(threading.Thread, "start", no_thread)
            thread = one.gate.serve_in_thread(guest, serve)
        if thread is not None:
            thread.join(WAIT_S)
        assert (thread is None) is fails
        assert friend.recv(6, socket.MSG_WAITALL) == (b"hello" if fails else b"hello!")
        assert friend.recv(1) == b"" and guest.connection.fileno() == -1
    assert len(one.said) == 1
    one.lets_in()


def test_it_fits_into_a_selector_of_the_caller_s(door: Callable[..., Door]) -> None:
    one = door()
    with selectors.DefaultSelector() as outer, one.knock() as friend:
        outer.register(one.gate, selectors.EVENT_READ)
        friend.sendall(SECRET)
        deadline = time.monotonic() + WAIT_S
        while not one.guests and time.monotonic() < deadline:
            if outer.select(1.0):
                one.guests += one.gate.step(0.0)
        assert one.guests and not outer.select(0.0)


def test_a_listening_socket_is_on_loopback_unless_told() -> None:
    with open_listener() as local, open_listener("") as everywhere:
        assert local.getsockname()[0] == "127.0.0.1"
        assert everywhere.getsockname()[0] in ("::", "0.0.0.0")
        with socket.create_connection(("127.0.0.1", everywhere.getsockname()[1]), WAIT_S):
            pass
    for port in (-1, 1 << 16):
        with pytest.raises(OSError, match="no port"):
            open_listener("127.0.0.1", port)


@pytest.fixture
def files() -> Iterator[Callable[[int, int], None]]:
    """Sets the soft and the hard limit of files; the true ones are those of before after the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda soft, hard: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("soft", "most"), [(1024, 256), (20, 16), (8192, 4096), (20_000, 15_904), (1 << 20, 16_384), (-1, 16_384)]
)
def test_how_many_strangers_are_held_follows_the_limit_of_files(
    soft: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_module.resource, "getrlimit", lambda _: (soft, soft))
    assert gate_module._room() == most


def test_the_limit_of_files_is_raised_for_strangers_only(
    door: Callable[..., Door], files: Callable[[int, int], None]
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files(128, hard)
    one = door()
    with contextlib.ExitStack() as stack:
        for _ in range(32):
            stack.enter_context(one.knock())
        one.until(lambda: one.gate.strangers == 32)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (128, hard), "not before they need it"
        stack.enter_context(one.knock())
        one.until(lambda: one.gate.strangers == 33)
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert one.gate._most - 32 == soft - 128 > 0, "the process keeps what it had for itself"


def test_a_child_holds_neither_port_nor_strangers(door: Callable[..., Door]) -> None:
    one = door()
    with one.knock() as silent:
        one.until(lambda: one.gate.strangers)
        reading, writing = os.pipe()
        begun, begins = os.pipe()
        if (child := os.fork()) == 0:
            os.write(begins, b"x")
            os.read(reading, 1)
            os._exit(0)
        try:
            assert os.read(begun, 1) == b"x", "what a child closes is closed once fork has returned there"
            one.close()
            assert silent.recv(5, socket.MSG_WAITALL) == b"hello" and silent.recv(1) == b""
            with pytest.raises(OSError, match="refused"):
                one.knock()
        finally:
            os.write(writing, b"x")
            os.waitpid(child, 0)
            for end in (reading, writing, begun, begins):
                os.close(end)


def test_what_is_kept_for_forks_goes_with_its_socket() -> None:
    with socket.socket() as one:
        close_in_forks(one)
        assert one in gate_module._not_shared


@pytest.mark.parametrize("host", ["a..b", "a" * 300, "no such host", "a\0b", "[::1]", "1.2.3.4.5"])
def test_what_no_host_is_called_is_an_error_of_the_system(host: str) -> None:
    """Python's own is a UnicodeError for some of them, which nobody expects of a connection."""
    with pytest.raises(OSError):
        open_listener(host)
    with pytest.raises(OSError):
        connect(host, 1, WAIT_S)
