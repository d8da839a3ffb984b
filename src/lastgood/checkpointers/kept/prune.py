"""Removing old checkpoints by hand: what a directory can do without, and how it is removed.

Only checkpoints count that were read completely and found to be what was written: as many of them as are to be kept,
the newest good one first of all. Without one that can be read, no checkpoint is removed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lastgood.checkpointers.directories.local import LocalStore
from lastgood.checkpointers.directories.manifest import check_files, files_in
from lastgood.checkpointers.ranks.checkpoint import JobCheckpoint
from lastgood.checkpointers.ranks.opened import OpenedJob, open_job
from lastgood.checkpointers.recovery.restorable import check_content
from lastgood.checkpointers.slots.contents import look_at_slots, read_timeout_s
from lastgood.checkpointers.torch_files.files import TorchFiles
from lastgood.errors import CheckpointError, CorruptCheckpoint, LockHeld, MismatchError, NoCheckpoint, StorageError
from lastgood.files import (
    local_path,
    remove_tree,
    storage_errors,
    sync_directory,
    temporary_beside,
    temporary_files,
)
from lastgood.locks import FileLock
from lastgood.storage import SlotInfo, SlotState, SlotStatus, SlotView
from lastgood.storage.format import LOCK_FILE, RecordKind
from lastgood.storage.global_commit import retained_sequences

__all__ = ["Doomed", "PrunePlan", "held_for_pruning", "plan_prune", "prune"]

_log = logging.getLogger("lastgood")

Told = Callable[[str], object]


@dataclass(frozen=True)
class Doomed:
    """A file or folder that is not needed."""

    path: Path
    what: str
    nbytes: int


@dataclass
class PrunePlan:
    """What `prune` removes, and why the rest stays."""

    directory: Path
    kept: list[tuple[int, str]] = field(default_factory=list)
    """Step and place of each checkpoint that stays, and was read and found complete; the newest first."""
    doomed: list[Doomed] = field(default_factory=list)
    """The oldest first: a kill in between leaves the newer ones."""
    left: list[str] = field(default_factory=list)
    """What is damaged or cannot be told, and is left where it is."""

    @property
    def freed_bytes(self) -> int:
        """Of all files that are not needed."""
        return sum(one.nbytes for one in self.doomed)


@contextlib.contextmanager
def held_for_pruning(directory: Path) -> Iterator[None]:
    """Hold the directory's lock, and those of its ranks: nobody writes there meanwhile.

    Raises LockHeld, naming the training that has it; StorageError.
    """
    job = open_job(local_path(directory))
    folders = [Path(job.where(rank)) for rank in job.views]
    if job.several:
        folders.insert(0, Path(job.place))
    with contextlib.ExitStack() as held:
        for folder in folders:
            if folder.is_dir():
                held.enter_context(FileLock(folder / LOCK_FILE, f"checkpoint directory {folder}"))
        yield


def plan_prune(directory: Path, keep: int, *, threads: int = 4, held: bool = False, tell: Told = str) -> PrunePlan:
    """Choose what a directory can do without. `held`: the caller is in `held_for_pruning`, so nobody writes there.

    Reads the checkpoints that stay. Slots that a living training is writing, and temporary files beside one, are left
    out. `tell` hears of each checkpoint that is read. Raises StorageError, MismatchError, and CheckpointError if there
    are checkpoints and none of them can be read: then nothing can be told to be old.
    """
    job = open_job(local_path(directory))
    plan = PrunePlan(directory)
    _plan_slots(plan, job, keep, threads, held, tell)
    for rank in job.views:
        folder = Path(job.where(rank))
        _plan_files(plan, folder, keep, tell)
        _plan_folders(plan, folder, keep, tell)
        if held and folder.is_dir():
            with storage_errors(folder, "reading the directory"):
                left = temporary_files(folder)
            plan.doomed += [
                Doomed(path, "left half-written by a process that was killed", _size(path)) for path in left
            ]
    return plan


def prune(plan: PrunePlan) -> int:
    """Remove what was planned; returns the bytes. Only in `held_for_pruning`.

    Raises StorageError for the first that cannot be removed; what was removed before stays removed.
    """
    freed = 0
    for one in plan.doomed:
        with storage_errors(one.path, "removing"):
            if one.path.is_dir():
                doomed = temporary_beside(one.path)
                one.path.rename(doomed)  # a kill half-way must not leave a checkpoint that lacks files
                remove_tree(doomed)
            else:
                one.path.unlink(missing_ok=True)
        freed += one.nbytes
    for folder in {one.path.parent for one in plan.doomed}:
        with storage_errors(folder, "flushing the directory"):
            sync_directory(folder)
    return freed


# -- slots -------------------------------------------------------------------------------------------------------------


def _plan_slots(plan: PrunePlan, job: OpenedJob, keep: int, threads: int, held: bool, tell: Told) -> None:
    looked: dict[int, list[SlotStatus]] = {}
    for rank, view in job.views.items():
        if view.directory.is_dir():
            looked[rank], troubles = look_at_slots(view)
            plan.left += troubles
    if not any(looked.values()):
        return
    stay = _stay_of_job(plan, job, keep, threads, tell) if job.several else _stay_of_one(plan, job, keep, threads, tell)
    doomed = []
    for rank, statuses in looked.items():
        view = job.views[rank]
        needed = {*view.book().restarts, *view.book().metrics}
        for status in statuses:
            info = status.info
            if info is None:
                _plan_slot_without(plan, status, held)
            elif stay is not None and not stay(rank, info) and info.sequence not in needed:
                doomed.append((info.sequence, Doomed(status.path, f"step {info.step}", status.file_bytes)))
    plan.doomed += [one for _, one in sorted(doomed, key=lambda pair: pair[0])]


def _stay_of_one(
    plan: PrunePlan, job: OpenedJob, keep: int, threads: int, tell: Told
) -> Callable[[int, SlotInfo], bool] | None:
    """Whether a checkpoint stays; None if there is none."""
    (view,) = job.views.values()
    committed, book = view.committed(), view.book()
    if not committed:
        return None
    read: list[SlotInfo] = []
    damaged: set[int] = set()
    for info in committed:
        if len(read) >= keep and any(not book.is_bad(one.sequence) for one in read):
            break
        tell(f"reading step {info.step}")
        if _holds(plan, view, info, threads):
            read.append(info)
        else:
            damaged.add(info.sequence)
    _refuse_none(plan, bool(read))
    staying = retained_sequences(read, book.is_bad, keep)
    plan.kept += [(info.step, str(info.path)) for info in read if info.sequence in staying]
    return lambda _rank, info: info.sequence in staying or info.sequence in damaged


def _stay_of_job(
    plan: PrunePlan, job: OpenedJob, keep: int, threads: int, tell: Told
) -> Callable[[int, SlotInfo], bool] | None:
    """As `_stay_of_one`, for what all ranks hold; newer ones of a rank stay, since others may hold them too."""
    try:
        checkpoints = job.checkpoints()
    except NoCheckpoint as error:
        plan.left.append(str(error))
        return lambda _rank, _info: True
    good: list[JobCheckpoint] = []
    others: list[JobCheckpoint] = []
    damaged: set[tuple[int, int]] = set()
    for one in checkpoints:
        if len(good) + len(others) >= keep and good:
            break
        tell(f"reading step {one.step} of {one.world_size} ranks")
        if all(_holds(plan, view, info, threads) for view, info in zip(one.views, one.infos, strict=True)):
            (good if one.bad is None else others).append(one)
        else:
            damaged.add(one.key)
    _refuse_none(plan, bool(good or others))
    staying = [*good[:1], *sorted([*good[1:], *others], key=lambda one: one.key, reverse=True)][:keep]
    plan.kept += [(one.step, one.where) for one in staying]
    keys = {one.key for one in staying} | damaged
    newest = {rank: info.sequence for rank, info in enumerate(checkpoints[0].infos)}
    return lambda rank, info: (info.incarnation, info.step) in keys or info.sequence > newest.get(rank, -1)


def _holds(plan: PrunePlan, view: SlotView, info: SlotInfo, threads: int) -> bool:
    try:
        view.verify(info, threads, read_timeout_s(info.stream_bytes))
        check_content(view, info)
    except (CorruptCheckpoint, MismatchError) as error:
        if view.why_gone(info):
            raise LockHeld(
                f"{view.directory}: a training writes here; nothing can be told to be old beside it"
            ) from error
        plan.left.append(str(error))
        return False
    return True


def _refuse_none(plan: PrunePlan, any_read: bool) -> None:
    if not any_read:
        raise CheckpointError(
            f"{plan.directory}: no checkpoint can be read, so none is removed: {'; '.join(plan.left)}"
        )


def _plan_slot_without(plan: PrunePlan, status: SlotStatus, held: bool) -> None:
    unfinished = status.record is not None and status.record.kind is RecordKind.WRITING
    if status.state is SlotState.VOID:
        plan.doomed.append(Doomed(status.path, "an empty slot", status.file_bytes))
    elif unfinished and (held or status.state is SlotState.TORN):
        plan.doomed.append(Doomed(status.path, "a write that never finished", status.file_bytes))
    else:
        plan.left.append(f"{status.path}: {status.state.value}{f' ({status.detail})' if status.detail else ''}")


# -- files and folders -------------------------------------------------------------------------------------------------


def _plan_files(plan: PrunePlan, folder: Path, keep: int, tell: Told) -> None:
    files = TorchFiles(folder, keep)

    def read(step: int, path: Path) -> None:
        files.read_file(path, step)

    _plan_by_sequence(plan, files.files(), keep, read, tell)


def _plan_folders(plan: PrunePlan, folder: Path, keep: int, tell: Told) -> None:
    found = [(one.sequence, one.step, Path(one.where)) for one in LocalStore(folder, keep).found()]
    _plan_by_sequence(plan, found, keep, lambda step, path: check_files(path, step), tell)


def _plan_by_sequence(
    plan: PrunePlan, found: list[tuple[int, int, Path]], keep: int, read: Callable[[int, Path], Any], tell: Told
) -> None:
    """The newest `keep` that can be read stay, with all that are newer; older ones go. `found` is newest first."""
    kept = 0
    older = []
    for _, step, path in found:
        if kept >= keep:
            older.append(Doomed(path, f"step {step}", _size(path)))
            continue
        tell(f"reading step {step}")
        try:
            read(step, path)
        except (CorruptCheckpoint, StorageError) as error:
            plan.left.append(str(error))
        else:
            kept += 1
            plan.kept.append((step, str(path)))
    if found:
        _refuse_none(plan, kept > 0)
    plan.doomed += reversed(older)


def _size(path: Path) -> int:
    files = files_in(path).values() if path.is_dir() else [path]
    with contextlib.suppress(OSError):
        return sum(one.stat().st_size for one in files)
    return 0
