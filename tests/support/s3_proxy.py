"""A small proxy before an S3 server: counts requests, and lets those that a rule names end badly."""

from __future__ import annotations

import http.client
import http.server
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

TIMEOUT_S = 60.0

Fault = Literal["refuse", "reset", "cut", "short", "flip", "lost", "wait"]
"""What becomes of a request:

- refuse: it is answered with `status` and `code`, and never sent on.
- reset: the connection is reset before it is sent on.
- cut: the answer's body is reset in its middle.
- short: the answer's body is shorter, and its length says so.
- flip: one bit of the answer's body is another.
- lost: it is sent on and has its effect; the connection is reset instead of an answer.
- wait: it is sent on after `seconds`.
"""


class Request(NamedTuple):
    method: str
    path: str
    status: int
    """0 if there was no answer."""
    nbytes: int
    """Of its body."""


@dataclass
class Rule:
    fault: Fault
    method: str
    path: re.Pattern[str]
    times: int
    after: int
    status: int
    code: str
    seconds: float
    met: int = 0

    def takes(self, method: str, path: str) -> bool:
        if self.times <= 0 or (self.method and self.method != method) or not self.path.search(path):
            return False
        if self.after > 0:
            self.after -= 1
            return False
        self.times -= 1
        self.met += 1
        return True


class FaultyProxy:
    """Made by `proxy_before`. Clients use its `url` as their endpoint."""

    def __init__(self, upstream: str) -> None:
        self.requests: list[Request] = []
        self._upstream = upstream.removeprefix("http://")
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def fail(
        self,
        fault: Fault,
        method: str = "",
        path: str = "",
        *,
        times: int = 1,
        after: int = 0,
        status: int = 503,
        code: str = "SlowDown",
        seconds: float = 0.0,
    ) -> Rule:
        """Let the next `times` requests of that method, whose path (with its query) holds `path`, end so."""
        rule = Rule(fault, method, re.compile(path), times, after, status, code, seconds)
        with self._lock:
            self._rules.append(rule)
        return rule

    def heal(self) -> None:
        with self._lock:
            self._rules.clear()
            self.requests.clear()

    def count(self, method: str, path: str = "") -> int:
        return sum(one.method == method and re.search(path, one.path) is not None for one in self.requests)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(TIMEOUT_S)

    def rule_for(self, method: str, path: str) -> Rule | None:
        with self._lock:
            return next((rule for rule in self._rules if rule.takes(method, path)), None)

    def note(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)

    def ask(self, method: str, path: str, headers: http.client.HTTPMessage, body: bytes) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._upstream, timeout=TIMEOUT_S)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():  # the host as well: it is part of what is signed
            if name.lower() not in ("connection", "transfer-encoding", "expect"):
                connection.putheader(name, value)
        connection.endheaders(body)
        return connection.getresponse()


@contextmanager
def proxy_before(upstream: str) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(upstream)
    try:
        yield proxy
    finally:
        proxy.close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    proxy: FaultyProxy

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients go away; that is what is tested."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    timeout = TIMEOUT_S

    def log_message(self, *_: object) -> None:
        pass

    def _forward(self) -> None:
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        rule = proxy.rule_for(self.command, self.path)
        fault = None if rule is None else rule.fault

        def note(status: int) -> None:  # before the answer, so that whoever has it finds it counted
            proxy.note(Request(self.command, self.path, status, len(body)))

        if rule is not None and fault == "refuse":
            text = f"<Error><Code>{rule.code}</Code><Message>made up</Message></Error>" if rule.code else ""
            note(rule.status)
            self._answer(rule.status, {"Content-Type": "application/xml"}, text.encode())
            return
        if fault == "reset":
            note(0)
            self._reset()
            return
        if rule is not None and fault == "wait":
            time.sleep(rule.seconds)
        response = proxy.ask(self.command, self.path, self.headers, body)
        content = response.read()
        note(0 if fault == "lost" else response.status)
        if fault == "lost":
            self._reset()
            return
        headers = {name: value for name, value in response.getheaders() if name.lower() not in _OWN}
        if self.command == "HEAD":
            headers["Content-Length"] = response.getheader("Content-Length", "0")
        if fault == "flip":
            content = content[:-1] + bytes([content[-1] ^ 4])
        elif fault == "short":
            content = content[: len(content) // 2]
        self._answer(response.status, headers, content, cut=fault == "cut")

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _forward  # noqa: N815

    def _answer(self, status: int, headers: dict[str, str], content: bytes, *, cut: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(content[: len(content) // 2] if cut else content)
        self.wfile.flush()
        if cut:
            self._reset()

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())  # what reads and writes it would keep it open otherwise


_OWN = ("connection", "transfer-encoding", "content-length", "date", "server")
