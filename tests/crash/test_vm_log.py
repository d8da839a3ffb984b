"""The log of QEMU's blklogwrites is read as it was written, and crash states are those that a disk may leave."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest
from vm_log import SECTOR, LogError, apply, crash_states, ext4_records, read_disk, read_epochs

DISK_SECTORS = 64
Entry = tuple[int, int, int]
"""First sector, sectors, flags."""
ENTRIES: list[Entry] = [(0, 8, 0), (16, 4, 0), (0, 0, 1), (0, 0, 1), (4, 8, 0), (20, 40, 0), (0, 0, 1), (6, 1, 0)]


def make_log(path: Path, entries: list[Entry], *, magic: int = 0x6A736677736872, text_bytes: int = 0) -> None:
    """A log in which every sector that is written holds bytes of its own."""
    parts = [struct.pack("<QQQI", magic, 1, len(entries), SECTOR).ljust(SECTOR, b"\0")]
    fill = 0
    for first, sectors, flags in entries:
        parts.append(struct.pack("<QQQQ", first, sectors, flags, text_bytes).ljust(SECTOR, b"\0"))
        for _ in range(sectors):
            fill += 1
            parts.append(bytes([fill]) * SECTOR)
    path.write_bytes(b"".join(parts))


def test_epochs_end_with_flushes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    make_log(path, ENTRIES)
    epochs = read_epochs(path, DISK_SECTORS * SECTOR)
    assert [[(write.first_sector, write.sectors) for write in epoch.writes] for epoch in epochs] == [
        [(0, 8), (16, 4)], [], [(4, 8), (20, 40)], [(6, 1)],
    ]  # fmt: skip
    # The superblock, then an entry's own sector before the sectors that it wrote.
    assert [epoch.log_end // SECTOR for epoch in epochs] == [1 + 9 + 5, 16, 17 + 9 + 41, 68 + 2]
    log = read_disk(path)
    disk = np.zeros((DISK_SECTORS, SECTOR), np.uint8)
    for epoch in epochs:
        apply(disk, log, epoch)
    expected = [0] * DISK_SECTORS
    fill = 0
    for first, sectors, _ in ENTRIES:
        for sector in range(first, first + sectors):
            fill += 1
            expected[sector] = fill
    assert (disk == np.array(expected, np.uint8)[:, None]).all()


def test_crash_states_are_selections_of_sectors(tmp_path: Path) -> None:
    path = tmp_path / "log"
    make_log(path, [(0, 8, 0), (4, 8, 0), (20, 40, 0)])
    (epoch,) = read_epochs(path, DISK_SECTORS * SECTOR)
    log, durable = read_disk(path), np.full((DISK_SECTORS, SECTOR), 255, np.uint8)
    allowed = [{255} for _ in range(DISK_SECTORS)]
    for base, first, sectors in ((1, 0, 8), (9, 4, 8), (17, 20, 40)):
        for number in range(sectors):
            allowed[first + number].add(base + number)
    seen: list[set[int]] = [set() for _ in range(DISK_SECTORS)]
    states = list(crash_states(durable, log, epoch, 400, random.Random(1), records=[2]))
    for _, state in states:
        assert (state == state[:, :1]).all()  # no sector is torn
        values = state[:, 0].tolist()
        assert (values[2] == 255) == (values[3] == 255)
        for sector, value in enumerate(values):
            seen[sector].add(value)
    assert seen == allowed
    assert (durable == 255).all()
    assert [name for name, _ in states[:2]] == ["nothing", "all"]
    assert (states[0][1] == 255).all()
    assert states[1][1][:, 0].tolist()[:12] == [1, 2, 3, 4, *range(9, 17)]
    # Torn inside a write, and somewhere between nothing and all.
    assert len({state.tobytes() for _, state in states}) > 150
    again = crash_states(durable, log, epoch, 400, random.Random(1), records=[2])
    assert all((one == other).all() for (_, one), (_, other) in zip(states, again, strict=True))


def test_an_epoch_without_writes_has_one_state(tmp_path: Path) -> None:
    path = tmp_path / "log"
    make_log(path, [(0, 0, 1)])
    disk = np.zeros((DISK_SECTORS, SECTOR), np.uint8)
    for epoch in read_epochs(path, disk.nbytes):
        assert [name for name, _ in crash_states(disk, read_disk(path), epoch, 5, random.Random(1))] == ["nothing"]


def test_the_journals_superblock_is_found() -> None:
    disk = np.zeros((DISK_SECTORS, SECTOR), np.uint8)
    disk[40, :8] = np.frombuffer(bytes.fromhex("c03b399800000004"), np.uint8)
    disk[48, :8] = np.frombuffer(bytes.fromhex("c03b399800000001"), np.uint8)  # another block of the journal
    assert ext4_records(disk) == [2, 40]


@pytest.mark.parametrize(
    ("entries", "knobs", "cut", "complaint"),
    [
        ([(0, 1, 0)], {"magic": 7}, 0, "magic 0x7"),
        ([(0, 1, 0)], {}, 3 * SECTOR, "0 bytes are too few"),
        ([(0, 1, 0), (0, 0, 1)], {}, SECTOR, "cut at entry 1 of 2"),
        ([(0, 9, 0)], {}, SECTOR, "beyond the end of the log"),
        ([(60, 9, 0)], {}, 0, "on a disk of 32768 bytes"),
        ([(0, 1, 2)], {}, 0, "flags 0x2"),  # a write that is durable at once, which virtio-blk does not have
        ([(0, 1, 1)], {}, 0, "1 sectors, flags 0x1"),
        ([(0, 0, 0)], {}, 0, "0 sectors, flags 0x0"),
        ([(0, 1, 0)], {"text_bytes": 5}, 0, "5 bytes of text"),
    ],
)
def test_other_logs_are_refused(
    tmp_path: Path, entries: list[Entry], knobs: dict[str, int], cut: int, complaint: str
) -> None:
    path = tmp_path / "log"
    make_log(path, entries, **knobs)
    path.write_bytes(path.read_bytes()[: path.stat().st_size - cut])
    with pytest.raises(LogError, match=complaint):
        read_epochs(path, DISK_SECTORS * SECTOR)
