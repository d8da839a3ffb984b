"""Files at names that others may have made: opened only if they are what they should be, made new, or replaced.

A name that Lastgood owns (a lock, a slot, a job file, an address, a token) may have become a FIFO, a device or a
symbolic link by the time it is opened. Opening a FIFO waits forever, and a link leads to a file that is not ours.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from pathlib import Path

from lastgood.errors import StorageError
from lastgood.units import format_bytes

__all__ = [
    "PRIVATE",
    "open_new",
    "open_regular",
    "read_bounded",
    "remove_temporary_files",
    "storage_error",
    "sync_directory",
    "temporary_beside",
    "write_atomically",
]

PRIVATE = 0o600
"""The mode of everything that can hold a secret or a state: its owner alone reads it."""
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.lastgood-tmp")
_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISCHR, "a character device"),
)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open an existing file that Lastgood made; returns its descriptor.

    Never waits, and follows no symbolic link in the last part of `path`. Raises StorageError if something else than a
    regular file is there, and OSError as `os.open` does.
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        # A link (ELOOP), a socket or a FIFO that nobody reads (ENXIO), a directory to write (EISDIR).
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _wrong_kind(path, path.lstat().st_mode) from error
        raise
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise _wrong_kind(path, mode)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _wrong_kind(path: Path, mode: int) -> StorageError:
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "no regular file")
    return StorageError(f"{path}: is {kind}, and a regular file belongs there; move it away")


def open_new(path: Path, flags: int = os.O_WRONLY, mode: int = PRIVATE) -> int:
    """Make a file that must not be there yet, with exactly `mode` whatever the umask; returns its descriptor.

    Raises OSError as `os.open` does (FileExistsError also for a symbolic link, wherever it leads).
    """
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE)
    if mode != PRIVATE:
        os.fchmod(descriptor, mode)
    return descriptor


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """The content of a small file that Lastgood made.

    Raises StorageError if it is larger than `most_bytes` or no regular file, and OSError as `os.open` does.
    """
    with open(open_regular(path), "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise StorageError(f"{path}: is larger than {most_bytes} bytes, the most that such a file may have")
    return content


def temporary_beside(path: Path) -> Path:
    """A name beside `path` that nobody can guess and that `remove_temporary_files` knows."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.lastgood-tmp")


def remove_temporary_files(directory: Path) -> list[Path]:
    """Remove regular files of `temporary_beside` that a killed process left. Only under the directory's lock."""
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        left = sorted(
            Path(entry.path)
            for entry in entries
            if _TEMPORARY.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
        )
        for path in left:
            path.unlink(missing_ok=True)
        return left
    return []


def write_atomically(path: Path, content: bytes, *, mode: int = PRIVATE) -> None:
    """Make or replace a small file: complete and durable, or not at all. Raises OSError."""
    temporary = temporary_beside(path)
    try:
        with open(open_new(temporary, mode=mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make names that were made, changed or removed in `directory` durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that cannot sync a directory keep its names by themselves
            raise
    finally:
        os.close(descriptor)


def storage_error(error: OSError, path: Path, operation: str, nbytes: int | None = None) -> StorageError:
    """The StorageError for what the operating system refused, with a hint where one is known."""
    # The native side knows more closely what failed.
    operation = getattr(error, "operation", operation)
    nbytes = getattr(error, "nbytes", nbytes) or nbytes
    offset = getattr(error, "offset", None)
    amount = "" if nbytes is None else f" of {nbytes} bytes ({format_bytes(nbytes)})"
    where = "" if offset is None else f" at offset {offset}"
    reason = os.strerror(error.errno) if error.errno else str(error)
    hint = {
        errno.ENOSPC: f"; free {format_bytes(nbytes or 0)} on that file system or use another directory",
        errno.EDQUOT: "; raise the quota or use another directory",
        errno.EFBIG: "; raise the file size limit (ulimit -f)",
        errno.EACCES: "; check the permissions of the directory and its parents",
        errno.EPERM: "; check the permissions of the directory and its parents",
        errno.EROFS: "; the file system is read-only, use another directory",
        errno.EIO: "; the device failed, look into the kernel log",
        errno.ENOENT: "; was it removed or unmounted?",
    }.get(error.errno or 0, "")
    refused = StorageError(f"{path}: {operation}{amount}{where} failed: {reason}{hint}")
    refused.errno = error.errno
    return refused
