"""What `lastgood hosts check` runs on each host: Python's own library only, sent over the connection.

It must tell of a host on which Lastgood is missing, or another revision of it, so it imports nothing of what is
installed there: the gate of its port travels along (`source`). It answers each line of JSON on its standard input with
a line of JSON, and ends with its input, or after the seconds that it is given. Between hosts it moves a bounded number
of random bytes over TCP, to see whether they reach each other, and how fast; sender and receiver prove to each other
that they know the token of this transfer, which is not sent. (The streams of `lastgood ceilings`, which measure a
network for figures, are another matter, and need Lastgood at both ends.)
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

from lastgood.wire.gate import Gate, Handshake, open_listener  # by its full name: see source()

__all__ = ["facts", "lastgood_facts", "main", "source"]

_CONNECT_S = 10.0
_NONCE_BYTES = _PROOF_BYTES = 32
_MAX_BYTES = 1 << 30
_MAX_S = 30.0
_GRACE_S = 10.0
_PIECE_BYTES = 1 << 20
_LEAST_TOKEN_BYTES = 16


def source() -> str:
    """The program for ``python -c``: this file, and before it the module that it needs."""
    name = Gate.__module__
    carried, own = (Path(str(one)).read_text(encoding="utf-8") for one in (sys.modules[name].__file__, __file__))
    return "\n".join(
        (
            "import sys, types",
            # In the place of a module that may be missing there, or another one. By its full name it is found without
            # the packages above it.
            f"carried = sys.modules[{name!r}] = types.ModuleType({name!r})",
            f"exec(compile({carried!r}, {name!r}, 'exec'), carried.__dict__)",
            f"exec(compile({own!r}, {__name__!r}, 'exec'))",
        )
    )


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


def _is_free(port: int) -> bool:
    try:
        open_listener("", port).close()
    except OSError:
        return False
    return True


# -- bytes between two hosts ---------------------------------------------------------------------------------------


def _listen(ports: list[int], token: bytes, seconds: float) -> int:
    """Wait in a thread for one sender that knows the token. Returns the port: one of `ports`, if one is free."""
    if len(token) < _LEAST_TOKEN_BYTES:
        raise ValueError(f"a token of {_LEAST_TOKEN_BYTES} bytes at least is needed")
    server = None
    for port in [*ports, 0]:
        try:
            server = open_listener("", port)
            break
        except OSError:
            continue
    if server is None:
        raise OSError("no port is free")
    found = int(server.getsockname()[1])
    threading.Thread(target=_receive, args=(server, token, min(seconds, _MAX_S)), daemon=True).start()
    return found


def _proof(token: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.new(token, side + nonces, hashlib.sha256).digest()


def _let_in(token: bytes) -> Handshake[bool]:
    """The sender proves first: a stranger is shown nothing with which he could try tokens by himself."""
    ours = os.urandom(_NONCE_BYTES)
    nonces = (yield _NONCE_BYTES) + ours
    yield ours
    if not hmac.compare_digest((yield _PROOF_BYTES), _proof(token, b"sender", nonces)):
        raise PermissionError("it does not know the token")
    yield _proof(token, b"receiver", nonces)
    return True


def _receive(server: socket.socket, token: bytes, seconds: float) -> None:
    end = time.monotonic() + seconds + _CONNECT_S
    # There is no log here: what is written is for the one who asks, who takes little of it.
    with Gate(server, lambda _: _let_in(token), "bytes between hosts", lambda _: None) as door:
        while (left := end - time.monotonic()) > 0:
            try:
                guests = door.step(left)
            except OSError:
                return
            for guest in guests:
                with guest.connection as connection:
                    try:
                        if _count(connection, end + _GRACE_S):
                            return
                    except OSError:
                        continue


def _count(connection: socket.socket, end: float) -> bool:
    """Take what the sender sends until it is done, and tell it how much came. False if it goes beyond the bounds."""
    count, buffer = 0, bytearray(_PIECE_BYTES)
    while (left := end - time.monotonic()) > 0:
        connection.settimeout(left)
        moved = connection.recv_into(buffer)
        if not moved:
            connection.sendall(struct.pack("<Q", count))
            return True
        count += moved
        if count > _MAX_BYTES:
            return False
    return False


def _send(host: str, port: int, token: bytes, nbytes: int, seconds: float) -> dict[str, Any]:
    """Send up to `nbytes`, for up to `seconds`; bytes, and seconds until the receiver had the last one."""
    nbytes, seconds = min(nbytes, _MAX_BYTES - _PIECE_BYTES), min(seconds, _MAX_S)
    piece, ours = os.urandom(_PIECE_BYTES), os.urandom(_NONCE_BYTES)
    with socket.create_connection((host, port), timeout=_CONNECT_S) as connection:
        connection.sendall(ours)
        nonces = ours + _exactly(connection, _NONCE_BYTES)
        connection.sendall(_proof(token, b"sender", nonces))
        if not hmac.compare_digest(_exactly(connection, _PROOF_BYTES), _proof(token, b"receiver", nonces)):
            raise OSError("something else listens there: it does not know this transfer's token")
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
