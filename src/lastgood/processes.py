"""Processes that end with another one, the end of those that were started here, and a standard output of their own."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from typing import Any

__all__ = ["die_with_parent", "exit_on", "keep_stdout", "wait_or_kill"]

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int | None = None, signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent ends, however it ends (prctl PR_SET_PDEATHSIG).

    `parent_pid`, if known, closes the gap in which the parent ended before this call.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal_number)


def wait_or_kill(process: subprocess.Popen[Any], timeout_s: float, killed_s: float | None = None) -> None:
    """Wait for a process that was told to end; one that does not in time is killed, and waited for `killed_s`."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(killed_s)


def exit_on(*numbers: int) -> None:
    """Let these signals raise SystemExit (128 and the signal's number), so that what was begun elsewhere is ended."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in numbers:
        signal.signal(number, stop)


def keep_stdout() -> None:
    """Keep standard output for what Python writes there: what libraries write to it goes to standard error from now on.

    NCCL says there what NCCL_DEBUG asks for, between lines that another program is to read, and into them. Does nothing
    if `sys.stdout` is not the process's own.
    """
    before = sys.stdout
    try:
        if before.fileno() != 1:
            return
        before.flush()
        kept = os.dup(1)
    except (AttributeError, OSError, ValueError):  # there is none, it is closed, or it is no file
        return
    os.dup2(2, 1)
    lines = 1 if before.isatty() else -1
    sys.stdout = os.fdopen(kept, "w", lines, before.encoding, before.errors)
