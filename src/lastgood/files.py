"""Files at names that others may have made: opened only if they are what they should be, made new, or replaced.

A name that Lastgood owns (a lock, a slot, a job file, an address, a token) may have become a FIFO, a device or a
symbolic link by the time it is opened. Opening a FIFO waits forever, and a link leads to a file that is not ours. A
directory may be reached through links, which are its owner's choice; only the last part of a file's path must not be
one.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from lastgood.errors import ConfigError, StorageError
from lastgood.locations import Location
from lastgood.units import format_bytes

__all__ = [
    "PRIVATE",
    "PUBLIC",
    "TEMPORARY_SUFFIX",
    "ReadableBy",
    "check_regular",
    "closed_after",
    "entries_of",
    "local_path",
    "make_directory",
    "open_log",
    "open_new",
    "open_regular",
    "read_bounded",
    "read_end",
    "readers_of",
    "remove_temporary_files",
    "remove_tree",
    "storage_error",
    "storage_errors",
    "sync_directory",
    "temporaries_beside",
    "temporary_beside",
    "temporary_files",
    "write_atomically",
    "write_result",
]

PRIVATE = 0o600
"""The mode of everything that can hold a secret or a state: its owner alone reads it."""
PUBLIC = 0o644
"""The mode of results, which are for everyone."""
TEMPORARY_SUFFIX = ".lastgood-tmp"
_MOST_STEM_BYTES = 200
"""Of a name, in a temporary one: file systems take 255 bytes in all."""
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.lastgood-tmp", re.DOTALL)
_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISCHR, "a character device"),
)


class ReadableBy(str, enum.Enum):
    """Who may read what is written, beside root; only its owner may ever change it."""

    OWNER = "owner"
    GROUP = "group"
    ALL = "all"

    @property
    def file_mode(self) -> int:
        """0600, 0640 or 0644."""
        return {"owner": PRIVATE, "group": 0o640, "all": PUBLIC}[self.value]

    @property
    def directory_mode(self) -> int:
        """0700, 0750 or 0755."""
        return {"owner": 0o700, "group": 0o750, "all": 0o755}[self.value]


def readers_of(readable_by: ReadableBy | str, whose: str) -> ReadableBy:
    """The option `readable_by` of `whose`. Raises ConfigError for anything else than owner, group or all."""
    try:
        return ReadableBy(readable_by)
    except ValueError:
        known = ", ".join(one.value for one in ReadableBy)
        raise ConfigError(f"{whose}: readable_by must be one of {known}, not {readable_by!r}") from None


def local_path(path: Path | str) -> Path:
    """`path` as it is from here on, wherever the process goes (`os.chdir`). Raises ConfigError for a URL."""
    return Location.parse(path).path


def open_regular(path: Path, flags: int = os.O_RDONLY, *, follow: bool = False) -> int:
    """Open an existing file; returns its descriptor.

    Never waits, and follows no symbolic link in the last part of `path`, unless told to `follow` one (for a file that a
    user named, which is not ours). Raises StorageError if something else than a regular file is there, and OSError as
    `os.open` does.
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    except OSError as error:
        # A link (ELOOP), a socket or a FIFO that nobody reads (ENXIO), a directory to write (EISDIR).
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _wrong_kind(path, (path.stat() if follow else path.lstat()).st_mode) from error
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


def check_regular(path: Path, *, follow: bool = False) -> None:
    """Raise as `open_regular` does, before something else opens `path`."""
    os.close(open_regular(path, follow=follow))


def _wrong_kind(path: Path, mode: int) -> StorageError:
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "no regular file")
    return StorageError(f"{path}: is {kind}, and a regular file belongs there; move it away")


def open_new(path: Path, flags: int = os.O_WRONLY, mode: int | None = PRIVATE) -> int:
    """Make a file that must not be there yet, with exactly `mode` (None: as the umask has it); returns its descriptor.

    Raises OSError as `os.open` does (FileExistsError also for a symbolic link, wherever it leads).
    """
    flags |= os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o666 if mode is None else PRIVATE)
    if mode is not None and mode != PRIVATE:
        os.fchmod(descriptor, mode)
    return descriptor


def open_log(path: Path) -> BinaryIO:
    """An empty log to write, for its owner alone: a program may print anything. An older one under its name is emptied.

    Raises StorageError if something else than a regular file is there, and OSError.
    """
    try:
        descriptor = open_new(path)
    except FileExistsError:
        descriptor = open_regular(path, os.O_WRONLY)
        with contextlib.suppress(PermissionError):  # another user's, who let this one write
            os.fchmod(descriptor, PRIVATE)
        os.ftruncate(descriptor, 0)
    return os.fdopen(descriptor, "wb")


def read_bounded(
    path: Path, most_bytes: int, *, follow: bool = False, too_large: type[Exception] = StorageError
) -> bytes:
    """The content of a small file.

    Raises `too_large` if it is larger than `most_bytes`, StorageError if it is no regular file (`open_regular`), and
    OSError as `os.open` does.
    """
    with os.fdopen(open_regular(path, follow=follow), "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise too_large(f"{path}: is larger than {most_bytes} bytes, the most that such a file may have")
    return content


def read_end(path: Path, most_bytes: int) -> bytes:
    """The last bytes of a file, of a log for instance. Raises as `open_regular`."""
    with os.fdopen(open_regular(path), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
        return file.read(most_bytes)


def temporary_beside(path: Path, token: bytes | None = None) -> Path:
    """A name beside `path` that nobody can guess and that `remove_temporary_files` knows.

    Several processes that share one temporary name share the 8 bytes of `token`.
    """
    return path.with_name(f"{_temporary_start(path)}{(token or secrets.token_bytes(8)).hex()}{TEMPORARY_SUFFIX}")


def temporaries_beside(path: Path) -> list[Path]:
    """What has a name that `temporary_beside` gave for this very `path`. Raises OSError."""
    start = _temporary_start(path)
    with contextlib.suppress(FileNotFoundError), os.scandir(path.parent) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(start) and _TEMPORARY.fullmatch(entry.name)]
        length = len(start) + 16 + len(TEMPORARY_SUFFIX)
        return [path.with_name(name) for name in sorted(names) if len(name) == length]
    return []


def _temporary_start(path: Path) -> str:
    return f".{os.fsdecode(os.fsencode(path.name)[:_MOST_STEM_BYTES])}."


def temporary_files(directory: Path, older: re.Pattern[str] | None = None) -> list[Path]:
    """What a killed process left under names of `temporary_beside`: files, and directories; no links.

    `older` are complete names that earlier versions gave. What a living process is writing is among them: only under
    the directory's lock is it nobody's. Raises OSError.
    """

    def ours(name: str) -> bool:
        return bool(_TEMPORARY.fullmatch(name) or (older and older.fullmatch(name)))

    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        left = sorted(Path(entry.path) for entry in entries if ours(entry.name) and not entry.is_symlink())
        return [path for path in left if path.is_dir() or path.is_file()]
    return []


def remove_temporary_files(directory: Path, older: re.Pattern[str] | None = None) -> list[Path]:
    """Remove what a killed process left, see `temporary_files`: files, and directories with all in them.

    Nothing else is touched, and no link is followed. Only under the directory's lock. Raises OSError.
    """
    left = temporary_files(directory, older)
    for path in left:
        if path.is_dir():
            remove_tree(path)
        else:
            path.unlink(missing_ok=True)
    return left


def entries_of(directory: Path) -> list[Path]:
    """What lies in a directory; nothing if there is none.

    Raises StorageError if it cannot be read, or is none.
    """
    with storage_errors(directory, "reading the directory"):
        try:
            return list(directory.iterdir())
        except FileNotFoundError:
            return []


def remove_tree(path: Path) -> None:
    """Remove a file, or a directory with all in it, as far as that is possible. Follows no link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes, *, mode: int | None = PRIVATE) -> None:
    """Make or replace a small file: complete and durable, or not at all. Raises OSError."""
    temporary = temporary_beside(path)
    try:
        with os.fdopen(open_new(temporary, mode=mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_result(path: Path, content: bytes, *, mode: int = PUBLIC) -> None:
    """As `write_atomically`, in a folder that is made if need be. Raises StorageError with the bytes needed."""
    with storage_errors(path, "writing", len(content)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content, mode=mode)


def make_directory(directory: Path, mode: int | None = None) -> None:
    """Make a directory and its parents, if they are not there, so that a power cut loses none of their names.

    It has exactly `mode` (None: as the umask has it); its parents are as the umask has them, and what was there stays
    as it is. The name of the lowest one that was there is flushed as well: a process that was killed may have just made
    it. Raises OSError.
    """
    directory = directory.absolute()
    missing = []
    there = directory
    while not there.exists():
        missing.append(there)
        there = there.parent
    with contextlib.suppress(PermissionError):  # then this user cannot have made it
        sync_directory(there.parent)
    for path in reversed(missing):
        try:
            if path == directory and mode is not None:
                path.mkdir(0o700)
                if mode != 0o700:  # and what the file system gives its directories (setgid) stays
                    path.chmod(mode | path.stat().st_mode & stat.S_ISGID)
            else:
                path.mkdir()
        except FileExistsError:
            if not path.is_dir():
                raise
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make names that were made, changed or removed in `directory` durable. Raises OSError."""
    with closed_after(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as descriptor:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # file systems that cannot sync a directory keep its names by themselves
                raise


@contextlib.contextmanager
def closed_after(descriptor: int) -> Iterator[int]:
    """Close a descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def storage_errors(path: Path, operation: str, nbytes: int | None = None) -> Iterator[None]:
    """While inside, an OSError becomes the StorageError that `storage_error` makes of it."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path, operation, nbytes) from error


def storage_error(error: OSError, path: Path, operation: str, nbytes: int | None = None) -> StorageError:
    """The StorageError for what the operating system refused, with a hint if one is known."""
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
