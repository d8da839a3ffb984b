"""Opening a directory of slots for writing: whose it is, and what an earlier process left there."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import NamedTuple

from lastgood.errors import MismatchError
from lastgood.files import ReadableBy, make_directory, remove_temporary_files, sync_directory, write_atomically
from lastgood.locks import FileLock
from lastgood.storage import files, reader
from lastgood.storage import format as fmt
from lastgood.storage.reader import SlotState, SlotStatus
from lastgood.storage.verdicts import VerdictBook

__all__ = ["Opened", "open_directory", "take_job", "take_over"]

log = logging.getLogger("lastgood.storage")


class Opened(NamedTuple):
    """What lies in a directory, durably; the numbers are those of the process that opened it."""

    statuses: list[SlotStatus]
    book: VerdictBook
    incarnation: int
    next_sequence: int


def open_directory(directory: Path, lock: FileLock, readable_by: ReadableBy) -> None:
    """Make the directory, take its lock, and remove what a killed process left half made. Raises OSError, LockHeld."""
    make_directory(directory, readable_by.directory_mode)
    lock.acquire()
    for path in remove_temporary_files(directory, fmt.OLDER_TEMPORARY_FILES):
        log.warning("%s: removed, a process that was killed left it half made", path)


def take_job(
    directory: Path, wanted: fmt.Job, mode: int, advice: str, *, agrees: bool | None = None, replace: bool = False
) -> fmt.Job:
    """The job that the directory belongs to from now on; `wanted` without an id takes the one that is there.

    Raises MismatchError, which ends in `advice`, if it belongs to another one; with `replace`, only if that one has
    left more than its description.
    """
    found = described = reader.read_job(directory)
    if found is None:
        slots = reader.find_slots(directory)
        statuses = [reader.look_at_slot(slot, number, None, held=False) for number, slot in slots.items()]
        found = reader.job_of_slots(statuses)
    if not wanted.job_id:
        wanted = wanted._replace(job_id=found.job_id if found else os.urandom(fmt.JOB_ID_BYTES))
    if found is not None and found != wanted and not (replace and _is_unused(directory)):
        raise MismatchError(f"{directory} belongs to {found}, and {wanted} was asked for; {advice}")
    agreed = agrees is None or reader.written_by_agreement(directory) is agrees
    if described != wanted or not agreed:
        write_atomically(directory / fmt.JOB_FILE, fmt.encode_job(wanted, agrees), mode=mode)
    return wanted


def _is_unused(directory: Path) -> bool:
    """Whether a job began here and left no more than its description, as one that was killed at once does."""
    return not reader.find_slots(directory) and reader.nothing_committed(directory)


def take_over(directory: Path, job: fmt.Job, mode: int) -> Opened:
    """Make durable what an earlier process left in the page cache, and go on after its numbers.

    A power cut would still take names and records that one can read: nothing may be overwritten in reliance on them
    before they are durable. Raises OSError, StorageError, MismatchError.
    """
    found = reader.find_slots(directory)
    for path in found.values():
        files.flush_file(path, mode)
    sync_directory(directory)
    statuses = [reader.look_at_slot(path, number, job, held=False) for number, path in found.items()]
    reader.refuse_foreign(statuses)
    records = [status.record for status in statuses if status.record is not None]
    # A record can be gone (a void slot that grew) while the book still names its checkpoint.
    book = VerdictBook(directory, mode)
    highest = max([book.highest_sequence, *(record.sequence for record in records)])
    for status in statuses:
        if status.state is SlotState.TORN:
            # An unfinished write is what every killed process leaves; anything else is damage.
            level = logging.WARNING if status.may_be_damaged else logging.INFO
            log.log(level, "%s: not a complete checkpoint: %s", status.path, status.detail)
    incarnation = max((record.incarnation for record in records), default=0) + 1
    return Opened(statuses, book, incarnation, max(highest, 0) + 1)
