"""The directories of a job's ranks, and the checkpoints that all of them hold completely."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from lastgood.checkpointers.rank_directory import rank_directories, rank_directory
from lastgood.checkpointers.ranks.checkpoint import JobCheckpoint, Parts
from lastgood.checkpointers.ranks.remote_job import RemoteJob
from lastgood.errors import MismatchError, NoCheckpoint, StorageError
from lastgood.files import (
    ReadableBy,
    local_path,
    make_directory,
    open_new,
    read_bounded,
    storage_error,
    sync_directory,
    temporary_beside,
)
from lastgood.locations import Location
from lastgood.storage import SlotInfo, SlotStore, SlotView
from lastgood.storage.objects.opening import holds_objects, open_objects
from lastgood.storage.objects.s3 import S3Options
from lastgood.storage.reader import find_slots, nothing_committed, read_job

__all__ = ["ID_FILE", "Buffers", "shared_job_id", "whole_checkpoints"]

Buffers = Literal["equal", "rank0"]
"""What of modules' buffers on another number of ranks: they must be equal on all that wrote, or rank 0's are taken."""

ID_FILE = "job-id"
"""In the directory of a job of several ranks: the id that all of them take."""
_ID_BYTES = 16


def shared_job_id(job: Path | str, readable_by: ReadableBy = ReadableBy.OWNER) -> bytes:
    """The id (16 bytes) that all ranks of a job give their directories; made by the rank that comes first.

    It lies in the job's directory, so ranks that share none have different ids. Raises StorageError.
    """
    path = local_path(job) / ID_FILE
    temporary = temporary_beside(path)
    try:
        make_directory(path.parent, readable_by.directory_mode)
        if not path.exists():
            mode = readable_by.file_mode
            with os.fdopen(open_new(temporary, mode=mode), "wb") as file:
                file.write(os.urandom(_ID_BYTES).hex().encode())
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)  # never over another rank's
            sync_directory(path.parent)
        found = bytes.fromhex(read_bounded(path, 2 * _ID_BYTES, too_large=ValueError).decode("ascii", errors="replace"))
    except ValueError as error:
        raise StorageError(f"{path}: is no job id ({error}); remove it if no rank has a directory yet") from error
    except OSError as error:
        raise storage_error(error, path, "making the job's id") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    if len(found) != _ID_BYTES:
        raise StorageError(f"{path}: is no job id ({len(found)} bytes); remove it if no rank has a directory yet")
    return found


def whole_checkpoints(job: Path | str, s3: S3Options | None = None) -> list[JobCheckpoint]:
    """The checkpoints that all ranks of a job hold completely, the newest (incarnation, step) first.

    Incarnation and step count together: a step that one rank has of an incarnation that ended and another of the
    incarnation after it is no checkpoint. `job` may also be the one directory of a job of one rank; or the URL of one
    in a bucket (s3://), which is reached with `s3`.

    Raises:
        NoCheckpoint: there is nothing, or no step that all ranks hold; says what each has.
        MismatchError: directories are missing or cannot be read here, or belong to several jobs or numbers of ranks;
            names them.
        StorageError: the job's directory cannot be read, or the bucket.
    """
    place = Location.parse(job)
    if holds_objects(place):
        return RemoteJob(open_objects(place, s3)).checkpoints()
    job = place.path
    paths = rank_directories(job)
    if not paths and job.is_dir() and find_slots(job):
        paths = {0: job}
    if not paths:
        raise NoCheckpoint(f"{job}: there are no directories of ranks ({rank_directory(job, 0)} and so on)")
    views = {rank: SlotStore.peek(path) for rank, path in paths.items()}
    held: dict[int, dict[tuple[int, int], SlotInfo]] = {}
    for rank, view in views.items():
        try:
            # Oldest first, so that of two saves of one step the later one stays.
            held[rank] = {(info.incarnation, info.step): info for info in reversed(view.committed())}
        except StorageError as error:
            raise MismatchError(f"{error}; the directories of all ranks must be readable here") from error
    world_size, job_id, strays = _one_job(job, views, held)
    missing = [rank for rank in range(world_size) if rank not in held or rank in strays]
    if missing:
        expected = ", ".join(str(rank_directory(job, rank)) for rank in missing[:4])
        raise MismatchError(
            f"{job}: of {world_size} ranks, {missing[:16]} are missing; expected at {expected}. If each host keeps "
            "its ranks on a disk of its own, bring all directories together first"
        )
    views = {rank: views[rank] for rank in range(world_size)}
    common = set.intersection(*(set(held[rank]) for rank in views))
    if not common:
        each = "; ".join(f"rank {rank} {_listed(held[rank])}" for rank in list(views)[:16])
        raise NoCheckpoint(f"{job}: no step of one incarnation that is complete on all {world_size} ranks: {each}")
    bad = _bad(views, held)
    return [
        JobCheckpoint(
            job,
            *key,
            job_id,
            partial(_parts_of, views, held, key),
            bad.get(key),
        )
        for key in sorted(common, reverse=True)
    ]


def _parts_of(
    views: Mapping[int, SlotView], held: Mapping[int, Mapping[tuple[int, int], SlotInfo]], key: tuple[int, int]
) -> Parts:
    return tuple(views.values()), tuple(held[rank][key] for rank in views)


def _one_job(
    job: Path, views: Mapping[int, SlotView], held: Mapping[int, Mapping[tuple[int, int], SlotInfo]]
) -> tuple[int, bytes, list[int]]:
    """Number of ranks and id that all directories agree on, but for ranks of another job that committed nothing.

    Such a one was refused, or killed, when it began: a job that was started on another number of ranks leaves them.
    """
    owners = {}
    for rank, view in views.items():
        info = next(iter(held[rank].values()), None)
        owner = info.record.job if info is not None else read_job(view.directory)
        if owner is not None:
            if owner.rank != rank:
                raise MismatchError(
                    f"{view.directory}: holds the part of rank {owner.rank}, by its name that of {rank}"
                )
            owners[rank] = owner
    if not owners:
        raise NoCheckpoint(f"{job}: nothing was ever committed here")
    kinds: dict[tuple[int, bytes], list[int]] = {}
    for rank, owner in owners.items():
        kinds.setdefault((owner.world_size, owner.job_id), []).append(rank)
    strays: list[int] = []
    if len(kinds) > 1:
        began = {
            key for key, ranks in kinds.items() if not all(nothing_committed(views[rank].directory) for rank in ranks)
        }
        if len(began) == 1:
            strays = [rank for key, ranks in kinds.items() if key not in began for rank in ranks]
            kinds = {key: ranks for key, ranks in kinds.items() if key in began}
    if len(kinds) > 1:
        named = "; ".join(f"ranks {ranks[:8]}: job {key[1].hex()} of {key[0]} ranks" for key, ranks in kinds.items())
        raise MismatchError(f"{job}: a mixture of several jobs: {named}; move the directories of all but one away")
    return *next(iter(kinds)), strays


def _bad(
    views: Mapping[int, SlotView], held: Mapping[int, Mapping[tuple[int, int], SlotInfo]]
) -> dict[tuple[int, int], str]:
    """Checkpoints that a rank judged bad, with the reason."""
    found = {}
    for rank, view in views.items():
        book = view.book()
        for key, info in held[rank].items():
            if book.is_bad(info.sequence):
                found[key] = f"rank {rank}: {book.verdicts[info.sequence].reason or 'no reason'}"
    return found


def _listed(held: Mapping[tuple[int, int], SlotInfo]) -> str:
    steps = [f"{step} (incarnation {incarnation})" for incarnation, step in sorted(held, reverse=True)[:8]]
    return f"steps {', '.join(steps)}" if steps else "none"
