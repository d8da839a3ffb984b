"""What a rank can come back from in the place that its job sends checkpoints to, beside those of its own disk."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lastgood.errors import CorruptCheckpoint, MismatchError, StorageError
from lastgood.storage.objects import format as objects
from lastgood.storage.objects.client import ObjectClient, ObjectMissing
from lastgood.storage.objects.commits import commits_of, names_of_job, read_commit
from lastgood.storage.objects.format import CommitName
from lastgood.storage.objects.judged import bad_verdicts
from lastgood.storage.objects.opening import ObjectPlace, open_objects
from lastgood.storage.objects.view import RemoteView
from lastgood.storage.verdicts import Verdict, VerdictBook

__all__ = ["Reachable", "look_at_place"]

_log = logging.getLogger("lastgood")

_LOOK_S = 15.0
"""For each request of the look: a training with checkpoints on its disk does not wait long for a server."""
_LOOK_RETRIES = 3


@dataclass(frozen=True)
class Reachable:
    """The checkpoints that were found in a place, by one rank of a job."""

    place: str
    view: RemoteView | None = None
    """Of this rank's parts; None if the place could not be looked at."""
    names: tuple[CommitName, ...] = ()
    """Newest first. What is damaged is among them: that is found when it is read."""
    job_id: bytes | None = None
    """Of the job that they belong to; None if there is nothing."""
    highest: tuple[int, int] = (0, 0)
    """Incarnation and step, of uploads in progress too, and of what was taken away."""
    sequence: int = 0
    """The highest that is known of this rank's parts."""
    trouble: str = ""
    """Why it could not be looked at."""
    judged: Mapping[CommitName, str] = field(default_factory=dict)
    """Which of them were judged bad, and why, as is known there."""
    _by_identity: dict[tuple[int, int], CommitName] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        self._by_identity.update({(name.incarnation, name.step): name for name in self.names})

    def name_of(self, identity: tuple[int, int]) -> CommitName | None:
        """The checkpoint of an incarnation and a step, if it is there."""
        return self._by_identity.get(identity)

    def bad(self, book: VerdictBook, name: CommitName) -> Verdict | None:
        """The bad verdict on a checkpoint here, if there is one: the disk's book knows it first, and counts more."""
        told = self.judged.get(name)
        verdict = None if told is None else Verdict(name.step, False, told)
        of_step = {sequence: one for sequence, one in book.verdicts.items() if one.step == name.step}
        if of_step and self.view is not None:
            try:
                verdict = of_step.get(self.view.look(name).sequence, verdict)
            except (CorruptCheckpoint, StorageError):
                return None  # nor can it be restored
        return None if verdict is None or verdict.ok else verdict


def look_at_place(place: ObjectPlace, world: tuple[int, int], disk: bytes | None) -> Reachable:
    """Look for rank world[0] of world[1] what it can come back from. Takes a bounded time, if the server is away.

    `disk` is the job whose checkpoints this rank's disk holds. If it holds some, a place that cannot be looked at is a
    warning, and `Reachable.trouble`. Raises StorageError else: a training must not begin again because a server is
    away. Raises MismatchError for checkpoints of another job, of several, or of another number of ranks, and
    ConfigError if it cannot be reached with these options at all.
    """
    short = replace(place.options, request_s=_LOOK_S, retry_s=_LOOK_S, retries=_LOOK_RETRIES)
    try:
        with contextlib.closing(open_objects(place.place, short)) as client:
            found = _look(client, world)
    except StorageError as error:
        if disk is None:
            raise StorageError(
                f"{place} cannot be looked at, and this disk holds no complete checkpoint: {error}; this training "
                "would begin again beside what may be there; make it reachable, or start without it (remote=None)"
            ) from error
        _log.warning("%s cannot be looked at: %s; the checkpoints on this disk are taken", place, error)
        return Reachable(str(place), trouble=str(error))
    if disk is not None and found.job_id is not None and found.job_id != disk:
        raise MismatchError(
            f"{place} has checkpoints of job {found.job_id.hex()}, and this disk has those of job {disk.hex()}; give "
            "each job a place of its own as remote"
        )
    return replace(found, place=str(place), view=RemoteView(place.open(), world[0], found.job_id))


def _look(client: ObjectClient, world: tuple[int, int]) -> Reachable:
    rank, ranks = world
    found = commits_of(client)
    names = names_of_job(found, client.place)
    if not names:
        return Reachable(client.place)
    job_id = names[0].job_id
    taken = {name for name in found if name.job_id == job_id}
    for info in client.list(f"{objects.UPLOADS}/{job_id.hex()}"):
        name = CommitName.parse("/".join(info.key.split("/")[1:3]))
        taken |= set() if name is None else {name}
    view = RemoteView(client, rank, job_id)
    sequence = 0
    for name in names:
        try:
            commit = read_commit(client, name)
            if len(commit.parts) != ranks:
                raise MismatchError(
                    f"{client.place} has checkpoints of a job of {len(commit.parts)} ranks, and this training has "
                    f"{ranks}; start as many ranks as before; or give a new directory and a new place as remote, and "
                    f"resume_from={client.place!r}"
                )
            sequence = view.look(name, 0, commit).sequence
            break
        except (CorruptCheckpoint, ObjectMissing):
            continue  # an older one tells it as well
    highest = max((name.incarnation, name.step) for name in taken)
    judged = bad_verdicts(client, names)
    return Reachable(client.place, None, tuple(names), job_id, highest, sequence, judged=judged)
