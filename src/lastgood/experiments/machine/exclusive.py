"""Exclusive use of the machine for one run: the machine lock, and a private folder on the disk under test."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lastgood.errors import LastgoodError, LockHeld
from lastgood.experiments.machine.lock import machine_turn
from lastgood.experiments.records.base import Spec
from lastgood.files import local_path
from lastgood.locks import FileLock
from lastgood.mounts import refuse_memory

__all__ = ["ExclusiveRun", "exclusive_machine"]

_LOCK_WAIT_S = 24 * 3600.0
"""How long a run waits for the machine."""
_NAME = re.compile(r"run-(\d+)-[0-9a-f]{8}")


@dataclass(frozen=True)
class ExclusiveRun:
    """What a run has while it lasts. `began_s` is on the monotonic clock."""

    folder: Path
    started_at: str
    began_s: float


@contextlib.contextmanager
def exclusive_machine(spec: Spec, scratch: Path, report: Callable[[str], None]) -> Iterator[ExclusiveRun]:
    """Wait for the machine, and make a folder for `spec` below `scratch`; both are given back at the end.

    Raises ConfigError for a scratch folder in memory, WaitTimeout, LastgoodError.
    """
    refuse_memory(scratch)
    with machine_turn(report, _LOCK_WAIT_S):
        started_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        began_s = time.monotonic()
        with _run_folder(local_path(scratch), spec) as folder:
            yield ExclusiveRun(folder, started_at, began_s)


@contextlib.contextmanager
def _run_folder(scratch: Path, spec: Spec) -> Iterator[Path]:
    """A folder of one run. Its lock tells a running run's folder from one that a killed run left behind."""
    folder = scratch / f"run-{os.getpid()}-{spec.cell_hash}"
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        _sweep(scratch)
        folder.mkdir(0o700)
    except OSError as error:
        raise LastgoodError(
            f"scratch {scratch}: {error.strerror}; set `scratch` to a folder you can write to"
        ) from error
    lock = FileLock(folder / "lock", f"scratch folder {folder}")
    lock.acquire()
    try:
        yield folder
    finally:
        _remove_folder(folder)
        lock.release()


def _sweep(scratch: Path) -> None:
    """Remove what killed runs left: folders whose lock is free, and those that had not come to a lock yet."""
    for left in scratch.iterdir():
        match = _NAME.fullmatch(left.name)
        if match is None:
            continue
        if not (left / "lock").exists():
            if not Path("/proc", match[1]).exists():
                shutil.rmtree(left, ignore_errors=True)
            continue
        lock = FileLock(left / "lock", f"scratch folder {left}")
        try:
            lock.acquire()
        except (LockHeld, OSError):
            continue  # in use, or another user's
        _remove_folder(left)
        lock.release()


def _remove_folder(folder: Path) -> None:
    """Delete a scratch folder, its lock last: a kill half-way leaves a folder that the next run still knows."""
    for entry in folder.iterdir():
        if entry.name == "lock":
            continue
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
