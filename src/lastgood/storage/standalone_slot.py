"""A slot file that stands alone: one stream under a name that somebody else chose; it appears complete or not at all.

It has the format of a slot (docs/file-format.md) and is written as one, but under a temporary name beside its own; it
gets its name by `publish`, when it is durable. It is written once and never reused, so it is not filled beforehand.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from lastgood import _native
from lastgood.errors import CorruptCheckpoint, MismatchError
from lastgood.files import PRIVATE, closed_after, open_new, open_regular, remove_tree, storage_errors, temporary_beside
from lastgood.storage import files
from lastgood.storage import format as fmt
from lastgood.storage.medium import Medium
from lastgood.storage.reader import SlotInfo, SlotState, SlotStatus, find_slots, look_at_slot
from lastgood.storage.write import SlotWrite

__all__ = [
    "ROOT",
    "StandaloneSlot",
    "StandaloneSlots",
    "is_standalone_slot",
    "look_at_standalone_slot",
    "look_at_standalone_slots",
]

ROOT = "file"
"""The one entry of the state in the layout of such a file."""
_MAGIC = fmt.SlotHeader(bytes(fmt.JOB_ID_BYTES), 0).encode()[:8]


class StandaloneSlot:
    """One file on its way; the `SlotOwner` of its own `write`.

    Args:
        path: the final name; its directory must be there.
        job: whose file this is. Files that belong together have one job id.
        step: finished training steps.
        stream_bytes: length of the stream.
        pool: buffers, shared by all files that are written at once.
        writer_threads: threads that write it.
        direct_io: whether the file system has direct I/O (`files.direct_io_works`).

    Raises StorageError, and leaves no file, if there is no room.
    """

    incarnation = 1
    writer_cpus: tuple[int, ...] = ()
    crc32c_variant = ""
    medium: Medium = "file"

    def __init__(
        self,
        path: Path,
        *,
        job: fmt.Job,
        step: int,
        stream_bytes: int,
        pool: _native.ChunkPool,
        writer_threads: int,
        direct_io: bool,
        mode: int = PRIVATE,
    ) -> None:
        self.path = path
        self._mode = mode
        self.job = job
        self.chunk_bytes = pool.chunk_bytes
        self.writer_threads = writer_threads
        self.direct_io = direct_io
        self.commit_lock = threading.Lock()
        self.pool = pool
        self._temporary = temporary_beside(path)
        try:
            self._make(fmt.stream_layout(stream_bytes, pool.chunk_bytes)[2])
            self.write = SlotWrite(self, self._temporary, 0, step, 1, stream_bytes, header_ok=False)
        except BaseException:
            remove_tree(self._temporary)
            raise

    def publish(self) -> None:
        """Give a committed file its name, in place of an older one. The caller flushes the directory.

        Raises StorageError.
        """
        with storage_errors(self.path, "naming"):
            self._temporary.replace(self.path)

    def discard(self) -> None:
        """Give the file up, if it is not published. Safe to call twice."""
        self.write.abort()
        remove_tree(self._temporary)

    # -- as SlotOwner ----------------------------------------------------------------------------------------------

    def newest_sequence(self) -> int:
        """-1: nothing ever supersedes a file that stands alone."""
        return -1

    def header(self, slot: int) -> fmt.SlotHeader:
        """The header that the file gets."""
        return fmt.SlotHeader(self.job.job_id, slot)

    def ended(self, write: SlotWrite, info: SlotInfo | None, *, idle: bool) -> None:
        """The write is over: there is nothing to give back."""

    def settle(self) -> None:
        """Nothing was reserved."""

    # -- inside ----------------------------------------------------------------------------------------------------

    def _make(self, file_bytes: int) -> None:
        try:
            with closed_after(open_new(self._temporary, os.O_RDWR, self._mode)) as descriptor:
                if not files.allocate(descriptor, 0, file_bytes):
                    os.ftruncate(descriptor, file_bytes)
        except OSError as error:
            raise files.no_room(error, self.path, "making the file", file_bytes) from error


def is_standalone_slot(path: Path) -> bool:
    """Whether a file begins as a slot does. Raises StorageError if it cannot be read."""
    with storage_errors(path, "reading"), closed_after(open_regular(path, follow=True)) as descriptor:
        return os.pread(descriptor, len(_MAGIC), 0) == _MAGIC


def look_at_standalone_slot(path: Path) -> SlotInfo:
    """What a file that stands alone holds, by its records; the data is checked as it is read (`SlotView`).

    Raises CorruptCheckpoint, MismatchError for another format version, StorageError.
    """
    status = look_at_slot(_followed(path), 0, None, held=False)
    if status.state is SlotState.FOREIGN:
        raise MismatchError(f"{path}: {status.detail}")
    if status.info is None:
        raise CorruptCheckpoint(f"{path}: not a complete checkpoint: {status.detail or status.state.value}")
    return status.info


def _followed(path: Path) -> Path:
    """A file that a user named, who may have put a link there."""
    return path.resolve() if path.is_symlink() else path


@dataclass(frozen=True)
class StandaloneSlots:
    """One file that stands alone, or all in a folder, and what else lies there."""

    place: Path
    statuses: list[SlotStatus]
    others: list[Path]
    """Files that are not in the format of a slot."""
    troubles: list[str]
    """What is wrong with them as a whole, in words."""


def look_at_standalone_slots(place: Path) -> StandaloneSlots | None:
    """A look at a file, or at all in a folder. None for a folder that holds none, or that is a store's (slots, ranks').

    A file whose first bytes are damaged is known by its commit record. Raises StorageError, and MismatchError for a
    file of another kind.
    """
    if place.is_dir():
        if find_slots(place) or (place / fmt.JOB_FILE).exists():
            return None
        with storage_errors(place, "reading the directory"):
            paths = sorted(path for path in place.iterdir() if path.is_file())
    else:
        paths = [place]
    statuses, others, troubles = [], [], []
    for path in paths:
        status = look_at_slot(_followed(path), 0, None, held=False)
        if status.record is not None or is_standalone_slot(path):
            statuses.append(status)
        else:
            others.append(path)
    if not statuses and place.is_dir():
        return None
    if not statuses:
        raise MismatchError(f"{place}: not a checkpoint in Lastgood's format; name a directory, or a file of one")
    jobs = {info.record.job_id: info.path.name for info in (status.info for status in statuses) if info is not None}
    if len(jobs) > 1:
        names = " and ".join(list(jobs.values())[:2])
        troubles.append(f"{place}: {names} are from two saves: one was saved over the other and was not finished")
    return StandaloneSlots(place, statuses, others, troubles)
