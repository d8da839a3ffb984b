"""A directory of checkpoints that are directories, each of which appears whole and durable or not at all.

Libraries that write a checkpoint as several files write into the final directory, sync no directory, and store no
checksums. Here each is written under a temporary name, with a *manifest* beside the library's files: length and CRC32C
of every file. Needs no torch.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lastgood import _native
from lastgood.errors import CorruptCheckpoint, StorageError
from lastgood.files import (
    ReadableBy,
    entries_of,
    make_directory,
    open_new,
    open_regular,
    read_bounded,
    remove_temporary_files,
    remove_tree,
    storage_error,
    sync_directory,
    temporary_beside,
)
from lastgood.storage.files import flush_file
from lastgood.text import is_whole, parse_json

__all__ = ["MANIFEST", "CheckpointDirectories", "check_files", "manifest_text", "seal_files"]

_log = logging.getLogger("lastgood")

MANIFEST = "lastgood-manifest.json"
_FORMAT = "lastgood-directory-1"
_NAME = re.compile(r"checkpoint-(\d{8,18})-step-(\d{1,18})")
_OLDER_TEMPORARY = re.compile(r"(step-\d+-[0-9a-f]{32}|checkpoint-\d{8,18}-step-\d{1,18})\.tmp")
_MOST_MANIFEST_BYTES = 64 << 20
_READ_BYTES = 8 << 20


class CheckpointDirectories:
    """Whole checkpoints ``checkpoint-SEQUENCE-step-STEP/`` in one directory, the newest with the highest sequence."""

    def __init__(self, directory: Path, keep: int, readable_by: ReadableBy = ReadableBy.OWNER) -> None:
        self.directory = directory
        self.keep = keep
        self._readable_by = readable_by

    def prepare(self) -> None:
        """Remove what a killed process left half-written. Only under the directory's lock. Raises StorageError."""
        try:
            make_directory(self.directory, self._readable_by.directory_mode)
            remove_temporary_files(self.directory, _OLDER_TEMPORARY)
        except OSError as error:
            raise storage_error(error, self.directory, "preparing the checkpoint directory") from error

    def temporary(self, step: int) -> Path:
        """A name for a checkpoint that is being written, which nothing that a killed process left still writes to."""
        return temporary_beside(self.directory / f"step-{step}")

    def make(self, temporary: Path) -> None:
        """Make the directory that a library writes into; until `commit` only its owner sees it. Raises OSError."""
        temporary.mkdir(0o700)

    def commit(self, temporary: Path, step: int) -> int:
        """Make a written checkpoint durable and give it its name; then drop all but the newest `keep`.

        Every file in it must be flushed already. Returns its bytes. Raises StorageError; the older checkpoints stay.
        """
        sequence = max((known for known, _, _ in self.found()), default=0) + 1
        final = self.directory / f"checkpoint-{sequence:08d}-step-{step}"
        try:
            written = 0
            for path in _files_in(temporary).values():
                written += path.stat().st_size
                path.chmod(self._readable_by.file_mode)
            for path in (one for one in temporary.rglob("*") if one.is_dir()):
                path.chmod(self._readable_by.directory_mode)
            temporary.chmod(self._readable_by.directory_mode)
            sync_directory(temporary)
            temporary.rename(final)
        except OSError as error:
            raise storage_error(error, final, "committing a checkpoint") from error
        try:
            sync_directory(self.directory)
        except OSError as error:
            # Under this name it would be taken for one whose name is durable.
            remove_tree(final)
            raise storage_error(error, self.directory, "flushing a checkpoint's name") from error
        self._drop_old()
        return written

    def give_up(self, temporary: Path) -> None:
        """Remove what a failed save wrote."""
        remove_tree(temporary)

    def found(self) -> list[tuple[int, int, Path]]:
        """Sequence, step and path of every checkpoint, newest first. Raises StorageError."""
        matches = ((_NAME.fullmatch(path.name), path) for path in entries_of(self.directory))
        return sorted(((int(match[1]), int(match[2]), path) for match, path in matches if match), reverse=True)

    def _drop_old(self) -> None:
        for _, _, old in self.found()[self.keep :]:
            doomed = temporary_beside(old)
            try:
                old.rename(doomed)  # a kill half-way must not leave a checkpoint that lacks files
            except OSError as error:
                _log.warning("%s: cannot remove an old checkpoint: %s", old, error)
            else:
                remove_tree(doomed)


def manifest_text(step: int, files: Mapping[str, tuple[int, int]]) -> bytes:
    """The manifest of a checkpoint: name to (bytes, CRC32C) of its files, with a checksum of its own behind it."""
    document = {"format": _FORMAT, "step": step, "files": {name: list(files[name]) for name in sorted(files)}}
    text = json.dumps(document, indent=1).encode()
    return text + _ending(text)


def _ending(text: bytes) -> bytes:
    return f"\n{_native.crc32c(text):08x}\n".encode()


_ENDING_BYTES = 10


def seal_files(checkpoint: Path, step: int) -> None:
    """Flush every file that a library wrote and did not flush, and its directories; then write the manifest.

    The checksums are those of the files as they are read back, mostly from the page cache. Raises StorageError.
    """
    files = {name: (path.stat().st_size, _checksum(path)) for name, path in _files_in(checkpoint).items()}
    for name in files:
        flush_file(checkpoint / name)
    path = checkpoint / MANIFEST
    try:
        for directory in (path for path in checkpoint.rglob("*") if path.is_dir()):
            sync_directory(directory)
        with open(open_new(path), "wb") as file:  # noqa: PTH123 - of a descriptor
            file.write(manifest_text(step, files))
    except OSError as error:
        raise storage_error(error, path, "writing") from error
    flush_file(path)


def check_files(checkpoint: Path, step: int) -> int:
    """Read every file of a checkpoint and compare lengths and checksums; returns their bytes.

    Raises CorruptCheckpoint, naming the file and both sides.
    """
    files = _read_manifest(checkpoint, step)
    found = _files_in(checkpoint).keys() - {MANIFEST}
    if found != files.keys():
        raise CorruptCheckpoint(
            f"{checkpoint}: holds {sorted(found - files.keys()) or 'nothing'} beyond its manifest and lacks "
            f"{sorted(files.keys() - found) or 'nothing'} of it"
        )
    for name, (nbytes, checksum) in files.items():
        path = checkpoint / name
        if path.stat().st_size != nbytes:
            raise CorruptCheckpoint(f"{path}: {path.stat().st_size} bytes, and the manifest says {nbytes}")
        actual = _checksum(path)
        if actual != checksum:
            raise CorruptCheckpoint(f"{path}: checksum {actual:08x}, and the manifest says {checksum:08x}")
    return sum(nbytes for nbytes, _ in files.values())


def _read_manifest(checkpoint: Path, step: int) -> dict[str, tuple[int, int]]:
    path = checkpoint / MANIFEST
    try:
        content = read_bounded(path, _MOST_MANIFEST_BYTES, too_large=CorruptCheckpoint)
        text = content[:-_ENDING_BYTES]
        if content != text + _ending(text):
            raise CorruptCheckpoint(f"{path}: its checksum does not hold")
        document: Any = parse_json(text, str(path), most_bytes=_MOST_MANIFEST_BYTES)
        if document["format"] != _FORMAT or document["step"] != step:
            raise CorruptCheckpoint(f"{path}: of {document['format']}, step {document['step']}; not of step {step}")
        files = {str(name): (nbytes, checksum) for name, (nbytes, checksum) in document["files"].items()}
        if not all(is_whole(nbytes, 0, 1 << 63) and is_whole(crc, 0, (1 << 32) - 1) for nbytes, crc in files.values()):
            raise ValueError("a file's length or checksum is none")
    except OSError as error:
        raise CorruptCheckpoint(f"{path}: cannot be read: {error.strerror}; the checkpoint has no manifest") from error
    except StorageError as error:
        raise CorruptCheckpoint(str(error)) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(f"{path}: is no manifest: {error!r}") from error
    if any(name.startswith("/") or ".." in name.split("/") for name in files):
        raise CorruptCheckpoint(f"{path}: names files outside its directory")
    return files


def _files_in(checkpoint: Path) -> dict[str, Path]:
    """Every file below a checkpoint's directory, by its path there."""
    return {str(path.relative_to(checkpoint)): path for path in checkpoint.rglob("*") if not path.is_dir()}


def _checksum(path: Path) -> int:
    checksum = 0
    memory = bytearray(_READ_BYTES)
    try:
        with open(open_regular(path), "rb", buffering=0) as file, memoryview(memory) as view:  # noqa: PTH123 - of a descriptor
            while got := file.readinto(view):
                checksum = _native.crc32c(view[:got], checksum)
    except OSError as error:
        raise CorruptCheckpoint(str(storage_error(error, path, "reading"))) from error
    except StorageError as error:
        raise CorruptCheckpoint(str(error)) from error
    return checksum
