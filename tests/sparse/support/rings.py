"""Exchanges of threads over loopback, and relays between them that are slow, or change what they carry."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from lastgood.sparse.blocks import SparseGradient
from lastgood.sparse.exchange import Elements, Exchange
from lastgood.sparse.meeting import Place
from lastgood.wire.ring_link import listen_ring

TOKEN = b"a token of thirty-two bytes long"
JOB = "0123456789abcdef" * 2
WAIT_S = 60.0
"""For what comes at once, but on a machine that has something else to do."""


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run calls in a thread each; the results, or the errors, in order."""

    def caught(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(max(1, len(calls))) as pool:
        return list(pool.map(caught, calls))


def places(ranks: int, through: dict[int, Callable[[str], str]] | None = None, **changes: Any) -> list[Place]:
    """Places of a ring over loopback; `through[rank]` gives the address at which `rank` meets the next one."""
    listeners = [listen_ring("127.0.0.1") for _ in range(ranks)]
    addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    found = []
    for rank, listener in enumerate(listeners):
        address = addresses[(rank + 1) % ranks]
        if through and rank in through:
            address = through[rank](address)
        found.append(Place(rank, ranks, JOB, 3, TOKEN, listener, address))
    return found


@contextmanager
def exchanges(
    ranks: int, layers: Sequence[Elements], through: dict[int, Callable[[str], str]] | None = None, **options: Any
) -> Iterator[list[Exchange]]:
    """One of each rank; closed at the end, all at once."""
    options = {"timeout_s": WAIT_S, "join_timeout_s": WAIT_S, **options}
    opened = together(
        [
            partial(Exchange.open, layers, {"compressor": "topk"}, place=place, **options)
            for place in places(ranks, through)
        ]
    )
    wrong = [one for one in opened if isinstance(one, Exception)]
    try:
        if wrong:
            raise wrong[0]
        yield opened
    finally:
        together([one.close for one in opened if isinstance(one, Exchange)])


def gradient(
    elements: int, count: int, seed: int, width: int = 1, dtype: torch.dtype = torch.float32
) -> SparseGradient:
    """Random places and values; another seed, others."""
    rng = np.random.default_rng(seed)
    blocks = -(-elements // width)
    chosen = np.sort(rng.choice(blocks, count, replace=False)).astype(np.uint32)
    values = torch.from_numpy(rng.standard_normal(count * width)).to(dtype)
    if count and chosen[-1] == blocks - 1 and elements % width:
        values[elements - blocks * width :] = 0
    return SparseGradient(elements, width, chosen, values)


def equal(one: SparseGradient, other: SparseGradient) -> bool:
    return (
        (one.elements, one.width, one.finite) == (other.elements, other.width, other.finite)
        and np.array_equal(one.indices, other.indices)
        and one.values.dtype == other.values.dtype
        and torch.equal(one.values, other.values)
    )


class Relay:
    """Between a rank and the next one: as slow as it is told to be, and little waits in it.

    `change` gets each piece that goes in the ring's direction, and gives what goes on in its place; None cuts both.
    """

    def __init__(
        self,
        bytes_per_s: float = float("inf"),
        change: Callable[[bytes], bytes | None] = lambda data: data,
        piece_bytes: int = 16 << 10,
    ) -> None:
        self.bytes_per_s, self.change, self.piece_bytes = bytes_per_s, change, piece_bytes
        self.carried = 0
        self.held = threading.Event()
        """While it is set, nothing goes in the ring's direction."""
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
        self._ends: list[socket.socket] = []
        self._target = ""

    def __call__(self, target: str) -> str:
        self._target = target
        threading.Thread(target=self._serve, daemon=True).start()
        return f"127.0.0.1:{self._server.getsockname()[1]}"

    def cut(self) -> None:
        """End both directions of both connections, as a cable that is pulled out at once shows itself."""
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        host, port = self._target.split(":")
        with self._server:
            self._server.settimeout(WAIT_S)
            inner, _ = self._server.accept()
        outer = socket.socket()
        outer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 10)
        outer.connect((host, int(port)))
        for end in (inner, outer):
            end.settimeout(2 * WAIT_S)
        self._ends = [inner, outer]
        back = threading.Thread(target=self._pass_on, args=(outer, inner, False), daemon=True)
        back.start()
        self._pass_on(inner, outer, True)
        back.join(2 * WAIT_S)
        for end in self._ends:
            end.close()

    def _pass_on(self, source: socket.socket, target: socket.socket, forward: bool) -> None:
        due = time.monotonic()
        try:
            while data := source.recv(self.piece_bytes):
                if forward:
                    while self.held.is_set():
                        time.sleep(0.01)
                    due = max(due, time.monotonic()) + len(data) / self.bytes_per_s
                    time.sleep(max(0.0, due - time.monotonic()))
                    changed = self.change(data)
                    if changed is None:
                        self.cut()
                        return
                    data = changed
                    self.carried += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            self.cut()
