"""The native reader of the kernel's blocks, against blocks that are made here: order, tags, flags, and damage."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from lastgood import _native
from lastgood.mirror.capture.frames import FRAME, FrameBatch
from tests.mirror.capture.support.blocks import (
    CSUM_NOT_READY,
    OUTGOING,
    TPID_VALID,
    VLAN_VALID,
    KernelFrame,
    kernel_block,
)
from tests.mirror.capture.support.captures import rows_of

BLOCK = 1 << 17


class Ring:
    """Memory of some blocks, and the native reader of it."""

    def __init__(self, *blocks: bytes) -> None:
        self.memory = np.frombuffer(bytearray(b"".join(blocks)), np.uint8)
        self.reader = _native.PacketBlocks(self.memory.ctypes.data, BLOCK, len(blocks), 1)
        self.table = np.zeros(5000, FRAME)

    def read(self, limit: int = 5000) -> list[tuple[bytes, int, int, int, int]]:
        while self.reader.release():
            pass
        count = self.reader.read(-1, self.table.ctypes.data, limit, 0.0)
        return rows_of(FrameBatch(memoryview(self.memory), self.table[:count]))

    def status(self, block: int) -> int:
        return int(self.memory[block * BLOCK + 8 : block * BLOCK + 12].view(np.uint32)[0])


def frames(count: int, seed: int = 1) -> list[KernelFrame]:
    rng = np.random.default_rng(seed)
    statuses = [0, VLAN_VALID, VLAN_VALID | TPID_VALID, CSUM_NOT_READY, CSUM_NOT_READY | VLAN_VALID]
    return [
        KernelFrame(
            rng.bytes(int(rng.integers(0, 200))),
            time_ns=i,
            length=500 if i % 7 == 0 else None,
            status=statuses[int(rng.integers(len(statuses)))],
            tag=int(rng.integers(1 << 16)),
            kind=0x88A8,
            sender=OUTGOING * int(rng.integers(2)),
        )
        for i in range(count)
    ]


def test_each_frame_is_as_it_was_on_the_wire() -> None:
    first, second = frames(300), frames(200, 2)
    ring = Ring(kernel_block(first, BLOCK), kernel_block(second, BLOCK), kernel_block([], BLOCK, status=0))
    assert ring.read() == [one.expected() for one in first]
    assert ring.status(0) == 1, "a block that is held is not the kernel's"
    assert ring.read() == [one.expected() for one in second]
    assert ring.status(0) == 0 and ring.status(1) == 1
    assert ring.read() == [] and ring.status(1) == 0
    counters = ring.reader.counters()
    every = [one.expected() for one in first + second]
    assert counters["frames"] == 500 and counters["damaged_blocks"] == 0
    assert counters["bytes"] == sum(len(one[0]) for one in every)
    for name, flag in (("no_checksum", 1), ("truncated", 2), ("vlan_restored", 4), ("own", 8)):
        assert counters[name] == sum(bool(one[3] & flag) for one in every) > 0


def test_a_block_is_read_in_parts_and_given_back_once() -> None:
    mine = frames(50)
    ring = Ring(kernel_block(mine, BLOCK), kernel_block([], BLOCK, status=0))
    found = []
    while part := ring.read(7):
        assert len(part) <= 7 and ring.status(0) == 1
        found += part
    assert found == [one.expected() for one in mine]
    assert ring.status(0) == 0


def test_empty_blocks_are_passed_over_and_the_ring_is_a_ring() -> None:
    ring = Ring(kernel_block([], BLOCK), kernel_block(frames(3), BLOCK))
    assert len(ring.read()) == 3 and ring.read() == [] and ring.status(0) == ring.status(1) == 0
    again = frames(4, 9)
    ring.memory[:BLOCK] = np.frombuffer(kernel_block(again, BLOCK), np.uint8)
    assert ring.read() == [one.expected() for one in again]


def test_blocks_are_held_until_they_are_released_in_their_order() -> None:
    first, second = frames(20), frames(30, 2)
    ring = Ring(kernel_block(first, BLOCK), kernel_block(second, BLOCK))
    assert ring.reader.oldest < 0 and not ring.reader.release()
    table = ring.table.ctypes.data
    assert ring.reader.read(-1, table, 5, 0.0) == 5 and not ring.reader.release(), "it is not read to its end"
    assert ring.reader.read(-1, table, 50, 0.0) == 15 and ring.reader.read(-1, table, 50, 0.0) == 30
    assert ring.reader.read(-1, table, 50, 0.0) == 0, "all blocks are held: none is read twice"
    assert (ring.status(0), ring.status(1), ring.reader.oldest) == (1, 1, 0)
    assert ring.reader.release() and (ring.status(0), ring.status(1), ring.reader.oldest) == (0, 1, 1)
    assert ring.reader.release() and ring.status(1) == 0 and not ring.reader.release()


def test_a_frame_of_64_kib_fits() -> None:
    one = KernelFrame(bytes(65_550), status=CSUM_NOT_READY)
    assert Ring(kernel_block([one], BLOCK)).read() == [one.expected()]


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (16, 1 << 31),  # first frame's place in the block
        (16, 0),
        (48 + 12, 1 << 31),  # its captured bytes
        (48 + 24, 10),  # its distance: no room for a tag
        (48 + 24, 0xFFFF),
        (48, 4),  # the next one inside this one
        (48, 1 << 31),
        (12, 1 << 31),  # frames in the block
    ],
)
def test_nothing_outside_a_block_is_believed(offset: int, value: int) -> None:
    mine = frames(3)
    raw = bytearray(kernel_block(mine, BLOCK))
    size = 2 if offset == 48 + 24 else 4
    raw[offset : offset + size] = struct.pack("<I", value)[:size]
    ring = Ring(bytes(raw), kernel_block(mine, BLOCK))
    found = []
    for _ in range(4):
        found += ring.read()
        if len(found) >= 3 and found[-3:] == [one.expected() for one in mine]:
            break
    assert found[-3:] == [one.expected() for one in mine], "the next block is read"
    assert ring.reader.counters()["damaged_blocks"] == 1


def test_any_block_is_survived() -> None:
    rng = np.random.default_rng(4)
    raw = kernel_block(frames(40), BLOCK)
    used = 40 * 300
    for _ in range(500):
        broken = bytearray(raw)
        for _ in range(int(rng.integers(1, 8))):
            broken[int(rng.integers(12, used))] = int(rng.integers(256))
        ring = Ring(bytes(broken))
        for _ in range(3):
            for row in ring.table[: ring.reader.read(-1, ring.table.ctypes.data, 5000, 0.0)]:
                assert int(row["offset"]) + int(row["captured"]) <= BLOCK


def test_wrong_sizes_are_refused() -> None:
    for size, blocks in ((4095, 1), (0, 1), (4096, 0)):
        with pytest.raises(ValueError, match="block"):
            _native.PacketBlocks(4096, size, blocks, 1)
