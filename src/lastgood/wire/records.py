"""Gradient records: a header of 64 bytes and its payload, the only thing that a data connection carries.

docs/wire-format.md describes them for other implementations. `native/src/wire` reads and writes them at speed; this
module is its plain twin.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import astuple, dataclass

from lastgood import _native
from lastgood.errors import CorruptCheckpoint

__all__ = [
    "FINAL",
    "HEADER_BYTES",
    "ITEM_BYTES",
    "MAX_ITERATION",
    "MAX_PAYLOAD_BYTES",
    "DType",
    "Record",
    "RecordKind",
    "pack_header",
    "parse_header",
]

_HEADER = struct.Struct("<4sHBBQIIQIB3xQII4xI")
HEADER_BYTES = _HEADER.size
MAX_PAYLOAD_BYTES = 64 << 20
"""Of one record; a receiver refuses longer ones before it takes any memory."""
MAX_ITERATION = 1 << 62
"""All iterations are below it, so that what is counted on from one is a number of 63 bits as well."""
FINAL = 1
"""Flag of a gradient that carries the sum (or mean) over all ranks; without it, it is a partial sum of a ring."""
_MAGIC = b"LGR1"
_VERSION = 1


class RecordKind(enum.IntEnum):
    """What a record is."""

    GRADIENT = 1
    END = 2
    """This rank sends nothing more for this iteration; no payload."""


class DType(enum.IntEnum):
    """Element type of a payload; the names are torch's."""

    float32 = 1
    float64 = 2
    float16 = 3
    bfloat16 = 4


ITEM_BYTES = {DType.float32: 4, DType.float64: 8, DType.float16: 2, DType.bfloat16: 2}


@dataclass(frozen=True)
class Record:
    """What a header says. The payload belongs at byte `offset` of bucket `bucket` of the declared layout.

    Between kind and flags the fields stand in the header's order.
    """

    kind: RecordKind
    job: int
    """The first eight bytes of the job's id, little-endian."""
    epoch: int
    rank: int
    iteration: int
    bucket: int = 0
    dtype: DType = DType.float32
    offset: int = 0
    length: int = 0
    checksum: int = 0
    """CRC32C of the payload. The header's own checksum covers it, so that a payload is bound to its place."""
    flags: int = 0


def pack_header(record: Record) -> bytes:
    """The 64 bytes of a header. Raises struct.error if a number does not fit its field."""
    kind, *fields, flags = astuple(record)
    header = _HEADER.pack(_MAGIC, _VERSION, kind, flags, *fields, 0)
    return header[:-4] + struct.pack("<I", _native.crc32c(header[:-4]))


def parse_header(content: bytes | bytearray | memoryview, other: str) -> Record:
    """Read a header that `other` sent. Raises CorruptCheckpoint for whatever no sender of version 1 writes."""
    if len(content) != HEADER_BYTES:
        raise CorruptCheckpoint(f"{other}: a record's header has {HEADER_BYTES} bytes, not {len(content)}")
    if content[56:60] != bytes(4) or content[37:40] != bytes(3):
        raise CorruptCheckpoint(f"{other}: a record's header with bytes set that version 1 leaves zero")
    magic, version, kind, flags, job, epoch, rank, iteration, bucket, dtype, offset, length, checksum, own = (
        _HEADER.unpack(content)
    )
    if magic != _MAGIC:
        raise CorruptCheckpoint(f"{other}: no gradient record (it begins with {bytes(magic)!r})")
    if version != _VERSION:
        raise CorruptCheckpoint(f"{other}: a record of version {version}; this side speaks version {_VERSION}")
    if own != _native.crc32c(bytes(content[:-4])):
        raise CorruptCheckpoint(f"{other}: a record's header is damaged")
    if kind not in list(RecordKind) or flags & ~FINAL or dtype not in list(DType):
        raise CorruptCheckpoint(f"{other}: a record of kind {kind}, flags {flags}, dtype {dtype}, which are not known")
    if iteration >= MAX_ITERATION:
        raise CorruptCheckpoint(f"{other}: a record of iteration {iteration}, which no training reaches")
    item = ITEM_BYTES[DType(dtype)]
    if length > MAX_PAYLOAD_BYTES or length % item or offset % item:
        raise CorruptCheckpoint(f"{other}: a record of {length} bytes at {offset}, of items of {item} bytes")
    if kind == RecordKind.END and length:
        raise CorruptCheckpoint(f"{other}: an end of iteration with {length} bytes of payload")
    return Record(RecordKind(kind), job, epoch, rank, iteration, bucket, DType(dtype), offset, length, checksum, flags)
