"""Every M-th checkpoint of a training, exported in the background to a directory where it stays."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path

from lastgood.checkpointers.base import DEFAULT_TIMEOUT_S
from lastgood.checkpointers.export.formats import ExportFormat, export_checkpoint
from lastgood.checkpointers.export.safetensors_file import read_facts
from lastgood.errors import CheckpointError, ConfigError, LastgoodError, MismatchError, WaitTimeout
from lastgood.files import ReadableBy, local_path, make_directory, remove_temporary_files, storage_error
from lastgood.locks import FileLock
from lastgood.storage import SlotInfo, SlotView

__all__ = ["Archive", "ArchiveCounts", "archived_files"]

_log = logging.getLogger("lastgood")

_NAME = re.compile(r"step-(\d{10,})-seq-(\d{6,})\.safetensors")
_OLDER_TEMPORARY = re.compile(r"step-\d{10,}-seq-\d{6,}\.safetensors\.\d+\.tmp")
_NICENESS = 10


@dataclass
class ArchiveCounts:
    """What became of the checkpoints that were due."""

    archived: int = 0
    replaced: int = 0
    """Not exported: a newer one was due while this one still waited."""
    failed: int = 0
    """Also those whose slot was reused before they were read, and checkpoints of another job."""


def archived_files(directory: Path) -> list[tuple[int, int, Path]]:
    """Sequence, step and path of every archived checkpoint, newest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted(((int(match[2]), int(match[1]), path) for match, path in found if match), reverse=True)


class Archive:
    """Exports every `every`-th checkpoint to ``DIRECTORY/step-0000000123-seq-000045.safetensors``.

    Checkpoints are counted by their sequence, which goes on over all incarnations of a job: one is due as soon as
    `every` have been begun since the last that was due, the archive's newest file included. So the count needs no file
    of its own, and where some saves fail or are superseded, the next durable one is taken. In an empty archive, the
    `every`-th of the job is the first.

    One thread, of low priority, exports; it exists only while there is something to do. It ends with its process, so
    call `close` (or `drain`) first; what is half made then is removed by the next incarnation. At most one checkpoint
    waits for it; a newer one takes its place. A waiting checkpoint does not keep its slot: if training needs that
    first, it is lost to the archive, and counted. The one that is being exported does (`SlotStore.hold`).

    Whatever fails is counted, logged once per kind, and never raised into the training. A file under its name is
    complete and durable, and `readable_by` says for whom. The directory belongs to one process at a time, and one job.

    Raises:
        ConfigError: `every` is not at least 1.
        LockHeld: another process archives into this directory; names it.
        StorageError: the directory cannot be made or read.
    """

    def __init__(self, directory: Path | str, every: int, readable_by: ReadableBy = ReadableBy.OWNER) -> None:
        if every < 1:
            raise ConfigError(f"an archive takes every M-th checkpoint, M at least 1: {every}")
        self.directory = local_path(directory)
        self.readable_by = readable_by
        self.every = every
        self.counts = ArchiveCounts()
        self._changed = threading.Condition()
        self._waiting: tuple[SlotView, SlotInfo] | None = None
        self._exporting: SlotInfo | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._kinds_logged: set[str] = set()
        self._owner: str | None = None
        self._lock = FileLock(
            self.directory / "lock",
            f"archive {self.directory}",
            shared_with_forks=False,
            mode=readable_by.file_mode,
        )
        try:
            make_directory(self.directory, readable_by.directory_mode)
            self._lock.acquire()
            for path in remove_temporary_files(self.directory, _OLDER_TEMPORARY):
                _log.warning("%s: removed, a process that was killed left it half made", path)
            self._last_due = max((sequence for sequence, _, _ in archived_files(self.directory)), default=0)
            self._owner = self._find_owner()
        except BaseException as error:
            self._lock.release()
            if isinstance(error, OSError):
                raise storage_error(error, self.directory, "opening the archive") from error
            raise

    def offer(self, view: SlotView, info: SlotInfo) -> bool:
        """Say that a checkpoint is durable; returns whether it was due. Returns at once, and never raises.

        `view` is the open store that holds it. May be called by several threads, and with older checkpoints behind
        newer ones.
        """
        with self._changed:
            if self._closed or not self._is_ours(info) or info.sequence < self._last_due + self.every:
                return False
            self._last_due = info.sequence
            if self._waiting is not None:
                self.counts.replaced += 1
                self._log_once(
                    "replaced",
                    f"the checkpoint of step {self._waiting[1].step} was not archived, since that of step {info.step} "
                    "was due before the archive had got to it; archive fewer, or to a faster disk",
                )
            self._waiting = (view, info)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="lastgood-archive", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # no more threads, or the interpreter is ending
                    self._waiting = None
                    self._fail(info, error)
                else:
                    self._thread = thread
            return True

    def drain(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until nothing waits and nothing is being exported. Raises WaitTimeout, naming the steps."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._thread is None, timeout_s):
                left = [self._exporting, None if self._waiting is None else self._waiting[1]]
                steps = [info.step for info in left if info is not None]
                raise WaitTimeout(f"{self.directory}: waited {timeout_s:.0f} s for steps {steps} to be archived")

    def close(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Take no more, finish what is due, and release the directory. Safe to call twice; before the store's close.

        Raises WaitTimeout, with the directory still held, if that takes longer; it may be called again.
        """
        with self._changed:
            self._closed = True
        self.drain(timeout_s)
        self._lock.release()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, own)))
        while True:
            with self._changed:
                if self._waiting is None:
                    self._exporting = self._thread = None
                    self._changed.notify_all()
                    return
                (view, info), self._waiting = self._waiting, None
                self._exporting = info
            try:
                self._export(view, info)
            except Exception as error:  # this thread has no caller: counts and log carry the failure
                with self._changed:
                    self._fail(info, error)
            else:
                with self._changed:
                    self.counts.archived += 1

    def _export(self, view: SlotView, info: SlotInfo) -> None:
        name = f"step-{info.step:010d}-seq-{info.sequence:06d}.safetensors"
        export_checkpoint(
            view,
            info,
            self.directory / name,
            ExportFormat.SAFETENSORS,
            threads=1,
            mode=self.readable_by.file_mode,
        )

    def _find_owner(self) -> str | None:
        """The job that wrote the newest readable file."""
        for _, _, path in archived_files(self.directory):
            try:
                return read_facts(path)["job_id"]
            except CheckpointError as error:
                _log.warning("%s", error)
        return None

    def _is_ours(self, info: SlotInfo) -> bool:
        job = info.record.job_id.hex()
        if self._owner is None:
            self._owner = job
        if self._owner == job:
            return True
        # Sequences of two jobs mean nothing to each other.
        self._fail(info, MismatchError(f"the archive holds job {self._owner}, and this is job {job}; use another one"))
        return False

    def _fail(self, info: SlotInfo, error: Exception) -> None:
        self.counts.failed += 1
        cause = error.__cause__ if isinstance(error, LastgoodError) else error
        kind = f"{type(error).__name__} {getattr(cause, 'errno', None)}"
        self._log_once(kind, f"the checkpoint of step {info.step} was not archived: {type(error).__name__}: {error}")

    def _log_once(self, kind: str, message: str) -> None:
        if kind not in self._kinds_logged:
            self._kinds_logged.add(kind)
            _log.error("%s: %s", self.directory, message)
