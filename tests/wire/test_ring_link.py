"""How a ring's connections are given up."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from lastgood.wire.frames import Wire, prove_peer
from lastgood.wire.ring_link import RING_GREETING, Hello, connect_ring, listen_ring
from tests.wire.ring_helpers import JOB, LAYOUT, TOKEN, WAIT_S


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
