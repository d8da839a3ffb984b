"""Numbers as Prometheus reads them, over HTTP on a port of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from lastgood.errors import CorruptCheckpoint, HostError
from lastgood.wire.gate import Gate, Handshake, Line, open_listener

__all__ = ["ScrapeServer"]

_TICK_S = 0.2
_MAX_LINE_BYTES = 4096
_MAX_FIELDS = 100


class ScrapeServer:
    """Answers GET /metrics, all requests in one thread. Raises HostError if the port cannot be had.

    `numbers` is asked for them at each request; `say` takes lines about connections that are dropped.
    """

    def __init__(self, numbers: Collector, host: str, port: int, say: Callable[[str], object]) -> None:
        self._numbers = numbers
        self._ending = threading.Event()
        try:
            listener = open_listener(host, port)
        except OSError as error:
            raise HostError(f"metrics cannot be served at {host}:{port}: {error}; name another port") from error
        self.address = f"{host}:{listener.getsockname()[1]}"
        self._gate: Gate[None] = Gate(listener, self._answer, "the metrics' port", say)
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._ending.set()
        self._thread.join()

    def _serve(self) -> None:
        with self._gate as gate:
            while not self._ending.is_set():
                gate.step(_TICK_S)

    def _answer(self, other: str) -> Handshake[None]:
        """A request and its answer: here nobody has anything to prove, and nobody stays."""
        words = (yield Line(b"\n", _MAX_LINE_BYTES)).decode("ascii").split()
        if len(words) < 2:
            raise CorruptCheckpoint(f"{other} sent no request")
        for _ in range(_MAX_FIELDS):
            if not (yield Line(b"\n", _MAX_LINE_BYTES)).strip():
                break
        else:
            raise CorruptCheckpoint(f"{other} sent more than {_MAX_FIELDS} fields of a request")
        known = words[1].split("?")[0] in ("/", "/metrics")
        if words[0] != "GET":
            status, text = "405 Method Not Allowed", "there is GET only\n"
        elif known:
            status, text = "200 OK", generate_latest(self._numbers).decode()
        else:
            status, text = "404 Not Found", "there is /metrics only\n"
        content = text.encode()
        head = (
            f"HTTP/1.0 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        yield head.encode() + content
