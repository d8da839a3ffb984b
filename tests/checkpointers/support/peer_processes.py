"""Finds the peer processes of a test, and sees to it that none outlives it, even if the test itself is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

PEER = "lastgood.checkpointers.gemini.peer"


def peers_below(folder: Path) -> list[int]:
    """Process ids of live peers whose directory is `folder` or lies below it."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = entry.joinpath("cmdline").read_bytes().decode(errors="replace").split("\0")
            state = entry.joinpath("stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if PEER in words and state != "Z":
            directory = Path(words[words.index("--directory") + 1])
            if directory == folder or folder in directory.parents:
                found.append(int(entry.name))
    return found


def wait_for_no_peer(folder: Path, seconds: float = 60.0) -> list[int]:
    """The peers that are still there after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := peers_below(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def kill_peer(pid: int, seconds: float = 60.0) -> None:
    """Kill a peer; on return nobody listens at its address.

    Its first thread may be gone, and with it its name, while another one still holds its open files.
    """
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + seconds
    while any(_lives(thread) for thread in Path(f"/proc/{pid}/task").glob("*")):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for peer {pid} to end"
        time.sleep(0.01)


def _lives(thread: Path) -> bool:
    try:
        return thread.joinpath("stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@contextmanager
def peers_end_with_the_test(folder: Path):
    """Remove all address files below `folder` at the end; fail if a peer stays although its file is gone.

    A watcher, whose standard input ends when this process does in whatever way, removes the folder then.
    """
    watcher = subprocess.Popen(
        ["sh", "-c", 'cat > /dev/null; rm -rf "$0"', str(folder)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        for pid in peers_below(folder):
            os.kill(pid, signal.SIGCONT)
        for path in folder.rglob("peer-*.json"):
            path.unlink()
        left = wait_for_no_peer(folder)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        watcher.kill()
        watcher.communicate()
        assert not left, "peers must end when their address file is gone"
