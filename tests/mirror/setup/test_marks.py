"""Marked frames: found with tags, cut, twice; and never taken from others."""

from __future__ import annotations

import struct

from lastgood.mirror.capture.frames import FrameBatch
from lastgood.mirror.setup.marks import _MAGIC, _MARK, new_key, read_marks
from tests.mirror.capture.support.captures import Shot, batch_of


class Frames:
    """A source of one batch."""

    link_type = 1

    def __init__(self, frames: list[Shot]) -> None:
        self.batches = [batch_of(frames)]

    def read(self, limit: int, timeout_s: float) -> FrameBatch | None:
        return self.batches.pop() if self.batches else None

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


def frame(payload: bytes, tags: bytes = b"", protocol: int = 17, options: bytes = b"") -> bytes:
    header = (
        struct.pack(">BBHIBBHII", 0x45 + len(options) // 4, 0, 28 + len(payload), 0, 64, protocol, 0, 1, 2) + options
    )
    return bytes(12) + tags + b"\x08\x00" + header + struct.pack(">HHHH", 5, 9, 8 + len(payload), 0) + payload


def test_they_are_counted_by_way_with_what_is_cut_and_twice() -> None:
    key, other = new_key(), new_key()

    def mark(way: int, number: int, its: bytes = key) -> bytes:
        return _MARK.pack(_MAGIC, its, way, number) + bytes(10)

    tag = bytes.fromhex("81000005")
    frames = [
        Shot(frame(mark(0, 0)), 0),
        Shot(frame(mark(0, 1), tag), 0),
        Shot(frame(mark(0, 1), tag + tag, options=bytes(8)), 0),
        Shot(frame(mark(1, 0)), 0, length=900),
        Shot(frame(mark(0, 7, other)), 0),
        Shot(frame(mark(7, 7)), 0),
        Shot(frame(mark(0, 8), protocol=1), 0),  # quoted in an answer that nobody is there
        Shot(frame(mark(0, 9))[:60], 0, length=90),
        Shot(b"", 0),
        Shot(bytes(13), 0),
        Shot(bytes.fromhex("810000058100000581000005") * 3, 0),
    ]
    (found,) = read_marks([Frames(frames)], key, 3, 5.0)
    assert dict(found["sent"].numbers) == {0: 1, 1: 2}
    assert (found["sent"].seen, found["sent"].repeated, found["sent"].cut) == (2, 1, 0)
    assert (found["received"].seen, found["received"].cut) == (1, 1)


def test_waiting_for_them_has_an_end() -> None:
    (found,) = read_marks([Frames([])], new_key(), 1, 0.2)
    assert found["sent"].seen == 0
