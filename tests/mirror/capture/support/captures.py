"""Captures written by hand, as other programs write them: nothing of the library's own writers."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from lastgood.mirror.capture.frames import FRAME, FrameBatch, FrameSource


@dataclass(frozen=True)
class Shot:
    """A frame as a test knows it."""

    data: bytes
    time_ns: int
    length: int | None = None
    flags: int = 0
    link: int = 1

    @property
    def on_wire(self) -> int:
        return len(self.data) if self.length is None else self.length

    @property
    def row(self) -> tuple[bytes, int, int, int, int]:
        flags = self.flags | (2 if len(self.data) < self.on_wire else 0)
        return self.data, self.on_wire, self.time_ns, flags, self.link


def shots(count: int, seed: int = 7, most: int = 300, link: int = 1) -> list[Shot]:
    rng = np.random.default_rng(seed)
    return [
        Shot(rng.bytes(int(rng.integers(0, most))), 1_700_000_000_000_000_000 + i * 1_000, link=link)
        for i in range(count)
    ]


def pcap(frames: list[Shot], order: str = "<", nano: bool = False, link: int = 1, snap: int = 65535) -> bytes:
    magic, unit = (0xA1B23C4D, 1) if nano else (0xA1B2C3D4, 1000)
    parts = [struct.pack(order + "IHHiIII", magic, 2, 4, 0, 0, snap, link)]
    for one in frames:
        seconds, rest = divmod(one.time_ns, 10**9)
        parts += [struct.pack(order + "IIII", seconds, rest // unit, len(one.data), one.on_wire), one.data]
    return b"".join(parts)


def block(order: str, kind: int, body: bytes) -> bytes:
    body += bytes(-len(body) % 4)
    size = struct.pack(order + "I", 12 + len(body))
    return struct.pack(order + "I", kind) + size + body + size


def option(order: str, code: int, value: bytes) -> bytes:
    return struct.pack(order + "HH", code, len(value)) + value + bytes(-len(value) % 4)


def section(order: str) -> bytes:
    return block(order, 0x0A0D0D0A, struct.pack(order + "IHHq", 0x1A2B3C4D, 1, 0, -1))


def interface(order: str, link: int = 1, snap: int = 0, options: bytes = b"") -> bytes:
    return block(order, 1, struct.pack(order + "HHI", link, 0, snap) + options)


def enhanced(order: str, one: Shot, ticks: int, number: int = 0, options: bytes = b"") -> bytes:
    head = struct.pack(order + "IIIII", number, ticks >> 32, ticks & 0xFFFFFFFF, len(one.data), one.on_wire)
    return block(order, 6, head + one.data + bytes(-len(one.data) % 4) + options)


def batch_of(frames: list[Shot], gap: int = 3) -> FrameBatch:
    """Frames in one stretch of memory, with gaps between them."""
    data, rows = bytearray(), []
    for one in frames:
        data += b"\xee" * gap
        rows.append((len(data), len(one.data), one.on_wire, one.time_ns, one.row[3], one.link))
        data += one.data
    return FrameBatch(memoryview(bytes(data)), np.array(rows, FRAME))


def rows_of(batch: FrameBatch) -> list[tuple[bytes, int, int, int, int]]:
    return [
        (
            bytes(batch.frame(number)),
            int(batch.table[number]["length"]),
            int(batch.table[number]["time_ns"]),
            int(batch.table[number]["flags"]),
            int(batch.table[number]["link"]),
        )
        for number in range(len(batch))
    ]


def read_all(source: FrameSource, limit: int = 64) -> list[tuple[bytes, int, int, int, int]]:
    found: list[tuple[bytes, int, int, int, int]] = []
    while (batch := source.read(limit, 1.0)) is not None:
        assert len(batch) <= limit
        found += rows_of(batch)
    return found
