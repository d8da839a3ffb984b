"""Removing what nobody needs: parts of removed checkpoints, and what uploads left that nobody goes on with.

This is the one way to lose data, so the order of what is read matters. First the notes of uploads, then the commits,
then the commits that were taken away: so whatever an upload may still take over is named by one of the three.

- An upload that nobody goes on with is given up first: an object with no byte takes the name of its commit, which is
  only ever created. From then on it cannot be committed, however late its process wakes up.
- A note names the commits whose segments its upload takes over, and is there before the upload looks whether these
  commits still are. What was taken away a short while ago (`GRACE_S`) therefore still counts as needed.
- What no commit names may belong to an upload that the listing did not show yet: what is younger than `GUARD_S` stays.

All ages are by the clock of the server, of which `now` is the time before the first listing.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from lastgood.errors import CorruptCheckpoint, StorageError
from lastgood.storage.objects import format as objects
from lastgood.storage.objects.client import ObjectClient, ObjectExists, ObjectInfo, ObjectMissing
from lastgood.storage.objects.commits import commits_of, read_manifest
from lastgood.storage.objects.format import Commit, CommitName, UploadNote, object_key
from lastgood.storage.objects.judged import list_verdicts

__all__ = ["GRACE_S", "GUARD_S", "SweepReport", "server_time", "sweep"]

GUARD_S = 86400.0
"""Younger than this is spared, and an upload that gave a sign of life since then goes on."""
GRACE_S = 600.0
"""For the segments of a checkpoint that was taken away: an upload that began before may have taken them over."""
FORGET_S = 30 * 86400.0
"""After so long a name with no byte is forgotten: longer than any upload may take (`MOST_UPLOAD_S`)."""
_CLOCK_STEP_S = 2.0
"""Times of objects are whole seconds."""
_BATCH = 500


@dataclass
class SweepReport:
    """What was removed, or would be."""

    segments: int = 0
    manifests: int = 0
    freed_bytes: int = 0
    oldest_s: float = 0.0
    """Age of the oldest of them."""
    given_up: list[CommitName] = field(default_factory=list)
    """Uploads that nobody went on with."""
    spared_bytes: int = 0
    """Of segments and manifests that no checkpoint needs, and that are too young or belong to a living upload."""


def sweep(
    client: ObjectClient,
    *,
    guard_s: float = GUARD_S,
    grace_s: float = GRACE_S,
    orphans: bool = True,
    dry_run: bool = False,
) -> SweepReport:
    """Remove what no checkpoint and no living upload needs. May be killed and repeated, and run by several at once.

    Without `orphans` only parts of checkpoints that were taken away are, which lists no segments. Raises StorageError,
    and CorruptCheckpoint or MismatchError if a commit or manifest cannot be read: then nothing is removed, since what
    it needs is not known.
    """
    now_s = server_time(client)
    notes = _notes(client)
    commits = commits_of(client)
    removed = _retired(client)
    report = SweepReport()

    # Uploads whose fate is open: the living stay, the others are given up before anything of them is removed.
    living: set[CommitName] = set()
    held: set[CommitName] = set()
    over: list[str] = []
    for name, written in notes.items():
        if name in commits:
            over += [info.key for info, _ in written]
        elif any(now_s - info.modified_s <= guard_s + _CLOCK_STEP_S for info, _ in written):
            living.add(name)
            held.update(base for _, note in written for base in note.bases)
        else:
            report.given_up.append(name)
            over += [info.key for info, _ in written]
            if not dry_run:
                info = _give_up(client, name)
                if info is not None:
                    commits[name] = info  # it was committed just now
    needed: set[str] = set()
    for name, info in commits.items():
        if info.nbytes:
            needed.update(_needs(client, name, name.key, missing=False))
    unneeded: set[str] = set()
    expired: list[CommitName] = []
    for name, info in removed.items():
        there = name in commits and commits[name].nbytes > 0
        if there:
            continue
        if name in held or now_s - info.modified_s <= grace_s + _CLOCK_STEP_S:
            needed.update(_needs(client, name, name.retired_key, missing=True))
        else:
            expired.append(name)
            unneeded.update(_needs(client, name, name.retired_key, missing=True))
    unneeded -= needed

    doomed: Iterable[ObjectInfo]
    tags = {name.tag for name in living}
    if orphans:
        doomed = _unnamed(client, needed, unneeded, tags, now_s - guard_s - _CLOCK_STEP_S, report)
    else:
        doomed = _looked_up(client, unneeded)
    _remove(client, doomed, report, now_s, dry_run=dry_run)
    if not dry_run:
        # What says that something is unneeded goes last, so that a sweep that is killed can be repeated.
        _delete(client, [*over, *(name.retired_key for name in expired)])
        # A verdict comes after its commit: one that is older than the listing of these is on one of them, or on none.
        present = {name for name, info in commits.items() if info.nbytes}
        verdicts = list(list_verdicts(client))
        _delete(client, [info.key for name, info in verdicts if name not in present and _before(info, now_s)])
        if orphans:
            _forget(client, commits, removed, notes, now_s)
    return report


def server_time(client: ObjectClient) -> float:
    """Now, by the clock that objects' ages are measured with; an object is put and taken away. Raises StorageError."""
    key = f"{objects.SWEEPS}/{secrets.token_hex(8)}"
    client.put(key, b"")
    info = client.head(key)
    client.delete([key])
    if info is None:
        raise StorageError(f"{client.where(key)}: was put and is not there; this store cannot be swept")
    return info.modified_s


def _before(info: ObjectInfo, now_s: float) -> bool:
    return info.modified_s < now_s - _CLOCK_STEP_S


def _notes(client: ObjectClient) -> dict[CommitName, list[tuple[ObjectInfo, UploadNote]]]:
    found: dict[CommitName, list[tuple[ObjectInfo, UploadNote]]] = {}
    for info in list(client.list(objects.UPLOADS)):
        try:
            content = client.get(info.key, objects.MOST_UPLOAD_BYTES)
        except ObjectMissing:
            continue  # done meanwhile
        where = client.where(info.key)
        note = UploadNote.decode(content, where)
        if not info.key.startswith(f"{note.name.uploads}/"):
            raise CorruptCheckpoint(f"{where}: the note of another upload, that of {note.name.told}; move it away")
        found.setdefault(note.name, []).append((info, note))
    return found


def _retired(client: ObjectClient) -> dict[CommitName, ObjectInfo]:
    found = {}
    for info in client.list(objects.RETIRED):
        name = CommitName.parse(info.key.removeprefix(f"{objects.RETIRED}/"))
        if name is not None:
            found[name] = info
    return found


def _give_up(client: ObjectClient, name: CommitName) -> ObjectInfo | None:
    """Take the name of its commit from an upload. The commit instead, if that was faster."""
    try:
        client.create(name.key, b"")
    except ObjectExists:
        info = client.head(name.key)
        return info if info is not None and info.nbytes else None
    return None


def _needs(client: ObjectClient, name: CommitName, key: str, *, missing: bool) -> set[str]:
    """The keys of all manifests and segments of a checkpoint. With `missing`, what is not there needs nothing."""
    needed: set[str] = set()
    try:
        content = client.get(key, objects.MOST_COMMIT_BYTES)
    except ObjectMissing:
        return needed
    if not content:  # taken away meanwhile; the copy of it is fresh, so that it was not removed yet
        try:
            content = client.get(name.retired_key, objects.MOST_COMMIT_BYTES)
        except ObjectMissing:
            return needed
        missing = True
    commit = Commit.decode(content, client.where(key), name)
    for rank, part in enumerate(commit.parts):
        try:
            manifest = read_manifest(client, name, part, rank, len(commit.parts))
        except ObjectMissing as error:
            if missing:
                continue
            raise CorruptCheckpoint(
                f"{error}; it belongs to {name.told}, and nothing is swept while it is not known what that needs"
            ) from error
        needed.add(object_key(objects.MANIFESTS, part.name))
        needed.update(object_key(objects.SEGMENTS, segment.name) for segment in manifest.segments)
    return needed


def _unnamed(
    client: ObjectClient,
    needed: set[str],
    unneeded: set[str],
    living: set[str],
    before_s: float,
    report: SweepReport,
) -> Iterator[ObjectInfo]:
    """Segments first: as long as a manifest is there, it is known what it was for."""
    for kind in (objects.SEGMENTS, objects.MANIFESTS):
        for info in client.list(kind):
            if info.key in needed:
                continue
            young = info.modified_s >= before_s or info.key.rpartition("/")[2][:16] in living
            if young and info.key not in unneeded:
                report.spared_bytes += info.nbytes
                continue
            yield info


def _looked_up(client: ObjectClient, keys: set[str]) -> Iterator[ObjectInfo]:
    for key in sorted(keys, reverse=True):  # segments before manifests
        info = client.head(key)
        if info is not None:
            yield info


def _remove(
    client: ObjectClient, doomed: Iterable[ObjectInfo], report: SweepReport, now_s: float, *, dry_run: bool
) -> None:
    rest = iter(doomed)
    while batch := list(islice(rest, _BATCH)):
        if not dry_run:
            client.delete([info.key for info in batch])
        for info in batch:
            report.freed_bytes += info.nbytes
            report.oldest_s = max(report.oldest_s, now_s - info.modified_s)
            if info.key.startswith(f"{objects.SEGMENTS}/"):
                report.segments += 1
            else:
                report.manifests += 1


def _forget(
    client: ObjectClient,
    commits: dict[CommitName, ObjectInfo],
    removed: dict[CommitName, ObjectInfo],
    notes: dict[CommitName, list[tuple[ObjectInfo, UploadNote]]],
    now_s: float,
) -> None:
    old = [
        info.key
        for name, info in commits.items()
        if not info.nbytes and now_s - info.modified_s > FORGET_S and name not in removed and name not in notes
    ]
    probes = [info.key for info in client.list(objects.SWEEPS) if now_s - info.modified_s > GUARD_S]
    _delete(client, [*old, *probes])


def _delete(client: ObjectClient, keys: list[str]) -> None:
    for begin in range(0, len(keys), _BATCH):
        client.delete(keys[begin : begin + _BATCH])
