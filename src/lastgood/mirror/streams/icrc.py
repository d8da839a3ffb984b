"""RoCEv2's invariant checksum (ICRC): CRC-32 over what no router changes.

Eight bytes of ones come first, then the packet from its IP header to its last payload byte, in which all that may
change on the way (traffic class, flow label, hop limit, checksums, BTH's reserved byte) counts as ones. Extension
headers and options count as they are. It is sent after the payload, little-endian. Source: InfiniBand specification,
annex A17.
"""

from __future__ import annotations

import zlib
from typing import Final

__all__ = ["ICRC_BYTES", "icrc"]

ICRC_BYTES: Final = 4
_IPV4_ONES: Final = (1, 8, 10, 11)
"""Type of service, time to live, checksum."""
_IPV6_ONES: Final = (1, 2, 3, 7)
"""Traffic class (its upper half in byte 0), flow label, hop limit."""
_UDP_ONES: Final = (6, 7)
_BTH_ONES: Final = 4
_UDP_BYTES: Final = 8
_BTH_BYTES: Final = 12


def icrc(packet: memoryview | bytes, udp: int) -> int:
    """The checksum of a packet, given from its IP header on and without the checksum. UDP's header is at `udp`."""
    head = bytearray(packet[: udp + _UDP_BYTES + _BTH_BYTES])
    if head[0] >> 4 == 6:
        head[0] |= 0x0F
        ones = _IPV6_ONES
    else:
        ones = _IPV4_ONES
    for place in ones:
        head[place] = 0xFF
    for place in _UDP_ONES:
        head[udp + place] = 0xFF
    head[udp + _UDP_BYTES + _BTH_ONES] = 0xFF
    start = zlib.crc32(head, zlib.crc32(b"\xff" * 8))
    return zlib.crc32(packet[len(head) :], start)
