"""What a training that is refused has made on the disk until then: it takes it back, so that it leaves no trace.

A refused start that leaves a lock, a job's description or void slots misleads whoever looks there next: a rank that was
one too many would count as a part of the job. Only what is new, is Lastgood's own and holds no checkpoint is removed,
and only under the directory's lock. A process that is killed meanwhile leaves it; readers pass over that
(`lastgood.storage.reader.nothing_committed`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path

from lastgood.checkpointers.rank_directory import job_of
from lastgood.checkpointers.ranks.directories import ID_FILE
from lastgood.checkpointers.recovery.checkmate_job import JOB_FILE, noted_job
from lastgood.errors import LastgoodError, LockHeld
from lastgood.locks import FileLock
from lastgood.storage import format as fmt
from lastgood.storage.reader import SlotState, look_at_slot, nothing_committed

__all__ = ["Traces"]

_log = logging.getLogger("lastgood")


class Traces:
    """Looks at the directories of one training before anything is made there."""

    def __init__(self, folders: Iterable[Path]) -> None:
        own = [folder.absolute() for folder in folders]
        jobs = [job for job in map(job_of, own) if job is not None]
        self._folders = own
        self._before = {folder: _names_in(folder) for folder in [*own, *jobs]}
        paths = {path for folder in self._before for path in (folder, *folder.parents)}
        self._missing = sorted((path for path in paths if not path.exists()), key=lambda path: -len(path.parts))

    def take_back(self) -> None:
        """Remove what was made since. Call it when nothing of the training holds a lock any more. Never raises."""
        for folder in self._folders:
            try:
                self._clear(folder)
            except (LastgoodError, OSError) as error:
                _log.debug("%s: what a refused start made there stays: %s", folder, error)
        self._remove_directories()
        for folder in self._before.keys() - {*self._folders}:
            # Ranks that are there may have taken their id from it.
            if self._is_new(folder / ID_FILE) and _names_in(folder) == {ID_FILE}:
                with contextlib.suppress(OSError):
                    (folder / ID_FILE).unlink()
        self._remove_directories()

    def _remove_directories(self) -> None:
        for path in self._missing:
            with contextlib.suppress(OSError):  # others have put something there
                path.rmdir()

    def _is_new(self, path: Path) -> bool:
        return path.name not in self._before[path.parent]

    def _clear(self, folder: Path) -> None:
        job = folder / JOB_FILE  # ranks of Checkmate have no lock; rank 0 alone writes it
        if self._is_new(job) and (noted := noted_job(folder)) is not None and noted.promised is None:
            job.unlink()
        lock = FileLock(folder / fmt.LOCK_FILE, f"directory {folder}", shared_with_forks=False)
        if not self._is_new(lock.path):
            if not any(map(self._is_new, _slots_in(folder))):
                return
        elif not lock.path.exists():
            return
        try:
            lock.acquire()
        except LockHeld:  # somebody else's by now
            return
        with lock:
            for path in filter(self._is_new, _slots_in(folder)):
                if look_at_slot(path, 0, None, held=False).state is SlotState.VOID:
                    path.unlink()
            description = folder / fmt.JOB_FILE
            if self._is_new(description) and not _slots_in(folder) and nothing_committed(folder):
                description.unlink(missing_ok=True)
            if self._is_new(lock.path) and _names_in(folder) <= {fmt.LOCK_FILE, *self._before[folder]}:
                lock.remove()


def _names_in(folder: Path) -> set[str]:
    """What is there; nothing if it cannot be read: then nothing can be made there either."""
    try:
        return {path.name for path in folder.iterdir()}
    except OSError:
        return set()


def _slots_in(folder: Path) -> list[Path]:
    return [folder / name for name in sorted(_names_in(folder)) if fmt.slot_number(Path(name)) is not None]
