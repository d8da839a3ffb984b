"""A process ends as it wants to while its background threads are inside native code."""

from __future__ import annotations

import subprocess
import sys

import pytest

TIMEOUT_S = 240.0
PROGRAM = """
import os, socket, sys, threading, time
from lastgood import _native

receiver = _native.Receiver(1, 1, [(0, 0, 1)], [[0]])
near, far = socket.socketpair()
sender = _native.Sender(near.fileno(), 1, 1, 1, "far")
content = bytes(1 << 20)
{work}

def forever():
    while True:
        work()

for _ in range(4):
    threading.Thread(target=forever, daemon=True).start()
time.sleep(0.1)
sys.exit(7)
"""
WORK = {
    "a receiver is polled": "work = lambda: receiver.poll(0.0001)",
    "a wait that looks for signals": "work = lambda: sender.wait_returned(1, 0.0001)",
    "bytes are summed": "work = lambda: _native.crc32c(content)",
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_background_threads_do_not_abort_it(work: str) -> None:
    """CPython ends them when they ask for the GIL, which must not become the end of the process by SIGABRT."""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(work=work)], capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert (done.returncode, done.stderr) == (7, "")
