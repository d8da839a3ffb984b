"""Every M-th checkpoint of a training, exported in the background to a directory where it stays."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import ClassVar

from lastgood.checkpointers.export.formats import ExportFormat, export_checkpoint
from lastgood.checkpointers.export.safetensors_file import read_facts
from lastgood.checkpointers.slots.follower import WAIT_S, Follower
from lastgood.errors import CheckpointError, MismatchError
from lastgood.files import ReadableBy, local_path, make_directory, remove_temporary_files, storage_error
from lastgood.locks import FileLock
from lastgood.storage import SlotInfo, SlotView

__all__ = ["Archive", "archived_files"]

_log = logging.getLogger("lastgood")

_NAME = re.compile(r"step-(\d{10,})-seq-(\d{6,})\.safetensors")
_OLDER_TEMPORARY = re.compile(r"step-\d{10,}-seq-\d{6,}\.safetensors\.\d+\.tmp")


def archived_files(directory: Path) -> list[tuple[int, int, Path]]:
    """Sequence, step and path of every archived checkpoint, newest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted(((int(match[2]), int(match[1]), path) for match, path in found if match), reverse=True)


class Archive(Follower):
    """Exports every `every`-th checkpoint to ``DIRECTORY/step-0000000123-seq-000045.safetensors``.

    The last that was due is the archive's newest file, so the count needs no file of its own; in an empty archive, the
    `every`-th of the job is the first. What is half made when the process ends is removed by the next incarnation. The
    checkpoint that is being exported keeps its slot.

    A file under its name is complete and durable, and `readable_by` says for whom. The directory belongs to one process
    at a time, and one job.

    Raises:
        ConfigError: `every` is not at least 1.
        LockHeld: another process archives into this directory; names it.
        StorageError: the directory cannot be made or read.
    """

    name: ClassVar[str] = "lastgood-archive"
    done_word: ClassVar[str] = "archived"
    advice: ClassVar[str] = "archive fewer, or to a faster disk"

    def __init__(self, directory: Path | str, every: int, readable_by: ReadableBy = ReadableBy.OWNER) -> None:
        self.directory = local_path(directory)
        super().__init__(self.directory, every)
        self.readable_by = readable_by
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

    def close(self, timeout_s: float = WAIT_S) -> None:
        """Take no more, finish what is due, and release the directory. Safe to call twice; before the store's close.

        Raises WaitTimeout, with the directory still held, if that takes longer; it may be called again.
        """
        super().close(timeout_s)
        self._lock.release()

    def _follow(self, view: SlotView, info: SlotInfo) -> None:
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
