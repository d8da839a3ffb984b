"""One timing run at a time on a machine, whoever starts it and in whatever folder."""

from __future__ import annotations

from pathlib import Path

from lastgood.locks import FileLock

__all__ = ["machine_lock"]


def machine_lock() -> FileLock:
    """The lock that every timing run on this machine takes before it imports anything heavy.

    Its place is fixed: a TMPDIR of one user must not hide that user from the others.
    """
    return FileLock(Path("/tmp/lastgood-machine.lock"), "this machine's turn to measure")
