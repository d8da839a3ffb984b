"""Strangers at a port: a process of its own holds silent connections, and makes each one anew that is closed.

They talk to loopback only, and end by themselves, with the process that started them at the latest.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PER_SOURCE = 5000
"""Connections from one address of loopback: ports are fewer than 30,000."""
IP_BIND_ADDRESS_NO_PORT = 24
"""Of Linux: the port is chosen at connect, so that it need be free for this other side only."""
READY_S = 120.0


@contextlib.contextmanager
def strangers(
    port: int, count: int, seconds: float, *, again_per_s: float = math.inf, first: bytes = b""
) -> Iterator[Callable[[], bool]]:
    """`count` silent connections to a port of this machine, once they all have been made; each sends `first` at most.

    Those that are closed are made anew, `again_per_s` at most. Gives a function that says whether they are still there.
    """
    numbers = (port, count, seconds, again_per_s, os.getpid())
    command = [sys.executable, str(Path(__file__)), first.hex(), *map(str, numbers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield lambda: process.poll() is None
    finally:
        process.kill()
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


def come_in(within: Callable[[], bool], enter: Callable[[], None], least: int = 1) -> list[float]:
    """Call `enter` again and again while `within` says so, at least so often; returns the seconds that each took."""
    took = []
    while within() or len(took) < least:
        began = time.monotonic()
        enter()
        took.append(time.monotonic() - began)
        time.sleep(0.01)
    return took


def main() -> None:
    """Be the strangers: FIRST PORT COUNT SECONDS AGAIN_PER_S PARENT."""
    first, port, count, parent = bytes.fromhex(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[6])
    seconds, again_per_s = float(sys.argv[4]), float(sys.argv[5])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    selector = selectors.DefaultSelector()
    held, made, began, end = 0, 0, math.inf, time.monotonic() + READY_S
    while time.monotonic() < end and os.getppid() == parent:
        allowed = count + (time.monotonic() - began) * again_per_s if began < math.inf else count
        while held < count and made < allowed:
            one = socket.socket()
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
            one.bind((f"127.0.0.{2 + made % (1 + count // PER_SOURCE)}", 0))
            made += 1
            if one.connect_ex(("127.0.0.1", port)) not in (0, errno.EINPROGRESS):
                one.close()
                continue
            selector.register(one, selectors.EVENT_WRITE | selectors.EVENT_READ)
            held += 1
            if made % 256 == 0:
                break
        if made >= count and began == math.inf:
            began, end = time.monotonic(), time.monotonic() + seconds
            sys.stdout.write("ready\n")
            sys.stdout.flush()
        for key, events in selector.select(0.02):
            one = key.fileobj
            try:
                if events & selectors.EVENT_WRITE:
                    selector.modify(one, selectors.EVENT_READ)
                    if first:
                        one.send(first)
                if events & selectors.EVENT_READ and not one.recv(4096):
                    raise OSError
            except BlockingIOError:
                continue
            except OSError:
                selector.unregister(one)
                one.close()
                held -= 1


if __name__ == "__main__":
    main()
