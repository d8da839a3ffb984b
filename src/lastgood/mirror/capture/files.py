"""Captured frames out of pcap and pcapng files, also out of ones that were cut in the middle or damaged."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from lastgood.errors import DataError
from lastgood.files import open_regular, storage_errors
from lastgood.mirror.capture.frames import ETHERNET, FRAME, TRUNCATED, FrameBatch
from lastgood.mirror.capture.pcap import PCAP_HEADER_BYTES, PcapWalker, Row, is_pcap
from lastgood.mirror.capture.pcapng import PcapngWalker, is_pcapng

__all__ = ["CaptureFile"]

_CHUNK_BYTES = 1 << 20
_LEAST_ETHERNET = 14
"""Bytes of a header: shorter frames are given all the same, and counted."""


class CaptureFile:
    """A FrameSource of a pcap or pcapng file, which is never in memory as a whole.

    A file that ends within a frame ends with the frame before (`cut_bytes`). After a record that cannot be, nothing is
    read (`damaged`, `unread_bytes`; `damage` says why).
    """

    def __init__(self, path: Path, *, chunk_bytes: int = _CHUNK_BYTES) -> None:
        """Raises DataError if it is no such file, or of another link type; StorageError if it cannot be read."""
        self.path = path
        self._chunk_bytes = chunk_bytes
        with storage_errors(path, "opening the capture"):
            self._file = os.fdopen(open_regular(path, follow=True), "rb", buffering=0)
        self._data, self._position, self._at_end = b"", 0, False
        self._frames = self._bytes = self._truncated = self._runts = self._cut = self._unread = 0
        try:
            self._walker = self._begin()
            self._rows: list[Row] = []
            if isinstance(self._walker, PcapngWalker):
                self._read_rows(1)  # of pcapng, whose interfaces stand among its frames
                if not self._rows and self._walker.counters()["other_link_frames"]:
                    raise DataError(
                        f"{path}: none of its interfaces is Ethernet or Linux cooked (link types 1, 113, 276)"
                    )
        except BaseException:
            self._file.close()
            raise

    @property
    def link_type(self) -> int:
        """Of its first interface that can be read."""
        return self._walker.link_type or ETHERNET

    @property
    def damage(self) -> str | None:
        """Why the rest of the file could not be read; None if all was, or will be seen."""
        return self._walker.damage

    def read(self, limit: int, timeout_s: float) -> FrameBatch | None:  # noqa: ARG002 - a file is never waited for
        """As `FrameSource.read`. Raises StorageError."""
        if not self._rows:
            self._read_rows(limit)
        rows, self._rows = self._rows, []
        if not rows:
            return None
        table = np.array(rows, FRAME)
        self._frames += len(rows)
        self._bytes += int(table["captured"].sum())
        self._truncated += int(np.count_nonzero(table["flags"] & TRUNCATED))
        self._runts += int(np.count_nonzero(table["captured"] < _LEAST_ETHERNET))
        return FrameBatch(memoryview(self._data), table)

    def counters(self) -> dict[str, int]:
        """As `FrameSource.counters`."""
        return {
            "frames": self._frames,
            "bytes": self._bytes,
            "truncated": self._truncated,
            "runts": self._runts,
            "cut_bytes": self._cut,
            "damaged": int(self.damage is not None),
            "unread_bytes": self._unread,
            **self._walker.counters(),
        }

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _begin(self) -> PcapWalker | PcapngWalker:
        self._fill()
        while len(self._data) < PCAP_HEADER_BYTES and not self._at_end:
            self._fill()
        if is_pcapng(self._data):
            return PcapngWalker()
        if not is_pcap(self._data):
            raise DataError(
                f"{self.path}: is neither a pcap nor a pcapng file; capture with tcpdump -w, or mirror dump"
            )
        self._position = PCAP_HEADER_BYTES
        return PcapWalker(self._data[:PCAP_HEADER_BYTES], str(self.path))

    def _read_rows(self, limit: int) -> None:
        """The next frames; none at the end of what can be read."""
        while True:
            if self.damage is None:
                self._position = self._walker.walk(self._data, self._position, max(1, limit), self._rows)
            if self._rows:
                return
            if self.damage is not None:
                if not self._unread:
                    left = max(0, os.fstat(self._file.fileno()).st_size - self._file.tell())
                    self._unread = left + len(self._data) - self._position
                return
            if self._at_end:
                self._cut = len(self._data) - self._position
                return
            self._fill()

    def _fill(self) -> None:
        """One chunk more, after what is not read yet: bounded, since no record is larger than a reader lets it be."""
        with storage_errors(self.path, "reading the capture"):
            chunk = self._file.read(self._chunk_bytes)
        self._at_end = not chunk
        if chunk:
            self._data = self._data[self._position :] + chunk
            self._position = 0
