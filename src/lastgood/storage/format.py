"""The slot file's format: offsets, records and their encoding. docs/file-format.md says the same in words.

All numbers are little-endian. Every record carries a magic number, the format version, its own length and, in its last
four bytes, a CRC32C over all that precedes; these five keep their places in every version of the format.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
import struct
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lastgood import _native
from lastgood.errors import CorruptCheckpoint
from lastgood.text import is_whole, parse_json

__all__ = [
    "BLOCK",
    "COMMIT_OFFSET",
    "DATA_OFFSET",
    "FORMAT_VERSION",
    "HEADER_OFFSET",
    "JOB_FILE",
    "JOB_ID_BYTES",
    "LOCK_FILE",
    "MAX_WORLD_SIZE",
    "MOST_JOB_BYTES",
    "OLDER_TEMPORARY_FILES",
    "RECORD_BYTES",
    "CommitRecord",
    "Job",
    "OtherVersionError",
    "RecordError",
    "RecordKind",
    "SlotHeader",
    "align_up",
    "decode_agrees",
    "decode_job",
    "encode_job",
    "seal_json",
    "slot_name",
    "slot_number",
    "stream_layout",
    "table_digest",
    "unseal_json",
]

FORMAT_VERSION = 1
BLOCK = 4096
"""Unit of every offset, length and memory address of direct I/O; covers all sector sizes in use."""
HEADER_OFFSET = 0
COMMIT_OFFSET = 64 << 10
"""Far from header and data: no device tears a write over such a distance."""
DATA_OFFSET = 1 << 20
RECORD_BYTES = 512
"""A record fits into one sector of any disk; the rest of its block is zero and means nothing."""
JOB_ID_BYTES = 16
MAX_WORLD_SIZE = 1 << 20
JOB_FILE = "job.json"
LOCK_FILE = "lock"
MOST_JOB_BYTES = 64 << 10
"""Of job.json; a real one has some hundred."""
OLDER_TEMPORARY_FILES = re.compile(r"(slot-\d{4,9}\.lgs|job\.json|verdicts\.json|global\.json|probe-\d+)\.tmp")
"""What earlier versions left half made in a directory of slots."""

_HEADER_MAGIC = b"LGSLOT\r\n"
_COMMIT_MAGIC = b"LGCOMMIT"
_PREFIX = struct.Struct("<8sII")  # magic, format version, record length
_HEADER = struct.Struct("<16sQ")  # job id, slot number
_COMMIT = struct.Struct("<16sII10Q32s32sII")
_CHECKSUM = struct.Struct("<I")
_SLOT_NAME = re.compile(r"slot-(\d{4,9})\.lgs")
_U64_MAX = (1 << 64) - 1
_MOST_JSON_BYTES = 1 << 20


class RecordError(ValueError):
    """The bytes are not a complete record: the text says which rule they break."""


class OtherVersionError(ValueError):
    """A complete record of a format version that this code does not know."""

    def __init__(self, version: int) -> None:
        super().__init__(f"format version {version}, and this program knows version {FORMAT_VERSION}")
        self.version = version


class Job(NamedTuple):
    """Whose checkpoints a directory holds."""

    job_id: bytes
    rank: int = 0
    world_size: int = 1

    def __str__(self) -> str:
        """For messages."""
        return f"job {self.job_id.hex()}, rank {self.rank} of {self.world_size}"


class RecordKind(enum.IntEnum):
    """What a commit record says about its slot."""

    WRITING = 1
    """The slot is void: a checkpoint is being written over it, or was when the process ended."""
    COMMITTED = 2
    """The slot holds a checkpoint."""


def align_up(nbytes: int) -> int:
    """The next multiple of BLOCK."""
    return -(-nbytes // BLOCK) * BLOCK


def _seal(magic: bytes, body: bytes) -> bytes:
    prefix = _PREFIX.pack(magic, FORMAT_VERSION, RECORD_BYTES)
    covered = (prefix + body).ljust(RECORD_BYTES - _CHECKSUM.size, b"\0")
    return covered + _CHECKSUM.pack(_native.crc32c(covered))


def _unseal(magic: bytes, block: bytes) -> bytes:
    """Return what follows the prefix, once magic, length, checksum and version hold, in this order."""
    if len(block) < RECORD_BYTES:
        raise RecordError(f"{len(block)} bytes are too few for a record")
    found_magic, version, length = _PREFIX.unpack_from(block)
    if found_magic != magic:
        raise RecordError(f"magic number {found_magic!r} instead of {magic!r}")
    if not RECORD_BYTES <= length <= min(BLOCK, len(block)):
        raise RecordError(f"record length {length} is out of bounds")
    covered = block[: length - _CHECKSUM.size]
    (expected,) = _CHECKSUM.unpack_from(block, length - _CHECKSUM.size)
    found = _native.crc32c(covered)
    if found != expected:
        raise RecordError(f"record checksum {found:#010x} instead of {expected:#010x}")
    if version != FORMAT_VERSION:
        raise OtherVersionError(version)
    if length != RECORD_BYTES:
        raise RecordError(f"record length {length} instead of {RECORD_BYTES}")
    return covered[_PREFIX.size :]


@dataclass(frozen=True)
class SlotHeader:
    """Who a slot file belongs to; written once, when the file is made."""

    job_id: bytes
    slot: int

    def encode(self) -> bytes:
        """RECORD_BYTES bytes."""
        return _seal(_HEADER_MAGIC, _HEADER.pack(self.job_id, self.slot))

    @classmethod
    def decode(cls, block: bytes) -> SlotHeader:
        """Read a header. Raises RecordError or OtherVersionError."""
        job_id, slot = _HEADER.unpack_from(_unseal(_HEADER_MAGIC, block))
        return cls(job_id, slot)


@dataclass(frozen=True)
class CommitRecord:
    """What a slot holds. Lengths and offsets in bytes; `meta_offset` counts in the stream, the others in the file.

    After kind and job the fields stand in the order of the record.
    """

    kind: RecordKind
    job_id: bytes
    step: int
    incarnation: int
    sequence: int
    stream_bytes: int
    meta_offset: int
    meta_bytes: int
    chunk_bytes: int
    data_offset: int
    table_offset: int
    table_bytes: int
    layout_digest: bytes
    """SHA-256 of the layout of the state, as its writer defines it."""
    table_digest: bytes
    """SHA-256 of the chunk-checksum table."""
    rank: int = 0
    world_size: int = 1
    """The stream is the part of this rank of so many."""

    def encode(self) -> bytes:
        """RECORD_BYTES bytes. Raises RecordError for a record that no reader would accept."""
        self._check()
        kind, job_id, *fields = astuple(self)
        return _seal(_COMMIT_MAGIC, _COMMIT.pack(job_id, kind, 0, *fields))

    def committed(self, meta_offset: int, meta_bytes: int, layout_digest: bytes, table: bytes) -> CommitRecord:
        """The record of the same stream once all of it is written, with this chunk-checksum table."""
        return replace(
            self,
            kind=RecordKind.COMMITTED,
            meta_offset=meta_offset,
            meta_bytes=meta_bytes,
            layout_digest=layout_digest,
            table_digest=table_digest(table),
        )

    @classmethod
    def decode(cls, block: bytes) -> CommitRecord | None:
        """Read a record; None if there never was one (all zero). Raises RecordError or OtherVersionError."""
        if len(block) >= RECORD_BYTES and not any(block[:RECORD_BYTES]):
            return None
        job_id, kind, _, *fields = _COMMIT.unpack_from(_unseal(_COMMIT_MAGIC, block))
        if kind not in (RecordKind.WRITING, RecordKind.COMMITTED):
            raise RecordError(f"record kind {kind} is unknown")
        # Version 1 first knew jobs of one rank only, and left both fields zero.
        fields[-1] = fields[-1] or 1
        record = cls(RecordKind(kind), job_id, *fields)
        record._check()
        return record

    @property
    def job(self) -> Job:
        """Who wrote it."""
        return Job(self.job_id, self.rank, self.world_size)

    @property
    def chunks(self) -> int:
        """Number of chunks of the stream."""
        return -(-self.stream_bytes // self.chunk_bytes)

    @property
    def end_offset(self) -> int:
        """The file is at least this long."""
        return self.table_offset + align_up(self.table_bytes)

    def _check(self) -> None:
        numbers = (self.step, self.incarnation, self.sequence, self.stream_bytes, self.meta_offset, self.meta_bytes)
        if any(not 0 <= number <= _U64_MAX for number in numbers):
            raise RecordError("a number does not fit into 64 bits")
        if self.chunk_bytes <= 0 or self.chunk_bytes % BLOCK or self.chunk_bytes > 1 << 32:
            raise RecordError(f"chunk size {self.chunk_bytes} is not a multiple of {BLOCK} up to 4 GiB")
        if self.meta_offset + self.meta_bytes > self.stream_bytes:
            raise RecordError(
                f"meta data at {self.meta_offset} of {self.meta_bytes} bytes is outside of {self.stream_bytes} bytes"
            )
        layout = (self.data_offset, self.table_offset, self.table_bytes)
        expected = (DATA_OFFSET, *stream_layout(self.stream_bytes, self.chunk_bytes)[:2])
        if layout != expected:
            raise RecordError(f"data and table lie at {layout} instead of {expected}")
        if len(self.job_id) != JOB_ID_BYTES or len(self.layout_digest) != 32 or len(self.table_digest) != 32:
            raise RecordError("job id or digest has a wrong length")
        if not 0 <= self.rank < self.world_size <= MAX_WORLD_SIZE:
            raise RecordError(f"rank {self.rank} of {self.world_size} is impossible")


def stream_layout(stream_bytes: int, chunk_bytes: int) -> tuple[int, int, int]:
    """Offset and length of the checksum table, and the length of the file that a stream needs, in bytes."""
    table_offset = DATA_OFFSET + align_up(stream_bytes)
    table_bytes = 4 * -(-stream_bytes // chunk_bytes)
    return table_offset, table_bytes, table_offset + align_up(table_bytes)


def written_bytes(stream_bytes: int, chunk_bytes: int) -> int:
    """Bytes that a complete write of a stream sends to the disk: data, table and two records."""
    return align_up(stream_bytes) + align_up(stream_layout(stream_bytes, chunk_bytes)[1]) + 2 * BLOCK


def table_digest(table: bytes) -> bytes:
    """SHA-256 of a chunk-checksum table."""
    return hashlib.sha256(table).digest()


def slot_name(slot: int) -> str:
    """The file name of a slot."""
    return f"slot-{slot:04d}.lgs"


def slot_number(path: Path) -> int | None:
    """The slot that a file name stands for, or None."""
    match = _SLOT_NAME.fullmatch(path.name)
    return int(match[1]) if match and slot_name(int(match[1])) == path.name else None


def encode_job(job: Job, agrees: bool | None = None) -> bytes:
    """The content of job.json; `agrees`, if it is known: whether checkpoints count only once all ranks have them."""
    described = {
        "format": "lastgood-slots",
        "version": FORMAT_VERSION,
        "job_id": job.job_id.hex(),
        "rank": job.rank,
        "world_size": job.world_size,
    }
    if agrees is not None:
        described["agrees"] = agrees
    return seal_json(described)


def decode_agrees(content: bytes) -> bool | None:
    """Whether the ranks of a job agree, by its job.json; None if that does not say. Raises as `decode_job`."""
    found = unseal_json(content).get("agrees")
    return found if isinstance(found, bool) else None


def decode_job(content: bytes) -> Job:
    """Read the content of job.json. Raises RecordError or OtherVersionError."""
    described = unseal_json(content)
    rank, world_size = described.get("rank", 0), described.get("world_size", 1)
    try:
        job_id = bytes.fromhex(described["job_id"])
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"not a job description: {error!r}") from error
    sane = is_whole(world_size, 1, MAX_WORLD_SIZE) and is_whole(rank, 0, world_size - 1)
    if described.get("format") != "lastgood-slots" or len(job_id) != JOB_ID_BYTES or not sane:
        raise RecordError("not a job description of this format")
    return Job(job_id, rank, world_size)


def seal_json(described: dict[str, Any]) -> bytes:
    """A JSON document with its own checksum in the key `crc32c`."""
    return (json.dumps({**described, "crc32c": _json_checksum(described)}, indent=1) + "\n").encode()


def unseal_json(content: bytes) -> dict[str, Any]:
    """Read what `seal_json` wrote, without the checksum. Raises RecordError or OtherVersionError."""
    try:
        described = parse_json(content, "a sealed document", most_bytes=_MOST_JSON_BYTES)
    except CorruptCheckpoint as error:
        raise RecordError(str(error)) from error
    if not isinstance(described, dict) or not {"crc32c", "version"} <= described.keys():
        raise RecordError("not a sealed JSON document")
    checksum, version, found = described.pop("crc32c"), described["version"], _json_checksum(described)
    if checksum != found:
        raise RecordError(f"checksum {found} instead of {str(checksum)[:40]}")
    if not is_whole(version, 0, _U64_MAX):
        raise RecordError("its version is no number")
    if version != FORMAT_VERSION:
        raise OtherVersionError(version)
    return described


def _json_checksum(described: dict[str, Any]) -> str:
    canonical = json.dumps(described, sort_keys=True, separators=(",", ":")).encode()
    return f"{_native.crc32c(canonical):08x}"
