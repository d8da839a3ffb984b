"""An S3 server that drops what it gets: large bodies are read and forgotten, small ones are kept for who looks again.

Prints its port, and ends with its standard input. For `benchmarks/objects.py`: a real server takes so much of the
machine that any two clients look alike before it.
"""

from __future__ import annotations

import email.utils
import http.server
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

KEPT_BYTES = 1 << 20
SCRATCH_BYTES = 1 << 20


class Sink(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.sizes: dict[str, int] = {}
        self.small: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, tuple[int, bytes]]] = {}
        """Of uploads in parts: size, and content if it is small."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    rbufsize = SCRATCH_BYTES
    server: Sink

    def do_PUT(self) -> None:
        path, query = self._where()
        if "x-amz-copy-source" in self.headers:
            return self._copy(path)
        length = int(self.headers["Content-Length"])
        if length <= KEPT_BYTES:
            content = self.rfile.read(length)
        else:
            content, left, scratch = b"", length, memoryview(bytearray(SCRATCH_BYTES))
            while left:
                left -= self.rfile.readinto(scratch[: min(left, SCRATCH_BYTES)]) or self._gone()
        with self.server.lock:
            if self.headers.get("If-None-Match") == "*" and path in self.server.sizes:
                return self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            if "partNumber" in query:
                self.server.parts.setdefault(path, {})[int(query["partNumber"])] = (length, content)
            else:
                self._keep(path, length, content)
        return self._answer(200, b"", {"ETag": '"0"'})

    def _keep(self, path: str, length: int, content: bytes) -> None:
        self.server.sizes[path] = length
        if len(content) == length:
            self.server.small[path] = content

    def _copy(self, path: str) -> None:
        source = "/" + urllib.parse.unquote(self.headers["x-amz-copy-source"]).lstrip("/")
        with self.server.lock:
            self._keep(path, self.server.sizes.get(source, 0), self.server.small.get(source, b""))
        text = '<ETag>"0"</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified>'
        self._answer(200, f"<CopyObjectResult>{text}</CopyObjectResult>".encode(), {"Content-Type": "application/xml"})

    def do_POST(self) -> None:
        """Begin and end an upload in parts."""
        path, query = self._where()
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "uploads" in query:
            kind, inside = "InitiateMultipartUploadResult", "<UploadId>u</UploadId>"
        else:
            kind, inside = "CompleteMultipartUploadResult", '<ETag>"0"</ETag>'
            with self.server.lock:
                parts = [part for _, part in sorted(self.server.parts.pop(path, {}).items())]
                self._keep(path, sum(size for size, _ in parts), b"".join(content for _, content in parts))
        bucket, _, key = path.strip("/").partition("/")
        text = f"<{kind}><Bucket>{bucket}</Bucket><Key>{key}</Key>{inside}</{kind}>"
        self._answer(200, text.encode(), {"Content-Type": "application/xml"})

    def do_HEAD(self) -> None:
        path, _ = self._where()
        with self.server.lock:
            size = self.server.sizes.get(path)
        if size is None:
            return self._answer(404, b"")
        return self._answer(200, b"", {"ETag": '"0"'}, length=size)

    def do_GET(self) -> None:
        path, query = self._where()
        with self.server.lock:
            if "list-type" in query:
                return self._answer(200, self._listed(path, query), {"Content-Type": "application/xml"})
            content = self.server.small.get(path)
        if content is None:
            return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        return self._answer(200, content, {"ETag": '"0"'})

    def do_DELETE(self) -> None:
        path, _ = self._where()
        with self.server.lock:
            self.server.sizes.pop(path, None)
            self.server.small.pop(path, None)
        self._answer(204, b"")

    def _listed(self, path: str, query: dict[str, str]) -> bytes:
        bucket = path.strip("/")
        prefix = f"/{bucket}/{query.get('prefix', '')}"
        found = []
        for key, size in sorted(self.server.sizes.items()):
            name = key.removeprefix(f"/{bucket}/")
            if key.startswith(prefix) and name > query.get("start-after", ""):
                found.append(
                    f"<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                    f'<ETag>"0"</ETag><Size>{size}</Size></Contents>'
                )
        inside = "".join(found)
        head = f"<IsTruncated>false</IsTruncated><KeyCount>{len(found)}</KeyCount>"
        text = f"<ListBucketResult>{head}{inside}</ListBucketResult>"
        return text.encode()

    def _where(self) -> tuple[str, dict[str, str]]:
        found = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qsl(found.query, keep_blank_values=True)
        return urllib.parse.unquote(found.path), dict(query)

    def _gone(self) -> int:
        raise ConnectionError("the client has gone")

    def _answer(self, status: int, content: bytes, headers: Any = None, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Last-Modified": email.utils.formatdate(0, usegmt=True)}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        return None


@contextmanager
def running_sink() -> Iterator[str]:
    """One in a process of its own; its URL."""
    process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.stdin.close()
        process.wait(20)


def main() -> None:
    with Sink() as sink:
        threading.Thread(target=sink.serve_forever, daemon=True).start()
        print(sink.server_address[1], flush=True)
        sys.stdin.read()
        sink.shutdown()


if __name__ == "__main__":
    main()
