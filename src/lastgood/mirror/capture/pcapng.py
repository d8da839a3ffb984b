"""The pcapng format: blocks of a type and a length, in sections that have a byte order and interfaces of their own."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from lastgood.mirror.capture.frames import LINK_TYPES, MOST_FRAME_BYTES, OWN, TRUNCATED
from lastgood.mirror.capture.pcap import Row

__all__ = ["MOST_BLOCK_BYTES", "PcapngWalker", "interface_block", "is_pcapng", "packet_block", "section_block"]

MOST_BLOCK_BYTES: Final = 16 << 20
"""As other readers have it; a block that says it is larger is damage."""
_MOST_INTERFACES = 4096
_SECTION, _INTERFACE, _OLD_PACKET, _SIMPLE, _STATISTICS, _ENHANCED = 0x0A0D0D0A, 1, 2, 3, 5, 6
_ORDER_MAGIC = 0x1A2B3C4D
_RESOLUTION, _OFFSET = 9, 14  # options of an interface
_INTERFACE_DROP, _SYSTEM_DROP = 5, 7  # of statistics
_FLAGS, _DROPPED = 2, 4  # of a packet
_OUTBOUND = 2
_MICROSECONDS = 10**6


def is_pcapng(start: bytes) -> bool:
    """Whether a file that begins so is of this format: a section's type is the same in both byte orders."""
    return start[:4] == struct.pack("<I", _SECTION)


@dataclass(frozen=True)
class _Interface:
    link: int
    snap_bytes: int
    ticks_per_s: int = _MICROSECONDS
    offset_s: int = 0

    def time_ns(self, high: int, low: int) -> int:
        found = ((high << 32) | low) * 10**9 // self.ticks_per_s + self.offset_s * 10**9
        return found if 0 <= found < 1 << 64 else 0


class _Damage(ValueError):
    pass


class PcapngWalker:
    """Finds the frames in the bytes of such a file, wherever those are cut."""

    def __init__(self) -> None:
        self.link_type = 0
        """Of the first interface whose frames can be read; 0 before it was seen."""
        self.damage: str | None = None
        self._order = "<"
        self._interfaces: list[_Interface] = []
        self._in_section = False
        self._other_links = self._other_blocks = self._dropped = 0

    def walk(self, data: bytes, position: int, limit: int, rows: list[Row]) -> int:
        """Append up to `limit` frames from `position` on; returns where the first block that is not complete begins."""
        most = len(rows) + limit
        try:
            while len(rows) < most and len(data) - position >= 12:
                kind, size = self._head(data, position)
                if len(data) - position < size:
                    break
                if struct.unpack_from(self._order + "I", data, position + size - 4)[0] != size:
                    raise _Damage("a block's two lengths differ")
                self._block(kind, data, position + 8, position + size - 4, rows)
                position += size
        except _Damage as damage:
            self.damage = str(damage)
        return position

    def counters(self) -> dict[str, int]:
        """What the file says was dropped while it was made, and what is not read."""
        return {
            "file_dropped_frames": self._dropped,
            "other_link_frames": self._other_links,
            "other_blocks": self._other_blocks,
        }

    def _head(self, data: bytes, position: int) -> tuple[int, int]:
        kind = struct.unpack_from(self._order + "I", data, position)[0]
        if kind == _SECTION:
            for order in "<>":
                if struct.unpack_from(order + "I", data, position + 8)[0] == _ORDER_MAGIC:
                    self._order = order
                    break
            else:
                raise _Damage("a section's byte order is none")
        elif not self._in_section:
            raise _Damage("there is no section")
        size = struct.unpack_from(self._order + "I", data, position + 4)[0]
        if not 12 <= size <= MOST_BLOCK_BYTES or size % 4 != 0:
            raise _Damage(f"a block says that it has {size} bytes")
        return kind, size

    def _block(self, kind: int, data: bytes, start: int, end: int, rows: list[Row]) -> None:
        if kind == _ENHANCED:
            self._packet("IIIII", data, start, end, rows)
        elif kind == _SECTION:
            if end - start < 16 or struct.unpack_from(self._order + "H", data, start + 4)[0] != 1:
                raise _Damage("a section of another version")
            self._in_section = True
            self._interfaces = []
        elif kind == _INTERFACE:
            self._interface(data, start, end)
        elif kind == _SIMPLE:
            self._simple(data, start, end, rows)
        elif kind == _OLD_PACKET:
            self._packet("HHIIII", data, start, end, rows)
        elif kind == _STATISTICS:
            drops = [value for code, value in self._options(data, start + 12, end) if code in _DROPS]
            self._dropped += sum(struct.unpack(self._order + "Q", value)[0] for value in drops if len(value) == 8)
        else:
            self._other_blocks += 1

    def _interface(self, data: bytes, start: int, end: int) -> None:
        if end - start < 8 or len(self._interfaces) >= _MOST_INTERFACES:
            raise _Damage("an interface that cannot be")
        link, _, snap_bytes = struct.unpack_from(self._order + "HHI", data, start)
        ticks_per_s, offset_s = _MICROSECONDS, 0
        for code, value in self._options(data, start + 8, end):
            if code == _RESOLUTION and len(value) == 1:
                power = value[0] & 0x7F
                if power > (63 if value[0] & 0x80 else 19):
                    raise _Damage("times finer than any clock's")
                ticks_per_s = (2 if value[0] & 0x80 else 10) ** power
            elif code == _OFFSET and len(value) == 8:
                offset_s = struct.unpack(self._order + "q", value)[0]
        self._interfaces.append(_Interface(link, snap_bytes, ticks_per_s, offset_s))
        if link in LINK_TYPES and self.link_type == 0:
            self.link_type = link

    def _packet(self, form: str, data: bytes, start: int, end: int, rows: list[Row]) -> None:
        head = struct.Struct(self._order + form)
        if end - start < head.size:
            raise _Damage("a packet's block ends within its head")
        fields = head.unpack_from(data, start)
        number, (high, low, captured, length) = fields[0], fields[-4:]
        if len(fields) == 6 and fields[1] != 0xFFFF:  # the old form counts drops in its head
            self._dropped += fields[1]
        start += head.size
        interface = self._checked(number, captured, end - start)
        flags = TRUNCATED if captured < length else 0
        rest = start + (captured + 3) // 4 * 4
        if rest < end:
            for code, value in self._options(data, rest, end):
                if code == _FLAGS and len(value) == 4:
                    direction = struct.unpack(self._order + "I", value)[0] & 3
                    flags |= OWN if direction == _OUTBOUND else 0
                elif code == _DROPPED and len(value) == 8:
                    self._dropped += struct.unpack(self._order + "Q", value)[0]
        if interface.link not in LINK_TYPES:
            self._other_links += 1
            return
        time_ns = interface.time_ns(high, low)
        rows.append((start, captured, max(captured, length), time_ns, flags, interface.link))

    def _simple(self, data: bytes, start: int, end: int, rows: list[Row]) -> None:
        if end - start < 4 or not self._interfaces:
            raise _Damage("a simple packet without an interface, or without a length")
        length = struct.unpack_from(self._order + "I", data, start)[0]
        interface = self._interfaces[0]
        most = min(length, interface.snap_bytes or length)
        captured = min(most, end - start - 4)
        self._checked(0, captured, end - start - 4)
        if interface.link not in LINK_TYPES:
            self._other_links += 1
            return
        rows.append((start + 4, captured, length, 0, TRUNCATED if captured < length else 0, interface.link))

    def _checked(self, number: int, captured: int, room: int) -> _Interface:
        if number >= len(self._interfaces):
            raise _Damage(f"a packet of interface {number}, which was not described")
        if captured > room or captured > MOST_FRAME_BYTES:
            raise _Damage(f"a packet says that it has {captured} bytes")
        return self._interfaces[number]

    def _options(self, data: bytes, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Code and value of each option; what does not fit its block ends them, and is no damage to what is before."""
        while end - start >= 4:
            code, size = struct.unpack_from(self._order + "HH", data, start)
            if code == 0 or end - start - 4 < size:
                return
            yield code, data[start + 4 : start + 4 + size]
            start += 4 + (size + 3) // 4 * 4


_DROPS = (_INTERFACE_DROP, _SYSTEM_DROP)


def section_block() -> bytes:
    """The block that begins a file, little-endian, of unknown length."""
    return struct.pack("<IIIHHqI", _SECTION, 28, _ORDER_MAGIC, 1, 0, -1, 28)


def interface_block(link_type: int, name: str = "") -> bytes:
    """An interface whose times are nanoseconds."""
    options = struct.pack("<HHB3x", _RESOLUTION, 1, 9)
    if name:
        raw = name.encode()[:256]
        options = struct.pack("<HH", 2, len(raw)) + raw + bytes(-len(raw) % 4) + options
    size = 20 + len(options) + 4
    head = struct.pack("<IIHHI", _INTERFACE, size, link_type, 0, MOST_FRAME_BYTES)
    return head + options + struct.pack("<II", 0, size)


def packet_block(
    frame: bytes | memoryview, time_ns: int, *, length: int | None = None, interface: int = 0, own: bool = False
) -> bytes:
    """A frame in such a file: the plain twin of the native writer."""
    options = struct.pack("<HHII", _FLAGS, 4, _OUTBOUND, 0) if own else b""
    body = bytes(frame) + bytes(-len(frame) % 4) + options
    size = 28 + len(body) + 4
    on_wire = len(frame) if length is None else length
    head = struct.pack("<IIIIIII", _ENHANCED, size, interface, time_ns >> 32, time_ns & 0xFFFFFFFF, len(frame), on_wire)
    return head + body + struct.pack("<I", size)
