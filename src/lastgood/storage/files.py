"""Slot files on a disk: aligned direct I/O, and files that are made and grown in full before their first use."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path

from lastgood import _native
from lastgood.errors import StorageError
from lastgood.files import (
    PRIVATE,
    closed_after,
    open_new,
    open_regular,
    storage_error,
    storage_errors,
    sync_directory,
    temporary_beside,
)
from lastgood.storage import format as fmt

__all__ = [
    "allocate",
    "direct_io_works",
    "flush",
    "flush_file",
    "grow_slot_file",
    "make_slot_file",
    "no_room",
    "open_file",
    "read_block",
    "write_block",
]

_MOST_SHORT_READS = 8
"""Of one block, before that is taken for a failure."""
_PREFILL_STEP = 128 << 20
"""Between two steps Python sees Ctrl-C."""
_NO_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)


def open_file(path: Path, flags: int, *, direct: bool = True) -> tuple[int, bool]:
    """Open an existing file, past the page cache if `direct` and the file system can; returns (descriptor, direct).

    Raises StorageError if it is no regular file, and OSError.
    """
    if direct:
        try:
            descriptor = open_regular(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _NO_DIRECT_IO:
                raise
        else:
            # Some file systems accept the flag and refuse the first transfer.
            try:
                read_block(descriptor, 0, fmt.BLOCK)
            except OSError as error:
                os.close(descriptor)
                if error.errno not in _NO_DIRECT_IO:
                    raise
            else:
                return descriptor, True
    return open_regular(path, flags), False


def direct_io_works(directory: Path) -> bool:
    """Whether files in `directory` can be written past the page cache; tried with a file that has no name left."""
    path = temporary_beside(directory / "probe")
    try:
        descriptor = open_new(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        if error.errno in _NO_DIRECT_IO:
            path.unlink(missing_ok=True)  # some file systems make the file before they refuse the flag
            return False
        raise
    with closed_after(descriptor):
        try:
            path.unlink()
            write_block(descriptor, b"\0" * fmt.BLOCK, 0)
            read_block(descriptor, 0, fmt.BLOCK)
        except OSError as error:
            if error.errno in _NO_DIRECT_IO:
                return False
            raise
    return True


def read_block(descriptor: int, offset: int, nbytes: int) -> bytes:
    """Read up to `nbytes` at `offset` through aligned memory; fewer if the file ends."""
    padded = fmt.align_up(nbytes)
    if padded == 0:
        return b""
    with mmap.mmap(-1, padded) as memory:
        done = again = 0
        while done < padded:
            with memoryview(memory) as view, view[done:] as rest:
                got = os.preadv(descriptor, [rest], offset + done)
            if got % fmt.BLOCK and offset + done + got < os.fstat(descriptor).st_size:
                # A short read that is not the end of the file: the block that it ended in is read again.
                again += 1
                if again > _MOST_SHORT_READS:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                done += got // fmt.BLOCK * fmt.BLOCK
                continue
            done += got
            if got == 0 or got % fmt.BLOCK:
                break
        return memory[: min(done, nbytes)]


def write_block(descriptor: int, content: bytes, offset: int) -> None:
    """Write `content`, filled up with zeros to whole blocks, at `offset` through aligned memory."""
    padded = fmt.align_up(len(content))
    if padded == 0:
        return
    with mmap.mmap(-1, padded) as memory:
        memory[: len(content)] = content
        done = 0
        while done < padded:
            with memoryview(memory) as view, view[done:] as rest:
                written = os.pwrite(descriptor, rest, offset + done)
            if written < padded - done and written < fmt.BLOCK:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += written if written == padded - done else written // fmt.BLOCK * fmt.BLOCK


def flush(descriptor: int) -> None:
    """Make what was written durable. Never called again for the same bytes after it failed: they may be gone."""
    os.fdatasync(descriptor)


def flush_file(path: Path, mode: int | None = None) -> None:
    """Make all that any process wrote into a file durable; give it `mode`, if this user may. Raises StorageError."""
    with storage_errors(path, "flushing"), closed_after(open_regular(path)) as descriptor:
        if mode is not None and os.fstat(descriptor).st_mode & 0o777 != mode:
            with contextlib.suppress(PermissionError):
                os.fchmod(descriptor, mode)
        os.fsync(descriptor)


def make_slot_file(path: Path, header: fmt.SlotHeader, file_bytes: int, *, direct: bool, mode: int = PRIVATE) -> None:
    """Make a void slot file of `file_bytes`, written in full, under its final name only once it is durable.

    Raises StorageError, and leaves no temporary file, if there is no room.
    """
    temporary = temporary_beside(path)
    try:
        os.close(open_new(temporary, mode=mode))
        descriptor, _ = open_file(temporary, os.O_RDWR, direct=direct)
        with closed_after(descriptor):
            _fill(descriptor, 0, file_bytes)
            write_block(descriptor, header.encode(), fmt.HEADER_OFFSET)
            os.fsync(descriptor)
        temporary.rename(path)
        try:
            sync_directory(path.parent)
        except BaseException:
            # Under this name it would be taken for a slot whose name is durable.
            with contextlib.suppress(OSError):
                path.unlink()
            raise
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise no_room(error, path, "making a slot", file_bytes) from error
        raise


def grow_slot_file(path: Path, header: fmt.SlotHeader, file_bytes: int, *, direct: bool) -> None:
    """Void an existing slot file and make it at least `file_bytes` long, written in full and durable.

    Raises StorageError, with the file as long as it was, if there is no room.
    """
    try:
        descriptor, _ = open_file(path, os.O_RDWR, direct=direct)
        with closed_after(descriptor):
            before = os.fstat(descriptor).st_size // fmt.BLOCK * fmt.BLOCK
            if before > fmt.COMMIT_OFFSET:
                write_block(descriptor, b"\0" * fmt.BLOCK, fmt.COMMIT_OFFSET)
                flush(descriptor)
            try:
                _fill(descriptor, before, file_bytes)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, before)
                raise
            write_block(descriptor, header.encode(), fmt.HEADER_OFFSET)
            os.fsync(descriptor)
    except OSError as error:
        raise no_room(error, path, "making a slot", file_bytes) from error


def allocate(descriptor: int, begin: int, end: int) -> bool:
    """Give a file long extents; fails at once if there is no room. False if the file system cannot."""
    try:
        os.posix_fallocate(descriptor, begin, end - begin)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        return False
    return True


def _fill(descriptor: int, begin: int, end: int) -> None:
    if begin >= end:
        return
    allocate(descriptor, begin, end)
    # Written in full as well: the first write into a merely allocated block changes the file system's own records, and
    # would make every later flush pay for them.
    for offset in range(begin, end, _PREFILL_STEP):
        _native.prefill(descriptor, offset, min(_PREFILL_STEP, end - offset))


def no_room(error: OSError, path: Path, operation: str, file_bytes: int) -> StorageError:
    """The error of a file that cannot be made: all of it is what is needed, not the part at which the disk was full."""
    return storage_error(OSError(error.errno, error.strerror), path, operation, file_bytes)
