"""Reading checkpoints back out of objects, with the surface of `SlotView`."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import logging
import re
import secrets
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import accumulate
from pathlib import PosixPath
from typing import ClassVar, TypeVar

import numpy as np

from lastgood import _native
from lastgood.errors import CorruptCheckpoint, MismatchError, StorageError, WaitTimeout
from lastgood.storage import format as fmt
from lastgood.storage.global_commit import GlobalCommit
from lastgood.storage.objects import format as objects
from lastgood.storage.objects.client import ObjectClient, ObjectInfo, ObjectMissing
from lastgood.storage.objects.commits import commits_of, find_commits, names_of_job, read_commit, read_manifest
from lastgood.storage.objects.format import Commit, CommitName, Manifest, UploadNote, object_key
from lastgood.storage.objects.judged import bad_verdicts
from lastgood.storage.objects.kept_chunks import KeptChunks
from lastgood.storage.objects.upload import chunk_checksum
from lastgood.storage.reader import READ_THREADS, READ_TIMEOUT_S, SlotInfo, SlotState, SlotStatus, SlotView
from lastgood.storage.verdicts import Verdict, VerdictBook
from lastgood.units import MIB

__all__ = ["RemoteInfo", "RemotePath", "RemoteRead", "RemoteStatus", "RemoteView"]

_T = TypeVar("_T")
_log = logging.getLogger("lastgood.storage")

_REQUEST_BYTES = 8 * MIB
_TRIES = 2
"""Of a piece whose checksum is wrong: what was damaged on the way is intact the second time."""


class RemotePath(PosixPath):
    """Where a checkpoint is, for messages: a URL keeps both of its slashes. No file is there."""

    def __str__(self) -> str:
        return re.sub(r"^([a-z][a-z0-9+.-]+):/(?!/)", r"\1://", super().__str__())


@dataclass(frozen=True)
class RemoteInfo(SlotInfo):
    """One committed checkpoint, as a rank sees it. `slot` is its place in the listing, 0 the newest."""

    name: CommitName
    manifest: Manifest
    manifest_name: str = ""


@dataclass(frozen=True)
class RemoteStatus(SlotStatus):
    """What a look at one commit, and a rank's manifest of it, showed."""

    name: CommitName | None = None
    found: RemoteInfo | None = None
    modified_s: float | None = None

    @property
    def info(self) -> SlotInfo | None:
        """The checkpoint, if it is complete."""
        return self.found

    @property
    def step(self) -> int | None:
        """As the name of the commit says, whatever is in it."""
        return None if self.name is None else self.name.step

    @property
    def incarnation(self) -> int | None:
        """As `step`."""
        return None if self.name is None else self.name.incarnation

    @property
    def written_s(self) -> float | None:
        """When it was committed, by the clock of the server."""
        return self.modified_s


class RemoteView(SlotView):
    """The parts of one rank in a store of objects, for reading only; `SlotView` says what its methods do.

    Nothing is overwritten there, so what was seen stays readable for `sweep.GRACE_S` after it was taken away. Damage
    raises CorruptCheckpoint, and never gives other bytes. Chunks that no range asks for are not fetched.

    Args:
        client: the store; the caller closes it.
        rank: whose parts.
        job_id: whose checkpoints, where there are those of several jobs.
        kept: for chunks that a read needs in part; views of other ranks may share it.
    """

    remote: ClassVar[bool] = True

    def __init__(
        self, client: ObjectClient, rank: int = 0, job_id: bytes | None = None, kept: KeptChunks | None = None
    ) -> None:
        self.directory = RemotePath(client.place)
        self.client = client
        self.rank = rank
        self.job_id = job_id
        self._kept = kept or KeptChunks()

    @property
    def held(self) -> bool:
        """False: objects have no locks."""
        return False

    def names(self) -> list[CommitName]:
        """The checkpoints, newest first, in as few requests as a listing needs. Raises StorageError, MismatchError."""
        return find_commits(self.client, self.job_id)

    def look(self, name: CommitName, slot: int = 0, commit: Commit | None = None) -> RemoteInfo:
        """One checkpoint of `names`. Raises ObjectMissing, CorruptCheckpoint, MismatchError, StorageError."""
        commit = commit or read_commit(self.client, name)
        if self.rank >= len(commit.parts):
            raise MismatchError(
                f"{self.client.where(name.key)}: {name.told} has {len(commit.parts)} ranks, and rank {self.rank} is "
                "asked for"
            )
        part = commit.parts[self.rank]
        manifest = read_manifest(self.client, name, part, self.rank, len(commit.parts))
        path = RemotePath(self.client.where(name.key))
        return RemoteInfo(
            path=path, slot=slot, record=manifest.record, name=name, manifest=manifest, manifest_name=part.name
        )

    def statuses(self) -> list[SlotStatus]:
        """A look at every checkpoint, newest first: complete, or torn if its commit or manifest is damaged or missing.

        Raises StorageError, MismatchError.
        """
        found = commits_of(self.client)
        return self._looks(names_of_job(found, self.client.place, self.job_id), found)

    def each_status(self) -> list[SlotStatus]:
        """As `statuses`, of all jobs that are there."""
        found = {name: info for name, info in commits_of(self.client).items() if info.nbytes}
        return self._looks(sorted(found, key=lambda name: (name.incarnation, name.step), reverse=True), found)

    def complete(self, statuses: Sequence[SlotStatus]) -> list[SlotInfo]:
        """As `SlotView.complete`: they are in that order."""
        return [info for info in (status.info for status in statuses) if info is not None]

    def why_gone(self, info: SlotInfo) -> str:
        """As `SlotView.why_gone`."""
        if isinstance(info, RemoteInfo):
            with contextlib.suppress(StorageError):
                found = self.client.head(info.name.key)
                if found is None or not found.nbytes:
                    return "it was taken away"
        return ""

    def committed(self) -> list[SlotInfo]:
        """The complete checkpoints, newest first. Raises StorageError, MismatchError."""

        def one(slot: int, name: CommitName) -> SlotInfo | None:
            try:
                return self.look(name, slot)
            except (CorruptCheckpoint, ObjectMissing):
                return None  # `statuses` reports it

        return [info for info in _each(one, self.names()) if info is not None]

    def read_into(
        self,
        info: SlotInfo,
        ranges: Sequence[tuple[int, int]],
        threads: int = READ_THREADS,
        *,
        offset: int = 0,
        timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        """As `SlotView.read_into`, with up to `threads` requests at a time, each of which a thread holds in memory.

        Chunks come in any order; none that is bad is delivered. Raises CorruptCheckpoint, StorageError, WaitTimeout.
        """
        self.begin_read(info, ranges, offset=offset).finish(threads, timeout_s)

    def begin_read(self, info: SlotInfo, ranges: Sequence[tuple[int, int]], *, offset: int = 0) -> RemoteRead:
        """What `read_into` does, for pieces that may come from elsewhere. Raises CorruptCheckpoint."""
        if not isinstance(info, RemoteInfo):
            raise StorageError(f"{info.path}: is not a checkpoint of {self.directory}")
        return RemoteRead(self.client, self._kept, info, ranges, offset)

    def verify(self, info: SlotInfo, threads: int = READ_THREADS, timeout_s: float = READ_TIMEOUT_S) -> None:
        """Read the whole stream and check it. Raises as `read_into` does."""
        read = self.begin_read(info, ())
        read.left = list(range(info.record.chunks))
        read.finish(threads, timeout_s)

    @contextlib.contextmanager
    def hold(self, info: SlotInfo) -> Iterator[None]:
        """Keep the objects of a checkpoint while it is read, for up to a day, though it may be taken away meanwhile.

        It needs the right to put; without it, what is taken away stays for `sweep.GRACE_S`. Raises CorruptCheckpoint if
        it was taken away already, StorageError.
        """
        if not isinstance(info, RemoteInfo):
            raise StorageError(f"{info.path}: is not a checkpoint of {self.directory}")
        # As an upload that takes its segments over, and that never comes to a commit.
        reader = CommitName(secrets.token_bytes(fmt.JOB_ID_BYTES), 0, 0)
        key = f"{reader.uploads}/{0:07d}"
        try:
            self.client.put(key, UploadNote(reader, 0, (info.name,)).encode())
        except StorageError as error:
            _log.warning("%s is read without being held: %s", info.path, error)
        try:
            found = self.client.head(info.name.key)
            if found is None or not found.nbytes:
                raise CorruptCheckpoint(f"{info.path}: step {info.step} was taken away")
            yield
        finally:
            try:
                self.client.delete([key])
            except StorageError as error:
                _log.warning("%s", error)

    def book(self) -> VerdictBook:
        """What was judged bad, as is known here. Counts of restarts are kept on the disk of the training only."""
        book = VerdictBook(self.directory, kept=False)
        try:
            for name, reason in bad_verdicts(self.client, self.names()).items():
                with contextlib.suppress(CorruptCheckpoint, ObjectMissing):  # `statuses` says so
                    book.verdicts[self.look(name).sequence] = Verdict(name.step, False, reason)
        except StorageError as error:
            # As on a disk: complete checkpoints are worth more than what is known of them.
            _log.warning("%s; no verdict on any checkpoint is known", error)
        return book

    def global_commit(self) -> GlobalCommit | None:
        """None: a commit here is one of all ranks."""
        return None

    def _describe(self) -> str:
        torn = [status.detail for status in self.statuses() if status.info is None]
        return "; ".join(torn) or "nothing was committed there, or all of it was removed"

    # -- inside ----------------------------------------------------------------------------------------------------

    def _looks(self, names: Sequence[CommitName], found: Mapping[CommitName, ObjectInfo]) -> list[SlotStatus]:
        def one(slot: int, name: CommitName) -> SlotStatus:
            path = RemotePath(self.client.where(name.key))
            modified_s = found[name].modified_s if name in found else None
            try:
                info = self.look(name, slot)
            except (CorruptCheckpoint, MismatchError, StorageError) as error:
                state = SlotState.FOREIGN if isinstance(error, MismatchError) else SlotState.TORN
                return RemoteStatus(path, slot, state, 0, detail=str(error), name=name, modified_s=modified_s)
            size = info.stream_bytes
            return RemoteStatus(
                path, slot, SlotState.WHOLE, size, info.record, name=name, found=info, modified_s=modified_s
            )

        return _each(one, names)


class RemoteRead:
    """One read of a part of a stream. Its pieces come in any order, and from the store or from whoever has them."""

    def __init__(
        self, client: ObjectClient, kept: KeptChunks, info: RemoteInfo, ranges: Sequence[tuple[int, int]], offset: int
    ) -> None:
        self.info = info
        self._client = client
        self._kept = kept
        self._targets = _Targets(info, ranges, offset)
        self.left = [chunk for chunk in self._targets.chunks() if not self._deliver_kept(chunk)]
        """Chunks that were not delivered yet, in order."""

    def pieces(self, chunks: Sequence[int]) -> list[tuple[int, int]]:
        """Runs of neighbouring chunks (first and count), each for one request: in one segment, of a bounded size."""
        return _pieces(self.info, chunks)

    def size_of(self, first: int, count: int) -> int:
        """Bytes of a piece."""
        begin = first * self.info.record.chunk_bytes
        return min(count * self.info.record.chunk_bytes, self.info.record.stream_bytes - begin)

    def fetch(self, first: int, count: int) -> memoryview:
        """A piece, checked. Raises CorruptCheckpoint, StorageError."""
        info = self.info
        record, manifest = info.record, info.manifest
        begin = first * record.chunk_bytes
        index = begin // manifest.segment_bytes
        key = object_key(objects.SEGMENTS, manifest.segments[index].name)
        tried = 0
        while True:
            tried += 1
            content = self._client.get_range(key, begin - index * manifest.segment_bytes, self.size_of(first, count))
            bad = _first_bad(record, manifest.table, first, content)
            if bad is None:
                return content
            if tried == _TRIES:
                chunk, expected, found = bad
                raise CorruptCheckpoint(
                    f"{self._client.where(key)}: step {info.step}, chunk {chunk} of {record.chunks}: checksum "
                    f"{found:#010x} instead of {expected:#010x}"
                )

    def holds(self, first: int, content: memoryview) -> bool:
        """Whether what came from elsewhere is a piece of this stream, by its checksums."""
        return _first_bad(self.info.record, self.info.manifest.table, first, content) is None

    def deliver(self, first: int, count: int, content: memoryview) -> None:
        """Copy a piece that was checked to where it belongs."""
        record = self.info.record
        begin = first * record.chunk_bytes
        self._targets.deliver(begin, content)
        for chunk in range(first, first + count):
            low = chunk * record.chunk_bytes
            high = min(low + record.chunk_bytes, record.stream_bytes)
            if self._targets.take_a_part_of(low, high):
                self._kept.keep(self.info.manifest_name, chunk, bytes(content[low - begin : high - begin]))

    def finish(self, threads: int, timeout_s: float) -> None:
        """Fetch and deliver what is left. Raises as `RemoteView.read_into` does."""
        deadline = time.monotonic() + timeout_s
        pieces = self.pieces(self.left)

        def one(piece: tuple[int, int]) -> None:
            if time.monotonic() > deadline:
                raise WaitTimeout(f"{self.info.path}: waited {timeout_s:.0f} s for its segments")
            self.deliver(*piece, self.fetch(*piece))

        threads = min(threads, len(pieces))
        if threads <= 1:
            for piece in pieces:
                one(piece)
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="lastgood-fetch") as pool:
            fetched = [pool.submit(one, piece) for piece in pieces]
            try:
                for future in wait(fetched, return_when=FIRST_EXCEPTION).done:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _deliver_kept(self, chunk: int) -> bool:
        content = self._kept.get(self.info.manifest_name, chunk)
        if content is not None:
            self._targets.deliver(chunk * self.info.record.chunk_bytes, memoryview(content))
        return content is not None


def _each(one: Callable[[int, CommitName], _T], names: Sequence[CommitName]) -> list[_T]:
    """Of each name with its number, several at a time."""
    if len(names) < 2:
        return [one(number, name) for number, name in enumerate(names)]
    with ThreadPoolExecutor(min(READ_THREADS, len(names)), thread_name_prefix="lastgood-look") as pool:
        return list(pool.map(one, range(len(names)), names))


def _first_bad(record: fmt.CommitRecord, table: bytes, first: int, content: memoryview) -> tuple[int, int, int] | None:
    for number, begin in enumerate(range(0, content.nbytes, record.chunk_bytes), first):
        (expected,) = struct.unpack_from("<I", table, 4 * number)
        found = chunk_checksum(content[begin : begin + record.chunk_bytes], _native.chunk_seed(record.sequence, number))
        if found != expected:
            return number, expected, found
    return None


def _pieces(info: RemoteInfo, chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of neighbouring chunks, each for one request: inside one segment, and of a bounded size."""
    chunk_bytes, per_segment = info.record.chunk_bytes, info.manifest.segment_bytes // info.record.chunk_bytes
    most = max(1, _REQUEST_BYTES // chunk_bytes)
    pieces: list[tuple[int, int]] = []
    for chunk in chunks:
        if pieces:
            first, count = pieces[-1]
            if first + count == chunk and count < most and chunk % per_segment:
                pieces[-1] = (first, count + 1)
                continue
        pieces.append((chunk, 1))
    return pieces


class _Targets:
    """Memory for a part of a stream. Raises CorruptCheckpoint if the stream is shorter."""

    def __init__(self, info: SlotInfo, ranges: Sequence[tuple[int, int]], offset: int) -> None:
        wanted = sum(nbytes for _, nbytes in ranges)
        if offset < 0 or any(nbytes < 0 for _, nbytes in ranges) or offset + wanted > info.stream_bytes:
            raise CorruptCheckpoint(
                f"{info.path}: step {info.step}: {wanted} bytes at byte {offset} are outside of a stream of "
                f"{info.stream_bytes}"
            )
        self._chunk_bytes = info.record.chunk_bytes
        begins = accumulate((nbytes for _, nbytes in ranges), initial=offset)
        spans = [
            (begin, begin + nbytes, address)
            for begin, (address, nbytes) in zip(begins, ranges, strict=False)
            if address and nbytes
        ]
        self._spans = spans
        self._begins = [begin for begin, _, _ in spans]

    def chunks(self) -> Sequence[int]:
        """Those that are needed, in order."""
        found: list[int] = []
        for begin, end, _ in self._spans:
            first = begin // self._chunk_bytes
            if found and found[-1] >= first:
                first = found[-1] + 1
            found += range(first, (end - 1) // self._chunk_bytes + 1)
        return found

    def take_a_part_of(self, begin: int, end: int) -> bool:
        """Whether some of these bytes of the stream are wanted, and others are not."""
        at = max(0, bisect.bisect_right(self._begins, begin) - 1)
        wanted = 0
        while at < len(self._spans) and self._spans[at][0] < end:
            first, last, _ = self._spans[at]
            wanted += max(0, min(last, end) - max(first, begin))
            at += 1
        return 0 < wanted < end - begin

    def deliver(self, begin: int, content: memoryview) -> None:
        """Copy bytes of the stream, from byte `begin` on, to where they belong."""
        end = begin + content.nbytes
        if not self._spans:
            return
        source = np.frombuffer(content, dtype=np.uint8).ctypes.data
        at = max(0, bisect.bisect_right(self._begins, begin) - 1)
        while at < len(self._spans) and self._spans[at][0] < end:
            first, last, address = self._spans[at]
            low, high = max(first, begin), min(last, end)
            if low < high:
                ctypes.memmove(address + low - first, source + low - begin, high - low)
            at += 1
