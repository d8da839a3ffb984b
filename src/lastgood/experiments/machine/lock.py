"""One timing run at a time on a machine, whoever starts it and in whatever folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lastgood.locks import FileLock

__all__ = ["TURN_S", "machine_lock", "machine_turn"]

TURN_S = 4 * 3600.0
"""How long a measurement waits for the machine."""


def machine_lock() -> FileLock:
    """The lock that every timing run on this machine takes before it imports anything heavy.

    Its place is fixed: a TMPDIR of one user must not hide that user from the others.
    """
    return FileLock(Path("/tmp/lastgood-machine.lock"), "this machine's turn to measure")


@contextmanager
def machine_turn(report: Callable[[str], None], timeout_s: float | None = None) -> Iterator[None]:
    """This machine's turn to measure; `report` is told who has it meanwhile.

    Raises LockHeld if it does not come within `timeout_s` (None: `TURN_S`).
    """
    lock = machine_lock()
    lock.acquire(TURN_S if timeout_s is None else timeout_s, on_wait=report)
    with lock:
        yield
