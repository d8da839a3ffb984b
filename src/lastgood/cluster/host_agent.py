"""What `lastgood hosts check` runs on each host: one file, Python's own library only, sent over the connection.

It must tell of a host on which Lastgood is missing, or another revision of it, so it imports nothing of it. It answers
each line of JSON on its standard input with a line of JSON, and ends with its input, or after the seconds that it is
given. Between hosts it moves a bounded number of random bytes over TCP, to see whether they reach each other, and how
fast; the sender proves by a token that it is the one that was announced. (The streams of `lastgood ceilings`, which
measure a network for figures, are another matter, and need Lastgood at both ends.)
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

__all__ = ["facts", "lastgood_facts", "main"]

_CONNECT_S = 10.0
_MAX_BYTES = 1 << 30
_MAX_S = 30.0
_GRACE_S = 10.0
_PIECE_BYTES = 1 << 20


def lastgood_facts() -> dict[str, Any]:
    """The installed Lastgood: version, a digest over its Python files, and the git revision of its checkout, if any."""
    try:
        spec = importlib.util.find_spec("lastgood")
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        return {"lastgood": None, "code": None, "revision": None, "dirty": None}
    package = Path(spec.origin).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package)} {len(content)}\n".encode() + content)
    revision, dirty = None, None
    checkout = package.parents[1]
    if (checkout / ".git").exists():
        revision = _output(["git", "-C", str(checkout), "rev-parse", "HEAD"])
        changes = _output(["git", "-C", str(checkout), "status", "--porcelain", "--untracked-files=no"])
        dirty = None if changes is None else bool(changes)
    return {"lastgood": _version("lastgood"), "code": digest.hexdigest()[:16], "revision": revision, "dirty": dirty}


def facts(folder: str, ports: list[int]) -> dict[str, Any]:
    """What this host is: versions, free bytes in `folder` (None if it is missing), GPUs, and which ports are taken."""
    place = Path(folder).expanduser()
    free = shutil.disk_usage(place).free if place.is_dir() else None
    names = None
    if shutil.which("nvidia-smi"):
        names = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    return {
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": _version("torch"),
        **lastgood_facts(),
        "folder": str(place.absolute()),
        "free_bytes": free,
        "gpus": (names or "").splitlines(),
        "busy_ports": [port for port in ports if not _is_free(port)],
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(command: list[str]) -> str | None:
    # Git must take no lock: a checkout may be read-only, or in use.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _server(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _is_free(port: int) -> bool:
    try:
        _server(port).close()
    except OSError:
        return False
    return True


# -- bytes between two hosts ---------------------------------------------------------------------------------------


def _listen(ports: list[int], token: bytes, seconds: float) -> int:
    """Wait in a thread for one sender that knows the token. Returns the port: one of `ports`, if one is free."""
    server = None
    for port in [*ports, 0]:
        try:
            server = _server(port)
            break
        except OSError:
            continue
    if server is None:
        raise OSError("no port is free")
    threading.Thread(target=_receive, args=(server, token, min(seconds, _MAX_S)), daemon=True).start()
    return int(server.getsockname()[1])


def _receive(server: socket.socket, token: bytes, seconds: float) -> None:
    end = time.monotonic() + seconds + _CONNECT_S
    with server:
        while (left := end - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.settimeout(_CONNECT_S)
                    if not hmac.compare_digest(_exactly(connection, len(token)), token):
                        continue
                    connection.sendall(b"+")
                    connection.settimeout(seconds + _GRACE_S)
                    count, buffer = 0, bytearray(_PIECE_BYTES)
                    while moved := connection.recv_into(buffer):
                        count += moved
                        if count > _MAX_BYTES or time.monotonic() > end + _GRACE_S:
                            return
                    connection.sendall(struct.pack("<Q", count))
                    return
                except OSError:
                    continue


def _send(host: str, port: int, token: bytes, nbytes: int, seconds: float) -> dict[str, Any]:
    """Send up to `nbytes`, for up to `seconds`; bytes, and seconds until the receiver had the last one."""
    nbytes, seconds = min(nbytes, _MAX_BYTES - _PIECE_BYTES), min(seconds, _MAX_S)
    piece = os.urandom(_PIECE_BYTES)
    with socket.create_connection((host, port), timeout=_CONNECT_S) as connection:
        connection.sendall(token)
        _exactly(connection, 1)
        connection.settimeout(seconds + _GRACE_S)
        sent, begin = 0, time.monotonic()
        while sent < nbytes and time.monotonic() - begin < seconds:
            connection.sendall(piece)
            sent += len(piece)
        connection.shutdown(socket.SHUT_WR)
        (arrived,) = struct.unpack("<Q", _exactly(connection, 8))
        elapsed_s = time.monotonic() - begin
    if arrived != sent:
        raise OSError(f"{sent} bytes were sent and {arrived} arrived")
    return {"bytes": sent, "seconds": elapsed_s}


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise OSError("the other side closed the connection")
        parts += part
    return bytes(parts)


# -- questions -----------------------------------------------------------------------------------------------------


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    kind = question["do"]
    if kind == "time":
        return {"time_s": time.time()}
    if kind == "facts":
        return facts(question["folder"], question["ports"])
    if kind == "listen":
        return {"port": _listen(question["ports"], bytes.fromhex(question["token"]), question["seconds"])}
    if kind == "send":
        host, port, token = question["host"], question["port"], bytes.fromhex(question["token"])
        return _send(host, port, token, question["bytes"], question["seconds"])
    raise ValueError(f"no such question: {kind!r}")


def main() -> None:
    """Answer until the input ends, or for as many seconds as the argument says: then SIGALRM ends this process."""
    signal.alarm(int(sys.argv[1]))
    for line in sys.stdin:
        try:
            answer = _answer(json.loads(line))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
