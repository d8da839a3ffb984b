"""What a disk may hold after a power cut, worked out from the log of recording_disk.c.

The model promises as little as POSIX does:

- A write is durable once an fsync or fdatasync of its file, begun after the write, has ended well. Until then each of
  its 512-byte sectors may be on the disk or not, whatever became of its neighbours; of a sector written several times,
  any version may be there.
- The length of a file is pending in the same way; what lies behind the length that is there does not exist. A sector
  that a file has newly got may hold anything until it is flushed (tried at a few sectors: all of them would be slow).
- A name that was made, changed or removed is durable once its directory was flushed. Names of one directory change in
  order; different directories, and files, do not wait for each other. Flushing a file does not keep its name.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

SECTOR = 512
_RECORD = struct.Struct("<IIQqqqqII")
KINDS = (
    "create",
    "truncate",
    "write",
    "allocate",
    "rename",
    "unlink",
    "mkdir",
    "flush_begin",
    "flush_end",
    "report",
    "unknown",
)


class Event(NamedTuple):
    """One record. `data` is None where it is `length` zeros; of a rename it is the new name."""

    kind: str
    inode: int
    offset: int
    length: int
    ticket: int
    result: int
    name: str
    data: bytes | None


def read_log(path: Path) -> list[Event]:
    content = path.read_bytes()
    events, at = [], 0
    while at < len(content):
        kind, zeros, inode, offset, length, ticket, result, name_bytes, data_bytes = _RECORD.unpack_from(content, at)
        at += _RECORD.size
        name = content[at : at + name_bytes].decode()
        at += name_bytes
        data = None if zeros else content[at : at + data_bytes]
        at += data_bytes
        events.append(Event(KINDS[kind - 1], inode, offset, length, ticket, result, name, data))
    assert at == len(content), "the log is cut"
    return events


class Contents:
    """Sector contents by small numbers, with a hash of each. Number 0 is all zeros, 1 is something unwritten."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self.bytes: list[bytes] = []
        self.zeros = self.number(bytes(SECTOR))
        self.noise = self.number(b"\xa5" * SECTOR)

    def number(self, content: bytes) -> int:
        found = self._numbers.setdefault(content, len(self.bytes))
        if found == len(self.bytes):
            self.bytes.append(content)
        return found

    def place_hash(self, sector: int, number: int) -> int:
        """To be combined by exclusive or: the hash of a file is that of all its sectors that are not zero."""
        if number == self.zeros:
            return 0
        digest = hashlib.blake2b(self.bytes[number] + sector.to_bytes(8, "little"), digest_size=16).digest()
        return int.from_bytes(digest, "little")


class Version(NamedTuple):
    since: int
    value: int


def _settle(history: list[Version], before: int) -> bool:
    """Drop what a flush that began at event `before` has overtaken; whether anything is still pending."""
    last = 0
    for at, version in enumerate(history):
        if version.since < before:
            last = at
    del history[:last]
    return len(history) > 1


@dataclass(eq=False)
class File:
    """`sectors`: the durable content number first, then the pending ones, oldest first. `sizes` likewise."""

    number: int
    sectors: dict[int, list[Version]] = field(default_factory=dict)
    sizes: list[Version] = field(default_factory=lambda: [Version(-1, 0)])
    pending: set[int] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)
    """Sectors whose history changed since a reader of the model last looked; that reader clears it."""

    @property
    def size(self) -> int:
        return self.sizes[-1].value


@dataclass(eq=False)
class Folder:
    """`durable`: names that are there for sure; `pending`: (event, names after it), oldest first."""

    number: int
    durable: dict[str, Node] = field(default_factory=dict)
    pending: list[tuple[int, dict[str, Node]]] = field(default_factory=list)

    @property
    def names(self) -> dict[str, Node]:
        """All that was done."""
        return self.pending[-1][1] if self.pending else self.durable

    def names_after(self, done: int) -> dict[str, Node]:
        """The first `done` pending changes reached the disk."""
        return self.pending[done - 1][1] if done else self.durable


Node = File | Folder


class Disk:
    """Follows a log, event by event."""

    def __init__(self, root: str) -> None:
        self.root_path = root
        self.contents = Contents()
        self.root = Folder(0)
        self.now = -1
        self.reports: list[tuple[int, int]] = []
        """(sequence, step) of what was reported durable."""
        self._nodes: dict[int, Node] = {}
        self._flushes: dict[int, tuple[int, Node | None]] = {}
        self._made = 0
        self._half_report = ""

    def follow(self, event: Event, root_inode: int) -> None:
        self.now += 1
        self._nodes.setdefault(root_inode, self.root)
        getattr(self, f"_{event.kind}")(event)

    def _place(self, path: str) -> tuple[Folder, str]:
        assert path.startswith(self.root_path + "/"), path
        *parents, name = path[len(self.root_path) + 1 :].split("/")
        folder = self.root
        for parent in parents:
            inside = folder.names[parent]
            assert isinstance(inside, Folder), path
            folder = inside
        return folder, name

    def _file(self, inode: int) -> File:
        node = self._nodes[inode]
        assert isinstance(node, File)
        return node

    def _change_names(self, folder: Folder, names: dict[str, Node]) -> None:
        folder.pending.append((self.now, names))

    def _create(self, event: Event) -> None:
        self._made += 1
        self._nodes[event.inode] = node = File(self._made)
        folder, name = self._place(event.name)
        self._change_names(folder, {**folder.names, name: node})

    def _mkdir(self, event: Event) -> None:
        self._made += 1
        self._nodes[event.inode] = node = Folder(self._made)
        folder, name = self._place(event.name)
        self._change_names(folder, {**folder.names, name: node})

    def _rename(self, event: Event) -> None:
        assert event.data is not None
        folder, old = self._place(event.name)
        target, new = self._place(event.data.decode())
        assert folder is target, "the model knows renames inside one directory"
        names = dict(folder.names)
        names[new] = names.pop(old)
        self._change_names(folder, names)

    def _unlink(self, event: Event) -> None:
        folder, name = self._place(event.name)
        self._change_names(folder, {known: node for known, node in folder.names.items() if known != name})

    def _write(self, event: Event) -> None:
        file = self._file(event.inode)
        end = event.offset + event.length
        self._grow(file, event.offset, end)
        if event.data is None:
            # Only sectors that ever held something can change.
            inside = range(event.offset // SECTOR, -(-end // SECTOR))
            sectors = [sector for sector in file.sectors if sector in inside]
        else:
            sectors = list(range(event.offset // SECTOR, -(-end // SECTOR)))
        for sector in sectors:
            begin = sector * SECTOR
            whole = event.offset <= begin and begin + SECTOR <= end
            if whole:
                old = b""
                new = bytes(SECTOR) if event.data is None else event.data[begin - event.offset :][:SECTOR]
            else:
                old = self.contents.bytes[self._latest(file, sector)]
                low, high = max(begin, event.offset), min(begin + SECTOR, end)
                data = bytes(high - low) if event.data is None else event.data[low - event.offset : high - event.offset]
                new = old[: low - begin] + data + old[high - begin :]
            self._set(file, sector, self.contents.number(new))

    def _latest(self, file: File, sector: int) -> int:
        return file.sectors[sector][-1].value if sector in file.sectors else self.contents.zeros

    def _set(self, file: File, sector: int, value: int) -> None:
        history = file.sectors.setdefault(sector, [Version(-1, self.contents.zeros)])
        if len(history) == 1 and history[0].value == value:
            return
        history.append(Version(self.now, value))
        file.pending.add(sector)
        file.changed.add(sector)

    def _grow(self, file: File, begin: int, end: int) -> None:
        if end <= file.size:
            return
        # Unwritten sectors at the edges of what is new: may be noise until flushed.
        first, last = -(-file.size // SECTOR), (end - 1) // SECTOR
        for sector in {first, last, 128} & set(range(first, last + 1)):
            if sector not in file.sectors:
                file.sectors[sector] = [Version(-1, self.contents.noise), Version(self.now, self.contents.zeros)]
                file.pending.add(sector)
                file.changed.add(sector)
        file.sizes.append(Version(self.now, end))

    def _allocate(self, event: Event) -> None:
        self._grow(self._file(event.inode), event.offset, event.offset + event.length)

    def _truncate(self, event: Event) -> None:
        file = self._file(event.inode)
        if event.offset > file.size:
            self._grow(file, file.size, event.offset)
        elif event.offset < file.size:
            assert event.offset % SECTOR == 0, "the model knows cuts at sectors"
            for sector in list(file.sectors):
                if sector * SECTOR >= event.offset:
                    self._set(file, sector, self.contents.zeros)
            file.sizes.append(Version(self.now, event.offset))

    def _flush_begin(self, event: Event) -> None:
        self._flushes[event.ticket] = (self.now, self._nodes.get(event.inode))

    def _flush_end(self, event: Event) -> None:
        begun, node = self._flushes.pop(event.ticket)
        if event.result != 0 or node is None:
            return
        if isinstance(node, File):
            _settle(node.sizes, begun)
            for sector in list(node.pending):
                node.changed.add(sector)
                if not _settle(node.sectors[sector], begun):
                    node.pending.discard(sector)
        else:
            while node.pending and node.pending[0][0] < begun:
                node.durable = node.pending.pop(0)[1]

    def _report(self, event: Event) -> None:
        lines = (self._half_report + (event.data or b"").decode()).split("\n")
        self._half_report = lines.pop()
        for line in lines:
            word, step, sequence = line.split()
            assert word == "durable"
            self.reports.append((int(sequence), int(step)))

    def _unknown(self, event: Event) -> None:
        raise AssertionError(f"the program uses {event.name}, which the model does not know")


@dataclass
class State:
    """One choice of what reached the disk; what is not named did not (index 0)."""

    folders: dict[Folder, int] = field(default_factory=dict)
    sizes: dict[File, int] = field(default_factory=dict)
    sectors: dict[File, dict[int, int]] = field(default_factory=dict)

    def files(self, disk: Disk) -> Iterator[tuple[str, File]]:
        """Names inside the disk, and files, as this state has them."""
        yield from ((path, node) for path, node in self.walk(disk.root) if isinstance(node, File))

    def walk(self, folder: Folder, prefix: str = "") -> Iterator[tuple[str, Node]]:
        for name, node in folder.names_after(self.folders.get(folder, 0)).items():
            yield prefix + name, node
            if isinstance(node, Folder):
                yield from self.walk(node, f"{prefix}{name}/")
