"""Streams of bytes whose content follows from what they are, and uploads of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from lastgood.addresses import memory_address
from lastgood.storage import format as fmt
from lastgood.storage.objects.client import ObjectClient
from lastgood.storage.objects.commits import Base, find_base
from lastgood.storage.objects.format import Commit, CommitName, Part
from lastgood.storage.objects.upload import PartUpload, commit_parts
from lastgood.storage.objects.view import RemoteInfo, RemoteView

CHUNK = 4096
SEGMENT = 2 * CHUNK
JOB = bytes(range(16))


@dataclass(frozen=True)
class Stream:
    """The part of one rank: segments whose `versions` are those of an earlier stream have its content."""

    versions: tuple[int, ...]
    step: int = 1
    incarnation: int = 1
    rank: int = 0
    world_size: int = 1
    job_id: bytes = JOB
    short: int = 100
    """Bytes that the last segment lacks."""

    @property
    def content(self) -> bytes:
        pieces = [
            hashlib.shake_128(f"{number} {self.rank} {version}".encode()).digest(SEGMENT)
            for number, version in enumerate(self.versions)
        ]
        return b"".join(pieces)[: SEGMENT * len(self.versions) - self.short]

    @property
    def record(self) -> fmt.CommitRecord:
        nbytes = len(self.content)
        table_offset, table_bytes, _ = fmt.stream_layout(nbytes, CHUNK)
        return fmt.CommitRecord(
            kind=fmt.RecordKind.WRITING,
            job_id=self.job_id,
            step=self.step,
            incarnation=self.incarnation,
            sequence=self.step + 1000 * self.incarnation,
            stream_bytes=nbytes,
            meta_offset=0,
            meta_bytes=0,
            chunk_bytes=CHUNK,
            data_offset=fmt.DATA_OFFSET,
            table_offset=table_offset,
            table_bytes=table_bytes,
            layout_digest=bytes(32),
            table_digest=bytes(32),
            rank=self.rank,
            world_size=self.world_size,
        )

    @property
    def name(self) -> CommitName:
        return CommitName(self.job_id, self.incarnation, self.step)


def send(client: ObjectClient, stream: Stream, base: Base | None = None, **options) -> tuple[PartUpload, Part]:
    """Upload a part, in this thread."""
    upload = PartUpload(client, stream.record, base=base, segment_bytes=SEGMENT, **options)
    upload.begin()
    content = stream.content
    for index in range(upload.segments):
        upload.send(index, content[index * SEGMENT : (index + 1) * SEGMENT])
    return upload, upload.finish(0, min(20, len(content)), hashlib.sha256(b"layout").digest())


def save(client: ObjectClient, *streams: Stream, take_over: bool = True, **options) -> tuple[Commit, list[PartUpload]]:
    """A checkpoint of these ranks, in this thread."""
    uploads, parts = [], []
    for stream in streams:
        base = find_base(client, stream.rank, stream.job_id) if take_over else None
        upload, part = send(client, stream, base, **options)
        uploads.append(upload)
        parts.append(part)
    commit = commit_parts(uploads[0], parts)
    for upload in uploads:
        upload.done()
    return commit, uploads


def read(view: RemoteView, info: RemoteInfo, threads: int = 1) -> bytes:
    memory = bytearray(info.stream_bytes)
    address, keep = memory_address(memory, 0, len(memory))
    view.read_into(info, [(address, len(memory))], threads)
    del keep
    return bytes(memory)
