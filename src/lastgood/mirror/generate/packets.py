"""RoCEv2 packets as bytes: what a network card would put on the wire for an RDMA write or an acknowledgement."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, field
from typing import Final

from lastgood.mirror.streams.icrc import icrc
from lastgood.mirror.streams.roce import FIRST, LAST, LAST_IMMEDIATE, MIDDLE, ONLY, ONLY_IMMEDIATE, ROCE_PORT

__all__ = ["ACKNOWLEDGE", "Path", "acknowledge", "negative_acknowledge", "write_packets"]

ACKNOWLEDGE: Final = 17
_PSNS: Final = 1 << 24
_NO_SEQUENCE: Final = 0x60
"""AETH: negative acknowledgement, PSN sequence error."""
_CREDITS: Final = 0
_FLAGS: Final = 0x40
"""BTH: migration state, as network cards send it."""
_KEY: Final = b"\xff\xff"


@dataclass(frozen=True)
class Path:
    """From one host to another: all headers before BTH. Addresses are text, IPv4 or IPv6."""

    source_mac: bytes
    destination_mac: bytes
    source: str
    destination: str
    port: int
    vlans: tuple[int, ...] = ()
    """From the outer tag inwards."""
    options: bytes = b""
    """IPv4: options, in whole 4 bytes. IPv6: a hop-by-hop extension header, in whole 8 bytes, or nothing."""
    hops: int = 64
    traffic_class: int = 0x68
    _link: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kind = 0x86DD if ":" in self.source else 0x0800
        tags = b"".join(
            struct.pack(">HH", 0x88A8 if number + 1 < len(self.vlans) else 0x8100, vlan)
            for number, vlan in enumerate(self.vlans)
        )
        object.__setattr__(self, "_link", self.destination_mac + self.source_mac + tags + struct.pack(">H", kind))

    @property
    def six(self) -> bool:
        """Whether it is IPv6."""
        return ":" in self.source

    def frame(self, transport: bytes) -> bytes:
        """A frame around BTH and what follows, with the checksum."""
        nbytes = 8 + len(transport) + 4
        if self.six:
            kind = 0 if self.options else 17
            head = struct.pack(
                ">IHBB16s16s",
                6 << 28 | self.traffic_class << 20,
                len(self.options) + nbytes,
                kind,
                self.hops,
                socket.inet_pton(socket.AF_INET6, self.source),
                socket.inet_pton(socket.AF_INET6, self.destination),
            )
            if self.options:
                head += bytes([17]) + self.options[1:]
        else:
            header = 20 + len(self.options)
            head = struct.pack(
                ">BBHHHBBH4s4s",
                0x40 | header // 4,
                self.traffic_class,
                header + nbytes,
                0,
                0x4000,
                self.hops,
                17,
                0,
                socket.inet_aton(self.source),
                socket.inet_aton(self.destination),
            )
            head += self.options
            head = head[:10] + struct.pack(">H", _ones_sum(head)) + head[12:]
        packet = head + struct.pack(">HHHH", self.port, ROCE_PORT, nbytes, 0) + transport
        return self._link + packet + struct.pack("<I", icrc(packet, len(head)))

    def back(self) -> Path:
        """From the other host to this one; the UDP source port is the same, as network cards have it."""
        return Path(
            self.destination_mac,
            self.source_mac,
            self.destination,
            self.source,
            self.port,
            self.vlans,
            self.options,
            self.hops,
            self.traffic_class,
        )


def write_packets(
    queue: int,
    psn: int,
    payload: bytes,
    address: int,
    rkey: int,
    mtu: int,
    *,
    immediate: bytes | None = None,
    split: bool = False,
    ack_every: int = 4,
) -> list[bytes]:
    """BTH and what follows of all packets of one RDMA write. `psn` is the first one's.

    `split`: each packet is a write of its own (as with adaptive routing), which has no immediate.
    """
    parts = [payload[at : at + mtu] for at in range(0, len(payload), mtu)] or [b""]
    packets = []
    for number, part in enumerate(parts):
        first, last = number == 0, number + 1 == len(parts)
        if split or (first and last):
            opcode = ONLY if immediate is None else ONLY_IMMEDIATE
        elif first:
            opcode = FIRST
        elif last:
            opcode = LAST if immediate is None else LAST_IMMEDIATE
        else:
            opcode = MIDDLE
        pad = -len(part) % 4
        extra = b""
        if split:
            extra = struct.pack(">QII", address + number * mtu, rkey, len(part))
        elif first:
            extra = struct.pack(">QII", address, rkey, len(payload))
        if last and immediate is not None:
            extra += immediate
        asks = last or number % ack_every == ack_every - 1
        packets.append(_bth(opcode, pad, queue, psn + number, asks) + extra + part + bytes(pad))
    return packets


def acknowledge(queue: int, psn: int, messages: int) -> bytes:
    """BTH and AETH of an acknowledgement: everything up to `psn` has come."""
    return _bth(ACKNOWLEDGE, 0, queue, psn, False) + struct.pack(">I", _CREDITS << 24 | messages % _PSNS)


def negative_acknowledge(queue: int, psn: int, messages: int) -> bytes:
    """BTH and AETH of a negative acknowledgement: `psn` is missing."""
    return _bth(ACKNOWLEDGE, 0, queue, psn, False) + struct.pack(">I", _NO_SEQUENCE << 24 | messages % _PSNS)


def _bth(opcode: int, pad: int, queue: int, psn: int, asks: bool) -> bytes:
    flags = _FLAGS | pad << 4
    return struct.pack(">BB2sII", opcode, flags, _KEY, queue, (asks << 31) | psn % _PSNS)


def _ones_sum(header: bytes) -> int:
    total: int = sum(struct.unpack(f">{len(header) // 2}H", header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
