"""Rings of threads over loopback, and a relay that sees what goes over a link."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from unittest import mock

from lastgood.wire import ring_comm
from lastgood.wire.frames import HEADER_BYTES as FRAME_HEADER_BYTES
from lastgood.wire.frames import parse_header as parse_frame
from lastgood.wire.records import HEADER_BYTES, Record, parse_header
from lastgood.wire.ring_comm import RingComm
from lastgood.wire.ring_link import RING_GREETING, listen_ring

TOKEN = b"a token of thirty-two bytes long"
JOB = "0123456789abcdef" * 2
LAYOUT = "ab" * 32
OPENING_BYTES = len(RING_GREETING) + 32 + 32
"""Greeting, nonce and proof, in front of the hello."""
WAIT_S = 60.0
"""For what comes at once, but on a machine that has something else to do."""
PROCESS_S = 240.0
"""For what a process does that is still to be started, and to import torch."""
_Result = TypeVar("_Result")


def together(calls: Sequence[Callable[[], _Result]]) -> list[_Result]:
    """Run calls in a thread each; the first error is raised once all have ended."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
    return [future.result() for future in futures]


def make_ring(ranks: int, through: dict[int, Callable[[str], str]] | None = None, **options: Any) -> list[RingComm]:
    """A ring over loopback; `through[rank]` gives the address at which `rank` meets the next one.

    A shorter `timeout_s` is the ring's alone: its ranks may take their time to meet.
    """
    listeners = [listen_ring("127.0.0.1") for _ in range(ranks)]
    addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    settings: dict[str, Any] = {"token": TOKEN, "job": JOB, "epoch": 3, "layout": LAYOUT, "timeout_s": WAIT_S}
    settings.update(options)

    def make(rank: int) -> RingComm:
        address = addresses[(rank + 1) % ranks]
        if through and rank in through:
            address = through[rank](address)
        return RingComm(rank, ranks, listener=listeners[rank], next_address=address, **settings)

    meet = ring_comm.connect_ring
    with mock.patch.object(ring_comm, "connect_ring", lambda *what: meet(*what[:-1], WAIT_S)):
        return together([partial(make, rank) for rank in range(ranks)])


class WireTap:
    """A relay in front of a rank's listener that keeps what its previous rank sends.

    `change` gives other bytes for what follows the hello, as long as it comes in one piece. With `retry`, the rank
    behind it may come later than the one in front of it.
    """

    def __init__(self, change: Callable[[bytes], bytes] | None = None, *, retry: bool = False) -> None:
        self.content = bytearray()
        self._change = change
        self._retry = retry
        self._server = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self._target = ""

    def __call__(self, target: str) -> str:
        self._target = target
        self._start(self._serve)
        return f"127.0.0.1:{self._server.getsockname()[1]}"

    def _start(self, call: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=call, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _serve(self) -> None:
        with self._server:
            self._server.settimeout(PROCESS_S)
            inner, _ = self._server.accept()
        outer = self._connect(time.monotonic() + PROCESS_S)
        inner.settimeout(PROCESS_S)
        self._start(self._pass_on, outer, inner, False)
        self._pass_on(inner, outer, True)

    def _connect(self, deadline: float) -> socket.socket:
        host, port = self._target.split(":")
        while True:
            try:
                return socket.create_connection((host, int(port)), timeout=PROCESS_S)
            except OSError:
                if not self._retry or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _pass_on(self, source: socket.socket, target: socket.socket, forward: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if forward:
                    if self._change is not None and len(self.content) > OPENING_BYTES:
                        data = self._change(data)
                    self.content += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()

    def records(self) -> list[tuple[Record, bytes]]:
        """What was seen, once both ends have closed."""
        for thread in self._threads:
            thread.join(WAIT_S)
        at = OPENING_BYTES
        at += FRAME_HEADER_BYTES + parse_frame(self.content[at : at + FRAME_HEADER_BYTES], "the tap", "a hello").length
        found = []
        while at < len(self.content):
            record = parse_header(self.content[at : at + HEADER_BYTES], "the tap")
            at += HEADER_BYTES
            found.append((record, bytes(self.content[at : at + record.length])))
            assert len(found[-1][1]) == record.length
            at += record.length
        return found
