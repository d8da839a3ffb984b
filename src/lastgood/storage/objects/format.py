"""The objects of a checkpoint: their keys, and the documents in them. docs/s3-format.md says the same in words."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lastgood.bounds import json_cost
from lastgood.errors import CorruptCheckpoint, MismatchError
from lastgood.storage import format as fmt
from lastgood.text import is_whole, parse_json
from lastgood.units import MIB

__all__ = [
    "COMMITS",
    "MANIFESTS",
    "MOST_COMMIT_BYTES",
    "MOST_MANIFEST_BYTES",
    "MOST_UPLOAD_BYTES",
    "MOST_VERDICT_BYTES",
    "RETIRED",
    "SEGMENTS",
    "SEGMENT_BYTES",
    "SWEEPS",
    "UPLOADS",
    "VERDICTS",
    "BadVerdict",
    "Commit",
    "CommitName",
    "Manifest",
    "Part",
    "Segment",
    "UploadNote",
    "manifest_name",
    "object_key",
    "segment_bytes_for",
    "segment_name",
]

VERSION = 1
_FORMAT = "lastgood-objects"
SEGMENT_BYTES = 32 * MIB
_LEAST_SEGMENT_BYTES = 4 * MIB
_SEGMENTS_OF_STREAM = 100
MOST_SEGMENT_BYTES = 1 << 32
"""A single put of S3 takes 5 GiB."""
MOST_MANIFEST_BYTES = 64 * MIB
"""Enough for a part of 10 TB in chunks of 4 MiB."""
MOST_COMMIT_BYTES = 128 * MIB
"""Enough for the ranks of the largest job (`MAX_WORLD_SIZE`)."""
MOST_UPLOAD_BYTES = 64 << 10
MOST_VERDICT_BYTES = 8 << 10
_MOST_BASES = 64
_MOST_COST, _BESIDE_BYTES = 4, 64 << 10
"""Memory for what a document says: so many times its bytes, and this."""

SEGMENTS, MANIFESTS, COMMITS, RETIRED, UPLOADS, SWEEPS, VERDICTS = (
    "segments",
    "manifests",
    "commits",
    "retired",
    "uploads",
    "sweeps",
    "verdicts",
)
"""What keys begin with."""

_OBJECT_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{64}")
_COMMIT_NAME = re.compile(r"([0-9a-f]{32})/([0-9]{20})-([0-9]{20})")
_HEX = re.compile(r"(?:[0-9a-f]{2})*")
_U64_MAX = (1 << 64) - 1


class CommitName(NamedTuple):
    """Which checkpoint: the order of the names of one job is that of its checkpoints, newest last."""

    job_id: bytes
    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.job_id.hex()}/{self.incarnation:020d}-{self.step:020d}"

    @property
    def told(self) -> str:
        """For messages."""
        return f"job {self.job_id.hex()}, incarnation {self.incarnation}, step {self.step}"

    @property
    def key(self) -> str:
        """Of its commit. An object without a byte there says that this checkpoint is not, and never will be, there."""
        return f"{COMMITS}/{self}"

    @property
    def retired_key(self) -> str:
        """Of a copy of its commit, which says what may be removed."""
        return f"{RETIRED}/{self}"

    @property
    def verdict_key(self) -> str:
        """Of what says that it was judged bad."""
        return f"{VERDICTS}/{self}"

    @property
    def uploads(self) -> str:
        """The folder of its uploads' notes."""
        return f"{UPLOADS}/{self}"

    @property
    def tag(self) -> str:
        """Its uploads, in the names of segments and manifests (16 digits)."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    @classmethod
    def parse(cls, text: str) -> CommitName | None:
        """Read what `str` gives; None for anything else."""
        match = _COMMIT_NAME.fullmatch(text)
        if match is None or max(int(match[2]), int(match[3])) > _U64_MAX:
            return None
        return cls(bytes.fromhex(match[1]), int(match[2]), int(match[3]))

    @classmethod
    def of(cls, record: fmt.CommitRecord) -> CommitName:
        """The checkpoint that a rank's record belongs to."""
        return cls(record.job_id, record.incarnation, record.step)


def object_key(kind: str, name: str) -> str:
    """The key of a segment or manifest: spread by the digest in its name."""
    return f"{kind}/{name[17:19]}/{name}"


def segment_name(tag: str, record: fmt.CommitRecord, index: int, checksums: bytes) -> str:
    """The name of a segment that is sent: whose it is, where it belongs, and the checksums of its chunks.

    `record` is that of the write in progress, before it knows its tables: it is the same however often it is sent.
    """
    hasher = hashlib.sha256(record.encode())
    hasher.update(index.to_bytes(8, "little"))
    hasher.update(checksums)
    return f"{tag}-{hasher.hexdigest()}"


def manifest_name(tag: str, content: bytes) -> str:
    """The name of a manifest: its content has that digest."""
    return f"{tag}-{hashlib.sha256(content).hexdigest()}"


def segment_bytes_for(chunk_bytes: int, stream_bytes: int | None = None) -> int:
    """The size of segments: as many chunks as fit into 32 MiB, and at least one.

    For a stream that may change in part, about a hundredth of it, from 4 MiB to 32 MiB: what did not change is found by
    segments. It is a power of two, so that a stream whose length changes a little is cut as before.
    """
    most = SEGMENT_BYTES
    if stream_bytes is not None:
        most = min(most, 1 << (max(_LEAST_SEGMENT_BYTES, stream_bytes // _SEGMENTS_OF_STREAM).bit_length() - 1))
    return max(1, most // chunk_bytes) * chunk_bytes


# -- documents ---------------------------------------------------------------------------------------------------------


class Segment(NamedTuple):
    """One object with a part of a stream."""

    name: str
    sha256: str | None
    """Of its bytes, if its writer took it: then a later upload can tell whether it would send the same."""


@dataclass(frozen=True)
class Manifest:
    """Where the part of one rank is: its commit record, the checksums of its chunks, and its segments in order."""

    record: fmt.CommitRecord
    table: bytes
    segment_bytes: int
    segments: tuple[Segment, ...]

    def encode(self) -> bytes:
        """The content of its object."""
        record = self.record
        return _document(
            "manifest",
            {
                "job_id": record.job_id.hex(),
                "rank": record.rank,
                "world_size": record.world_size,
                **{name: getattr(record, name) for name in _NUMBERS},
                "layout_digest": record.layout_digest.hex(),
                "table_digest": record.table_digest.hex(),
                "table": self.table.hex(),
                "segment_bytes": self.segment_bytes,
                "segments": [list(segment) for segment in self.segments],
            },
        )

    @classmethod
    def decode(cls, content: bytes, where: str) -> Manifest:
        """Read one, and hold it to all its rules. Raises CorruptCheckpoint, MismatchError for another version."""
        found = _Reader(content, where, "manifest", MOST_MANIFEST_BYTES)
        numbers = {name: found.number(name) for name in _NUMBERS}
        stream_bytes, chunk_bytes = numbers["stream_bytes"], numbers["chunk_bytes"]
        if chunk_bytes < 1:
            raise found.wrong(f"chunks of {chunk_bytes} bytes")
        table_offset, table_bytes, _ = fmt.stream_layout(stream_bytes, chunk_bytes)
        record = fmt.CommitRecord(
            kind=fmt.RecordKind.COMMITTED,
            job_id=found.digits("job_id", fmt.JOB_ID_BYTES),
            data_offset=fmt.DATA_OFFSET,
            table_offset=table_offset,
            table_bytes=table_bytes,
            layout_digest=found.digits("layout_digest", 32),
            table_digest=found.digits("table_digest", 32),
            rank=found.number("rank"),
            world_size=found.number("world_size"),
            **numbers,
        )
        try:
            record.encode()
        except fmt.RecordError as error:
            raise found.wrong(str(error)) from None
        segment_bytes, table = found.number("segment_bytes"), found.digits("table", table_bytes)
        if not 0 < segment_bytes <= MOST_SEGMENT_BYTES or segment_bytes % chunk_bytes:
            raise found.wrong(f"segments of {segment_bytes} bytes, which are no whole chunks of {chunk_bytes}")
        if fmt.table_digest(table) != record.table_digest:
            raise found.wrong(f"a checksum table with digest {fmt.table_digest(table).hex()} instead of its own")
        segments = tuple(found.segments(-(-stream_bytes // segment_bytes)))
        found.end()
        return cls(record, table, segment_bytes, segments)

    def size_of(self, index: int) -> int:
        """Bytes of a segment; the last one may be shorter."""
        return min(self.segment_bytes, self.record.stream_bytes - index * self.segment_bytes)


class Part(NamedTuple):
    """A rank's manifest, for the commit."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Commit:
    """A checkpoint: the manifests of all its ranks, in their order."""

    name: CommitName
    parts: tuple[Part, ...]

    def encode(self) -> bytes:
        """The content of its object: a line of JSON, and the SHA-256 of that line."""
        line = _document(
            "commit",
            {
                "job_id": self.name.job_id.hex(),
                "incarnation": self.name.incarnation,
                "step": self.name.step,
                "world_size": len(self.parts),
                "manifests": [list(part) for part in self.parts],
            },
        )
        return line + hashlib.sha256(line.rstrip(b"\n")).hexdigest().encode() + b"\n"

    @classmethod
    def decode(cls, content: bytes, where: str, name: CommitName) -> Commit:
        """Read the commit of a checkpoint. Raises CorruptCheckpoint, MismatchError for another version."""
        line, _, digest = content.partition(b"\n")
        if digest != hashlib.sha256(line).hexdigest().encode() + b"\n":
            raise CorruptCheckpoint(f"{where}: the commit does not have the digest that stands in it")
        found = _Reader(line, where, "commit", MOST_COMMIT_BYTES)
        named = CommitName(found.digits("job_id", fmt.JOB_ID_BYTES), found.number("incarnation"), found.number("step"))
        if named != name:
            raise found.wrong(f"it is that of {named.told}")
        world_size = found.number("world_size")
        parts = tuple(found.parts(world_size))
        found.end()
        return cls(name, parts)


@dataclass(frozen=True)
class UploadNote:
    """What an upload in progress says of itself: which checkpoints have segments that it takes over.

    The whole object is written again now and then: its age says whether somebody still sends.
    """

    name: CommitName
    rank: int
    bases: tuple[CommitName, ...] = ()
    part: Part | None = None
    """The manifest, once all is sent: for rank 0, which commits."""

    def encode(self) -> bytes:
        """The content of its object."""
        fields = {"upload": str(self.name), "rank": self.rank, "bases": [str(base) for base in self.bases]}
        return _document("upload", fields if self.part is None else {**fields, "part": list(self.part)})

    @classmethod
    def decode(cls, content: bytes, where: str) -> UploadNote:
        """Read one. Raises CorruptCheckpoint, MismatchError for another version."""
        found = _Reader(content, where, "upload", MOST_UPLOAD_BYTES)
        name, rank = CommitName.parse(found.text("upload")), found.number("rank")
        bases = [CommitName.parse(text) if isinstance(text, str) else None for text in found.items("bases")]
        part = found.part("part") if found.has("part") else None
        found.end()
        if name is None or None in bases or len(bases) > _MOST_BASES:
            raise found.wrong("names that are none of checkpoints")
        return cls(name, rank, tuple(base for base in bases if base is not None), part)


@dataclass(frozen=True)
class BadVerdict:
    """That a checkpoint was judged bad. There is none of one that is good: what is taken back is removed."""

    name: CommitName
    reason: str

    def encode(self) -> bytes:
        """The content of its object."""
        return _document("verdict", {"checkpoint": str(self.name), "ok": False, "reason": self.reason})

    @classmethod
    def decode(cls, content: bytes, where: str, name: CommitName) -> BadVerdict:
        """Read that on a checkpoint. Raises CorruptCheckpoint, MismatchError for another version."""
        found = _Reader(content, where, "verdict", MOST_VERDICT_BYTES)
        named, ok, reason = found.text("checkpoint"), found.flag("ok"), found.text("reason")
        found.end()
        if named != str(name) or ok:
            raise found.wrong(f"it is that on {named[:80]!r}, and calls it {'good' if ok else 'bad'}")
        return cls(name, reason)


_NUMBERS = (
    "step",
    "incarnation",
    "sequence",
    "stream_bytes",
    "meta_offset",
    "meta_bytes",
    "chunk_bytes",
)
"""Of a commit record, which a manifest has under the same names."""


def _document(kind: str, fields: dict[str, Any]) -> bytes:
    described = {"format": _FORMAT, "version": VERSION, "kind": kind, **fields}
    return json.dumps(described, separators=(",", ":")).encode() + b"\n"


class _Reader:
    """The fields of one document, each asked for once; what is left over at the end is wrong as well."""

    def __init__(self, content: bytes, where: str, kind: str, most_bytes: int) -> None:
        self._told = f"{where}: the {kind} cannot be read"
        if len(content) > most_bytes or json_cost(content) > _MOST_COST * len(content) + _BESIDE_BYTES:
            raise self.wrong(f"{len(content)} bytes, or more lists in them than such a document has")
        found = parse_json(content, f"{where}: the {kind}", most_bytes=most_bytes, most_depth=4)
        if not isinstance(found, dict) or found.pop("format", None) != _FORMAT or found.pop("kind", None) != kind:
            raise self.wrong(f"it is no {kind} of this format")
        version = found.pop("version", None)
        if version != VERSION:
            raise MismatchError(f"{where}: version {version!r:.40} of the {kind}; this program knows version {VERSION}")
        self._fields = found

    def wrong(self, why: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{self._told}: {why}")

    def _take(self, name: str) -> Any:
        try:
            return self._fields.pop(name)
        except KeyError:
            raise self.wrong(f"it has no {name}") from None

    def number(self, name: str) -> int:
        value = self._take(name)
        if not is_whole(value, 0, _U64_MAX):
            raise self.wrong(f"{name} is {value!r:.40}")
        return int(value)

    def text(self, name: str) -> str:
        value = self._take(name)
        if not isinstance(value, str):
            raise self.wrong(f"{name} is {value!r:.40}")
        return value

    def flag(self, name: str) -> bool:
        value = self._take(name)
        if not isinstance(value, bool):
            raise self.wrong(f"{name} is {value!r:.40}")
        return value

    def items(self, name: str) -> list[Any]:
        value = self._take(name)
        if not isinstance(value, list):
            raise self.wrong(f"{name} is {value!r:.40}")
        return value

    def digits(self, name: str, nbytes: int) -> bytes:
        value = self.text(name)
        if len(value) != 2 * nbytes or not _HEX.fullmatch(value):
            raise self.wrong(f"{name} is {value[:40]!r}, and {nbytes} bytes in hexadecimal digits belong there")
        return bytes.fromhex(value)

    def segments(self, count: int) -> Sequence[Segment]:
        listed = self.items("segments")
        if len(listed) != count:
            raise self.wrong(f"{len(listed)} segments instead of {count}")
        found = []
        for item in listed:
            name, sha256 = _two(item)
            if not _is_name(name) or not (sha256 is None or _is_sha256(sha256)):
                raise self.wrong(f"{item!r:.120} is no segment")
            found.append(Segment(name, sha256))
        if len({segment.name for segment in found}) < count:
            raise self.wrong("a segment stands in it twice")
        return found

    def parts(self, count: int) -> Sequence[Part]:
        listed = self.items("manifests")
        if not 1 <= count <= fmt.MAX_WORLD_SIZE or len(listed) != count:
            raise self.wrong(f"{len(listed)} manifests for {count} ranks")
        found = [self._part(item) for item in listed]
        if len({part.name for part in found}) < count:
            raise self.wrong("a manifest stands in it twice")
        return found

    def has(self, name: str) -> bool:
        return name in self._fields

    def part(self, name: str) -> Part:
        return self._part(self._take(name))

    def _part(self, item: Any) -> Part:
        name, nbytes = _two(item)
        if not _is_name(name) or not is_whole(nbytes, 1, MOST_MANIFEST_BYTES):
            raise self.wrong(f"{item!r:.120} is no manifest")
        return Part(name, nbytes)

    def end(self) -> None:
        if self._fields:
            raise self.wrong(f"{min(self._fields)[:40]!r} has no place in it")


def _two(item: Any) -> tuple[Any, Any]:
    return (item[0], item[1]) if isinstance(item, list) and len(item) == 2 else (None, None)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and _OBJECT_NAME.fullmatch(value) is not None


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and _HEX.fullmatch(value) is not None
