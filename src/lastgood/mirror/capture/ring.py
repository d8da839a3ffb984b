"""The ring of frames between two processes: a file in memory that one fills and one empties.

Each side holds a lock of the kernel on one byte of the file as long as it lives, so the other sees when it has died,
however that came. The native side has the ring itself; docs/flowcheck-capture.md has its layout.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from lastgood import _native
from lastgood.errors import ConfigError, CorruptCheckpoint, HostError, LockHeld, StorageError, WaitTimeout
from lastgood.files import open_new, open_regular, storage_errors, temporary_beside
from lastgood.mirror.capture.frames import FRAME, FrameBatch, empty_batch
from lastgood.mirror.capture.memory import address_of
from lastgood.text import parse_json
from lastgood.units import MIB

__all__ = ["DEFAULT_RING", "LEAST_RING_BYTES", "RING_BYTES", "RingReader", "RingWriter", "read_report"]

DEFAULT_RING: Final = Path("/dev/shm/lastgood-frames")
RING_BYTES: Final = 64 * MIB
LEAST_RING_BYTES: Final = _native.FRAME_RING_HEADER_BYTES + _native.FRAME_RING_LEAST_DATA_BYTES
_MOST_RING_BYTES = 1 << 40
_WRITER, _READER = 0, 1
"""The byte of the file that each side locks."""
_REPORT_AT, _REPORT_BYTES = 1024, _native.FRAME_RING_HEADER_BYTES - 1024
_SLICE_S = 0.1
"""So often a side that waits looks whether the other one lives."""
_FLOCK = "hhqqi4x"


def _lock(descriptor: int, side: int, kind: int = fcntl.F_WRLCK) -> bool:
    """Take a side of the ring; False if another holds it. As long as this open file lives, it is held."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, side, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _is_locked(descriptor: int, side: int) -> bool:
    """Whether another open file holds a side."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, side, 1, 0)
    return bool(struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK)


class _Mapped:
    """The file of a ring, mapped, with one side locked."""

    def __init__(self, path: Path, descriptor: int, side: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._side = side
        self._last: dict[str, int] = {}
        self._memory = mmap.mmap(descriptor, 0)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        try:
            self._ring = _native.FrameRing(self._bytes.ctypes.data, len(self._bytes), side == _WRITER)
        except ValueError as error:
            _Mapped.close(self)
            raise StorageError(f"{path}: {error}; remove it, and start `lastgood mirror dump` again") from error

    @property
    def descriptor(self) -> int:
        """Of the file: a process that inherits it holds this side as well."""
        return self._descriptor

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return len(self._bytes)

    def other_lives(self) -> bool:
        """Whether the other side is attached now."""
        return self._descriptor >= 0 and _is_locked(self._descriptor, _READER if self._side == _WRITER else _WRITER)

    def close(self) -> None:
        """Let go of this side; safe to call twice."""
        if self._descriptor < 0:
            return
        if hasattr(self, "_ring"):
            self._last = self._ring_counters()
            del self._ring  # it has addresses in the memory
        # A batch that is still held keeps the memory, which would keep the lock.
        _lock(self._descriptor, self._side, fcntl.F_UNLCK)
        os.close(self._descriptor)
        self._descriptor = -1
        self._bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError, AttributeError):
            self._memory.close()

    def _ring_counters(self) -> dict[str, int]:
        return self._ring.counters() if self._descriptor >= 0 else self._last


class RingWriter(_Mapped):
    """The side that fills a ring. It never writes over a frame that the reader has not given back."""

    def __init__(self, path: Path, nbytes: int, link_type: int) -> None:
        """Make a ring of `nbytes` at `path`, which should lie in /dev/shm; what a dead writer left is replaced.

        Raises ConfigError for a size that cannot be, LockHeld if a writer lives there, StorageError if there is no
        room.
        """
        if not LEAST_RING_BYTES <= nbytes <= _MOST_RING_BYTES:
            raise ConfigError(f"a ring of frames has at least {LEAST_RING_BYTES} bytes, not {nbytes}")
        self._file_of(path)
        temporary = temporary_beside(path)
        with storage_errors(path, "making a ring of frames", nbytes):
            descriptor = open_new(temporary, os.O_RDWR)
            try:
                # All of it now: a file system that is full later would end both sides with SIGBUS.
                os.posix_fallocate(descriptor, 0, nbytes)
                with contextlib.closing(mmap.mmap(descriptor, nbytes)) as memory:
                    raw = np.frombuffer(memory, np.uint8)
                    _native.FrameRing.format(raw.ctypes.data, nbytes, link_type)
                    del raw
                _lock(descriptor, _WRITER)
                temporary.replace(path)
            except BaseException:
                os.close(descriptor)
                temporary.unlink(missing_ok=True)
                raise
        self._inode = os.fstat(descriptor).st_ino
        super().__init__(path, descriptor, _WRITER)

    def write(
        self, batch: FrameBatch, *, drop: bool, patience_s: float = 0.0, stop: threading.Event | None = None
    ) -> int:
        """Copy a batch in; with `drop`, frames that do not fit now are dropped, and counted.

        Without, it waits for room, until `stop` is set; raises WaitTimeout if none is made in `patience_s`. Returns how
        many frames were taken from the batch.
        """
        table = batch.table if batch.table.flags.c_contiguous else np.ascontiguousarray(batch.table)
        data, done, deadline = address_of(batch.data), 0, time.monotonic() + patience_s
        while done < len(table) and not (stop is not None and stop.is_set()):
            place = table.ctypes.data + done * table.itemsize
            count = self._ring.write(data, len(batch.data), place, len(table) - done, drop)
            done += count
            if count:
                deadline = time.monotonic() + patience_s
            elif not self._ring.wait_freed(_SLICE_S) and time.monotonic() > deadline:
                reader = "its reader takes nothing" if self.other_lives() else "it has no reader"
                raise WaitTimeout(f"{self.path}: the ring is full and {reader} for {patience_s:g} s")
        return done

    def report(self, content: Mapping[str, Any]) -> None:
        """Leave counters of all places before this ring where its reader, and a status, finds them."""
        raw = json.dumps(content, separators=(",", ":")).encode()
        if len(raw) > _REPORT_BYTES - 8:
            raise StorageError(f"{self.path}: a report of {len(raw)} bytes; at most {_REPORT_BYTES - 8} fit")
        head = struct.pack("<II", len(raw), zlib.crc32(raw))
        self._memory[_REPORT_AT : _REPORT_AT + 8 + len(raw)] = head + raw

    def wait_drained(self, patience_s: float) -> bool:
        """Wait until the reader gave everything back; False if it makes no step in `patience_s`."""
        held, deadline = self._ring_counters()["held_bytes"], time.monotonic() + patience_s
        while held and time.monotonic() < deadline:
            time.sleep(_SLICE_S / 10)
            now = self._ring_counters()["held_bytes"]
            if now != held:
                held, deadline = now, time.monotonic() + patience_s
        return not held

    def end(self) -> None:
        """Say that nothing more comes."""
        self._ring.end()

    def counters(self) -> dict[str, int]:
        """Frames offered, dropped and taken; bytes that are in it."""
        found = {name: value for name, value in self._ring_counters().items() if name != "missing_frames"}
        return {**found, "has_reader": int(self.other_lives())}

    def close(self) -> None:
        """Let go, and remove the file if it still is this ring's: a reader that has it goes on to its end."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                if self.path.stat().st_ino == self._inode:
                    self.path.unlink()
        super().close()

    @staticmethod
    def _file_of(path: Path) -> None:
        """Refuse a path that a living writer has, or that something other than a ring has."""
        with storage_errors(path, "looking for a ring of frames"):
            try:
                descriptor = open_regular(path, os.O_RDWR)
            except FileNotFoundError:
                return
            try:
                if _is_locked(descriptor, _WRITER):
                    raise LockHeld(f"{path}: another process fills this ring; end it, or name another --ring")
                start = os.pread(descriptor, 8, 0)
                if start and start != b"LGFRAMES":
                    raise StorageError(f"{path}: is no ring of frames; name another --ring, or move it away")
            finally:
                os.close(descriptor)


class RingReader(_Mapped):
    """The side that empties a ring: a FrameSource.

    It ends when its writer has ended, and when the writer has died (`writer_died`); in both cases after everything that
    is in the ring.
    """

    def __init__(self, path: Path = DEFAULT_RING, *, wait_s: float = 0.0) -> None:
        """Waits for a ring at `path` up to `wait_s`.

        Raises HostError if there is none, LockHeld if it has a reader, StorageError for anything that is no ring.
        """
        deadline = time.monotonic() + wait_s
        while True:
            with storage_errors(path, "opening a ring of frames"), contextlib.suppress(FileNotFoundError):
                descriptor = open_regular(path, os.O_RDWR)
                break
            if time.monotonic() > deadline:
                raise HostError(f"{path}: there is no ring of frames; start `lastgood mirror dump --ring {path}`")
            time.sleep(_SLICE_S / 2)
        try:
            if os.fstat(descriptor).st_size < LEAST_RING_BYTES:
                raise StorageError(f"{path}: is no ring of frames")
            if not _lock(descriptor, _READER):
                raise LockHeld(f"{path}: another process reads this ring, and it has one reader; end that one first")
        except BaseException:
            os.close(descriptor)
            raise
        super().__init__(path, descriptor, _READER)
        self.link_type = int(self._ring.link)
        self.writer_died = False
        self._frames = self._nbytes = 0
        self._table = np.empty(0, FRAME)
        self._report: dict[str, Any] = {}

    def read(self, limit: int, timeout_s: float) -> FrameBatch | None:
        """As `FrameSource.read`; a batch lies in the ring. Raises CorruptCheckpoint if something else wrote into it."""
        if self._descriptor < 0:
            return None
        if len(self._table) < limit:
            self._table = np.empty(limit, FRAME)
        deadline = time.monotonic() + timeout_s
        while True:
            # Looked at before the ring: what comes in between is seen.
            lives = self.other_lives()
            left_s = min(_SLICE_S, max(0.0, deadline - time.monotonic())) if lives else 0.0
            try:
                count = self._ring.read(self._table.ctypes.data, max(1, limit), left_s)
            except RuntimeError as error:
                raise CorruptCheckpoint(f"{self.path}: {error}; start dump and reader again") from error
            if count:
                table = self._table[:count]
                self._frames += count
                self._nbytes += int(table["captured"].sum())
                return FrameBatch(self._bytes.data, table)
            if self._ring.drained and (self._ring.ended or not lives):
                self.writer_died = not self._ring.ended
                return None
            if time.monotonic() >= deadline:
                return empty_batch()

    def give_back(self) -> None:
        """Say that the last batch is not needed any more, before the next is asked for."""
        if self._descriptor >= 0:
            self._ring.give_back()

    def counters(self) -> dict[str, int]:
        """As `FrameSource.counters`, with what the writer reports of all places before the ring."""
        ring = self._ring_counters()
        if self._descriptor >= 0:
            self._report = _report_in(memoryview(self._memory)) or self._report
        found = {
            "frames": self._frames,
            "bytes": self._nbytes,
            "ring_dropped_frames": ring["dropped_frames"],
            "ring_dropped_bytes": ring["dropped_bytes"],
            "ring_held_bytes": ring["held_bytes"],
            "ring_missing_frames": ring["missing_frames"],
            "writer_died": int(self.writer_died),
        }
        for place, values in self._report.items():
            if isinstance(values, dict):
                found |= {f"{place}_{name}": value for name, value in values.items() if isinstance(value, int)}
        return found

    def close(self) -> None:
        """Let go; what was not given back is read by the next reader."""
        if self._descriptor >= 0:
            self.counters()  # with the writer's last report
        super().close()


def read_report(path: Path = DEFAULT_RING) -> dict[str, Any]:
    """What the writer of a ring reported last, without being its reader; empty before the first time.

    Raises HostError if there is no ring, StorageError if something else is there.
    """
    with storage_errors(path, "opening a ring of frames"):
        try:
            descriptor = open_regular(path)
        except FileNotFoundError:
            raise HostError(f"{path}: there is no ring of frames; start `lastgood mirror dump --ring {path}`") from None
        try:
            start = os.pread(descriptor, _REPORT_AT + _REPORT_BYTES, 0)
        finally:
            os.close(descriptor)
    if start[:8] != b"LGFRAMES" or len(start) < _REPORT_AT + _REPORT_BYTES:
        raise StorageError(f"{path}: is no ring of frames")
    return _report_in(memoryview(start))


def _report_in(memory: memoryview) -> dict[str, Any]:
    """The report as its writer left it; empty while it is being written, or if there is none."""
    size, checksum = struct.unpack_from("<II", memory, _REPORT_AT)
    if not 0 < size <= _REPORT_BYTES - 8:
        return {}
    raw = bytes(memory[_REPORT_AT + 8 : _REPORT_AT + 8 + size])
    if zlib.crc32(raw) != checksum:
        return {}
    found = parse_json(raw, "a ring's report", most_bytes=_REPORT_BYTES, error=StorageError)
    return found if isinstance(found, dict) else {}
