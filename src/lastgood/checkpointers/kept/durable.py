"""The durable checkpoints of a place, whatever system wrote them: step, age, size, by names and records alone.

Nothing of their data is read, so a look takes milliseconds and may be made every minute beside a training.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lastgood.checkpointers.directories.local import LocalStore
from lastgood.checkpointers.directories.manifest import files_in
from lastgood.checkpointers.ranks.opened import OpenedJob, open_job
from lastgood.checkpointers.remote.status import read_status
from lastgood.checkpointers.slots.contents import look_at_slots
from lastgood.checkpointers.telling import failures_told
from lastgood.checkpointers.torch_files.files import TorchFiles
from lastgood.errors import NoCheckpoint
from lastgood.files import storage_errors
from lastgood.locations import Location
from lastgood.storage import SlotStatus
from lastgood.storage.objects.s3 import S3Options

__all__ = ["Durable", "Look", "look_at_place"]


@dataclass(frozen=True)
class Durable:
    """A checkpoint that is complete; of a job of several ranks, on all of them."""

    step: int
    written_s: float | None
    """When it was written, in seconds since 1970, by the times that its storage keeps."""
    nbytes: int
    """Of all ranks."""
    where: str
    incarnation: int | None = None
    """Of checkpoints in slots."""
    bad: str | None = None
    """Why it was judged bad."""


@dataclass(frozen=True)
class Look:
    """What `look_at_place` found."""

    place: str
    checkpoints: tuple[Durable, ...]
    """The newest first."""
    in_use: bool
    """Whether a process has it open for writing, as far as the kernel tells this user."""
    failures: tuple[str, ...]
    """What went wrong and can still be seen, the newest first: damage, verdicts, what could not be sent elsewhere, and
    saves that failed, by the file of events."""

    @property
    def newest(self) -> Durable | None:
        """The newest one that was not judged bad: what a restore takes."""
        return next((one for one in self.checkpoints if one.bad is None), None)

    @property
    def pace(self) -> tuple[float, float] | None:
        """Steps per second and seconds per checkpoint, of the newest two of one incarnation; None if unknown."""
        for newer, older in zip(self.checkpoints, self.checkpoints[1:], strict=False):
            if newer.written_s is None or older.written_s is None or newer.incarnation != older.incarnation:
                return None
            seconds, steps = newer.written_s - older.written_s, newer.step - older.step
            return (steps / seconds, seconds) if seconds > 0 and steps > 0 else None
        return None


def look_at_place(place: Path | str | Location, s3: S3Options | None = None) -> Look:
    """Look at a directory, one of several ranks, or a job in a bucket. Takes no lock, and reads no data.

    Raises StorageError, ConfigError, and MismatchError for what cannot be one job's.
    """
    job = open_job(place, s3)
    statuses: dict[int, list[SlotStatus]] = {}
    failures: list[tuple[float, str]] = []
    for rank, view in job.views.items():
        if job.remote is None and not view.directory.is_dir():
            continue
        statuses[rank], troubles = look_at_slots(view)
        failures += [(time.time(), trouble) for trouble in troubles]
        failures += _failures(job, rank, statuses[rank])
    found = _of_slots(job, statuses, failures)
    if job.remote is None:
        for rank in job.views:
            found += _others(Path(job.where(rank)))
        for directory in {Path(str(job.place)), *(Path(job.where(rank)) for rank in job.views)}:
            failures += failures_told(directory)
    found.sort(key=lambda one: one.written_s or 0.0, reverse=True)
    told = [text for _, text in sorted(failures, key=lambda one: one[0], reverse=True)]
    in_use = any(view.held for view in job.views.values())
    return Look(str(job.place), tuple(found), in_use, tuple(dict.fromkeys(told)))


def _of_slots(
    job: OpenedJob, statuses: dict[int, list[SlotStatus]], failures: list[tuple[float, str]]
) -> list[Durable]:
    held: dict[tuple[int, int], list[SlotStatus]] = {}
    bad: dict[tuple[int, int], str] = {}
    for rank, found in statuses.items():
        book = job.views[rank].book()
        newest: dict[tuple[int, int], SlotStatus] = {}
        for status in found:
            info = status.info
            if info is None:
                continue
            key = (info.incarnation, info.step)
            before = newest.get(key)
            if before is None or before.info is None or before.info.sequence < info.sequence:
                newest[key] = status
            if book.is_bad(info.sequence):
                bad[key] = book.verdicts[info.sequence].reason or "no reason"
        for key, status in newest.items():
            held.setdefault(key, []).append(status)
    if job.several and held:
        try:
            common = {one.key for one in job.checkpoints()}
        except NoCheckpoint as error:
            failures.append((time.time(), str(error)))
            return []
        held = {key: found for key, found in held.items() if key in common}
    return [
        Durable(
            step,
            _newest_time(one.written_s for one in parts),
            sum(one.record.stream_bytes for one in parts if one.record is not None),
            str(job.place) if job.several else str(parts[0].path),
            incarnation,
            bad.get((incarnation, step)),
        )
        for (incarnation, step), parts in held.items()
    ]


def _newest_time(times: Iterable[float | None]) -> float | None:
    known = [one for one in times if one is not None]
    return max(known) if known else None


def _others(directory: Path) -> list[Durable]:
    """Files and folders of systems without slots."""
    with storage_errors(directory, "reading the directory"):
        if not directory.is_dir():
            return []
        found = []
        for _, step, path in TorchFiles(directory, 1).files():
            about = path.stat()
            found.append(Durable(step, about.st_mtime, about.st_size, str(path)))
        for one in LocalStore(directory, 1).found():
            sizes = [path.stat() for path in files_in(Path(one.where)).values()]
            written_s = _newest_time(about.st_mtime for about in sizes)
            found.append(Durable(one.step, written_s, sum(about.st_size for about in sizes), one.where))
        return found


def _failures(job: OpenedJob, rank: int, statuses: list[SlotStatus]) -> list[tuple[float, str]]:
    view = job.views[rank]
    found = [
        (status.written_s or 0.0, f"{status.path}: {status.detail or 'damaged'}")
        for status in statuses
        if status.may_be_damaged
    ]
    book = view.book()
    for status in statuses:
        info = status.info
        if info is not None and book.is_bad(info.sequence):
            reason = book.verdicts[info.sequence].reason or "no reason"
            found.append((status.written_s or 0.0, f"{status.path}: step {info.step} was judged bad: {reason}"))
    if job.remote is None:
        sent = read_status(view.directory)
        if sent is not None and sent.last_error:
            found.append((time.time(), f"{sent.place}: {sent.last_error}"))
    return found
