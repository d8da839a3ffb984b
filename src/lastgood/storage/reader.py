"""Looking at a directory of slots and reading checkpoints back. Changes nothing and needs no lock."""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from lastgood import _native
from lastgood.addresses import memory_address
from lastgood.errors import CorruptCheckpoint, MismatchError, NoCheckpoint, StorageError, WaitTimeout
from lastgood.files import closed_after, local_path, open_regular, read_bounded, storage_error, storage_errors
from lastgood.locks import lock_holders
from lastgood.storage import format as fmt
from lastgood.storage.files import open_file, read_block
from lastgood.storage.global_commit import GLOBAL_FILE, GlobalCommit, read_global_commit
from lastgood.storage.verdicts import VERDICT_FILE, VerdictBook

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["READ_TIMEOUT_S", "SlotInfo", "SlotState", "SlotStatus", "SlotView", "find_slots", "look_at_slot"]

log = logging.getLogger("lastgood.storage")

READ_TIMEOUT_S = 600.0
READ_THREADS = 8


class SlotState(str, enum.Enum):
    """What one slot file holds, judged by its records; `verify` also reads the data."""

    WHOLE = "whole"
    """A committed checkpoint whose record and checksum table hold."""
    VOID = "void"
    """Nothing."""
    TORN = "torn"
    """Something that is not complete: a write that never finished, or damage."""
    WRITING = "being written"
    """A living process is writing here."""
    FOREIGN = "foreign"
    """Another job's, or of another format version."""


@dataclass(frozen=True)
class SlotInfo:
    """One committed checkpoint."""

    path: Path
    slot: int
    record: fmt.CommitRecord

    @property
    def step(self) -> int:
        """Finished training steps."""
        return self.record.step

    @property
    def sequence(self) -> int:
        """Place in the order of all checkpoints that were begun in this directory."""
        return self.record.sequence

    @property
    def incarnation(self) -> int:
        """Which incarnation of the job wrote it, from 1."""
        return self.record.incarnation

    @property
    def stream_bytes(self) -> int:
        """Length of the stream."""
        return self.record.stream_bytes

    @property
    def meta_offset(self) -> int:
        """Where in the stream the meta data lies."""
        return self.record.meta_offset

    @property
    def meta_bytes(self) -> int:
        """Length of the meta data."""
        return self.record.meta_bytes

    @property
    def layout_digest(self) -> bytes:
        """SHA-256 of the state's layout (32 bytes)."""
        return self.record.layout_digest


@dataclass(frozen=True)
class SlotStatus:
    """What a look at one slot file showed. `record` is there wherever one could be read, of any job."""

    path: Path
    slot: int
    state: SlotState
    file_bytes: int
    record: fmt.CommitRecord | None = None
    header_ok: bool = True
    detail: str = ""

    @property
    def info(self) -> SlotInfo | None:
        """The checkpoint, if it is complete."""
        if self.state is SlotState.WHOLE and self.record is not None:
            return SlotInfo(self.path, self.slot, self.record)
        return None

    @property
    def step(self) -> int | None:
        """Finished training steps, if a record has them."""
        return None if self.record is None else self.record.step

    @property
    def incarnation(self) -> int | None:
        """Which incarnation of the job wrote it, if a record has it."""
        return None if self.record is None else self.record.incarnation

    @property
    def written_s(self) -> float | None:
        """When it was last written, in seconds since 1970, by the times that the storage keeps; None if it is gone."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return None

    @property
    def may_be_damaged(self) -> bool:
        """Whether a checkpoint may have been here; a write that never finished leaves a record of its own kind."""
        committed = self.record is None or self.record.kind is fmt.RecordKind.COMMITTED
        return self.state is SlotState.TORN and committed


def find_slots(directory: Path) -> dict[int, Path]:
    """The slot files of a directory, by number. Raises StorageError if the directory cannot be read."""
    with storage_errors(directory, "reading the directory"):
        found = {fmt.slot_number(path): path for path in directory.iterdir()}
    return dict(sorted((number, path) for number, path in found.items() if number is not None))


def read_job(directory: Path) -> fmt.Job | None:
    """What job.json says, or None if that file is missing or damaged.

    Raises MismatchError for another format version.
    """
    path = directory / fmt.JOB_FILE
    try:
        return fmt.decode_job(read_bounded(path, fmt.MOST_JOB_BYTES, too_large=fmt.RecordError))
    except FileNotFoundError:
        return None
    except fmt.RecordError as error:
        log.warning("%s is damaged (%s); the job is taken from the slots", path, error)
        return None
    except fmt.OtherVersionError as error:
        raise MismatchError(f"{path}: {error}") from error
    except OSError as error:
        raise storage_error(error, path, "reading") from error


def nothing_committed(directory: Path) -> bool:
    """Whether no checkpoint was ever committed in the slots here: a job that began here, or was refused, has no claim.

    Raises StorageError.
    """
    if (directory / GLOBAL_FILE).exists() or (directory / VERDICT_FILE).exists():
        return False
    statuses = [look_at_slot(path, number, None, held=False) for number, path in find_slots(directory).items()]
    return all(
        status.state is SlotState.VOID
        or (status.record is not None and status.record.kind is fmt.RecordKind.WRITING and status.record.sequence == 1)
        for status in statuses
    )


def written_by_agreement(directory: Path) -> bool | None:
    """Whether the ranks of the job that wrote here agree on their checkpoints; None if no record has it."""
    path = directory / fmt.JOB_FILE
    try:
        found = fmt.decode_agrees(read_bounded(path, fmt.MOST_JOB_BYTES, too_large=fmt.RecordError))
    except (fmt.RecordError, fmt.OtherVersionError, OSError):
        found = None  # `read_job` says what is wrong with it
    return True if found is None and (directory / GLOBAL_FILE).exists() else found


def job_of_slots(statuses: Sequence[SlotStatus]) -> fmt.Job | None:
    """The one job that all readable commit records name, or None. Raises MismatchError if they name several."""
    owners = {status.record.job: status.path for status in statuses if status.record is not None}
    if len(owners) > 1:
        named = "; ".join(f"{path} belongs to {job}" for job, path in owners.items())
        raise MismatchError(f"{named}; move the files of one away")
    return next(iter(owners), None)


def look_at_slot(path: Path, slot: int, job: fmt.Job | None, *, held: bool) -> SlotStatus:
    """Judge one slot file; `held` says whether a living process has the directory open for writing."""
    with storage_errors(path, "opening"):
        descriptor, _ = open_file(path, os.O_RDONLY)
    with closed_after(descriptor), storage_errors(path, "reading records"):
        return _judge(descriptor, path, slot, job, held)


def _look_or_say_why_not(path: Path, slot: int, job: fmt.Job | None, held: bool) -> SlotStatus:
    """For readers only: a slot that cannot be read hides no other one. A writer must know all sequences."""
    try:
        return look_at_slot(path, slot, job, held=held)
    except StorageError as error:
        log.warning("%s; the checkpoint in it, if any, is left out", error)
        return SlotStatus(path, slot, SlotState.TORN, 0, detail=str(error))


def _judge(descriptor: int, path: Path, slot: int, job: fmt.Job | None, held: bool) -> SlotStatus:
    size = os.fstat(descriptor).st_size
    header_ok, detail = True, ""
    try:
        header = fmt.SlotHeader.decode(read_block(descriptor, fmt.HEADER_OFFSET, fmt.BLOCK))
    except fmt.OtherVersionError as error:
        return SlotStatus(path, slot, SlotState.FOREIGN, size, detail=str(error))
    except fmt.RecordError as error:
        # The commit record says all that a reader needs.
        header_ok, detail = False, f"header: {error}"
    else:
        if job is not None and header.job_id != job.job_id:
            detail = f"belongs to job {header.job_id.hex()}, and this directory to {job}"
            return SlotStatus(path, slot, SlotState.FOREIGN, size, detail=detail)
        if header.slot != slot:
            header_ok, detail = False, f"made as {fmt.slot_name(header.slot)}"

    def status(state: SlotState, record: fmt.CommitRecord | None, *details: str) -> SlotStatus:
        return SlotStatus(path, slot, state, size, record, header_ok, "; ".join(filter(None, (*details, detail))))

    try:
        record = fmt.CommitRecord.decode(read_block(descriptor, fmt.COMMIT_OFFSET, fmt.BLOCK))
    except fmt.OtherVersionError as error:
        return status(SlotState.FOREIGN, None, str(error))
    except fmt.RecordError as error:
        return status(SlotState.TORN, None, f"commit record: {error}")
    if record is None:
        return status(SlotState.VOID, None)
    if job is not None and record.job != job:
        return status(SlotState.FOREIGN, record, f"belongs to {record.job}, and this directory to {job}")
    if record.kind is fmt.RecordKind.WRITING:
        if held:
            return status(SlotState.WRITING, record)
        return status(SlotState.TORN, record, f"the write of step {record.step} never finished")
    if record.end_offset > size:
        return status(SlotState.TORN, record, f"the file has {size} bytes instead of {record.end_offset}")
    table = read_block(descriptor, record.table_offset, record.table_bytes)
    if fmt.table_digest(table) != record.table_digest:
        return status(SlotState.TORN, record, "the checksum table does not have the digest of the commit record")
    return status(SlotState.WHOLE, record)


def newest_first(statuses: Sequence[SlotStatus]) -> list[SlotInfo]:
    """The complete checkpoints, newest first, each sequence once (a copied slot file counts once)."""
    by_sequence = {info.sequence: info for info in (status.info for status in reversed(statuses)) if info is not None}
    return [by_sequence[sequence] for sequence in sorted(by_sequence, reverse=True)]


def refuse_foreign(statuses: Sequence[SlotStatus]) -> None:
    """Raise MismatchError if a slot is another job's or of another format version."""
    for status in statuses:
        if status.state is SlotState.FOREIGN:
            raise MismatchError(f"{status.path}: {status.detail}; move that file away to go on without it")


class SlotView:
    """A directory of slots, for reading only. Works beside a training that writes there, and on copies.

    Such a training may overwrite what was seen; reading that raises CorruptCheckpoint and never gives other bytes.
    """

    remote: ClassVar[bool] = False
    """Whether it reads objects, several at once: chunks that no range asks for are left out, and a checkpoint is held
    for all its ranks."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = local_path(directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release what is held: nothing, for a view."""

    @property
    def held(self) -> bool:
        """Whether a process has the directory open for writing, as far as the kernel tells this user."""
        try:
            descriptor = open_regular(self.directory / fmt.LOCK_FILE)
        except (OSError, StorageError):
            return False
        with closed_after(descriptor):
            return bool(lock_holders(descriptor))

    def statuses(self) -> list[SlotStatus]:
        """A look at every slot file, in the order of their numbers. Raises StorageError, MismatchError."""
        slots = find_slots(self.directory)
        held = self.held
        job = read_job(self.directory)
        found = [_look_or_say_why_not(path, number, job, held) for number, path in slots.items()]
        if job is None:
            job_of_slots(found)
        return found

    def each_status(self) -> list[SlotStatus]:
        """As `statuses`, of slots that need not belong together. Raises StorageError only if none can be looked at."""
        held = self.held
        found = []
        for number, path in find_slots(self.directory).items():
            try:
                found.append(look_at_slot(path, number, None, held=held))
            except StorageError as error:
                found.append(SlotStatus(path, number, SlotState.TORN, 0, detail=str(error)))
        return found

    def complete(self, statuses: Sequence[SlotStatus]) -> list[SlotInfo]:
        """The complete checkpoints among `statuses` of this view, newest first."""
        return newest_first(statuses)

    def why_gone(self, info: SlotInfo) -> str:
        """Why a checkpoint is not there any more, in words: reading it fails then, but nothing is damaged. "" if it is.

        What cannot be told counts as there.
        """
        if info.path.exists():  # else a slot beyond the number asked for was removed
            try:
                status = look_at_slot(info.path, info.slot, None, held=True)
            except StorageError:
                return ""
            grows = status.record is None and status.state is SlotState.VOID
            if not grows and (status.record is None or status.record == info.record):
                return ""
        return "a training has reused the slot"

    def committed(self) -> list[SlotInfo]:
        """The complete checkpoints, newest first. Raises StorageError, MismatchError."""
        statuses = self.statuses()
        refuse_foreign(statuses)
        return newest_first(statuses)

    def newest(self) -> SlotInfo:
        """The newest complete checkpoint. Raises NoCheckpoint, naming what is there instead."""
        found = self.committed()
        if not found:
            raise NoCheckpoint(f"{self.directory}: no complete checkpoint; {self._describe()}")
        return found[0]

    def read_meta(self, info: SlotInfo, timeout_s: float = READ_TIMEOUT_S) -> bytes:
        """The meta data inside the stream, checked. Raises CorruptCheckpoint, StorageError."""
        return self.read_bytes(info, info.record.meta_offset, info.record.meta_bytes, timeout_s)

    def read_bytes(self, info: SlotInfo, offset: int, nbytes: int, timeout_s: float = READ_TIMEOUT_S) -> bytes:
        """`nbytes` of the stream from byte `offset` on. Raises as `read_into` does."""
        memory = bytearray(nbytes)
        if memory:
            address, keep = memory_address(memory, 0, nbytes)
            self.read_into(info, [(address, nbytes)], offset=offset, timeout_s=timeout_s)
            del keep
        return bytes(memory)

    def read_into(
        self,
        info: SlotInfo,
        ranges: Sequence[tuple[int, int]],
        threads: int = READ_THREADS,
        *,
        offset: int = 0,
        timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        """Read the stream from byte `offset` on into (address, nbytes) ranges; address 0 skips that many bytes.

        Addresses come from `lastgood.addresses`, which knows that so many bytes of memory are there.
        Every chunk is checked before a byte of it is delivered; chunks in front of a bad one are delivered. Raises
        CorruptCheckpoint (file, chunk, both checksums), StorageError, WaitTimeout.
        """
        record = info.record
        if offset < 0 or offset + sum(nbytes for _, nbytes in ranges) > record.stream_bytes:
            raise CorruptCheckpoint(
                f"{info.path}: step {info.step}: {sum(nbytes for _, nbytes in ranges)} bytes at byte {offset} are "
                f"outside of a stream of {record.stream_bytes}"
            )
        first_chunk = offset // record.chunk_bytes
        wanted = [(0, offset - first_chunk * record.chunk_bytes), *ranges]
        with storage_errors(info.path, "opening"):
            descriptor, _ = open_file(info.path, os.O_RDONLY)
        try:
            table = self._current_table(descriptor, info)
            place = (record.data_offset, record.stream_bytes, record.chunk_bytes, record.sequence)
            bad = _native.read_verify(descriptor, *place, table, wanted, first_chunk, threads, timeout_s)
        except TimeoutError as error:
            raise WaitTimeout(f"{info.path}: waited {timeout_s:.0f} s for {error}") from error
        except OSError as error:
            if error.errno == errno.ENODATA:
                raise CorruptCheckpoint(f"{info.path}: step {info.step}: the file was cut: {error}") from error
            raise storage_error(error, info.path, "read") from error
        finally:
            os.close(descriptor)
        if bad is not None:
            chunk, expected, found = bad
            raise CorruptCheckpoint(
                f"{info.path}: step {info.step}, chunk {chunk} of {record.chunks}: "
                f"checksum {found:#010x} instead of {expected:#010x}"
            )

    @contextlib.contextmanager
    def hold(self, info: SlotInfo) -> Iterator[None]:
        """Nothing, for a view: only the store that writes here can keep a slot from being reused."""
        del info
        yield

    def book(self) -> VerdictBook:
        """Verdicts and restart counts, as they are on the disk now. Raises StorageError, MismatchError."""
        return VerdictBook(self.directory)

    def global_commit(self) -> GlobalCommit | None:
        """The newest checkpoint that all ranks of a job are known to hold, if it has several. Raises MismatchError."""
        return read_global_commit(self.directory)

    def verify(self, info: SlotInfo, threads: int = READ_THREADS, timeout_s: float = READ_TIMEOUT_S) -> None:
        """Read the whole stream and check it. Raises as `read_into` does."""
        self.read_into(info, [(0, info.stream_bytes)], threads, timeout_s=timeout_s)

    def _current_table(self, descriptor: int, info: SlotInfo) -> bytes:
        """The checksum table, if the slot still holds what `info` says."""
        try:
            current = fmt.CommitRecord.decode(read_block(descriptor, fmt.COMMIT_OFFSET, fmt.BLOCK))
        except (fmt.RecordError, fmt.OtherVersionError) as error:
            raise CorruptCheckpoint(f"{info.path}: step {info.step}: commit record: {error}") from error
        if current != info.record:
            holds = "nothing" if current is None else f"step {current.step} ({current.kind.name.lower()})"
            raise CorruptCheckpoint(f"{info.path}: step {info.step} was overwritten; the slot now holds {holds}")
        table = read_block(descriptor, info.record.table_offset, info.record.table_bytes)
        if fmt.table_digest(table) != info.record.table_digest:
            found = fmt.table_digest(table).hex()
            raise CorruptCheckpoint(
                f"{info.path}: step {info.step}: checksum table with digest {found} instead of "
                f"{info.record.table_digest.hex()}"
            )
        return table

    def _describe(self) -> str:
        states = [status.state.value for status in self.statuses()]
        if not states:
            return "it has no slot files"
        return "its slots are " + ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
