"""The pcap format: a header of 24 bytes, then records, in either byte order, with micro- or nanoseconds."""

from __future__ import annotations

import struct
from typing import Final

from lastgood.errors import DataError
from lastgood.mirror.capture.frames import LINK_TYPES, MOST_FRAME_BYTES, TRUNCATED

__all__ = ["PCAP_HEADER_BYTES", "PcapWalker", "Row", "is_pcap"]

Row = tuple[int, int, int, int, int, int]
"""As FRAME: offset, captured, length, time_ns, flags, link."""

PCAP_HEADER_BYTES: Final = 24
_MICROSECONDS, _NANOSECONDS = 0xA1B2C3D4, 0xA1B23C4D
_RECORD_BYTES = 16


def is_pcap(start: bytes) -> bool:
    """Whether a file that begins so is of this format."""
    return any(
        start[:4] == struct.pack(order + "I", magic) for order in "<>" for magic in (_MICROSECONDS, _NANOSECONDS)
    )


class PcapWalker:
    """Finds the frames in the bytes of such a file, wherever those are cut."""

    def __init__(self, header: bytes, name: str) -> None:
        """From the first `PCAP_HEADER_BYTES` of the file. Raises DataError."""
        if len(header) < PCAP_HEADER_BYTES:
            raise DataError(f"{name}: ends within the header of a pcap file; there is no frame in it")
        order = "<" if header[:4] in (struct.pack("<I", _MICROSECONDS), struct.pack("<I", _NANOSECONDS)) else ">"
        magic, major, _, _, _, _, link = struct.unpack(order + "IHHiIII", header)
        if major != 2:
            raise DataError(f"{name}: is a pcap file of version {major}; version 2 is read")
        self.link_type = link & 0xFFFF  # above it stand flags of checksums at the end of frames
        if self.link_type not in LINK_TYPES:
            raise DataError(
                f"{name}: its frames are of link type {self.link_type}; Ethernet (1) and Linux cooked (113, 276) are "
                f"read: capture again on an Ethernet interface"
            )
        self._scale = 1000 if magic == _MICROSECONDS else 1
        self._record = struct.Struct(order + "IIII")
        self.damage: str | None = None
        """Why nothing after this can be read."""

    def walk(self, data: bytes, position: int, limit: int, rows: list[Row]) -> int:
        """Append up to `limit` frames from `position` on; returns where the first one that is not complete begins."""
        unpack, scale, link, end = self._record.unpack_from, self._scale, self.link_type, len(data)
        for _ in range(limit):
            if end - position < _RECORD_BYTES:
                break
            seconds, fraction, captured, length = unpack(data, position)
            if captured > MOST_FRAME_BYTES:
                self.damage = f"a record says that it has {captured} bytes"
                break
            start = position + _RECORD_BYTES
            if end - start < captured:
                break
            flags = TRUNCATED if captured < length else 0
            rows.append((start, captured, max(captured, length), seconds * 10**9 + fraction * scale, flags, link))
            position = start + captured
        return position

    def counters(self) -> dict[str, int]:
        """Nothing is counted here that the reader does not count."""
        return {}
