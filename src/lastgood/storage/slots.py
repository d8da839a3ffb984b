"""A directory of slots that one process writes checkpoints into: several at once, the newest wins, older ones stay."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lastgood import _native
from lastgood.errors import CheckpointError, ConfigError, CorruptCheckpoint, WaitTimeout
from lastgood.files import ReadableBy, storage_errors, sync_directory
from lastgood.locks import FileLock
from lastgood.storage import files, reader
from lastgood.storage import format as fmt
from lastgood.storage.medium import Medium
from lastgood.storage.opening import open_directory, take_job, take_over
from lastgood.storage.reader import READ_THREADS, READ_TIMEOUT_S, SlotInfo, SlotStatus, SlotView
from lastgood.storage.retention import Retention, Slot
from lastgood.storage.write import WRITE_TIMEOUT_S, SlotWrite
from lastgood.units import MIB

__all__ = ["SlotStore"]

log = logging.getLogger("lastgood.storage")

_CLOSE_S = 60.0
_ADVICE = (
    "use a directory of its own for each job and rank, and as many ranks as before (or a new job, and this one as its "
    "resume_from)"
)


class SlotStore(Retention):
    """Up to `slots` slot files, of which `keep` complete checkpoints are never touched.

    These are the newest one that was not judged bad, and the newest of the others. So `slots - keep` checkpoints can be
    in flight. Use it as a context manager, or call `close`. Safe to use from
    several threads. Opening takes the directory's lock, removes what a killed process left half made, and goes on after
    the highest sequence and incarnation found.

    Args:
        directory: made if it is not there.
        slots: number of slot files, at least keep + 1. More files of an earlier opening are used up, then removed.
        keep: complete checkpoints that stay, whatever happens; at least 1.
        keep_best: how many more stay as the best ones, by which metric (`measure`), and whether less of it is better.
        chunk_bytes: unit of writing and of checksums, a multiple of 4096.
        writer_threads: threads that write one checkpoint.
        pool: buffers shared by all checkpoints in flight; by default one of `pool_bytes` is made at the first use.
        pool_bytes: size of that pool; it may be smaller than the state.
        job_id: 16 bytes that this directory must belong to; by default whatever it belongs to, or a new random one.
        rank, world_size: whose part of a job of several ranks the directory holds; each rank has one of its own.
        agrees: whether a checkpoint of these ranks counts only once all have it, for job.json; None: that is not known.
        medium: how slots are written (`lastgood.storage.medium`).
        writer_cpus: CPUs that writer threads stay on, in turn; none: wherever the kernel likes.
        crc32c_variant: how checksums are computed; by default the fastest way that this CPU has.
        readable_by: who may read what is made here; slot files that are there get that mode too.
        taken: incarnation and sequence that are taken elsewhere: those of this store are higher.

    Raises:
        LockHeld: another process has the directory open; names it.
        MismatchError: the directory, or a slot in it, is another job's or of another format version; names both.
        StorageError: the operating system refused; names file and operation.
        ConfigError: arguments that cannot work.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        slots: int,
        keep: int = 2,
        chunk_bytes: int = 4 * MIB,
        writer_threads: int = 2,
        pool: _native.ChunkPool | None = None,
        pool_bytes: int = 256 * MIB,
        job_id: bytes | None = None,
        rank: int = 0,
        world_size: int = 1,
        agrees: bool | None = None,
        medium: Medium = "file",
        writer_cpus: Sequence[int] = (),
        crc32c_variant: str = "",
        readable_by: ReadableBy = ReadableBy.OWNER,
        keep_best: tuple[int, str, bool] = (0, "", True),
        taken: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__(directory, keep, readable_by)
        self.keep_best = keep_best
        if keep < 1 or slots < keep + keep_best[0] + 1:
            best = f" + {keep_best[0]} of the best" if keep_best[0] else ""
            raise ConfigError(f"keep must be at least 1 and slots at least keep{best} + 1: slots={slots}, keep={keep}")
        if chunk_bytes <= 0 or chunk_bytes % fmt.BLOCK:
            raise ConfigError(f"chunk_bytes must be a positive multiple of {fmt.BLOCK}: {chunk_bytes}")
        if writer_threads < 1:
            raise ConfigError(f"writer_threads must be at least 1: {writer_threads}")
        available = pool_bytes if pool is None else pool.chunk_bytes
        if available < chunk_bytes:
            raise ConfigError(f"the pool's buffers hold {available} bytes, fewer than chunk_bytes={chunk_bytes}")
        if job_id is not None and len(job_id) != fmt.JOB_ID_BYTES:
            raise ConfigError(f"job_id must have {fmt.JOB_ID_BYTES} bytes, not {len(job_id)}")
        self.slots = slots
        self.chunk_bytes = chunk_bytes
        self.writer_threads = writer_threads
        self.writer_cpus = tuple(writer_cpus)
        self.crc32c_variant = crc32c_variant
        self.medium = medium
        self.commit_lock = threading.Lock()
        self._writes: set[SlotWrite] = set()
        self._stuck: list[tuple[SlotWrite, Slot]] = []
        self._wanted_bytes = 0
        self._pool = pool
        self._pool_bytes = pool_bytes
        self._newest = -1
        self._next_sequence = 1
        self._lock = FileLock(
            self.directory / fmt.LOCK_FILE,
            f"checkpoint directory {self.directory}",
            shared_with_forks=False,
            mode=readable_by.file_mode,
        )
        with storage_errors(self.directory, "opening the directory"):
            try:
                self._open(job_id, rank, world_size, agrees)
                self.incarnation = max(self.incarnation, taken[0] + 1)
                self._next_sequence = max(self._next_sequence, taken[1] + 1)
            except BaseException:
                self._lock.release()
                raise

    @staticmethod
    def peek(directory: Path | str) -> SlotView:
        """Look at a directory without its lock, also while a training writes there, and at copies of directories."""
        return SlotView(directory)

    @property
    def pool(self) -> _native.ChunkPool:
        """The buffers that checkpoints pass through. May be replaced; writes in progress keep theirs."""
        with self._changed:
            if self._pool is None:
                self._pool = _native.ChunkPool(0, self._pool_bytes, self.chunk_bytes)
            return self._pool

    @pool.setter
    def pool(self, pool: _native.ChunkPool) -> None:
        if pool.chunk_bytes < self.chunk_bytes:
            raise ConfigError(f"the pool's buffers hold {pool.chunk_bytes} bytes, fewer than {self.chunk_bytes}")
        with self._changed:
            self._pool = pool

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Give up unfinished writes and release the directory. Safe to call twice.

        A commit that another thread is in the middle of ends first. Raises WaitTimeout, with the lock still held, if
        that takes longer than `timeout_s`.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            writes = list(self._writes)
        for write in writes:
            write.abort()
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while busy := self._busy():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise WaitTimeout(
                        f"{self.directory}: waited {timeout_s:.3g} s for "
                        + ", ".join(f"{slot.path.name} ({slot.busy})" for slot in busy)
                    )
                self._changed.wait(min(left, 1.0) if self._stuck else left)
        if not self._book_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise WaitTimeout(f"{self._book.path}: waited {timeout_s:.3g} s for its flush")
        self._book_lock.release()
        self._lock.release()

    # -- space -----------------------------------------------------------------------------------------------------

    def reserve(self, capacity_bytes: int) -> None:
        """Make sure that every slot can take a stream of `capacity_bytes`, written in full beforehand.

        Missing files are made and free ones grown now; a slot that holds a kept checkpoint or is being written grows
        when it is free again. Raises StorageError, naming path and bytes, if there is no room; the checkpoints and
        the slots that were there stay.
        """
        if capacity_bytes < 0:
            raise ConfigError(f"capacity_bytes must not be negative: {capacity_bytes}")
        with self._changed:
            self._wanted_bytes = fmt.stream_layout(capacity_bytes, self.chunk_bytes)[2]
        self._settle()

    def slot_file_bytes(self, capacity_bytes: int) -> int:
        """Disk space of one slot for a stream of `capacity_bytes`."""
        return fmt.stream_layout(capacity_bytes, self.chunk_bytes)[2]

    # -- writing ---------------------------------------------------------------------------------------------------

    def begin(
        self, step: int, stream_bytes: int, timeout_s: float = WRITE_TIMEOUT_S, *, later: bool = False
    ) -> SlotWrite:
        """Start a checkpoint of `stream_bytes` after `step` finished steps, waiting for a place if need be.

        The slot must grow first if `reserve` was not called for this size, which may take seconds. With `later` the
        caller calls `SlotWrite.void`, which waits for a flush. Raises WaitTimeout (names what holds the slots),
        StorageError.
        """
        write = self._begin(step, stream_bytes, timeout_s, later)
        if write is None:
            with self._changed:
                raise WaitTimeout(f"waited {timeout_s:.3g} s for a free slot in {self.directory}: {self._occupancy()}")
        return write

    def try_begin(self, step: int, stream_bytes: int, *, later: bool = False) -> SlotWrite | None:
        """As `begin`, but None at once if no slot is free."""
        return self._begin(step, stream_bytes, 0.0, later)

    def statuses(self) -> list[SlotStatus]:
        """A look at every slot file, in the order of their numbers."""
        return [
            reader.look_at_slot(path, number, self.job, held=True)
            for number, path in reader.find_slots(self.directory).items()
        ]

    def read_into(
        self,
        info: SlotInfo,
        ranges: Sequence[tuple[int, int]],
        threads: int = READ_THREADS,
        *,
        offset: int = 0,
        timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        """As `SlotView.read_into`; the slot is not reused meanwhile, and no longer kept once found corrupt."""
        with self._changed:
            slot = next((slot for slot in self._all if slot.info == info), None)
            if slot is not None:
                slot.readers += 1
        try:
            super().read_into(info, ranges, threads, offset=offset, timeout_s=timeout_s)
        except CorruptCheckpoint:
            if slot is not None:
                slot.damaged = True
            raise
        finally:
            if slot is not None:
                with self._changed:
                    slot.readers -= 1
                    self._changed.notify_all()

    @contextlib.contextmanager
    def hold(self, info: SlotInfo) -> Iterator[None]:
        """Keep the slot of a checkpoint from being reused meanwhile. Raises CorruptCheckpoint if it was already."""
        with self._changed:
            slot = next((slot for slot in self._all if slot.info == info), None)
            if slot is None:
                raise CorruptCheckpoint(f"{info.path}: step {info.step} was overwritten")
            slot.readers += 1
        try:
            yield
        finally:
            with self._changed:
                slot.readers -= 1
                self._changed.notify_all()

    # -- for SlotWrite ---------------------------------------------------------------------------------------------

    def newest_sequence(self) -> int:
        """Sequence of the newest durable checkpoint (that all ranks hold, if there are several); -1 if none."""
        with self._changed:
            return self._newest if self._everywhere is None else max(self._everywhere, default=-1)

    def header(self, slot: int) -> fmt.SlotHeader:
        """The header that slot file must have."""
        return fmt.SlotHeader(self.job.job_id, slot)

    def ended(self, write: SlotWrite, info: SlotInfo | None, *, idle: bool) -> None:
        """Called by a SlotWrite at its end."""
        with self._changed:
            self._writes.discard(write)
            slot = next(slot for slot in self._all if slot.number == write.slot)
            slot.info = info
            slot.damaged = False
            slot.header_ok = write.header_ok
            if info is not None:
                self._newest = max(self._newest, info.sequence)
            if idle:
                self._free(slot)
            else:
                log.error("%s: the disk does not let go of the write of step %d", write.path, write.step)
                self._stuck.append((write, slot))

    def settle(self) -> None:
        """Called after a commit; trouble is only logged, since that checkpoint is durable and begin() will meet it."""
        try:
            if self._got_on():
                self.forget_restarts()
            self._settle()
        except CheckpointError as error:
            log.warning("%s", error)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _open(self, job_id: bytes | None, rank: int, world_size: int, agrees: bool | None) -> None:
        open_directory(self.directory, self._lock, self.readable_by)
        self.direct_io = files.direct_io_works(self.directory)
        if not self.direct_io:
            log.warning("%s: this file system has no direct I/O; writing through the page cache", self.directory)
        mode = self.readable_by.file_mode
        wanted = fmt.Job(job_id or b"", rank, world_size)
        self.job = take_job(self.directory, wanted, mode, _ADVICE, agrees=agrees, replace=True)
        statuses, self._book, self.incarnation, self._next_sequence = take_over(self.directory, self.job, mode)
        complete = {info.slot: info for info in reader.newest_first(statuses)}
        self._newest = max((info.sequence for info in complete.values()), default=-1)
        self._reached = max([self._book.reached, *(info.step for info in complete.values())])
        self._all = [
            Slot(status.slot, status.path, status.file_bytes, status.header_ok, complete.get(status.slot))
            for status in statuses
        ]
        missing = set(range(self.slots)) - {status.slot for status in statuses}
        self._all += [Slot(number, self.directory / fmt.slot_name(number)) for number in sorted(missing)]

    def _begin(self, step: int, stream_bytes: int, timeout_s: float, later: bool) -> SlotWrite | None:
        if step < 0 or stream_bytes < 0:
            raise ConfigError(f"step {step} and stream_bytes {stream_bytes} must not be negative")
        file_bytes = self.slot_file_bytes(stream_bytes)
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._closed:
                    raise CheckpointError(f"{self.directory}: the store is closed")
                slot = self._pick(file_bytes)
                if slot is not None:
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                # A disk that lets go of a stuck write tells nobody, so that is looked at now and then.
                self._changed.wait(min(left, 1.0) if self._stuck else left)
            sequence = self._next_sequence
            self._next_sequence += 1
            slot.busy = f"step {step}"
            slot.info = None
        try:
            if slot.file_bytes < file_bytes:
                self._resize(slot, max(file_bytes, self._wanted_bytes))
            write = SlotWrite(
                self, slot.path, slot.number, step, sequence, stream_bytes, header_ok=slot.header_ok, later=later
            )
        except BaseException:
            with self._changed:
                self._free(slot)
            raise
        with self._changed:
            self._writes.add(write)
            closed = self._closed
        if closed:
            write.abort()
            raise CheckpointError(f"{self.directory}: the store was closed")
        return write

    def _free_slots(self) -> list[Slot]:
        """Slots that may be overwritten: void ones first, then what was judged bad, then from the oldest on.

        The newest checkpoints may yet be judged: what was good before them is worth more than what is known to be bad.
        """
        self._reap()
        kept = self._kept()
        free = [
            slot
            for slot in self._all
            if not slot.busy
            and not slot.readers
            and (slot.damaged or slot.info is None or slot.info.sequence not in kept)
        ]

        def worth(slot: Slot) -> tuple[int, int]:
            if slot.info is None:
                return 0, 0
            return 1 if self._book.is_bad(slot.info.sequence) else 2, slot.info.sequence

        return sorted(free, key=worth)

    def _reap(self) -> None:
        """Give back slots whose writer threads the disk has let go of at last."""
        for write, slot in list(self._stuck):
            if write.idle():
                self._stuck.remove((write, slot))
                self._free(slot)

    def _busy(self) -> list[Slot]:
        self._reap()
        return [slot for slot in self._all if slot.busy]

    def _pick(self, file_bytes: int) -> Slot | None:
        free = [slot for slot in self._free_slots() if slot.number < self.slots]
        return next((slot for slot in free if slot.file_bytes >= file_bytes), free[0] if free else None)

    def _settle(self) -> None:
        """Make or grow free slots that are smaller than what was reserved, and remove free ones beyond `slots`."""
        while True:
            with self._changed:
                if self._closed:
                    return
                free = self._free_slots()
                slot = next((s for s in free if s.number >= self.slots or s.file_bytes < self._wanted_bytes), None)
                if slot is None:
                    return
                slot.busy = "being resized"
                slot.info = None
                wanted = self._wanted_bytes
            try:
                if slot.number >= self.slots:
                    self._remove(slot)
                else:
                    self._resize(slot, wanted)
            finally:
                with self._changed:
                    self._free(slot)

    def _resize(self, slot: Slot, file_bytes: int) -> None:
        header = self.header(slot.number)
        if slot.path.exists():
            files.grow_slot_file(slot.path, header, file_bytes, direct=self.direct_io)
        else:
            mode = self.readable_by.file_mode
            files.make_slot_file(slot.path, header, file_bytes, direct=self.direct_io, mode=mode)
        slot.header_ok = True

    def _remove(self, slot: Slot) -> None:
        with storage_errors(slot.path, "removing a slot beyond the number asked for"):
            slot.path.unlink(missing_ok=True)
            sync_directory(self.directory)
        with self._changed:
            self._all.remove(slot)

    def _free(self, slot: Slot) -> None:
        """Give a slot back; its file is looked at again, since it may have grown, failed to, or gone."""
        slot.busy = ""
        try:
            slot.file_bytes = slot.path.stat().st_size
        except OSError:
            slot.file_bytes = 0
        self._changed.notify_all()

    def _occupancy(self) -> str:
        writing = [slot.busy for slot in self._all if slot.busy]
        staying = self._kept()
        kept = [f"step {info.step}" for info in self._committed() if info.sequence in staying]
        reading = sum(1 for slot in self._all if slot.readers)
        return (
            f"{len(self._all)} slots, {len(writing)} being written ({', '.join(writing) or 'none'}), "
            f"{len(kept)} kept ({', '.join(kept) or 'none'}), {reading} being read"
        )
