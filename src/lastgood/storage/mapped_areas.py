"""Two files, mapped into memory, that alternate: each checkpoint is stored over the older one.

The files have the format of slots (`lastgood.storage.format`), so all that reads slots reads them. What is different is
how they are written: by stores into a shared mapping, from any thread or device, made durable by msync.

A checkpoint goes in this order; each step is durable before the next one begins:

1. a record of kind 1 over the old commit record of the area (it is void from here on), msync;
2. the data and the table of checksums, msync;
3. a record of kind 2, msync.

The kernel may write a dirty page of a mapping at any time, so before an msync returns any part of what was stored may
be on the disk, and the rest not. That is why step 1 ends before step 2 begins: no record ever stands before data that
is not its own. A record that is caught half stored has no valid checksum, and is none. The other area is not touched
meanwhile, and holds the checkpoint before. An msync that failed is not tried again: the area stays void.

A store cannot fail; if the kernel cannot give the page, the process gets SIGBUS and dies. So files are written in
full before they are mapped, and pages are asked for (MADV_POPULATE_WRITE, Linux 5.14) before a CPU stores into them:
that fails with an error instead. A file that somebody cuts in the moment between the two still ends the process.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from lastgood.errors import CheckpointError, ConfigError, CorruptCheckpoint
from lastgood.files import ReadableBy, local_path, open_regular, storage_error, storage_errors
from lastgood.locks import FileLock
from lastgood.storage import files, reader
from lastgood.storage import format as fmt
from lastgood.storage.opening import open_directory, take_job, take_over
from lastgood.storage.reader import SlotInfo, SlotView
from lastgood.storage.write import writing_record

__all__ = ["AREAS", "AreaStore", "AreaWrite", "MappedArea"]

log = logging.getLogger("lastgood.storage")

AREAS = 2
_MS_SYNC = 4
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)  # mmap's own calls would hold the interpreter's lock
_libc.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class MappedArea:
    """A complete file, mapped shared. Offsets and lengths are bytes of the file. Raises OSError if it cannot be.

    The file must be written in full, and nobody may cut it while it is mapped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.closing: list[Callable[[], None]] = []
        """Called before the memory goes, by `close`: for devices that know its address."""
        self._descriptor = open_regular(path, os.O_RDWR)
        try:
            self._opened = os.fstat(self._descriptor)
            self.nbytes = self._opened.st_size
            self.memory = mmap.mmap(self._descriptor, self.nbytes)
        except BaseException:
            os.close(self._descriptor)
            raise
        anchor = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(anchor)
        del anchor  # a buffer that is exported would keep the mapping from being closed

    def is_whole(self) -> bool:
        """Whether the file is still under its name and not cut. Raises OSError if it is gone."""
        named = self.path.stat()
        return os.path.samestat(named, self._opened) and named.st_size >= self.nbytes

    def populate(self, offset: int, nbytes: int) -> None:
        """Have the kernel give the pages of a range for storing. Raises OSError if a store would get SIGBUS."""
        if _libc.madvise(*self._pages(offset, nbytes), _MADV_POPULATE_WRITE) == 0:
            return
        number = ctypes.get_errno()
        if number == errno.EINVAL:  # a kernel before 5.14
            return
        # EFAULT: the file system refused a page. It is full, or cannot read what was there, or the file was cut.
        raise OSError(errno.EIO if number == errno.EFAULT else number, os.strerror(number))

    def store(self, content: bytes, offset: int) -> None:
        """Store bytes from the CPU. Raises OSError."""
        self.populate(offset, len(content))
        self.memory[offset : offset + len(content)] = content

    def redirty(self, offset: int, nbytes: int) -> None:
        """Store one byte of each page again, from the CPU: the kernel does not see stores of a device.

        A page that it does not know to have changed is not written by msync. To be called when the device's stores
        have ended.
        """
        self.populate(offset, nbytes)
        begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
        pages = np.frombuffer(self.memory, dtype=np.uint8)[begin : offset + nbytes : mmap.PAGESIZE]
        pages[:] = pages.copy()

    def flush(self, offset: int, nbytes: int) -> None:
        """Make what was stored in a range durable. Raises OSError; never called again for the same stores then."""
        if _libc.msync(*self._pages(offset, nbytes), _MS_SYNC) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def close(self) -> None:
        """Unmap. Safe to call twice."""
        if not self.memory.closed:
            while self.closing:
                self.closing.pop()()
            self.memory.close()
            os.close(self._descriptor)

    def _pages(self, offset: int, nbytes: int) -> tuple[int, int]:
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"{self.path}: {nbytes} bytes at {offset} are outside of {self.nbytes}")
        begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
        return self.address + begin, offset + nbytes - begin


@dataclass
class _Area:
    """What the store knows of one area file."""

    number: int
    path: Path
    mapped: MappedArea | None = None
    info: SlotInfo | None = None


class AreaStore:
    """The two areas of a directory, for one process and one thread. Use `SlotView` for reading.

    Opening takes the directory's lock, removes what a killed process left half made, makes durable what it left in the
    page cache, and goes on after the highest sequence and incarnation found. One checkpoint always stays: the newest
    complete one, or `restored`, the one that this incarnation began with. If it is not `restored`, all of it is read
    and checked first, since the other one is about to be overwritten.

    Args:
        directory: made if it is not there.
        chunk_bytes: unit of checksums, a multiple of 4096.
        restored: the checkpoint that was read and found good, if any was.
        readable_by: who may read what is made here; area files that are there get that mode too.

    Raises:
        LockHeld: another process has the directory open; names it.
        MismatchError: the directory, or an area in it, is another job's or of another format version; names both.
        StorageError: the operating system refused; names file and operation.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        chunk_bytes: int,
        restored: SlotInfo | None = None,
        readable_by: ReadableBy = ReadableBy.OWNER,
    ) -> None:
        if chunk_bytes <= 0 or chunk_bytes % fmt.BLOCK:
            raise ConfigError(f"chunk_bytes must be a positive multiple of {fmt.BLOCK}: {chunk_bytes}")
        self.directory = local_path(directory)
        self.chunk_bytes = chunk_bytes
        self.readable_by = readable_by
        self._areas = [_Area(number, self.directory / fmt.slot_name(number)) for number in range(AREAS)]
        self._stays: SlotInfo | None = None
        self._lock = FileLock(
            self.directory / fmt.LOCK_FILE,
            f"checkpoint directory {self.directory}",
            mode=readable_by.file_mode,
        )
        with storage_errors(self.directory, "opening the directory"):
            try:
                self._open(restored)
            except BaseException:
                self._lock.release()
                raise

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called yet."""
        return self._lock.held

    def close(self) -> None:
        """Unmap the areas and give the lock back. Safe to call twice."""
        for area in self._areas:
            self._unmap(area)
        self._lock.release()

    def protect(self, info: SlotInfo) -> None:
        """The checkpoint that training goes on from: it stays until a newer one is durable."""
        self._stays = info

    def reserve(self, capacity_bytes: int) -> None:
        """Make sure that an area can take a stream of `capacity_bytes`, written in full beforehand.

        The area whose checkpoint stays is left alone, and grows when its turn comes. Raises StorageError, naming path
        and bytes, if there is no room; the checkpoint that stays is untouched.
        """
        file_bytes = fmt.stream_layout(capacity_bytes, self.chunk_bytes)[2]
        if self._stays is not None and not self._stays.path.exists():
            # Somebody removed it. If the other one is still there, that is the one that must stay now.
            others = [area.info for area in self._areas if area.info not in (None, self._stays) and area.path.exists()]
            self._stays = others[0] if others else self._stays
        for area in self._areas:
            if self._stays is None or self._stays.path != area.path:
                self._make_room(area, file_bytes)

    def begin(self, step: int, stream_bytes: int) -> AreaWrite:
        """Make the area whose turn it is void, durably, for a checkpoint of `stream_bytes` after `step` steps.

        Call `reserve` first. Raises StorageError; the other area stays.
        """
        if not self.is_open:
            raise CheckpointError(f"{self.directory}: the areas are closed")
        free = [area for area in self._areas if self._stays is None or self._stays.path != area.path]
        area = min(free, key=lambda area: -1 if area.info is None else area.info.sequence)
        if area.mapped is None or area.mapped.nbytes < fmt.stream_layout(stream_bytes, self.chunk_bytes)[2]:
            raise CheckpointError(f"{area.path}: too small for {stream_bytes} bytes; call reserve first")
        sequence = self._next_sequence
        self._next_sequence += 1
        area.info = None
        write = AreaWrite(self, area.path, area.number, area.mapped, step, sequence, stream_bytes)
        write.void()
        return write

    def committed(self, info: SlotInfo) -> None:
        """Called by an AreaWrite: from now on this checkpoint stays, and the other area is free."""
        self._areas[info.slot].info = info
        self._stays = info

    # -- inside ----------------------------------------------------------------------------------------------------

    def _open(self, restored: SlotInfo | None) -> None:
        open_directory(self.directory, self._lock, self.readable_by)
        mode = self.readable_by.file_mode
        advice = "areas are of jobs of one rank; use another directory"
        self.job = take_job(self.directory, fmt.Job(b""), mode, advice)
        statuses, _, self.incarnation, self._next_sequence = take_over(self.directory, self.job, mode)
        for status in statuses:
            if status.slot < AREAS:
                self._areas[status.slot].info = status.info
        self._stays = self._choose(reader.newest_first(statuses), restored)

    def _choose(self, whole: list[SlotInfo], restored: SlotInfo | None) -> SlotInfo | None:
        """The checkpoint that stays: the restored one, or the newest of which every checksum holds."""
        if restored in whole:
            return restored
        view = SlotView(self.directory)
        for info in whole:
            try:
                view.verify(info)
            except CorruptCheckpoint as error:
                log.warning("%s; the checkpoint before it stays instead", error)
            else:
                return info
        return None

    def _make_room(self, area: _Area, file_bytes: int) -> None:
        """Make, grow and map an area, if need be. What was mapped before is unmapped: a file that is cut ends us."""
        header = fmt.SlotHeader(self.job.job_id, area.number)
        try:
            if area.mapped is not None and area.mapped.nbytes >= file_bytes and area.mapped.is_whole():
                return
            self._unmap(area)
            size = area.path.stat().st_size
        except FileNotFoundError:
            self._unmap(area)
            size = None
        except OSError as error:
            raise storage_error(error, area.path, "looking at an area") from error
        # Through the page cache, where the pages are wanted next.
        if size is None:
            files.make_slot_file(area.path, header, file_bytes, direct=False, mode=self.readable_by.file_mode)
            area.info = None
        elif size < file_bytes or not self._has_header(area, header):
            area.info = None
            files.grow_slot_file(area.path, header, max(file_bytes, size), direct=False)
        with storage_errors(area.path, "mapping", file_bytes):
            area.mapped = MappedArea(area.path)

    def _has_header(self, area: _Area, header: fmt.SlotHeader) -> bool:
        try:
            with os.fdopen(open_regular(area.path), "rb") as file:
                return fmt.SlotHeader.decode(file.read(fmt.BLOCK)) == header
        except (fmt.RecordError, fmt.OtherVersionError):
            return False

    def _unmap(self, area: _Area) -> None:
        if area.mapped is not None:
            area.mapped.close()
            area.mapped = None


@dataclass(eq=False)
class AreaWrite:
    """One checkpoint on its way into an area. Made by `AreaStore.begin`; given up by not committing it.

    The caller stores `padded_bytes` at `address` (a part of `mapped`, from `data_offset` on): the stream, and zeros
    after it. It gives the checksums of the chunks.
    """

    _store: AreaStore
    path: Path
    _area: int
    mapped: MappedArea
    step: int
    sequence: int
    stream_bytes: int
    data_offset: ClassVar[int] = fmt.DATA_OFFSET

    @property
    def padded_bytes(self) -> int:
        """The stream, filled up to whole blocks."""
        return fmt.align_up(self.stream_bytes)

    @property
    def address(self) -> int:
        """Where the stream's first byte belongs in memory."""
        return self.mapped.address + self.data_offset

    @property
    def bytes_written(self) -> int:
        """Bytes that a complete write of this stream sends to the disk."""
        return fmt.written_bytes(self.stream_bytes, self._store.chunk_bytes)

    def void(self) -> None:
        """Step 1: the area's old checkpoint is no more, also after a power cut. Raises StorageError."""
        with storage_errors(self.path, "voiding the area", fmt.BLOCK):
            self._put_record(writing_record(self._store, self.step, self.sequence, self.stream_bytes))

    def commit(self, meta_offset: int, meta_bytes: int, layout_digest: bytes, checksums: list[int]) -> SlotInfo:
        """Steps 2 and 3, when all stores have ended: `checksums` are those of the chunks, in order.

        Raises StorageError, with the area void and the other one as it was.
        """
        table_offset, table_bytes, _ = fmt.stream_layout(self.stream_bytes, self._store.chunk_bytes)
        table = np.asarray(checksums, dtype="<u4").tobytes()
        if len(table) != table_bytes:
            raise CheckpointError(f"{self.path}: {len(checksums)} checksums instead of {table_bytes // 4}")
        record = writing_record(self._store, self.step, self.sequence, self.stream_bytes)
        record = record.committed(meta_offset, meta_bytes, layout_digest, table)
        with storage_errors(self.path, "making it durable", self.padded_bytes):
            self.mapped.store(table, table_offset)
            self.mapped.flush(self.data_offset, table_offset + table_bytes - self.data_offset)
            if not self.mapped.is_whole():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            self._put_record(record)
        info = SlotInfo(self.path, self._area, record)
        self._store.committed(info)
        return info

    def _put_record(self, record: fmt.CommitRecord) -> None:
        self.mapped.store(record.encode(), fmt.COMMIT_OFFSET)
        self.mapped.flush(fmt.COMMIT_OFFSET, fmt.RECORD_BYTES)
