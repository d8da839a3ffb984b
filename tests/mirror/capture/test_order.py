"""Frames of the kernel's blocks in the order of their times, over the edges of blocks; and clocks that are set back."""

from __future__ import annotations

import socket
from contextlib import closing

import numpy as np
import pytest

from lastgood.mirror.capture import interface
from lastgood.mirror.capture.frames import FRAME
from lastgood.mirror.capture.interface import InterfaceSource

BLOCK = 1 << 17
MS = 1_000_000


class Blocks:
    """In place of the kernel's ring: blocks of frames of these times; it says which ones are held."""

    def __init__(self, source: InterfaceSource, times: list[list[int]]) -> None:
        self.source, self.times = source, times
        self.given, self.oldest_held = 0, 0

    def read(self, fd: int, table: int, limit: int, timeout_s: float) -> int:
        if self.given == len(self.times):
            return 0
        found = self.times[self.given]
        rows = [(self.given * BLOCK + i, 1, 1, time, 0, 1) for i, time in enumerate(found)]
        self.source._table[: len(found)] = np.array(rows, FRAME)
        self.given += 1
        return len(found)

    def release(self) -> bool:
        self.oldest_held += 1
        return True

    @property
    def oldest(self) -> int:
        return self.oldest_held if self.oldest_held < self.given else -1


def source_of(times: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> tuple[InterfaceSource, Blocks]:
    monkeypatch.setattr(interface, "_SETTLED_S", 0.0)
    one = InterfaceSource.__new__(InterfaceSource)
    one.interfaces = ("none",)
    one._socket = socket.socket()
    one._gone, one._reordered, one._taken_at = False, 0, 0.0
    one._block_bytes = BLOCK
    one._bytes = np.zeros(8, np.uint8)
    one._table, one._pending = np.empty(1000, FRAME), np.empty(0, FRAME)
    blocks = Blocks(one, times)
    one._blocks = blocks  # type: ignore[assignment]
    return one, blocks


def read_times(one: InterfaceSource, limit: int = 1000) -> list[int]:
    found: list[int] = []
    while batch := one.read(limit, 0):
        assert len(batch) <= limit
        found += batch.table["time_ns"].tolist()
    return found


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_a_frame_that_was_overtaken_is_put_in_its_place(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    times = [[10 * MS, 12 * MS, 11 * MS], [20 * MS, 30 * MS, 30 * MS + 50], [30 * MS + 20, 40 * MS], [], [50 * MS]]
    one, blocks = source_of(times, monkeypatch)
    with closing(one._socket):
        assert read_times(one, limit) == sorted(time for block in times for time in block)
        assert one._reordered == 2
        assert blocks.oldest < 0, "all blocks are given back"


def test_a_block_is_held_while_one_of_its_frames_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    one, blocks = source_of([[10 * MS, 20 * MS], [30 * MS]], monkeypatch)
    with closing(one._socket):
        first = one.read(10, 0)
        assert first is not None and first.table["time_ns"].tolist() == [10 * MS]
        assert blocks.oldest == 0
        second = one.read(10, 0)
        assert second is not None and second.table["time_ns"].tolist() == [20 * MS] and blocks.oldest == 0
        assert [len(one.read(10, 0) or ()) for _ in range(2)] == [1, 0] and blocks.oldest < 0


def test_a_clock_that_is_set_back_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hour = 3_600_000 * MS
    one, blocks = source_of([[hour, hour + 1], [5 * MS, 6 * MS], [7 * MS, 9 * MS]], monkeypatch)
    with closing(one._socket):
        assert len(read_times(one)) == 6 and blocks.oldest < 0
    one, blocks = source_of([[hour, hour + 1], [5 * MS, 6 * MS], [7 * MS, 9 * MS]], monkeypatch)
    with closing(one._socket):
        assert len(one.read(10, 0) or ()) == 3, "what came before the change is not after it"
