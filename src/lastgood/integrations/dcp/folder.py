"""Where a checkpoint of DCP lies: a folder of a file system, written beside its name, which it gets when complete.

A checkpoint exists when its ``.metadata`` does. All else has names of the one save that wrote it, so that a checkpoint
can take the name of an older one by a single rename: the older one is complete until then. Needs no torch.

`bucket` is this module's like for a URL of an object store; `places` tells which of them a user named.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lastgood import _native
from lastgood.checkpointers.dcp.metadata import plain_file_name
from lastgood.checkpointers.directories.manifest import manifest_text
from lastgood.errors import LockHeld, StorageError
from lastgood.files import (
    ReadableBy,
    entries_of,
    open_new,
    remove_tree,
    storage_errors,
    sync_directory,
    temporaries_beside,
    temporary_beside,
)
from lastgood.locks import FileLock
from lastgood.storage.files import flush_file

__all__ = ["METADATA", "CheckpointFolder", "file_name", "manifest_name", "metadata_name"]

_log = logging.getLogger("lastgood")

METADATA = ".metadata"
_OF_A_SAVE = re.compile(r"(?:__\d+_\d+-|lastgood-manifest-)([0-9a-f]{16})\.(?:lgs|distcp|json)")
_OF_A_RANK = re.compile(r"__\d+\.metadata")
_POLL_S = 0.05
_TRIES = 10
_APPEARS_S = 10.0
"""How long a shared file system may take to show another host's new folder."""


def file_name(rank: int, number: int, save_id: bytes, suffix: str) -> str:
    """The name of a data file of one save: DCP's own, and the save's."""
    return f"__{rank}_{number}-{save_id[:8].hex()}.{suffix}"


def manifest_name(save_id: bytes) -> str:
    """The name of the manifest of one save, which holds the length and CRC32C of each file without checksums."""
    return f"lastgood-manifest-{save_id[:8].hex()}.json"


def metadata_name(rank: int | None) -> str:
    """The file of DCP's metadata: of all ranks, or of one that saved by itself (``use_collectives=False``)."""
    return METADATA if rank is None else f"__{rank}{METADATA}"


@dataclass(frozen=True)
class CheckpointFolder:
    """One save's view of the folder `final`. All ranks make it alike; rank 0 calls `make` and `publish`."""

    final: Path
    save_id: bytes
    readable_by: ReadableBy = ReadableBy.OWNER

    @property
    def draft(self) -> Path:
        """Where the files are until they are published; known by its name to be temporary."""
        return temporary_beside(self.final, self.save_id[:8])

    def make(self) -> FileLock:
        """Make the draft, after removing drafts of this name that nobody holds. The lock says that this one is in use.

        Raises StorageError.
        """
        with storage_errors(self.draft, "making the folder"):
            self.final.parent.mkdir(parents=True, exist_ok=True)
            for left in temporaries_beside(self.final):
                _remove_unheld(left)
        for tried in range(1, _TRIES + 1):
            lock = FileLock(
                self.draft, "a checkpoint that is being written", shared_with_forks=False, on_directory=True
            )
            try:
                with storage_errors(self.draft, "making the folder"):
                    self.draft.mkdir(0o700)
                    self.draft.chmod(self.readable_by.directory_mode)
                lock.acquire(_APPEARS_S)
            except (StorageError, LockHeld):
                # Another save of this name may have taken it for a dead one's, before it was locked.
                if tried == _TRIES or self.draft.exists():
                    raise
                continue
            break
        return lock

    def wait_for_draft(self, timeout_s: float) -> None:
        """Return when the draft that rank 0 made is seen here. Raises StorageError, naming host and folder."""
        deadline = time.monotonic() + min(timeout_s, _APPEARS_S)
        while not self.draft.is_dir():
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{self.final.parent}: on host {socket.gethostname()} this folder lacks what rank 0 has just made "
                    f"there ({self.draft.name}), so the ranks do not share it; name a folder of a shared file system"
                )
            time.sleep(_POLL_S)

    def seal(self, metadata: bytes, files: dict[str, tuple[int, int]], rank: int | None = None) -> None:
        """Write DCP's metadata and the manifest into the draft. `files` as for `manifest_text`, without the metadata.

        Raises StorageError.
        """
        name = metadata_name(rank)
        for path, content in (
            (self.draft / name, metadata),
            (self.draft / manifest_name(self.save_id), manifest_text(0, {**files, **sums_of(name, metadata)})),
        ):
            with storage_errors(path, "writing", len(content)):
                with os.fdopen(open_new(path, mode=self.readable_by.file_mode), "wb") as file:
                    file.write(content)
                flush_file(path)
        with storage_errors(self.draft, "flushing the folder"):
            sync_directory(self.draft)

    def publish(self, older_files: Iterable[str], timeout_s: float, rank: int | None = None) -> None:
        """Give the checkpoint its name, durably; then remove `older_files`, which the one before it consisted of.

        With `rank`, only that rank's own checkpoint among those of others (``use_collectives=False``). Raises
        StorageError; the older checkpoint is complete then, unless the error says otherwise.
        """
        with storage_errors(self.final, "naming the checkpoint"):
            if rank is None and not (self.final.exists() and any(self.final.iterdir())):
                self.draft.rename(self.final)
                sync_directory(self.final.parent)
                return
            if rank is not None and (self.final / METADATA).exists():
                raise StorageError(
                    f"{self.final}: holds a checkpoint of all ranks, which a load would take before rank {rank}'s own; "
                    "save under another name, or remove it first"
                )
            with contextlib.suppress(FileExistsError):
                self.final.mkdir(self.readable_by.directory_mode)
            with _locked(self.final, timeout_s):
                self._move_into_place(older_files, rank)

    def _move_into_place(self, older_files: Iterable[str], rank: int | None) -> None:
        name = metadata_name(rank)
        names = [path.name for path in entries_of(self.draft) if path.name != name]
        moved = []
        try:
            for one in names:
                (self.draft / one).rename(self.final / one)
                moved.append(one)
            sync_directory(self.final)
            (self.draft / name).replace(self.final / name)  # from here on it is the checkpoint of this name
        except BaseException:
            for one in moved:
                (self.final / one).unlink(missing_ok=True)
            raise
        sync_directory(self.final)
        sync_directory(self.final.parent)
        for old in {*older_files, *(self._dead_files() if rank is None else [])} - set(names):
            if plain_file_name(old):
                remove_file(self.final / old)
        remove_tree(self.draft)

    def _dead_files(self) -> list[str]:
        """Files of saves that never were published here, or whose metadata has just been replaced."""
        mine = self.save_id[:8].hex()
        found = ((path.name, _OF_A_SAVE.fullmatch(path.name)) for path in entries_of(self.final))
        return [name for name, match in found if (match and match[1] != mine) or _OF_A_RANK.fullmatch(name)]

    def discard(self) -> None:
        """Remove what was not published. Safe to call twice."""
        remove_tree(self.draft)


def sums_of(name: str, content: bytes) -> dict[str, tuple[int, int]]:
    """A file's entry in a manifest."""
    return {name: (len(content), _native.crc32c(content))}


def remove_file(path: Path) -> None:
    """Remove a file of an older checkpoint; never a folder."""
    if path.is_symlink() or path.is_file():
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s: cannot remove a file of an older checkpoint: %s", path, error)


@contextlib.contextmanager
def _locked(folder: Path, timeout_s: float) -> Iterator[None]:
    """One save at a time changes a checkpoint that is there."""
    lock = FileLock(folder, "this checkpoint's name", shared_with_forks=False, on_directory=True)
    try:
        lock.acquire(timeout_s)
    except LockHeld as error:
        raise StorageError(f"{folder}: another save is taking this name: {error}") from error
    try:
        yield
    finally:
        lock.release()


def _remove_unheld(draft: Path) -> None:
    """Remove a draft, unless a living save holds it."""
    try:
        descriptor = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_tree(draft)
        _log.info("%s: removed, a save that was killed left it", draft)
    except OSError:
        return  # in use
    finally:
        os.close(descriptor)
