"""Checkpoints that are folders of a file system: each appears complete and durable, or not at all.

A draft is a folder under a temporary name in the checkpoint directory. Its files are flushed, then the manifest, then
the names in it; then it gets its name by a rename, and that name is flushed. Needs no torch.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lastgood.checkpointers.directories.manifest import MANIFEST, files_in, manifest_text, sum_file
from lastgood.checkpointers.directories.store import Draft, StoredCheckpoint, SummedStream
from lastgood.errors import StorageError
from lastgood.files import (
    ReadableBy,
    entries_of,
    make_directory,
    open_new,
    open_regular,
    remove_temporary_files,
    remove_tree,
    storage_errors,
    sync_directory,
    temporary_beside,
)
from lastgood.storage.files import flush_file

__all__ = ["LocalDraft", "LocalStore"]

_log = logging.getLogger("lastgood")

_NAME = re.compile(r"checkpoint-(\d{8,18})-step-(\d{1,18})")
_OLDER_TEMPORARY = re.compile(r"(step-\d+-[0-9a-f]{32}|checkpoint-\d{8,18}-step-\d{1,18})\.tmp")


@dataclass(frozen=True)
class LocalStore:
    """Checkpoints ``checkpoint-SEQUENCE-step-STEP/`` in one directory, the newest with the highest sequence.

    `keep` of them stay. What a reader finds under such a name was flushed completely before it got it. A draft can be
    read by its owner alone; `readable_by` is for checkpoints.
    """

    directory: Path
    keep: int
    readable_by: ReadableBy = ReadableBy.OWNER

    def prepare(self) -> None:
        """Make the directory, and remove what a killed process left half-written."""
        with storage_errors(self.directory, "preparing the checkpoint directory"):
            make_directory(self.directory, self.readable_by.directory_mode)
            remove_temporary_files(self.directory, _OLDER_TEMPORARY)

    def begin(self, step: int) -> LocalDraft:
        """A draft under a name that nothing which a killed process left still writes to."""
        return LocalDraft(step, temporary_beside(self.directory / f"step-{step}"))

    def commit(self, draft: Draft) -> int:
        """Give a sealed draft its name, durably; then drop all but the newest `keep`."""
        assert isinstance(draft, LocalDraft)
        temporary = draft.path
        sequence = max((known.sequence for known in self.found()), default=0) + 1
        final = self.directory / StoredCheckpoint(sequence, draft.step, "").name
        if not (temporary / MANIFEST).exists():
            raise StorageError(f"{temporary}: has no manifest, so it is not complete; seal() comes before commit()")
        with storage_errors(final, "committing a checkpoint"):
            written = 0
            for path in files_in(temporary).values():
                written += path.stat().st_size
                path.chmod(self.readable_by.file_mode)
            for path in (one for one in temporary.rglob("*") if one.is_dir()):
                path.chmod(self.readable_by.directory_mode)
            temporary.chmod(self.readable_by.directory_mode)
            sync_directory(temporary)
            temporary.rename(final)
        with storage_errors(self.directory, "flushing a checkpoint's name"):
            try:
                sync_directory(self.directory)
            except OSError:
                remove_tree(final)  # under this name it would be taken for one whose name is durable
                raise
        self.drop_old()
        return written

    def give_up(self, draft: Draft) -> None:
        """Remove what a failed save wrote."""
        assert isinstance(draft, LocalDraft)
        draft.given_up = True
        remove_tree(draft.path)

    def found(self) -> list[StoredCheckpoint]:
        """By the names in the directory."""
        matches = (_NAME.fullmatch(path.name) for path in entries_of(self.directory))
        found = [(int(match[1]), int(match[2]), str(self.directory / match[0])) for match in matches if match]
        return [StoredCheckpoint(*one) for one in sorted(found, reverse=True)]

    def read(self, checkpoint: StoredCheckpoint, name: str, begin: int = 0, nbytes: int | None = None) -> bytes:
        """From the file itself; follows no link."""
        path = Path(checkpoint.where) / name
        with storage_errors(path, "reading"), os.fdopen(open_regular(path), "rb") as file:
            file.seek(begin)
            return file.read(-1 if nbytes is None else nbytes)

    @contextlib.contextmanager
    def local_folder(self, checkpoint: StoredCheckpoint) -> Iterator[Path]:
        """The checkpoint itself."""
        yield Path(checkpoint.where)

    def drop_old(self) -> None:
        """Remove all but the newest `keep`; what cannot be removed is logged."""
        for one in self.found()[self.keep :]:
            old = Path(one.where)
            doomed = temporary_beside(old)
            try:
                old.rename(doomed)  # a kill half-way must not leave a checkpoint that lacks files
            except OSError as error:
                _log.warning("%s: cannot remove an old checkpoint: %s", old, error)
            else:
                remove_tree(doomed)


class LocalDraft(Draft):
    """A folder under a temporary name; until `commit` only its owner sees it. Can be sent to another process."""

    def __init__(self, step: int, path: Path) -> None:
        super().__init__(step, str(path))
        self.path = path
        self._made = False

    def __getstate__(self) -> dict[str, object]:
        # A process that still writes when this one has given up must not make the folder again.
        self.folder()
        return self.__dict__

    def folder(self) -> Path:
        """The folder that becomes the checkpoint."""
        self.refuse_given_up()
        if not self._made:
            self.path.mkdir(0o700, exist_ok=True)
            self._made = True
        return self.path

    def seal(self) -> None:
        """Flush every file that a library wrote and did not flush, and the folders; then write the manifest.

        The checksums of such files are those of the files as they are read back, mostly from the page cache.
        """
        found = files_in(self.path)
        lost = self._sums.keys() - found.keys()
        if lost:
            raise StorageError(f"{self.path}: {sorted(lost)} were written and are gone; was the folder meddled with?")
        unknown = {name: path for name, path in found.items() if name not in self._sums}
        files = self._sums | {name: (path.stat().st_size, sum_file(path)) for name, path in unknown.items()}
        for path in unknown.values():
            flush_file(path)
        manifest = self.path / MANIFEST
        with storage_errors(manifest, "writing"):
            for directory in (path for path in self.path.rglob("*") if path.is_dir()):
                sync_directory(directory)
            with os.fdopen(open_new(manifest), "wb") as file:
                file.write(manifest_text(self.step, files))
        flush_file(manifest)

    def _open(self, name: str) -> io.RawIOBase:
        path = self.folder() / name
        for parent in reversed(path.relative_to(self.path).parents[:-1]):  # not the folder itself: it may be gone
            (self.path / parent).mkdir(0o700, exist_ok=True)
        return io.FileIO(open_new(path), "wb")

    def _complete(self, name: str, stream: SummedStream) -> None:
        os.fsync(stream.fileno())
        super()._complete(name, stream)
