"""Sending the part of one rank, and making a checkpoint of the parts of all ranks."""

from __future__ import annotations

import hashlib
import queue
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING

from lastgood import _native
from lastgood.addresses import memory_address
from lastgood.errors import CheckpointError, ConfigError, CorruptCheckpoint, MismatchError, StorageError
from lastgood.storage import format as fmt
from lastgood.storage.objects import format as objects
from lastgood.storage.objects.client import ObjectClient, ObjectExists, ObjectInfo, ObjectMissing
from lastgood.storage.objects.commits import Base, is_committed, read_manifest
from lastgood.storage.objects.format import Commit, CommitName, Manifest, Part, Segment, UploadNote, object_key
from lastgood.storage.reader import SlotInfo, SlotView

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["MOST_UPLOAD_S", "PartUpload", "commit_parts", "told_parts", "upload_slot"]

BEAT_S = 3600.0
"""How often an upload says that it goes on: far more often than `sweep.GUARD_S`."""
MOST_UPLOAD_S = 7 * 86400.0
"""From the begin of an upload to its commit, so that what a sweep has forgotten after a month cannot come back."""
UPLOAD_THREADS = 4
_ZEROS = bytes(fmt.BLOCK)
_NONCE_BYTES = 8
_FEW, _LOOKERS = 4, 16
"""Manifests that are looked for one after another; threads that look for more."""


class PartUpload:
    """Sends the stream of one rank, segment by segment, in any order, from any threads.

    Make it, `begin`, `send` all segments, `finish`; then rank 0 commits the parts of all ranks, and every rank calls
    `done`. Killed or failed at any moment, nothing of it is ever listed; when it is tried again (a new PartUpload of
    the same record), what was sent is not sent twice. What nobody goes on with is removed by `sweep`, a day later.

    Args:
        client: where to; one prefix for one job, or for one name that is saved to again and again.
        record: whose stream it is. Of a slot, its commit record; else as `storage.write.writing_record` makes it.
        base: the newest part of this rank that is committed there, if unchanged segments shall be kept.
        hashed: take the SHA-256 of all that is sent, not only of what looks unchanged. Segments without it are sent
            once more before they can be recognised; it costs 0.8 s of a core for each GiB.
        segment_bytes: of all uploads to one place; a multiple of the chunk size. By default 4 to 32 MiB, about
            a hundredth of the stream.

    All calls raise StorageError; `begin` and `finish` also CheckpointError, for a checkpoint that was given up.
    """

    def __init__(
        self,
        client: ObjectClient,
        record: fmt.CommitRecord,
        *,
        base: Base | None = None,
        hashed: bool = False,
        segment_bytes: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.client = client
        self.name = CommitName.of(record)
        if segment_bytes is None:
            segment_bytes = objects.segment_bytes_for(record.chunk_bytes, record.stream_bytes)
        self.segment_bytes = segment_bytes
        if not 0 < self.segment_bytes <= objects.MOST_SEGMENT_BYTES or self.segment_bytes % record.chunk_bytes:
            raise ConfigError(
                f"segment_bytes must be a multiple of the chunk size {record.chunk_bytes} up to "
                f"{objects.MOST_SEGMENT_BYTES}, not {self.segment_bytes}"
            )
        self.world_size = record.world_size
        self.sent_bytes = self.kept_bytes = 0
        """Of the stream: sent by this upload; there already."""
        self._expected = record if record.kind is fmt.RecordKind.COMMITTED else None
        self._record = replace(
            record,
            kind=fmt.RecordKind.WRITING,
            meta_offset=0,
            meta_bytes=0,
            layout_digest=bytes(32),
            table_digest=bytes(32),
        )
        self._base = base if base is not None and base.fits(record, self.segment_bytes) else None
        self._hashed = hashed
        self._clock = clock
        self._began_s = (clock(), time.clock_gettime(time.CLOCK_BOOTTIME))
        self._lock = threading.Lock()
        count = -(-record.stream_bytes // self.segment_bytes)
        self._segments: list[tuple[Segment, bytes] | None] = [None] * count
        self._note = f"{self.name.uploads}/{record.rank:07d}-{secrets.token_hex(_NONCE_BYTES)}"
        self._part: Part | None = None
        self._again = False
        self._beaten_s = self._began_s[0]
        self._shift = _Reseeding(record.chunk_bytes)

    @property
    def segments(self) -> int:
        """How many there are to send."""
        return len(self._segments)

    def size_of(self, index: int) -> int:
        """Bytes of a segment; the last one may be shorter."""
        return min(self.segment_bytes, self._record.stream_bytes - index * self.segment_bytes)

    def begin(self) -> None:
        """Say that this upload is in progress, before anything else is sent."""
        self._beat()
        # Only now: a sweep that did not see the note began before it, and what it takes for unneeded was unneeded.
        self.refuse_given_up()
        if self._base is not None and not is_committed(self.client, self._base.name):
            self._base = None
        rank = self._note.rpartition("/")[2].partition("-")[0]
        self._again = any(
            info.key != self._note and info.key.rpartition("/")[2].startswith(f"{rank}-")
            for info in self.client.list(self.name.uploads)
        )

    def send(self, index: int, *pieces: Buffer) -> bool:
        """Make sure that a segment is there, whose bytes are those of `pieces` one after another.

        False if it did not need to be sent. Its memory is free afterwards.
        """
        views = [memoryview(piece).cast("B") for piece in pieces]
        nbytes = sum(view.nbytes for view in views)
        if nbytes != self.size_of(index):
            raise ConfigError(f"segment {index} has {self.size_of(index)} bytes, not {nbytes}")
        self.beat()
        checksums = self._checksums(index, views)
        known = self._unchanged(index, checksums)
        sha256 = _sha256(views) if self._hashed or known is not None else None
        if known is not None and known.sha256 == sha256:
            self._note_segment(index, known, checksums, 0)
            return False
        segment = Segment(objects.segment_name(self.name.tag, self._record, index, checksums), sha256)
        sent = self._create(object_key(objects.SEGMENTS, segment.name), *views)
        self._note_segment(index, segment, checksums, nbytes if sent else 0)
        return sent

    def finish(self, meta_offset: int, meta_bytes: int, layout_digest: bytes) -> Part:
        """All segments are sent: leave this rank's manifest, for the commit.

        Raises CorruptCheckpoint if the stream is not what the record of its slot says.
        """
        missing = [number for number, segment in enumerate(self._segments) if segment is None]
        if missing:
            raise CheckpointError(f"{self.client.place}: {self.name.told}: segments {missing[:5]} were not sent")
        given = [segment for segment in self._segments if segment is not None]
        table = b"".join(checksums for _, checksums in given)
        record = self._record.committed(meta_offset, meta_bytes, layout_digest, table)
        if self._expected is not None and record != self._expected:
            raise CorruptCheckpoint(
                f"{self.name.told}, rank {record.rank}: what was read does not have the checksums of its commit record"
            )
        content = Manifest(record, table, self.segment_bytes, tuple(segment for segment, _ in given)).encode()
        if len(content) > objects.MOST_MANIFEST_BYTES:
            raise ConfigError(f"{self.name.told}: a manifest of {len(content)} bytes; use larger chunks")
        part = Part(objects.manifest_name(self.name.tag, content), len(content))
        self._create(object_key(objects.MANIFESTS, part.name), content)
        return part

    def tell(self, part: Part) -> None:
        """Say what `finish` gave, for a rank 0 elsewhere that calls `told_parts`. Raises also CheckpointError."""
        self.refuse_late()
        self._part = part
        self._beat()

    def beat(self) -> None:
        """Say that this upload goes on, if it is time to: called by `send`, and by whoever waits for other ranks."""
        with self._lock:
            due = self._clock() - self._beaten_s >= BEAT_S
        if due:
            self._beat()

    def done(self) -> None:
        """The checkpoint is committed: take the note away. What raises is harmless; a sweep takes it away later."""
        self.client.delete([self._note])

    def refuse_late(self) -> None:
        """Raise CheckpointError if this upload has taken too long to be committed."""
        walls, runs = self._clock() - self._began_s[0], time.clock_gettime(time.CLOCK_BOOTTIME) - self._began_s[1]
        if max(walls, runs) > MOST_UPLOAD_S:
            raise CheckpointError(
                f"{self.client.place}: the upload of {self.name.told} began more than a week ago; it is not committed "
                "any more, since a sweep may have taken it for dead"
            )

    def refuse_given_up(self) -> None:
        """Raise CheckpointError if a sweep gave this upload up, or what it made was taken away."""
        info = self.client.head(self.name.key)
        if info is not None and not info.nbytes:
            raise _given_up(self.client, self.name)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        bases = () if self._base is None else (self._base.name,)
        note = UploadNote(self.name, self._record.rank, bases, self._part)
        with self._lock:
            self._beaten_s = self._clock()
        self.client.put(self._note, note.encode())

    def _checksums(self, index: int, views: Sequence[memoryview]) -> bytes:
        chunk_bytes, first = self._record.chunk_bytes, index * (self.segment_bytes // self._record.chunk_bytes)
        sums: list[int] = []
        held = chunk_bytes  # of the last chunk
        for view in views:
            begin = 0
            while begin < view.nbytes:
                if held == chunk_bytes:
                    sums.append(_native.chunk_seed(self._record.sequence, first + len(sums)))
                    held = 0
                count = min(view.nbytes - begin, chunk_bytes - held)
                sums[-1] = _native.crc32c(view[begin : begin + count], sums[-1])
                begin, held = begin + count, held + count
        if sums:
            sums[-1] = _padded(sums[-1], held)
        return struct.pack(f"<{len(sums)}I", *sums)

    def _unchanged(self, index: int, checksums: bytes) -> Segment | None:
        """The base's segment, if its checksums say that it is the same."""
        if self._base is None:
            return None
        old, chunk_bytes = self._base.manifest, self._record.chunk_bytes
        if index >= len(old.segments) or old.size_of(index) != self.size_of(index):
            return None
        first = index * (self.segment_bytes // chunk_bytes)
        theirs = struct.unpack_from(f"<{len(checksums) // 4}I", old.table, 4 * first)
        ours = struct.unpack(f"<{len(checksums) // 4}I", checksums)
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            nbytes = min(chunk_bytes, self._record.stream_bytes - (first + number) * chunk_bytes)
            seeds = (
                _native.chunk_seed(self._record.sequence, first + number),
                _native.chunk_seed(old.record.sequence, first + number),
            )
            if mine ^ other != self._shift.difference(*seeds, fmt.align_up(nbytes)):
                return None
        return old.segments[index]

    def _create(self, key: str, *content: Buffer) -> bool:
        """Whether it had to be sent; nothing is ever overwritten, and its name says what is in it."""
        if self._again:
            info = self.client.head(key)
            if info is not None and info.nbytes == sum(memoryview(piece).nbytes for piece in content):
                return False
        try:
            self.client.create(key, *content)
        except ObjectExists:
            return False
        return True

    def _note_segment(self, index: int, segment: Segment, checksums: bytes, sent_bytes: int) -> None:
        with self._lock:
            self._segments[index] = (segment, checksums)
            self.sent_bytes += sent_bytes
            self.kept_bytes += self.size_of(index) - sent_bytes


def chunk_checksum(chunk: memoryview, seed: int) -> int:
    """The checksum of a chunk, as a slot has it: with zeros up to a whole block."""
    return _padded(_native.crc32c(chunk, seed), chunk.nbytes)


def _padded(checksum: int, nbytes: int) -> int:
    """That of `nbytes` bytes, which is `checksum`, with the zeros after them up to a whole block."""
    return _native.crc32c(_ZEROS[: -nbytes % fmt.BLOCK], checksum)


def _sha256(views: Sequence[memoryview]) -> str:
    found = hashlib.sha256()
    for view in views:
        found.update(view)
    return found.hexdigest()


class _Reseeding:
    """By how much two checksums of the same bytes differ, for two seeds: CRC32C is linear in its seed."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._bits: dict[int, list[int]] = {}

    def difference(self, seed: int, other: int, nbytes: int) -> int:
        both, found = seed ^ other, 0
        if both and nbytes not in self._bits:
            zeros = bytes(nbytes)
            of_zero = _native.crc32c(zeros)
            self._bits[nbytes] = [_native.crc32c(zeros, 1 << bit) ^ of_zero for bit in range(32)]
        for bit in range(32):
            if both >> bit & 1:
                found ^= self._bits[nbytes][bit]
        return found


# -- a slot ------------------------------------------------------------------------------------------------------------


def upload_slot(
    upload: PartUpload,
    view: SlotView,
    info: SlotInfo,
    *,
    threads: int = UPLOAD_THREADS,
    pace: Callable[[int], None] | None = None,
) -> Part:
    """Send a committed slot, in the memory of `threads` segments; the caller holds it (`SlotStore.hold`).

    `pace` is called with the bytes of each segment before it is read; it may wait, or raise to give up. Raises as
    `PartUpload` and `SlotView.read_into` do, with nothing of this call left running.
    """
    upload.begin()
    threads = max(1, min(threads, upload.segments))
    free: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
    for _ in range(threads):
        free.put(bytearray(min(upload.segment_bytes, max(1, info.stream_bytes))))
    stopped = threading.Event()

    def one(index: int) -> None:
        if stopped.is_set():
            return
        memory = free.get()
        try:
            size = upload.size_of(index)
            if pace is not None:
                pace(size)
            address, keep = memory_address(memory, 0, size)
            view.read_into(info, [(address, size)], 1, offset=index * upload.segment_bytes)
            del keep
            upload.send(index, memoryview(memory)[:size])
        except BaseException:
            stopped.set()
            raise
        finally:
            free.put(memory)

    if threads == 1:
        for index in range(upload.segments):
            one(index)
    else:
        with ThreadPoolExecutor(threads, thread_name_prefix="lastgood-upload") as pool:
            sent = [pool.submit(one, index) for index in range(upload.segments)]
            for future in wait(sent, return_when=FIRST_EXCEPTION).done:
                future.result()
    return upload.finish(info.meta_offset, info.meta_bytes, info.layout_digest)


# -- the commit --------------------------------------------------------------------------------------------------------


def told_parts(
    client: ObjectClient, name: CommitName, world_size: int, known: Mapping[int, Part] | None = None
) -> dict[int, Part]:
    """The parts of a checkpoint that ranks have said to be there (`PartUpload.tell`), by rank, with those `known`.

    A rank that began several times may have left several; each of them is complete, and one is as good as another, if
    they are of one stream. If not, two copies of the job write here, whose parts must not be mixed: MismatchError. Of
    known ranks this looks at the first only. Raises StorageError, CorruptCheckpoint.
    """
    found = dict(known or {})
    looked_at = found.keys() - {0}
    for info in client.list(name.uploads):
        rank = info.key.rpartition("/")[2].partition("-")[0]
        if rank.isdecimal() and int(rank) in looked_at:
            continue
        try:
            content = client.get(info.key, objects.MOST_UPLOAD_BYTES)
        except ObjectMissing:
            continue
        note = UploadNote.decode(content, client.where(info.key))
        if note.name != name or note.part is None or note.rank in looked_at:
            continue
        other = found.setdefault(note.rank, note.part)
        if other != note.part and not _of_one_stream(client, name, note.rank, world_size, (other, note.part)):
            raise _rivals(client, name)
    return found


def commit_parts(upload: PartUpload, parts: Sequence[Part]) -> Commit:
    """Called by rank 0 with its own upload, when all ranks have finished: make the checkpoint of their parts.

    May be called again after a StorageError: a commit whose answer was lost is told from somebody else's. Raises
    MismatchError, naming it, if another checkpoint took the name, CheckpointError if a sweep gave this upload up.
    """
    client, name = upload.client, upload.name
    if len(parts) != upload.world_size:
        raise MismatchError(f"{name.told}: {len(parts)} parts of {upload.world_size} ranks")
    keys = [object_key(objects.MANIFESTS, part.name) for part in parts]
    for key, part, info in zip(keys, parts, _heads(client, keys), strict=True):
        if info is None or info.nbytes != part.nbytes:
            raise CheckpointError(
                f"{client.where(key)}: the manifest of a rank is not there; {name.told} is not committed"
            )
    upload.refuse_late()
    commit = Commit(name, tuple(parts))
    content = commit.encode()
    try:
        client.create(name.key, content)
    except StorageError as error:
        found = _read_back(client, name, error)
        if found == content:
            return commit
        if not found:
            raise _given_up(client, name) from error
        theirs = Commit.decode(found, client.where(name.key), name)
        if _records(client, theirs) == _records(client, commit):
            return theirs  # the same streams, though other segments may have been taken over
        raise _rivals(client, name) from error
    return commit


def _of_one_stream(client: ObjectClient, name: CommitName, rank: int, world_size: int, parts: Iterable[Part]) -> bool:
    """Whether parts of a rank that differ do so only in whose segments they took over."""
    try:
        return len({read_manifest(client, name, part, rank, world_size).record for part in parts}) == 1
    except ObjectMissing:
        return True  # of an upload that is over, and was swept: a commit of it would not succeed
    except CorruptCheckpoint:
        return False  # of another number of ranks


def _rivals(client: ObjectClient, name: CommitName) -> MismatchError:
    return MismatchError(
        f"{client.where(name.key)}: {name.told} was sent by another process with other content; two jobs, or two "
        "copies of one, write here: give each a prefix of its own"
    )


def _records(client: ObjectClient, commit: Commit) -> list[fmt.CommitRecord]:
    """Of all ranks: which stream each of them committed."""
    return [
        read_manifest(client, commit.name, part, rank, len(commit.parts)).record
        for rank, part in enumerate(commit.parts)
    ]


def _heads(client: ObjectClient, keys: Sequence[str]) -> Sequence[ObjectInfo | None]:
    if len(keys) <= _FEW:
        return [client.head(key) for key in keys]
    with ThreadPoolExecutor(_LOOKERS, thread_name_prefix="lastgood-commit") as pool:
        return list(pool.map(client.head, keys))


def _read_back(client: ObjectClient, name: CommitName, error: StorageError) -> bytes:
    """What lies under the name of a commit that could not be made. Raises that error if nothing does."""
    try:
        return client.get(name.key, objects.MOST_COMMIT_BYTES)
    except ObjectMissing:
        raise error from None
    except StorageError:
        if isinstance(error, ObjectExists):
            raise
        raise error from None


def _given_up(client: ObjectClient, name: CommitName) -> CheckpointError:
    return CheckpointError(
        f"{client.where(name.key)}: {name.told} was given up by a sweep, since nobody had gone on with it for long, or "
        "was removed; it cannot be committed any more, and the next checkpoint can"
    )
