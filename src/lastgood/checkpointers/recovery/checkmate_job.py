"""A job of Checkmate on a disk: its id, and the newest step that is known to have been complete on all shadows.

Everything else is in the memory of shadows. If all of them are lost this file is all that tells a training that is
started again that it would begin again after steps that were called durable.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from lastgood.errors import CheckpointError, CorruptCheckpoint, StorageError
from lastgood.files import ReadableBy, make_directory, read_bounded, storage_errors, write_atomically
from lastgood.text import is_whole, parse_json

__all__ = ["JOB_FILE", "NotedJob", "Promises", "note_job", "noted_job"]

_log = logging.getLogger("lastgood")

JOB_FILE = "checkmate.json"
_MOST_JOB_BYTES = 4096
_MOST_STEP = (1 << 63) - 1


@dataclass(frozen=True)
class NotedJob:
    """What a job's file says."""

    job: str
    promised: int | None = None
    """A step that was complete on all shadows; later ones may have been. None: no step is known to have been."""


def noted_job(directory: Path) -> NotedJob | None:
    """The job that a directory belongs to; None if it has no file of one. Raises CheckpointError."""
    path = directory / JOB_FILE
    try:
        content = parse_json(read_bounded(path, _MOST_JOB_BYTES), str(path), most_bytes=_MOST_JOB_BYTES)
        job, promised = content["job"], content.get("promised")
        if not isinstance(job, str) or not re.fullmatch("[0-9a-f]{32}", job):
            raise ValueError("no job of 32 hex digits")
        if promised is not None and not is_whole(promised, 0, _MOST_STEP):
            raise ValueError("what was promised is no step")
    except FileNotFoundError:
        return None
    except (OSError, CorruptCheckpoint, StorageError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); remove it to take the job that the shadows keep"
        ) from error
    return NotedJob(job, promised)


def note_job(directory: Path, job: str, readable_by: ReadableBy = ReadableBy.OWNER) -> None:
    """Let a directory that belongs to no job yet belong to this one. Raises StorageError."""
    if not (directory / JOB_FILE).exists():
        _write(directory, {"job": job}, readable_by)


def _write(directory: Path, content: dict[str, str | int], readable_by: ReadableBy) -> None:
    path = directory / JOB_FILE
    with storage_errors(path, "writing"):
        make_directory(directory, readable_by.directory_mode)
        write_atomically(path, (json.dumps(content) + "\n").encode(), mode=readable_by.file_mode)


class Promises:
    """Keeps the steps of one incarnation that were complete on all shadows in the job's file, on rank 0.

    The first one is durable there before anybody calls it so; the newest one when the incarnation ends. Those between
    cost nothing.
    """

    def __init__(self, directory: Path, job: str, readable_by: ReadableBy) -> None:
        self._directory = directory
        self._job = job
        self._readable_by = readable_by
        self._newest: int | None = None
        self._noted: int | None = None
        self._tried = False

    def made(self, step: int) -> None:
        """A step is complete on all shadows. Never raises."""
        self._newest = step if self._newest is None else max(step, self._newest)
        if not self._tried:
            self._tried = True
            self._note()

    def close(self) -> None:
        """The incarnation ends. Never raises."""
        if self._newest != self._noted:
            self._note()

    def _note(self) -> None:
        assert self._newest is not None
        try:
            noted = noted_job(self._directory)
            if noted is not None and noted.job != self._job:
                return  # somebody began again here while this incarnation still ran
            _write(self._directory, {"job": self._job, "promised": self._newest}, self._readable_by)
        except CheckpointError as error:  # shadows hold the step all the same
            _log.warning(
                "checkmate: %s; if all shadows are lost, a training that starts again begins at 0 without an error",
                error,
            )
        else:
            self._noted = self._newest
