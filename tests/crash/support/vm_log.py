"""The log of QEMU's blklogwrites (the format of Linux's dm-log-writes), and the crash states that it allows.

The log is a sequence of writes and flushes in the order in which the virtual disk finished them. What lies between two
flushes is an epoch. After a power cut in an epoch, all writes of earlier epochs are on the disk, and of this epoch's
writes any selection of their sectors: but for two records of ext4's own, of two sectors each, which ext4 needs whole.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SECTOR = 512
"""Bytes that a disk writes whole or not at all; also the unit of the log."""

_MAGIC = 0x6A736677736872
_VERSION = 1
_SUPER = struct.Struct("<QQQI")  # magic, version, entries, sector size
_ENTRY = struct.Struct("<QQQQ")  # first sector, sectors, flags, length of a mark's text
_FLUSH = 1

Sectors = NDArray[np.uint8]
"""Shape (sectors, 512)."""


class LogError(ValueError):
    """The file is not a log of the kind that this program can replay: the text says where and why."""


@dataclass(frozen=True)
class Write:
    """Sectors that were written. `log_offset` is where their content lies in the log, in bytes."""

    first_sector: int
    sectors: int
    log_offset: int


@dataclass
class Epoch:
    """The writes between two flushes; `log_end` is the length of the log just before the flush that ends it."""

    writes: list[Write] = field(default_factory=list)
    log_end: int = 0

    @property
    def sectors(self) -> int:
        """Sectors written, each as often as it was written."""
        return sum(write.sectors for write in self.writes)


def read_epochs(path: Path, disk_bytes: int) -> list[Epoch]:
    """All epochs; the last one was ended by no flush and may be empty. Raises LogError."""
    log_bytes = path.stat().st_size
    epochs = [Epoch()]
    with path.open("rb") as file:
        start = file.read(SECTOR)
        if len(start) < SECTOR:
            raise LogError(f"{path}: {log_bytes} bytes are too few for a log")
        magic, version, entries, sector_bytes = _SUPER.unpack_from(start)
        if (magic, version, sector_bytes) != (_MAGIC, _VERSION, SECTOR):
            raise LogError(f"{path}: magic {magic:#x}, version {version}, sectors of {sector_bytes} bytes")
        position = SECTOR
        for number in range(entries):
            file.seek(position)
            header = file.read(_ENTRY.size)
            if len(header) < _ENTRY.size:
                raise LogError(f"{path}: cut at entry {number} of {entries}")
            first, sectors, flags, text_bytes = _ENTRY.unpack(header)
            where = f"{path}: entry {number} at {position}"
            if flags not in (0, _FLUSH) or text_bytes or (flags == _FLUSH) != (sectors == 0):
                raise LogError(f"{where}: {sectors} sectors, flags {flags:#x}, {text_bytes} bytes of text")
            if (first + sectors) * SECTOR > disk_bytes:
                raise LogError(f"{where}: sectors {first} to {first + sectors} on a disk of {disk_bytes} bytes")
            content = position + SECTOR
            if content + sectors * SECTOR > log_bytes:
                raise LogError(f"{where}: {sectors} sectors reach beyond the end of the log")
            if flags == _FLUSH:
                epochs[-1].log_end = position
                epochs.append(Epoch())
            else:
                epochs[-1].writes.append(Write(first, sectors, content))
            position = content + sectors * SECTOR
    epochs[-1].log_end = position
    return epochs


def ext4_records(disk: Sectors) -> list[int]:
    """First sectors of the two 1024-byte records that ext4 cannot be mounted without: its and its journal's superblock.

    Torn, each fails its checksum, and e2fsck must be run by hand: so ext4 counts on disks that write them whole.
    """
    journal = struct.pack(">II", 0xC03B3998, 4)  # jbd2's magic number, and "superblock, version 2"
    starts = np.flatnonzero((disk[:, : len(journal)] == np.frombuffer(journal, np.uint8)).all(axis=1))
    return [2, *(int(sector) for sector in starts)]


def read_disk(path: Path) -> Sectors:
    """A whole disk image in memory."""
    return np.fromfile(path, dtype=np.uint8).reshape(-1, SECTOR)


def written(log: Sectors, write: Write) -> Sectors:
    """What a write wrote. `log` is the log as an array of sectors."""
    first = write.log_offset // SECTOR
    return log[first : first + write.sectors]


def apply(disk: Sectors, log: Sectors, epoch: Epoch) -> None:
    """Make all of an epoch durable."""
    for write in epoch.writes:
        disk[write.first_sector : write.first_sector + write.sectors] = written(log, write)


def crash_states(
    durable: Sectors, log: Sectors, epoch: Epoch, seeded: int, chance: random.Random, records: Sequence[int] = ()
) -> Iterator[tuple[str, Sectors]]:
    """(name, disk) for power cuts in this epoch: nothing of it, all of it, and `seeded` random selections.

    `durable` is the disk at the epoch's start. The two sectors from each of `records` on are written both or neither.
    An epoch without writes has the one state "nothing".
    """
    yield "nothing", durable.copy()
    if not epoch.writes:
        return
    everything = durable.copy()
    apply(everything, log, epoch)
    yield "all", everything
    for _ in range(seeded):
        name, kept = chance.choice(_SELECTIONS)(epoch, chance)
        disk = durable.copy()
        for write, mask in zip(epoch.writes, kept, strict=True):
            for place in (record - write.first_sector for record in records):
                if 0 <= place < write.sectors - 1:
                    mask[place + 1] = mask[place]
            disk[write.first_sector : write.first_sector + write.sectors][mask] = written(log, write)[mask]
        yield name, disk


_Selection = tuple[str, list[NDArray[np.bool_]]]


def _scattered(epoch: Epoch, chance: random.Random) -> _Selection:
    """Each sector by itself, with one probability for all."""
    share = chance.choice((0.1, 0.5, 0.9))
    draw: Any = np.random.default_rng(chance.getrandbits(64))
    return f"{share:.0%} of the sectors", [draw.random(write.sectors) < share for write in epoch.writes]


def _whole_writes(epoch: Epoch, chance: random.Random) -> _Selection:
    """Each write whole or not at all: what a disk does that reorders and never tears."""
    return "half of the writes", [np.full(write.sectors, chance.random() < 0.5) for write in epoch.writes]


def _cut(epoch: Epoch, chance: random.Random) -> _Selection:
    """The writes before one of them, a part of this one, and nothing behind: a disk that keeps the order."""
    at = chance.randrange(len(epoch.writes))
    kept = [np.full(write.sectors, number < at) for number, write in enumerate(epoch.writes)]
    kept[at][: chance.randrange(epoch.writes[at].sectors + 1)] = True
    return f"up to write {at}", kept


def _one_torn(epoch: Epoch, chance: random.Random) -> _Selection:
    """One write without one end, and either all or none of the others: a disk that finishes one write late or early."""
    others = chance.random() < 0.5
    at = chance.randrange(len(epoch.writes))
    kept = [np.full(write.sectors, others) for write in epoch.writes]
    edge = chance.randrange(epoch.writes[at].sectors)
    kept[at][:] = chance.random() < 0.5
    kept[at][edge:] ^= True
    return f"write {at} torn, the others {'there' if others else 'missing'}", kept


_SELECTIONS = (_scattered, _whole_writes, _cut, _one_torn)
