"""States that a power cut may leave: choosing them, and having them as real files, one after another, cheaply."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

from disk_model import SECTOR, Disk, File, Folder, State

COMMIT_SECTOR = 65536 // SECTOR

Signature = tuple[int, int]
"""Length and hash of one file's content."""


def states(disk: Disk, chance: random.Random, draws: int) -> Iterator[State]:
    """States that the disk may be in now: nothing pending, everything, each commit record alone and all but it, each
    number of changed names, and `draws` random ones."""
    folders, files = _pending(disk)
    yield State()
    yield _everything(folders, files)
    for file in files:
        if COMMIT_SECTOR in file.pending:
            newest = len(file.sectors[COMMIT_SECTOR]) - 1
            alone = {file: {COMMIT_SECTOR: newest}}
            sizes = {one: len(one.sizes) - 1 for one in files}
            names = {folder: len(folder.pending) for folder in folders}
            yield State(sectors=alone)
            yield State(names, sizes, alone)
            rest = _everything(folders, files)
            rest.sectors[file][COMMIT_SECTOR] = 0
            yield rest
    for folder in folders:
        for done in range(len(folder.pending)):
            yield State({folder: done}, {file: len(file.sizes) - 1 for file in files}, _everything([], files).sectors)
            yield State({folder: done})
    # More where more is under way.
    choices = sum(len(file.pending) for file in files) + sum(len(folder.pending) for folder in folders)
    for _ in range(draws * min(choices - 1, 24) // 12):
        yield _some(folders, files, chance)


def _pending(disk: Disk) -> tuple[list[Folder], list[File]]:
    """Directories and files that can be reached in some state and have something pending."""
    folders: list[Folder] = []
    files: list[File] = []
    left: list[Folder] = [disk.root]
    while left:
        folder = left.pop()
        if folder in folders:
            continue
        folders.append(folder)
        for names in (folder.durable, *(after for _, after in folder.pending)):
            for node in names.values():
                if isinstance(node, Folder):
                    left.append(node)
                elif node not in files:
                    files.append(node)
    return (
        [folder for folder in folders if folder.pending],
        [file for file in files if file.pending or len(file.sizes) > 1],
    )


def _everything(folders: list[Folder], files: list[File]) -> State:
    return State(
        {folder: len(folder.pending) for folder in folders},
        {file: len(file.sizes) - 1 for file in files},
        {file: {sector: len(file.sectors[sector]) - 1 for sector in file.pending} for file in files},
    )


def _some(folders: list[Folder], files: list[File], chance: random.Random) -> State:
    state = State()
    for folder in folders:
        state.folders[folder] = chance.randint(0, len(folder.pending))
    for file in files:
        state.sizes[file] = chance.randint(0, len(file.sizes) - 1) if chance.random() < 0.5 else len(file.sizes) - 1
        landed = chance.choice((0.0, 0.03, 0.5, 0.97, 1.0))
        state.sectors[file] = {
            sector: chance.randint(1, len(file.sectors[sector]) - 1)
            for sector in sorted(file.pending)
            if chance.random() < landed
        }
    return state


class _Mirror:
    """One file of the model as a real file, with the content that the present state gives it."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.size = 0
        self.hash = 0
        self._sectors: dict[int, int] = {}
        self._look_again: set[int] = set()

    def take(self, disk: Disk, file: File, size_index: int, chosen: dict[int, int]) -> None:
        contents = disk.contents
        look_at = self._look_again | file.changed | file.pending
        file.changed.clear()
        size = file.sizes[size_index].value
        if size != self.size:
            os.ftruncate(self.descriptor, size)
            cut = min(size, self.size)
            for sector in [known for known in self._sectors if (known + 1) * SECTOR > cut]:
                self._note(disk, sector, contents.zeros)
                look_at.add(sector)
            if cut % SECTOR:
                look_at.add(cut // SECTOR)
            self.size = size
        self._look_again = set()
        run: list[bytes] = []
        run_at = 0
        for sector in sorted(look_at):
            if sector * SECTOR >= size:
                self._look_again.add(sector)
                continue
            history = file.sectors.get(sector)
            value = contents.zeros if history is None else history[chosen.get(sector, 0)].value
            if self._sectors.get(sector, contents.zeros) == value:
                continue
            self._note(disk, sector, value)
            if run and run_at + len(run) != sector:
                self._write(run_at, run)
                run = []
            if not run:
                run_at = sector
            run.append(contents.bytes[value])
        if run:
            self._write(run_at, run)

    def _write(self, sector: int, run: list[bytes]) -> None:
        at = sector * SECTOR
        data = b"".join(run)[: self.size - at]
        assert os.pwrite(self.descriptor, data, at) == len(data)

    def _note(self, disk: Disk, sector: int, value: int) -> None:
        before = self._sectors.get(sector, disk.contents.zeros)
        self.hash ^= disk.contents.place_hash(sector, before) ^ disk.contents.place_hash(sector, value)
        self._sectors[sector] = value
        if value == disk.contents.zeros:
            del self._sectors[sector]


class StateDirectory:
    """Holds one state of a disk at a time as real files under `path`; going to the next changes only what differs."""

    def __init__(self, place: Path) -> None:
        self.path = place / "disk"
        self.path.mkdir()
        self._pool = place / "pool"
        self._pool.mkdir()
        self._mirrors: dict[File, _Mirror] = {}
        self._names: dict[str, File | Folder] = {}

    def close(self) -> None:
        for mirror in self._mirrors.values():
            os.close(mirror.descriptor)

    def take(self, disk: Disk, state: State) -> dict[str, Signature | None]:
        """Make the files those of `state`; return what there is, by name (None for a directory)."""
        wanted = dict(state.walk(disk.root))
        for name in sorted(self._names.keys() - wanted.keys(), reverse=True):
            self._remove(name)
        for name in [known for known, node in self._names.items() if wanted[known] is not node]:
            if isinstance(self._names[name], File):
                self._remove(name)
        found: dict[str, Signature | None] = {}
        for name, node in wanted.items():
            if isinstance(node, Folder):
                if name not in self._names:
                    (self.path / name).mkdir()
                found[name] = None
            else:
                mirror = self._mirrors.get(node)
                if mirror is None:
                    mirror = self._mirrors[node] = _Mirror(self._pool / str(node.number))
                mirror.take(disk, node, state.sizes.get(node, 0), state.sectors.get(node, {}))
                if name not in self._names:
                    os.link(self._pool / str(node.number), self.path / name)
                found[name] = (mirror.size, mirror.hash)
        self._names = wanted
        return found

    def _remove(self, name: str) -> None:
        if isinstance(self._names.pop(name), Folder):
            (self.path / name).rmdir()
        else:
            (self.path / name).unlink()
