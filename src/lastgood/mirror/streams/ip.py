"""The IP packet in a frame, by the length fields: Ethernet with VLAN tags, or Linux cooked; IPv4 or IPv6.

Nothing is guessed: a frame whose headers are cut, damaged or fragmented has a name (a `Left`), and is counted by it.
A packet whose payload is cut keeps the part that is there.
"""

from __future__ import annotations

import enum
import struct
from typing import Final, NamedTuple

from lastgood.mirror.capture.frames import COOKED, COOKED_V2, ETHERNET

__all__ = ["TCP", "UDP", "IpPacket", "Left", "ip_packet"]

TCP: Final = 6
UDP: Final = 17

_IPV4, _IPV6 = 0x0800, 0x86DD
_VLAN_TAGS = frozenset((0x8100, 0x88A8, 0x9100))
_MOST_TAGS = 2
_MOST_EXTENSIONS = 8
_HOP_BY_HOP, _ROUTING, _FRAGMENT, _AUTHENTICATION, _OPTIONS = 0, 43, 44, 51, 60
_JUMBO = 0xC2
_TYPE = struct.Struct(">H")
_LONG = struct.Struct(">I")


class Left(str, enum.Enum):
    """Why a frame is left aside."""

    SHORT = "short_frames"
    """Ends inside a header."""
    LINK = "unknown_links"
    NOT_IP = "not_ip"
    FRAGMENT = "fragments"
    """A part of an IP packet: where it belongs is only known with the others."""
    DAMAGED = "damaged_headers"
    """Lengths that contradict each other."""
    WRONG = "wrong_checksums"
    """Changed on the way."""


class IpPacket(NamedTuple):
    """What an IP packet carries: bytes `begin` to `end` of the frame, of which those before `captured` are there."""

    protocol: int
    start: int
    """Where the IP header begins."""
    source: bytes
    """4 or 16 bytes."""
    destination: bytes
    begin: int
    end: int
    captured: int


def ip_packet(frame: memoryview, length: int, link_type: int) -> IpPacket | Left:
    """Find the IP packet in a frame. `length` is the frame's own, of which `frame` may only hold the beginning."""
    if link_type == ETHERNET:
        at, kind_at = 14, 12
    elif link_type == COOKED:
        at, kind_at = 16, 14
    elif link_type == COOKED_V2:
        at, kind_at = 20, 0
    else:
        return Left.LINK
    if len(frame) < at:
        return Left.SHORT
    (kind,) = _TYPE.unpack_from(frame, kind_at)
    for _ in range(_MOST_TAGS):
        if kind not in _VLAN_TAGS:
            break
        if len(frame) < at + 4:
            return Left.SHORT
        (kind,) = _TYPE.unpack_from(frame, at + 2)
        at += 4
    if kind == _IPV4:
        return _ipv4(frame, length, at)
    if kind == _IPV6:
        return _ipv6(frame, length, at)
    return Left.NOT_IP


def _ipv4(frame: memoryview, length: int, at: int) -> IpPacket | Left:
    if len(frame) < at + 20:
        return Left.SHORT
    header = (frame[at] & 15) * 4
    (total,) = _TYPE.unpack_from(frame, at + 2)
    if total == 0:  # A frame that the network card would have cut up, of more than 64 KiB.
        total = length - at
    if frame[at] >> 4 != 4 or header < 20 or total < header or at + total > length:
        return Left.DAMAGED
    if len(frame) < at + header:
        return Left.SHORT
    (fragment,) = _TYPE.unpack_from(frame, at + 6)
    if fragment & 0x3FFF:
        return Left.FRAGMENT
    end = at + total
    source, destination = bytes(frame[at + 12 : at + 16]), bytes(frame[at + 16 : at + 20])
    return IpPacket(frame[at + 9], at, source, destination, at + header, end, min(end, len(frame)))


def _ipv6(frame: memoryview, length: int, at: int) -> IpPacket | Left:
    if len(frame) < at + 40:
        return Left.SHORT
    if frame[at] >> 4 != 6:
        return Left.DAMAGED
    source, destination = bytes(frame[at + 8 : at + 24]), bytes(frame[at + 24 : at + 40])
    (payload,) = _TYPE.unpack_from(frame, at + 4)
    kind = frame[at + 6]
    begin = at + 40
    jumbo = None
    for _ in range(_MOST_EXTENSIONS):
        if kind not in (_HOP_BY_HOP, _ROUTING, _FRAGMENT, _AUTHENTICATION, _OPTIONS):
            break
        if len(frame) < begin + 8:
            return Left.SHORT
        if kind == _FRAGMENT:
            if _TYPE.unpack_from(frame, begin + 2)[0] & 0xFFF9:
                return Left.FRAGMENT
            size = 8
        elif kind == _AUTHENTICATION:
            size = (frame[begin + 1] + 2) * 4
        else:
            size = (frame[begin + 1] + 1) * 8
        if kind == _HOP_BY_HOP and payload == 0 and frame[begin + 2] == _JUMBO and frame[begin + 3] == 4:
            (jumbo,) = _LONG.unpack_from(frame, begin + 4)
        kind = frame[begin]
        begin += size
    end = at + 40 + (payload if payload else jumbo if jumbo is not None else length - at - 40)
    if end > length or begin > end:
        return Left.DAMAGED
    if len(frame) < begin:
        return Left.SHORT
    return IpPacket(kind, at, source, destination, begin, end, min(end, len(frame)))
