"""TCP reassembly of mirrored connections, both directions, by sequence numbers.

A direction's bytes are handed on in order, once: the first copy wins. What is missing stays a hole until it is *final*:
when the other direction acknowledges beyond it (the receiver has these bytes, so nobody sends them again), when the
connection ends, or, if the other direction is not captured, after a count of later bytes. `native/src/mirror` does the
same at speed.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np

from lastgood.mirror.streams.ip import TCP, IpPacket, Left
from lastgood.units import MIB

__all__ = [
    "Bytes",
    "Connection",
    "Half",
    "Reader",
    "Segment",
    "Streams",
    "TcpSettings",
    "in_memory",
    "is_changed",
    "tcp_segment",
]

FIN: Final = 1
SYN: Final = 2
RST: Final = 4
ACK: Final = 16
_FARTHEST = 1 << 30
"""No window is larger: what lies farther ahead or back does not belong to the connection as it is known."""
_STORED_BYTES: Final = 128
"""What keeping a segment takes beside its bytes."""
_HEADER = struct.Struct(">HHIIBB")
_CHECKSUM, _CHECKSUM_AT = struct.Struct(">H"), 16


@dataclass(frozen=True)
class TcpSettings:
    """How much memory reassembly may take, and when it stops waiting."""

    keep_bytes: int = 64 * MIB
    """Of one direction, after a hole; more makes the hole final."""
    keep_all_bytes: int = 512 * MIB
    """Of all directions together."""
    blind_bytes: int = 4 * MIB
    """Bytes after a hole that make it final if the other direction is not captured."""
    max_connections: int = 4096
    """The one that was silent for longest is given up for the next one."""


class Segment(NamedTuple):
    """A TCP segment: its header, and where its payload lies in the frame."""

    source_port: int
    destination_port: int
    sequence: int
    acknowledgement: int
    flags: int
    begin: int
    end: int
    """Of the payload as sent; bytes from `captured` on are not there."""
    captured: int


class Bytes(NamedTuple):
    """Bytes in memory that stays until the next batch."""

    view: memoryview
    address: int


def in_memory(content: bytes) -> Bytes:
    """Bytes with their address; the view keeps them there."""
    return Bytes(memoryview(content), int(np.frombuffer(content, np.uint8).ctypes.data) if content else 0)


class Reader(Protocol):
    """Takes one direction of a connection, in order."""

    def data(self, content: Bytes, time_ns: int, /) -> None:
        """The next bytes."""

    def hole(self, nbytes: int, /) -> None:
        """The next bytes will never come."""

    def end(self) -> None:
        """Nothing more comes."""


def tcp_segment(frame: memoryview, packet: IpPacket) -> Segment | Left:
    """Read the TCP header of an IP packet."""
    at = packet.begin
    if packet.captured < at + 20:
        return Left.SHORT if packet.end >= at + 20 else Left.DAMAGED
    source, destination, sequence, acknowledgement, size, flags = _HEADER.unpack_from(frame, at)
    begin = at + (size >> 4) * 4
    if begin < at + 20 or begin > packet.end:
        return Left.DAMAGED
    return Segment(
        source, destination, sequence, acknowledgement, flags, begin, packet.end, max(begin, packet.captured)
    )


def is_changed(frame: memoryview, packet: IpPacket) -> bool:
    """Whether the checksum of a TCP segment that is there to its end says that it was changed on the way (RFC 9293).

    A sender that leaves the sum to its network card sends zero, or the sum of the pseudo-header alone (Linux): a frame
    that is mirrored before the card, or was made of several, says nothing of itself. A network card that joins
    segments without a new sum (LRO) must not do so.
    """
    (given,) = _CHECKSUM.unpack_from(frame, packet.begin + _CHECKSUM_AT)
    if packet.captured < packet.end or not given:
        return False
    size = packet.end - packet.begin
    ends = _folded(_words(packet.source) + _words(packet.destination) + TCP)
    pseudo = _folded(ends + (size & 0xFFFF) + (size >> 16))
    if given in (ends, pseudo):
        return False
    return _folded(pseudo + _words(frame[packet.begin : packet.end])) != 0xFFFF


def _words(content: bytes | memoryview) -> int:
    """Sum of the big-endian words of 16 bits, the last one filled up with zero."""
    even = len(content) & ~1
    total = int(np.frombuffer(content[:even], ">u2").sum(dtype=np.uint64))
    return total + (content[-1] << 8 if len(content) & 1 else 0)


def _folded(total: int) -> int:
    """In ones' complement."""
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


class _Stored(NamedTuple):
    begin: int
    content: bytes
    time_ns: int


class Half:
    """One direction of a connection. Positions count bytes; 0 is the first one that this side saw or should have."""

    def __init__(self) -> None:
        self.reader: Reader | None = None
        self.seen = False
        """Whether a frame of this direction was captured."""
        self.known = False
        """Whether its sequence numbers are known."""
        self.next = 0
        """All before it was handed on, as bytes or as a hole."""
        self.acknowledged = 0
        self.first: int | None = None
        """The sequence number of a SYN, if there was one."""
        self.fin: int | None = None
        self.stored: list[_Stored] = []
        self.stored_bytes = 0
        self.given: list[tuple[int, memoryview]] = []
        """Handed on out of the present batch: a second copy is compared with it."""
        self._base = 0
        """The sequence number of position 0, modulo 2^32."""

    def begin_at(self, sequence: int) -> None:
        """The byte with this sequence number is the first one."""
        self._base = sequence
        self.next = self.acknowledged = 0
        self.known = True

    def position(self, sequence: int) -> int:
        """Of a sequence number, near `next`; may be negative."""
        ahead = (sequence - self._base - self.next) & 0xFFFFFFFF
        return self.next + (ahead if ahead < 1 << 31 else ahead - (1 << 32))


Key = tuple[bytes, int, bytes, int]


class Connection:
    """Two directions. Side 0 is the one of which a frame was seen first, or that sent the SYN."""

    def __init__(self, key: Key) -> None:
        self.key = key
        """Address and port of side 0, then of side 1."""
        self.halves = (Half(), Half())
        self.opened_by: int | None = None
        """The side that opened it, if that was seen."""


class Opener(Protocol):
    """Gives a new connection its readers."""

    def open(self, connection: Connection) -> None:
        """Set the `reader` of both halves."""


class Streams:
    """All connections of a capture."""

    def __init__(self, opener: Opener, settings: TcpSettings | None = None) -> None:
        self.settings = settings or TcpSettings()
        self.counts: Counter[str] = Counter()
        self._opener = opener
        self._connections: OrderedDict[Key, Connection] = OrderedDict()
        self._stored_bytes = 0
        self._touched: set[Half] = set()

    def new_batch(self) -> None:
        """Memory of the frames before is gone."""
        for half in self._touched:
            half.given.clear()
        self._touched.clear()

    def segment(self, packet: IpPacket, segment: Segment, payload: Bytes, time_ns: int) -> None:
        """Take one segment; `payload` is what is there of it."""
        connection, side = self._find(packet, segment)
        half, other = connection.halves[side], connection.halves[1 - side]
        if segment.flags & RST:
            near = not half.known or abs(half.position(segment.sequence) - half.next) < _FARTHEST
            if near or not segment.sequence:
                self._close(connection)
            else:
                self.counts["implausible_segments"] += 1
            return
        begin = self._place(half, other, segment)
        if begin is None:
            self.counts["implausible_segments"] += 1
            return
        size = segment.end - segment.begin
        if size:
            if size <= 1 and begin + size == half.next and half.acknowledged >= half.next:
                self.counts["keep_alives"] += 1
            else:
                self._take(half, begin, payload, time_ns)
                self._bound(half, other)
        if segment.flags & FIN and half.fin is None:
            half.fin = begin + size
        if segment.flags & ACK:
            self._acknowledged(other, segment.acknowledgement)
        if all(one.fin is not None and one.next >= one.fin for one in connection.halves):
            self._close(connection)

    def finish(self) -> None:
        """The capture has ended."""
        for connection in list(self._connections.values()):
            self._close(connection)

    # -- connections ---------------------------------------------------------------------------------------------------

    def _find(self, packet: IpPacket, segment: Segment) -> tuple[Connection, int]:
        source, destination = (packet.source, segment.source_port), (packet.destination, segment.destination_port)
        forward: Key = (*source, *destination)
        backward: Key = (*destination, *source)
        connection, side = self._connections.get(forward), 0
        if connection is None:
            connection, side = self._connections.get(backward), 1
        if connection is not None and segment.flags & SYN and self._is_new(connection, side, segment):
            self.counts["reused_ports"] += 1
            self._close(connection)
            connection = None
        if connection is None:
            side = 1 if segment.flags & SYN and segment.flags & ACK else 0
            connection = Connection(backward if side else forward)
            if segment.flags & SYN:
                connection.opened_by = 0
            if len(self._connections) >= self.settings.max_connections:
                self.counts["given_up_connections"] += 1
                self._close(next(iter(self._connections.values())))
            self._connections[connection.key] = connection
            self.counts["connections"] += 1
            self._opener.open(connection)
        else:
            self._connections.move_to_end(connection.key)
        return connection, side

    def _is_new(self, connection: Connection, side: int, segment: Segment) -> bool:
        """Whether a SYN opens another connection between the same ports."""
        half = connection.halves[side]
        if half.first is not None:
            return half.first != segment.sequence
        if half.known:
            return half.position(segment.sequence + 1) != 0
        if not segment.flags & ACK:
            return True
        # The answer to a SYN. To the one that is known?
        other = connection.halves[1 - side]
        return other.first is None or (other.first + 1) & 0xFFFFFFFF != segment.acknowledgement

    def _place(self, half: Half, other: Half, segment: Segment) -> int | None:
        """The position of the segment's first byte; None if it cannot belong here."""
        syn = bool(segment.flags & SYN)
        sequence = (segment.sequence + syn) & 0xFFFFFFFF
        if not half.known:
            half.begin_at(sequence)
        half.seen = True
        if syn:
            half.first = segment.sequence
            if segment.flags & ACK and not other.known:  # The answer to a SYN that was not captured (yet).
                other.begin_at(segment.acknowledgement)
                other.first = (segment.acknowledgement - 1) & 0xFFFFFFFF
        begin = half.position(sequence)
        return begin if abs(begin - half.next) < _FARTHEST else None

    def _close(self, connection: Connection) -> None:
        del self._connections[connection.key]
        for half in connection.halves:
            while half.stored:
                self._skip(half, half.stored[0].begin)
                self._hand_on_stored(half)
            if half.fin is not None:
                self._skip(half, half.fin)
            if half.reader is not None:
                half.reader.end()

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def _take(self, half: Half, begin: int, payload: Bytes, time_ns: int) -> None:
        view, address = payload
        end = begin + len(view)
        if begin < half.next:
            old = min(end, half.next) - begin
            self.counts["repeated_bytes"] += old
            self._compare(half, begin, view[:old])
            view, address, begin = view[old:], address + old, begin + old
        if not len(view):
            return
        if begin == half.next and (not half.stored or end <= half.stored[0].begin):
            self._hand_on(half, view, address, time_ns)
            self._hand_on_stored(half)
        else:
            self._store(half, begin, view, time_ns)
            if half.stored and half.stored[0].begin == half.next:
                self._hand_on_stored(half)

    def _hand_on(self, half: Half, view: memoryview, address: int, time_ns: int) -> None:
        half.given.append((half.next, view))
        self._touched.add(half)
        half.next += len(view)
        if half.reader is not None:
            half.reader.data(Bytes(view, address), time_ns)

    def _compare(self, half: Half, begin: int, view: memoryview) -> None:
        """Count bytes that differ from the first copy, as far as that is in the present batch."""
        end = begin + len(view)
        for place, given in half.given:
            low, high = max(begin, place), min(end, place + len(given))
            if low < high and view[low - begin : high - begin] != given[low - place : high - place]:
                self.counts["differing_copies"] += 1

    def _store(self, half: Half, begin: int, view: memoryview, time_ns: int) -> None:
        """Keep what lies after a hole: the parts that are not there yet."""
        self.counts["out_of_order_segments"] += 1
        at = max(0, bisect_left(half.stored, begin, key=lambda one: one.begin) - 1)
        end = begin + len(view)
        fresh: list[_Stored] = []
        position = begin
        while position < end:
            while at < len(half.stored) and half.stored[at].begin + len(half.stored[at].content) <= position:
                at += 1
            known = half.stored[at] if at < len(half.stored) else None
            stop = end if known is None else min(end, known.begin)
            if position < stop:
                fresh.append(_Stored(position, bytes(view[position - begin : stop - begin]), time_ns))
            if known is not None and stop < end:
                high = min(end, known.begin + len(known.content))
                low = max(position, known.begin)
                self.counts["repeated_bytes"] += high - low
                if view[low - begin : high - begin] != known.content[low - known.begin : high - known.begin]:
                    self.counts["differing_copies"] += 1
                stop = high
            position = stop
        if fresh:
            added = sum(len(one.content) + _STORED_BYTES for one in fresh)
            half.stored_bytes += added
            self._stored_bytes += added
            half.stored.extend(fresh)
            half.stored.sort(key=lambda one: one.begin)

    def _hand_on_stored(self, half: Half) -> None:
        count = 0
        for begin, content, time_ns in half.stored:
            if begin != half.next:
                break
            count += 1
            half.stored_bytes -= len(content) + _STORED_BYTES
            self._stored_bytes -= len(content) + _STORED_BYTES
            self._hand_on(half, *in_memory(content), time_ns)
        del half.stored[:count]

    # -- holes ---------------------------------------------------------------------------------------------------------

    def _acknowledged(self, half: Half, acknowledgement: int) -> None:
        """The other side has all bytes of `half` before this sequence number."""
        if not half.seen:
            return
        position = half.position(acknowledgement)
        if half.fin is not None and position == half.fin + 1:
            position = half.fin
        if position <= half.acknowledged or position - half.next >= _FARTHEST:
            return
        half.acknowledged = position
        while half.next < position:
            stop = min(position, half.stored[0].begin) if half.stored else position
            self._skip(half, stop)
            self._hand_on_stored(half)

    def _skip(self, half: Half, position: int) -> None:
        if position <= half.next:
            return
        nbytes = position - half.next
        half.next = position
        self.counts["holes"] += 1
        self.counts["lost_bytes"] += nbytes
        if half.reader is not None:
            half.reader.hole(nbytes)

    def _bound(self, half: Half, other: Half) -> None:
        """Stop waiting for a hole if too much lies after it."""
        settings = self.settings
        while half.stored and (
            half.stored_bytes > settings.keep_bytes
            or self._stored_bytes > settings.keep_all_bytes
            or (not other.seen and half.stored_bytes > settings.blind_bytes)
        ):
            if other.seen:
                self.counts["not_waited_for"] += 1
            self._skip(half, half.stored[0].begin)
            self._hand_on_stored(half)
