"""What checkpoints lie in a folder, of whatever system and layout: a training must not begin again beside them.

A job of one rank keeps its checkpoints in its directory; several keep theirs in ``rank-NNNNN`` below it. Needs no
torch.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from lastgood.checkpointers.directories.local import LocalStore
from lastgood.checkpointers.known import all_traits
from lastgood.checkpointers.rank_directory import job_of, rank_directories
from lastgood.checkpointers.ranks.directories import whole_checkpoints
from lastgood.checkpointers.recovery.checkmate_job import JOB_FILE, noted_job
from lastgood.checkpointers.torch_files.files import TorchFiles
from lastgood.checkpointers.traits import Keeps, Traits
from lastgood.errors import CheckpointError, MismatchError, StorageError
from lastgood.files import storage_errors
from lastgood.storage.reader import SlotState, SlotView, find_slots, read_job, written_by_agreement
from lastgood.storage.standalone_slot import is_standalone_slot

__all__ = ["Found", "found_in", "others_in", "refuse_beside", "words_on_control", "words_on_layout", "words_on_none"]

_MOST_STEPS = 4
_LOOKED_AT = 64
"""Folders, and files in each, in a search for a better name: a user's mistake may point anywhere."""


@dataclass(frozen=True)
class Found:
    """Checkpoints of one kind in one folder."""

    where: Path
    what: str
    """Of which systems, and in which files."""
    steps: tuple[int, ...]
    """As far as they can be read, newest first."""
    world_size: int | None = None
    """Ranks of the job that wrote them, if they record it."""

    def __str__(self) -> str:
        """For messages."""
        if not self.steps:
            return f"{self.where} holds {self.what}, none of which can be read"
        more = " and so on" if len(self.steps) > _MOST_STEPS else ""
        return f"{self.where} holds {self.what} of steps {', '.join(map(str, self.steps[:_MOST_STEPS]))}{more}"


def found_in(directory: Path) -> list[Found]:
    """The checkpoints that lie in a folder itself, also damaged ones and those of other format versions.

    Raises StorageError if it cannot be read.
    """
    with storage_errors(directory, "reading the directory"):
        slots = _slots(directory) if directory.is_dir() else None
    return [*([] if slots is None else [slots]), *others_in(directory)]


def others_in(directory: Path) -> list[Found]:
    """As `found_in`, without what lies in slots."""
    with storage_errors(directory, "reading the directory"):
        if not directory.is_dir():
            return []
        found = []
        files = TorchFiles(directory, 1).steps()
        if files:
            found.append(Found(directory, f"files of {_names('files')} (checkpoint-*.pt)", tuple(files)))
        folders = LocalStore(directory, 1).found()
        if folders:
            kinds = {_library(Path(one.where)) for one in folders}
            what = f"folders of {' and '.join(sorted(kinds))} (checkpoint-*-step-*/)"
            found.append(Found(directory, what, tuple(one.step for one in folders)))
        in_shadows = _in_shadows(directory)
        return found if in_shadows is None else [*found, in_shadows]


def _names(keeps: Keeps) -> str:
    """The systems that keep their checkpoints so, in the order of figures."""
    return " or ".join(name for name, traits in _ranked() if traits.keeps == keeps)


def _library(checkpoint: Path) -> str:
    markers = ((name, traits.marker) for name, traits in _ranked() if traits.keeps == "folders" and traits.marker)
    return next((name for name, marker in markers if (checkpoint / marker).exists()), "an unknown system")


def _ranked() -> list[tuple[str, Traits]]:
    return sorted(all_traits()[0].items(), key=lambda one: (one[1].order, one[0]))


def _in_shadows(directory: Path) -> Found | None:
    """What Checkmate's shadows keep, or kept: its job's directory says of one step that it was complete."""
    what = f"the job of shadows of {_names('shadows')} ({JOB_FILE})"
    try:
        noted = noted_job(directory)
    except CheckpointError:
        return Found(directory, what, ())
    return None if noted is None or noted.promised is None else Found(directory, what, (noted.promised,))


def _slots(directory: Path) -> Found | None:
    """Slots that hold a checkpoint, or may have held one: not void ones, nor those of a write that never finished."""
    try:
        statuses = SlotView(directory).statuses()
    except MismatchError as error:
        return Found(directory, f"slots (slot-*.lgs) that cannot be told apart ({error})", ())
    held = [
        status for status in statuses if status.state in (SlotState.WHOLE, SlotState.FOREIGN) or status.may_be_damaged
    ]
    if not held:
        return None
    records = [status.record for status in held if status.record is not None]
    whole = sorted((status.record for status in held if status.info and status.record), key=lambda one: -one.sequence)
    sizes = {record.world_size for record in records}
    return Found(
        directory,
        f"slots of {_names('slots')} (slot-*.lgs)",
        tuple(record.step for record in whole),
        sizes.pop() if len(sizes) == 1 else None,
    )


def words_on_none(directory: Path) -> str:
    """What to say of a directory that holds no checkpoint in slots: what it holds of systems that have none.

    Else which folders in it hold some, the newest three of them: DeepSpeed's `save_checkpoint` is given the folder
    above those that hold its files. Raises StorageError.
    """

    def holds(folder: Path) -> bool:
        files = islice((path for path in folder.iterdir() if path.is_file()), _LOOKED_AT)
        here = find_slots(folder) or rank_directories(folder) or others_in(folder)
        return bool(here) or any(is_standalone_slot(path) for path in files)

    others = others_in(directory)
    if others:
        return f"{'; '.join(map(str, others))}; that system restores them, and only slots are looked into here"
    found: list[tuple[float, str]] = []
    with contextlib.suppress(OSError):
        for folder in islice((path for path in directory.iterdir() if path.is_dir()), _LOOKED_AT):
            with contextlib.suppress(OSError, StorageError):
                if holds(folder):
                    found.append((folder.stat().st_mtime, folder.name))
    if not found:
        return f"{directory}: there is no checkpoint here"
    names = [name for _, name in sorted(found, reverse=True)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{directory}: there is no checkpoint here, but in {', '.join(names[:3])}{more} below; name that folder"


def words_on_layout(directory: Path, rank: int, ranks: int, *, parted: bool) -> str:
    """Why a training must not use `directory`: its other layout has checkpoints. "" if nothing is against it.

    `parted`: the training's ranks keep their checkpoints in rank-NNNNN below `directory`; else it is the directory of
    this rank itself. Raises StorageError.
    """
    job = directory if parted else job_of(directory)
    if job is not None:
        beside = found_in(job)
        wrote = 1
    else:
        job = directory
        theirs = {number: found_in(path) for number, path in rank_directories(directory).items()}
        beside = [one for found in theirs.values() for one in found]
        wrote = max([sum(1 for found in theirs.values() if found), *(one.world_size or 0 for one in beside)])
    if not beside:
        return ""
    more = f", and there are more in {job}" if len(beside) > 1 else ""
    advice = _advice(job)
    layout = f"in {job} itself" if wrote == 1 else "that keep a directory each (rank-NNNNN)"
    return (
        f"{beside[0]}{more}, written by a job of {_number(wrote)} {layout}; this training is rank {rank} of "
        f"{_number(ranks)}, and uses {_place(directory, parted, ranks)}. Was the number of ranks, or `control`, "
        f"changed? {advice[0].upper()}{advice[1:]}"
    )


def words_on_control(directory: Path, ranks: int, *, agrees: bool) -> str:
    """Why ranks that agree on their checkpoints, or do not, must not go on from those in `directory`; "" if nothing.

    A restart of ranks that did not agree may have mixed steps; those of ranks that did count only if all have them.
    Raises StorageError, MismatchError.
    """
    job = read_job(directory)
    theirs = written_by_agreement(directory)
    if (
        job is None
        or job.world_size != ranks
        or ranks == 1
        or theirs is None
        or theirs == agrees
        or not found_in(directory)
    ):
        return ""
    did, do = ("agreed on them", 'do not (control="off")') if theirs else ('did not agree (control="off")', "do")
    return (
        f"{found_in(directory)[0]}, rank {job.rank} of a job of {_number(job.world_size)} whose ranks {did}, and those "
        f"of this training {do}: `control` was changed; {_advice(job_of(directory) or directory)}"
    )


def refuse_beside(directory: Path, system: str, ranks: int) -> None:
    """Raise MismatchError if a training that found nothing to resume would begin again beside checkpoints.

    They are another system's, or those of other ranks, of which this one's were lost or never were.
    """
    job = job_of(directory)
    folders = [directory, *(() if job is None else (path for path in rank_directories(job).values()))]
    for folder in dict.fromkeys(folders):
        found = found_in(folder)
        if not found:
            continue
        if folder == directory:
            raise MismatchError(
                f"{found[0]}, which {system} cannot resume; it would begin again beside them. Use the system "
                "that wrote them; or another directory; or, to begin again here, move them away"
            )
        wrote = found[0].world_size or len(rank_directories(folder.parent))
        raise MismatchError(
            f"{directory} holds no checkpoint, and {found[0]}, written by a job of {_number(wrote)}; this training has "
            f"{_number(ranks)}. If this rank is new, {_advice(folder.parent)}; if its checkpoints "
            "were lost, bring them back"
        )


def _advice(job: Path) -> str:
    """What to do where another number of ranks has left checkpoints."""
    try:
        go_on = (
            f"; or, to go on from them, give PCcheck a new directory and resume_from={str(job)!r}"
            if whole_checkpoints(job)
            else ""
        )
    except CheckpointError:  # those of other systems, or not of all ranks
        go_on = ""
    return f"start it as before{go_on}; or, to begin again, move them away"


def _number(ranks: int) -> str:
    return f"{ranks} rank" if ranks == 1 else f"{ranks} ranks"


def _place(directory: Path, parted: bool, ranks: int) -> str:
    if parted:
        return f"a directory for each ({directory}/rank-NNNNN)"
    return f"{directory} itself" if ranks == 1 else f'{directory} itself (control="off")'
