"""How a ring's connections are given up."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from contextlib import ExitStack

import pytest

from lastgood.wire.frames import Wire
from lastgood.wire.ring_link import RING_GREETING, Hello, connect_ring, listen_ring
from tests.wire.support.answering import prove_peer
from tests.wire.support.ring_helpers import JOB, LAYOUT, TOKEN, WAIT_S, together


def test_an_interrupt_does_not_wait_for_a_neighbour_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Hello(JOB, 1, 0, 2, LAYOUT, "host")
    with listen_ring("127.0.0.1") as listener, listen_ring("127.0.0.1") as following:
        wires: list[Wire] = []

        def answer() -> None:
            wire = Wire(following.accept()[0], "rank 0", WAIT_S)
            wires.append(wire)
            prove_peer(wire, TOKEN, RING_GREETING)
            wire.receive_message("a hello")
            wire.send_message(**Hello(JOB, 1, 1, 2, LAYOUT, "host").content())

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        caught: list[BaseException] = []

        def connect() -> None:
            try:
                connect_ring(own, listener, f"127.0.0.1:{following.getsockname()[1]}", TOKEN, 100.0)
            except BaseException as error:
                caught.append(error)

        monkeypatch.setattr(Future, "result", interrupted)
        threads = [threading.Thread(target=call, daemon=True) for call in (answer, connect)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert [type(error) for error in caught] == [KeyboardInterrupt]
        assert wires[0].wait_readable(WAIT_S) and wires[0].ended(), "the connection that was made ends with it"
        wires[0].close()


def test_silent_connections_hold_up_no_neighbour() -> None:
    """One after another, each for as long as its proof may take, they would be waited for longer than the ring is."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(listen_ring("127.0.0.1")) for _ in range(2)]
        addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
        for listener in listeners:
            for first in (b"", RING_GREETING, b"GET / HTTP/1.1\r\n\r\n" + bytes(100)) * 10:
                stranger = socket.create_connection(listener.getsockname(), WAIT_S)
                stack.enter_context(stranger).sendall(first)
        hellos = [Hello(JOB, 1, rank, 2, LAYOUT, "host") for rank in range(2)]
        links = together(
            [
                lambda rank=rank: connect_ring(hellos[rank], listeners[rank], addresses[1 - rank], TOKEN, WAIT_S)
                for rank in range(2)
            ]
        )
        for previous, following in links:
            previous.wire.close()
            following.wire.close()
