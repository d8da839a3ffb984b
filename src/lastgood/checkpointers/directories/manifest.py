"""The manifest of a checkpoint that is a folder of files: length and CRC32C of each, and a checksum of its own.

Libraries that write a checkpoint as several files store no checksums. Needs no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lastgood import _native
from lastgood.errors import CorruptCheckpoint, StorageError
from lastgood.files import open_regular, read_bounded, storage_error
from lastgood.text import is_whole, parse_json

__all__ = ["MANIFEST", "MOST_MANIFEST_BYTES", "check_files", "files_in", "manifest_text", "parse_manifest", "sum_file"]

MANIFEST = "lastgood-manifest.json"
MOST_MANIFEST_BYTES = 64 << 20
_FORMAT = "lastgood-directory-1"
_ENDING_BYTES = 10
_READ_BYTES = 8 << 20


def manifest_text(step: int, files: Mapping[str, tuple[int, int]]) -> bytes:
    """The manifest of a checkpoint: name to (bytes, CRC32C) of its files, followed by a checksum of its own."""
    document = {"format": _FORMAT, "step": step, "files": {name: list(files[name]) for name in sorted(files)}}
    text = json.dumps(document, indent=1).encode()
    return text + _ending(text)


def _ending(text: bytes) -> bytes:
    return f"\n{_native.crc32c(text):08x}\n".encode()


def parse_manifest(content: bytes, where: str, step: int) -> dict[str, tuple[int, int]]:
    """What `manifest_text` was given. `where` names the file. Raises CorruptCheckpoint, also for another step's.

    No name in it leads out of the checkpoint's folder.
    """
    try:
        text = content[:-_ENDING_BYTES]
        if content != text + _ending(text):
            raise CorruptCheckpoint(f"{where}: its checksum does not hold")
        document: Any = parse_json(text, where, most_bytes=MOST_MANIFEST_BYTES)
        if document["format"] != _FORMAT or document["step"] != step:
            raise CorruptCheckpoint(f"{where}: of {document['format']}, step {document['step']}; not of step {step}")
        files = {str(name): (nbytes, checksum) for name, (nbytes, checksum) in document["files"].items()}
        if not all(is_whole(nbytes, 0, 1 << 63) and is_whole(crc, 0, (1 << 32) - 1) for nbytes, crc in files.values()):
            raise ValueError("a file's length or checksum is none")
    except StorageError as error:
        raise CorruptCheckpoint(str(error)) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(f"{where}: is no manifest: {error!r}") from error
    if any(name.startswith("/") or ".." in name.split("/") for name in files):
        raise CorruptCheckpoint(f"{where}: names files outside its directory")
    return files


def check_files(checkpoint: Path, step: int) -> int:
    """Read every file of a checkpoint and compare lengths and checksums; returns their bytes.

    Raises CorruptCheckpoint, naming the file and both sides.
    """
    files = _read_manifest(checkpoint / MANIFEST, step)
    found = files_in(checkpoint).keys() - {MANIFEST}
    if found != files.keys():
        raise CorruptCheckpoint(
            f"{checkpoint}: holds {sorted(found - files.keys()) or 'nothing'} beyond its manifest and lacks "
            f"{sorted(files.keys() - found) or 'nothing'} of it"
        )
    for name, (nbytes, checksum) in files.items():
        path = checkpoint / name
        if path.stat().st_size != nbytes:
            raise CorruptCheckpoint(f"{path}: {path.stat().st_size} bytes, and the manifest says {nbytes}")
        actual = sum_file(path)
        if actual != checksum:
            raise CorruptCheckpoint(f"{path}: checksum {actual:08x}, and the manifest says {checksum:08x}")
    return sum(nbytes for nbytes, _ in files.values())


def _read_manifest(path: Path, step: int) -> dict[str, tuple[int, int]]:
    try:
        content = read_bounded(path, MOST_MANIFEST_BYTES, too_large=CorruptCheckpoint)
    except OSError as error:
        raise CorruptCheckpoint(f"{path}: cannot be read: {error.strerror}; the checkpoint has no manifest") from error
    except StorageError as error:
        raise CorruptCheckpoint(str(error)) from error
    return parse_manifest(content, str(path), step)


def files_in(folder: Path) -> dict[str, Path]:
    """Every file below a folder, by its path there."""
    return {str(path.relative_to(folder)): path for path in folder.rglob("*") if not path.is_dir()}


def sum_file(path: Path) -> int:
    """The CRC32C of a file. Raises CorruptCheckpoint if it cannot be read, or is no regular file."""
    checksum = 0
    memory = bytearray(_READ_BYTES)
    try:
        with os.fdopen(open_regular(path), "rb", buffering=0) as file, memoryview(memory) as view:
            while got := file.readinto(view):
                checksum = _native.crc32c(view[:got], checksum)
    except OSError as error:
        raise CorruptCheckpoint(str(storage_error(error, path, "reading"))) from error
    except StorageError as error:
        raise CorruptCheckpoint(str(error)) from error
    return checksum
