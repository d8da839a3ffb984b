"""A Gemini peer in this process: no connection, and no moment without threads, ends what it keeps."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from lastgood.checkpointers.gemini.address_file import Address
from lastgood.checkpointers.gemini.peer import Connection, Peer
from lastgood.wire.frames import Wire, chunk_checksum, prove_trainer
from lastgood.wire.gate import open_listener

TOKEN = b"k" * 32
WAIT_S = 60.0
CONTENT = bytes(range(200))


@pytest.fixture
def peer(tmp_path) -> Iterator[Peer]:
    listener = open_listener()
    address = Address(tmp_path / "peer-0-000001.json", "127.0.0.1", listener.getsockname()[1], TOKEN, 1)
    address.write()
    made = Peer(listener, address, 1 << 20, WAIT_S)
    thread = threading.Thread(target=made.run, args=(1000.0,), name="peer")
    thread.start()
    yield made
    assert thread.is_alive(), "the peer has ended, with all that it kept"
    made.ending.set()
    thread.join(WAIT_S)


@contextlib.contextmanager
def trainer(peer: Peer) -> Iterator[Wire]:
    connection = socket.create_connection(("127.0.0.1", peer._address.port), WAIT_S)
    wire = Wire(connection, "the peer", WAIT_S)
    try:
        prove_trainer(wire, TOKEN)
        yield wire
    finally:
        wire.close()


def begin(wire: Wire) -> dict[str, object]:
    sizes = {"nbytes": len(CONTENT), "meta_bytes": 8, "part_bytes": 1024, "parts": 2}
    wire.send_message(op="begin", owner=0, sequence=1, step=10, **sizes)
    return wire.receive_message("an answer")


def keeps_one(wire: Wire) -> None:
    assert begin(wire)["ok"]
    wire.send_chunk(memoryview(CONTENT), 0, chunk_checksum(memoryview(CONTENT), 1, 0))
    wire.receive_frame("an acknowledgement")
    wire.send_message(op="commit")
    assert wire.receive_message("an answer")["ok"]


def held(peer: Peer) -> list[int]:
    with trainer(peer) as wire:
        wire.send_message(op="list", owner=0)
        return [one["step"] for one in wire.receive_message("an answer")["checkpoints"]]


@contextlib.contextmanager
def no_threads(name: str) -> Iterator[None]:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if name in (thread.name, getattr(thread._target, "__name__", "")):  # type: ignore[attr-defined]
            raise RuntimeError("can't start new thread")
        start(thread)

    with mock.patch.object(threading.Thread, "start", refused):
        yield


def test_a_trainer_whose_machine_lost_its_power_holds_no_place_for_ever(peer):
    """Nothing comes from it, not even an end: the kernel asks, and the connection ends (keepalive, timer 2)."""
    with trainer(peer) as wire:
        keeps_one(wire)
        near = wire._socket.getsockname()[1]
        ends = f":{peer._address.port:04X} 0100007F:{near:04X} "
        deadline = time.monotonic() + WAIT_S
        while True:  # until what was sent has been acknowledged, there is another timer
            (row,) = [line for line in Path("/proc/net/tcp").read_text().splitlines() if ends in line]
            timer = row.split()[5][:2]
            if timer != "01":
                break
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert timer == "02"


def test_a_moment_without_threads_ends_one_connection_only(peer):
    with trainer(peer) as wire:
        keeps_one(wire)
    with no_threads("guest"), trainer(peer) as refused:
        assert refused.wait_readable(WAIT_S) and refused.ended()
    assert held(peer) == [10]


def test_a_checkpoint_that_no_thread_can_take_in_is_refused_and_the_next_one_is_not(peer):
    with trainer(peer) as wire:
        with no_threads("_land"):
            answer = begin(wire)
            assert not answer["ok"] and "can't start new thread" in answer["why"]
        keeps_one(wire)
    with trainer(peer) as other:  # the machine's place was given back as well
        keeps_one(other)
    assert held(peer) == [10, 10]


@pytest.mark.parametrize("error", [RecursionError("deep"), MemoryError(), KeyError("odd")], ids=repr)
def test_whatever_one_connection_brings_ends_that_one(peer, monkeypatch, error):
    with trainer(peer) as wire:
        keeps_one(wire)

        def odd(connection, frame):
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(Connection, "_answer", odd)
            wire.send_message(op="list", owner=0)
            assert wire.wait_readable(WAIT_S) and wire.ended()
    assert held(peer) == [10]


def test_silent_connections_lock_nobody_out(peer):
    with contextlib.ExitStack() as stack:
        for _ in range(70):
            stack.enter_context(socket.create_connection(("127.0.0.1", peer._address.port), WAIT_S))
        assert held(peer) == []
