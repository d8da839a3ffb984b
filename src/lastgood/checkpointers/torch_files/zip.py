"""The zip that torch.save writes: a directory of entries whose bytes lie in the file as they are.

Python's own reader inflates what is compressed, and reads what several entries claim several times. Here nothing is
compressed, nothing lies outside the zip, and no byte belongs to two entries.
"""

from __future__ import annotations

import itertools
import os
import struct
import zlib
from dataclasses import dataclass

from lastgood._lazy import torch
from lastgood.bounds import Budget, Refused, require

__all__ = ["TorchZip", "read_at"]


@dataclass(frozen=True)
class _Entry:
    begin: int
    """Where its bytes lie, counted from the begin of the zip."""
    nbytes: int
    checksum: int


_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY_BYTES = 700
"""Of memory, for one entry."""


class TorchZip:
    """The entries of one zip, which may be a part of a file. Raises Refused and OSError."""

    def __init__(self, descriptor: int, begin: int, nbytes: int, budget: Budget) -> None:
        self._descriptor = descriptor
        self._begin = begin
        self._nbytes = nbytes
        self._budget = budget
        self.entries = self._directory()

    def _directory(self) -> dict[str, _Entry]:
        begin, nbytes, count = self._find_directory()
        self._budget.take(nbytes + count * _ENTRY_BYTES)
        content = self._read_at(begin, nbytes)
        found: dict[str, _Entry] = {}
        taken: list[tuple[int, int, str]] = []
        position = 0
        for _ in range(count):
            if position + _CENTRAL.size > nbytes:
                raise Refused("its zip has fewer entries than it says")
            fields = _CENTRAL.unpack_from(content, position)
            flags, method, checksum, packed, size, name_bytes, extra_bytes, comment_bytes = (
                fields[index] for index in (3, 4, 7, 8, 9, 10, 11, 12)
            )
            position += _CENTRAL.size
            name = content[position : position + name_bytes].decode("utf-8", "replace")
            extra = content[position + name_bytes : position + name_bytes + extra_bytes]
            position += name_bytes + extra_bytes + comment_bytes
            size, packed, local = _wide([size, packed, fields[16]], extra)
            if fields[0] != b"PK\1\2" or position > nbytes or name in found:
                raise Refused("the directory of its zip is damaged")
            if method or packed != size or flags & 0x2041:
                raise Refused(f"{name!r} in it is compressed or encrypted, which torch.save never does")
            data = self._data_begin(local, begin)
            if data + size > begin:
                raise Refused(f"{name!r} in it reaches beyond its end")
            found[name] = _Entry(data, size, checksum)
            taken.append((local, data + size, name))
        taken.sort()
        for (_, end, _), (following, _, name) in itertools.pairwise(taken):
            if following < end:
                raise Refused(f"{name!r} in it lies over another entry")
        return found

    def _find_directory(self) -> tuple[int, int, int]:
        """Begin and bytes of the zip's directory, and the number of entries."""
        at = self._nbytes - _END.size
        if at < 0:
            raise Refused("it is no file of torch.save (of torch 1.6 or later)")
        end = _END.unpack(self._read_at(at, _END.size))
        if end[0] != b"PK\5\6" or end[7]:
            raise Refused("it is no file of torch.save (of torch 1.6 or later), or its end is missing")
        count, nbytes, begin = end[4], end[5], end[6]
        if at >= _LOCATOR.size:
            locator = _LOCATOR.unpack(self._read_at(at - _LOCATOR.size, _LOCATOR.size))
            if locator[0] == b"PK\6\7":
                at = locator[2]
                wide = _END64.unpack(self._read_at(at, _END64.size))
                if wide[0] != b"PK\6\6":
                    raise Refused("the end of its zip is damaged")
                count, nbytes, begin = wide[7], wide[8], wide[9]
        if begin + nbytes > at or count * _CENTRAL.size > nbytes:
            raise Refused("the directory of its zip does not fit into it")
        return begin, nbytes, count

    def _data_begin(self, local: int, directory: int) -> int:
        if local + _LOCAL.size > directory:
            raise Refused("an entry of its zip lies outside it")
        fields = _LOCAL.unpack(self._read_at(local, _LOCAL.size))
        if fields[0] != b"PK\3\4":
            raise Refused("an entry of its zip is damaged")
        return int(local + _LOCAL.size + fields[9] + fields[10])

    def _read_at(self, position: int, nbytes: int) -> bytes:
        if not 0 <= position <= position + nbytes <= self._nbytes:
            raise Refused("its zip points outside it")
        content = os.pread(self._descriptor, nbytes, self._begin + position)
        if len(content) != nbytes:
            raise Refused("it became shorter while it was read")
        return content

    def read(self, name: str) -> torch.Tensor:
        """The bytes of one entry, in memory of their own, with their checksum compared."""
        entry = self.entries.get(name)
        if entry is None:
            raise Refused(f"it lacks {name[:200]!r}")
        content = read_at(self._descriptor, self._begin + entry.begin, entry.nbytes)
        if zlib.crc32(content.numpy().data) != entry.checksum:
            raise Refused(f"the checksum of {name!r} does not hold")
        return content


def read_at(descriptor: int, position: int, nbytes: int, what: str = "it") -> torch.Tensor:
    """Bytes of a file, in memory of their own; `what` is the file in errors. Raises Refused if it ends before them."""
    content = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    left = content.numpy().data
    while left:
        got = os.preadv(descriptor, [left], position + nbytes - len(left))
        require(got > 0, f"{what} became shorter while it was read")
        left = left[got:]
    return content


def _wide(numbers: list[int], extra: bytes) -> list[int]:
    """Sizes and an offset of which those that do not fit into 32 bits stand in the zip64 field."""
    if 0xFFFFFFFF not in numbers:
        return numbers
    position = 0
    while position + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<2H", extra, position)
        if kind == 1:
            wide = list(struct.unpack(f"<{nbytes // 8}Q", extra[position + 4 : position + 4 + nbytes // 8 * 8]))
            return [wide.pop(0) if number == 0xFFFFFFFF else number for number in numbers]
        position += 4 + nbytes
    return numbers
