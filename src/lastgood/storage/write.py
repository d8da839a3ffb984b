"""One checkpoint on its way into a slot."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

from lastgood import _native
from lastgood.errors import CheckpointError, WaitTimeout
from lastgood.files import storage_error, storage_errors
from lastgood.storage import format as fmt
from lastgood.storage.medium import Medium, open_slot_file
from lastgood.storage.reader import SlotInfo

__all__ = ["WRITE_TIMEOUT_S", "SlotOwner", "SlotWrite", "writing_record"]

WRITE_TIMEOUT_S = 600.0
_JOIN_S = 10.0


class RecordOwner(Protocol):
    """What all records of a directory's owner say."""

    job: fmt.Job
    incarnation: int
    chunk_bytes: int


class SlotOwner(RecordOwner, Protocol):
    """What a write needs to know of its store, and tells it."""

    writer_threads: int
    writer_cpus: tuple[int, ...]
    crc32c_variant: str
    medium: Medium
    direct_io: bool
    commit_lock: threading.Lock

    @property
    def pool(self) -> _native.ChunkPool:
        """Buffers for all writes."""

    def newest_sequence(self) -> int:
        """Sequence of the newest durable checkpoint; -1 if there is none."""

    def header(self, slot: int) -> fmt.SlotHeader:
        """The header that a slot file must have."""

    def ended(self, write: SlotWrite, info: SlotInfo | None, *, idle: bool) -> None:
        """The write is over; `info` if it was committed; `idle` if none of its threads is left."""

    def settle(self) -> None:
        """A commit made an older slot free: the time to make it fit what was reserved."""


def writing_record(owner: RecordOwner, step: int, sequence: int, stream_bytes: int) -> fmt.CommitRecord:
    """The record of a stream that begins at `DATA_OFFSET` while it is being written."""
    table_offset, table_bytes, _ = fmt.stream_layout(stream_bytes, owner.chunk_bytes)
    return fmt.CommitRecord(
        kind=fmt.RecordKind.WRITING,
        job_id=owner.job.job_id,
        step=step,
        incarnation=owner.incarnation,
        sequence=sequence,
        stream_bytes=stream_bytes,
        meta_offset=0,
        meta_bytes=0,
        chunk_bytes=owner.chunk_bytes,
        data_offset=fmt.DATA_OFFSET,
        table_offset=table_offset,
        table_bytes=table_bytes,
        layout_digest=bytes(32),
        table_digest=bytes(32),
        rank=owner.job.rank,
        world_size=owner.job.world_size,
    )


class SlotWrite:
    """Writes one stream into one slot and commits it. Made by `SlotStore.begin`.

    If it was begun `later`, call `void` first. Call `copy_host` (or `acquire` and `put`) until the whole stream was
    given, then `commit`, perhaps in another thread. Whatever fails, the slot is void afterwards (or as it was, before
    `void`), is given back to the store, and the older checkpoints stay; StorageError names file, operation and bytes.
    """

    def __init__(
        self,
        store: SlotOwner,
        path: Path,
        slot: int,
        step: int,
        sequence: int,
        stream_bytes: int,
        *,
        header_ok: bool,
        later: bool = False,
    ) -> None:
        self.path = path
        self.slot = slot
        self.step = step
        self.sequence = sequence
        self.stream_bytes = stream_bytes
        self.bytes_written = fmt.written_bytes(stream_bytes, store.chunk_bytes)
        """Bytes that a complete write of this stream sends to the disk."""
        self.header_ok = header_ok
        """Whether the slot file has its header."""
        self.info: SlotInfo | None = None
        """The checkpoint, once it is durable."""
        self.phases: list[tuple[str, float, float]] = []
        """What was done when: name, begin and end, in `time.perf_counter()` seconds. Chunks are written from the end of
        ``void`` on, while later ones are still being copied."""
        self._store = store
        self._record = writing_record(store, step, sequence, stream_bytes)
        self._native: _native.SlotWriter | None = None
        self._state_lock = threading.Lock()
        self._users = 0  # threads inside a call; the last one out ends a write that was given up
        self._given_up = False
        self._over = False
        with storage_errors(path, "opening"):
            nbytes = fmt.stream_layout(stream_bytes, store.chunk_bytes)[2]
            self._file = open_slot_file(path, store.medium, direct=store.direct_io, nbytes=nbytes)
        self.how = self._file.how
        """How the bytes reach storage: ``direct``, ``page cache``, ``libpmem`` or ``msync``."""
        if later:
            return
        with storage_errors(path, "voiding the slot", fmt.BLOCK):
            try:
                self._void()
            except BaseException:
                self._file.close()
                raise

    def void(self) -> None:
        """Make the slot's old checkpoint void, durably: before that nothing is written. Of a write begun `later`, once.

        It may be called in another thread than `SlotStore.begin` was, whose caller then waits for no flush. Raises
        StorageError, which ends this write.
        """
        with self._in_use("voiding the slot"):
            self._void()

    def _void(self) -> None:
        began_s, store = time.perf_counter(), self._store
        # From here on the old checkpoint of this slot is void, also after a power cut: only then is it overwritten,
        # since there are no writer threads before.
        if not self.header_ok:
            self._file.write_block(store.header(self.slot).encode(), fmt.HEADER_OFFSET)
        self._file.write_block(self._record.encode(), fmt.COMMIT_OFFSET)
        self._file.flush()
        self.header_ok = True
        self._native = _native.SlotWriter(
            store.pool,
            self._file.descriptor,
            fmt.DATA_OFFSET,
            self.stream_bytes,
            store.chunk_bytes,
            self.sequence,
            store.writer_threads,
            store.writer_cpus,
            store.crc32c_variant,
            self._file.mapping,
        )
        self._phase("void", began_s)

    @property
    def _writer(self) -> _native.SlotWriter:
        if self._native is None:
            raise CheckpointError(f"{self.path}: nothing may be written for step {self.step} before void()")
        return self._native

    @property
    def position(self) -> int:
        """Bytes of the stream given so far."""
        return 0 if self._native is None else self._native.position

    def copy_host(
        self, ranges: Sequence[tuple[int, int]], timeout_s: float = WRITE_TIMEOUT_S, threads: int = 1
    ) -> None:
        """Append (address, nbytes) ranges of host memory to the stream; return once they may be overwritten.

        With `threads` > 1, long appends are copied by that many threads. Raises StorageError, WaitTimeout (a free
        buffer did not come in time); either ends this write.
        """
        with self._in_use("copying"):
            self._writer.copy_host(ranges, timeout_s, threads)

    def acquire(self, timeout_s: float = WRITE_TIMEOUT_S) -> tuple[int, int, int]:
        """Take a buffer for the next chunk: (address, chunk index, bytes of the stream that belong in it).

        Fill it and `put` it. Hold few at a time: all writes share one pool. Raises StorageError, which ends this write,
        and WaitTimeout, after which it may be tried again.
        """
        with self._in_use("copying", after_timeout=True):
            return self._writer.acquire(timeout_s)

    def put(self, chunk_index: int) -> None:
        """Hand a filled buffer over; a writer thread checksums and writes it. Raises StorageError."""
        with self._in_use("copying"):
            self._writer.put(chunk_index)

    def release(self) -> None:
        """After a failure: give back the buffers taken by `acquire`, once no copy into them is in progress any more."""
        if self._native is not None:
            self._native.release()

    def commit(
        self, meta_offset: int, meta_bytes: int, layout_digest: bytes, timeout_s: float = WRITE_TIMEOUT_S
    ) -> Literal["durable", "superseded"]:
        """Wait until all is written, make it durable and the newest checkpoint.

        "superseded" if a checkpoint that was begun later is durable already: then this one is dropped. Raises
        StorageError, WaitTimeout; either ends this write.
        """
        deadline = time.monotonic() + timeout_s
        with self._in_use("writing"):
            table = self._writer.finish(timeout_s)
            self._phase("write", self.phases[-1][2])
            record = self._record.committed(meta_offset, meta_bytes, layout_digest, table)
            encoded = record.encode()
            if self._store.newest_sequence() > self.sequence:
                self._end(None)
                return "superseded"
            self._file.write_block(table, record.table_offset)
            self._file.flush()
            self._phase("flush", self.phases[-1][2])
            # One record at a time, so that no older one is written after a newer one.
            if not self._store.commit_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise TimeoutError("another checkpoint's commit")
            try:
                if self._store.newest_sequence() > self.sequence:
                    self._end(None)
                    return "superseded"
                self._check_still_ours()
                self._file.write_block(encoded, fmt.COMMIT_OFFSET)
                self._file.flush()
                self._phase("commit", self.phases[-1][2])
                self._end(SlotInfo(self.path, self.slot, record))
            finally:
                self._store.commit_lock.release()
        self._store.settle()
        return "durable"

    def abort(self) -> None:
        """Give this write up. Safe to call twice, from any thread, and after a commit (then it does nothing).

        If another thread is inside a call of this write, that call fails and the write ends with it.
        """
        with self._state_lock:
            if self._over:
                return
            self._given_up = True
            in_use = self._users > 0
        self._stop()
        if not in_use:
            self._end(None)

    def idle(self, timeout_s: float = 0.0) -> bool:
        """Whether none of the writer threads is left."""
        return self._native is None or self._native.join(timeout_s)

    def _stop(self) -> None:
        if self._native is not None:
            self._native.abort()

    def _phase(self, name: str, began_s: float) -> None:
        self.phases.append((name, began_s, time.perf_counter()))

    def _check_still_ours(self) -> None:
        """A slot file that was removed or replaced meanwhile would take the checkpoint with it."""
        if self._given_up:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        if not os.path.samestat(os.fstat(self._file.descriptor), self.path.stat()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    @contextlib.contextmanager
    def _in_use(self, operation: str, *, after_timeout: bool = False) -> Iterator[None]:
        """End this write on every failure (but a timeout if `after_timeout`) and say what failed."""
        with self._state_lock:
            if self._over or self._given_up:
                raise CheckpointError(f"{self.path}: the write of step {self.step} is over")
            self._users += 1
        failed = True
        try:
            yield
            failed = False
        except TimeoutError as error:
            failed = not after_timeout
            raise WaitTimeout(f"{self.path}: step {self.step}: gave up waiting for {error}") from error
        except OSError as error:
            if error.errno == errno.ECANCELED:
                raise CheckpointError(f"{self.path}: the write of step {self.step} was aborted") from error
            raise storage_error(error, self.path, operation, fmt.align_up(self.stream_bytes)) from error
        finally:
            if failed:
                self._stop()
            with self._state_lock:
                self._given_up |= failed
                self._users -= 1
                last = self._given_up and self._users == 0
            if last:
                self._end(None)

    def _end(self, info: SlotInfo | None) -> None:
        with self._state_lock:
            if self._over:
                return
            self._over = True
            self.info = info
        if info is None:
            self._stop()
        idle = self.idle(_JOIN_S)
        self._file.close()
        self._store.ended(self, info, idle=idle)
