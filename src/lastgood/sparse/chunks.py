"""What a link of the exchange carries: records of 64 bytes and at most 64 KiB, each bound to its place by checksums.

docs/wire-format.md describes them. A block goes around the ring as its origin cut it: whoever passes a chunk on changes
nothing in it, so that its checksum holds from the first rank to the last one.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from lastgood import _native
from lastgood.errors import (
    CheckpointError,
    CorruptCheckpoint,
    MismatchError,
    WaitTimeout,
)
from lastgood.text import parse_json
from lastgood.units import KIB
from lastgood.wire.records import MAX_ITERATION

__all__ = [
    "CHUNK_BYTES",
    "HEADER_BYTES",
    "Chunk",
    "Kind",
    "cut",
    "failure_payload",
    "pack_header",
    "parse_failure",
    "parse_header",
]

_HEADER = struct.Struct("<4sHBBQIIQIIQQII")
HEADER_BYTES = _HEADER.size
CHUNK_BYTES = 64 * KIB
"""Payload of one record at most: what a more urgent block has to wait for."""
_MAGIC = b"LGS1"
_VERSION = 1
_MAX_FAILURE_BYTES = 4 * KIB
_FAILURES: dict[str, type[CheckpointError]] = {
    kind.__name__: kind for kind in (CheckpointError, CorruptCheckpoint, MismatchError, WaitTimeout)
}


class Kind(enum.IntEnum):
    """What a record is."""

    CHUNK = 1
    """A piece of a block."""
    END = 2
    """Its origin takes part no more; nothing of it follows. No payload."""
    FAILURE = 3
    """The exchange has ended for all; the payload says why."""


@dataclass(frozen=True)
class Chunk:
    """What a header says. The payload is bytes `offset` to `offset + length` of a block of `total` bytes."""

    kind: Kind
    job: int
    """The first eight bytes of the job's id, little-endian."""
    incarnation: int
    origin: int
    """The rank whose block it is, or that ends."""
    iteration: int = 0
    layer: int = 0
    length: int = 0
    offset: int = 0
    total: int = 0
    checksum: int = 0
    """CRC32C of the payload."""


def pack_header(chunk: Chunk) -> bytes:
    """The 64 bytes of a header. Raises struct.error if a number does not fit its field."""
    header = _HEADER.pack(
        _MAGIC,
        _VERSION,
        chunk.kind,
        0,
        chunk.job,
        chunk.incarnation,
        chunk.origin,
        chunk.iteration,
        chunk.layer,
        chunk.length,
        chunk.offset,
        chunk.total,
        chunk.checksum,
        0,
    )
    return header[:-4] + struct.pack("<I", _native.crc32c(header[:-4]))


def parse_header(content: bytes | bytearray, other: str) -> Chunk:
    """Read a header that `other` sent. Raises CorruptCheckpoint for whatever no sender of version 1 writes."""
    if len(content) != HEADER_BYTES:
        raise CorruptCheckpoint(f"{other}: a chunk's header has {HEADER_BYTES} bytes, not {len(content)}")
    magic, version, kind, flags, *fields, own = _HEADER.unpack(content)
    if magic != _MAGIC:
        raise CorruptCheckpoint(f"{other}: no record of a sparse exchange (it begins with {bytes(magic)!r})")
    if version != _VERSION:
        raise CorruptCheckpoint(f"{other}: a record of version {version}; this side speaks version {_VERSION}")
    if own != _native.crc32c(bytes(content[:-4])):
        raise CorruptCheckpoint(f"{other}: a chunk's header is damaged")
    if kind not in list(Kind) or flags:
        raise CorruptCheckpoint(f"{other}: a record of kind {kind}, flags {flags}, which are not known")
    chunk = Chunk(Kind(kind), *fields)
    if chunk.iteration >= MAX_ITERATION:
        raise CorruptCheckpoint(f"{other}: a record of iteration {chunk.iteration}, which no training reaches")
    if chunk.kind is Kind.CHUNK:
        if not 0 < chunk.length <= CHUNK_BYTES or chunk.offset + chunk.length > chunk.total:
            raise CorruptCheckpoint(
                f"{other}: a chunk of {chunk.length} bytes at {chunk.offset}, of a block of {chunk.total}"
            )
    elif chunk.iteration or chunk.layer or chunk.offset or chunk.total:
        raise CorruptCheckpoint(f"{other}: a record of kind {chunk.kind.name} with a place in a block")
    elif chunk.length > (_MAX_FAILURE_BYTES if chunk.kind is Kind.FAILURE else 0):
        raise CorruptCheckpoint(f"{other}: a record of kind {chunk.kind.name} with {chunk.length} bytes")
    return chunk


def cut(block: memoryview, like: Chunk) -> Iterator[tuple[bytes, memoryview]]:
    """The records of a block, in order: headers `like` this one, and their payloads."""
    for offset in range(0, len(block), CHUNK_BYTES):
        payload = block[offset : offset + CHUNK_BYTES]
        header = Chunk(
            Kind.CHUNK,
            like.job,
            like.incarnation,
            like.origin,
            like.iteration,
            like.layer,
            len(payload),
            offset,
            len(block),
            _native.crc32c(payload),
        )
        yield pack_header(header), payload


def failure_payload(error: CheckpointError) -> bytes:
    """What the other ranks are told of `error`."""
    why = str(error)
    while len(payload := json.dumps({"error": type(error).__name__, "why": why}).encode()) > _MAX_FAILURE_BYTES:
        why = why[: len(why) // 2]
    return payload


def parse_failure(payload: bytes, name: str) -> CheckpointError:
    """The error that rank `name` tells of. Raises CorruptCheckpoint if it is none."""
    content = parse_json(payload, f"what {name} says of its failure", most_bytes=_MAX_FAILURE_BYTES)
    if not isinstance(content, dict) or not all(isinstance(content.get(key), str) for key in ("error", "why")):
        raise CorruptCheckpoint(f"{name} says of its failure what cannot be read")
    kind = _FAILURES.get(content["error"], CheckpointError)
    return kind(f"{name} ended the exchange: {content['why']}")
