"""The two ways in which the bytes of a slot reach its storage, behind one small interface.

`DirectFile` writes past the page cache and flushes; `MappedFile` stores into a mapping, for persistent memory (a DAX
file system), where a store needs no system call. Both promise the same: after `flush` has returned, all that was
written before it survives a power cut.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Literal

from lastgood import _native
from lastgood.files import open_regular
from lastgood.storage import files
from lastgood.storage import format as fmt

__all__ = ["DirectFile", "MappedFile", "Medium", "SlotFile", "open_slot_file"]

Medium = Literal["file", "pmem"]
"""How slots are written: ``file`` (direct I/O) or ``pmem`` (stores into mapped persistent memory)."""


class SlotFile(ABC):
    """One open slot file. Used by one thread at a time; the chunks of a stream go through a native writer."""

    descriptor: int
    how: str
    """In a word for records: ``direct``, ``page cache``, ``libpmem`` or ``msync``."""
    mapping: _native.PersistentMapping | None = None
    """What the native writer stores through instead of writing to the descriptor."""

    @abstractmethod
    def write_block(self, content: bytes, offset: int) -> None:
        """Write `content`, filled up with zeros to whole blocks. Raises OSError."""

    @abstractmethod
    def flush(self) -> None:
        """Make what was written durable. Raises OSError; never called again for the same bytes after it failed."""

    def close(self) -> None:
        """Close the file. Native threads have descriptors and mappings of their own."""
        os.close(self.descriptor)


class DirectFile(SlotFile):
    """Writes past the page cache if the file system can, and through it if it cannot."""

    def __init__(self, path: Path, *, direct: bool) -> None:
        self.descriptor, direct = files.open_file(path, os.O_RDWR, direct=direct)
        self.how = "direct" if direct else "page cache"

    def write_block(self, content: bytes, offset: int) -> None:
        """As `SlotFile.write_block`."""
        files.write_block(self.descriptor, content, offset)

    def flush(self) -> None:
        """As `SlotFile.flush`: fdatasync."""
        files.flush(self.descriptor)


class MappedFile(SlotFile):
    """Stores into a mapping of the file's first `nbytes`: through libpmem on persistent memory, else with msync."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.descriptor = open_regular(path, os.O_RDWR)
        try:
            self._mapping = self.mapping = _native.PersistentMapping(self.descriptor, nbytes)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.how = self._mapping.how

    def write_block(self, content: bytes, offset: int) -> None:
        """As `SlotFile.write_block`."""
        self._mapping.write(content.ljust(fmt.align_up(len(content)), b"\0"), offset)

    def flush(self) -> None:
        """As `SlotFile.flush`: nothing is left to do with libpmem, msync without."""
        self._mapping.flush()


def open_slot_file(path: Path, medium: Medium, *, direct: bool, nbytes: int) -> SlotFile:
    """Open an existing slot file of at least `nbytes`, written in full. Raises OSError."""
    if medium == "pmem":
        return MappedFile(path, nbytes)
    return DirectFile(path, direct=direct)
