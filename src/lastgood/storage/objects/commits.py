"""Which checkpoints there are, and which of them stay."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lastgood.errors import CorruptCheckpoint, MismatchError
from lastgood.storage import format as fmt
from lastgood.storage.objects import format as objects
from lastgood.storage.objects.client import ObjectClient, ObjectInfo, ObjectMissing
from lastgood.storage.objects.format import Commit, CommitName, Manifest, Part, object_key

__all__ = [
    "Base",
    "commits_of",
    "find_base",
    "find_commits",
    "is_committed",
    "names_of_job",
    "read_commit",
    "read_manifest",
    "retire",
    "spared",
]


@dataclass(frozen=True)
class Base:
    """An earlier part of the same rank, whose segments are not sent again if they did not change."""

    name: CommitName
    manifest: Manifest

    def fits(self, record: fmt.CommitRecord, segment_bytes: int) -> bool:
        """Whether segments of the same number lie at the same bytes."""
        old = self.manifest.record
        same = (old.rank, old.world_size, old.chunk_bytes) == (record.rank, record.world_size, record.chunk_bytes)
        return same and self.manifest.segment_bytes == segment_bytes


def commits_of(client: ObjectClient) -> dict[CommitName, ObjectInfo]:
    """All names under which something lies: checkpoints, and (with no byte) those that are not there any more."""
    found = {}
    for info in client.list(objects.COMMITS):
        name = CommitName.parse(info.key.removeprefix(f"{objects.COMMITS}/"))
        if name is not None:
            found[name] = info
    return found


def find_commits(client: ObjectClient, job_id: bytes | None = None) -> list[CommitName]:
    """The checkpoints of one job, newest first. Reads none of them.

    Raises MismatchError if there are several jobs' and `job_id` says none of them, StorageError.
    """
    return names_of_job(commits_of(client), client.place, job_id)


def names_of_job(found: Mapping[CommitName, ObjectInfo], place: str, job_id: bytes | None = None) -> list[CommitName]:
    """Of `commits_of`, the checkpoints of one job, newest first. Raises MismatchError as `find_commits`."""
    names = [name for name, info in found.items() if info.nbytes and job_id in (None, name.job_id)]
    jobs = sorted({name.job_id.hex() for name in names})
    if len(jobs) > 1:
        raise MismatchError(
            f"{place}: has checkpoints of several jobs: {', '.join(jobs[:5])}; give each a prefix of its own"
        )
    return sorted(names, reverse=True)


def is_committed(client: ObjectClient, name: CommitName) -> bool:
    """Whether this checkpoint is there. Raises StorageError."""
    info = client.head(name.key)
    return info is not None and info.nbytes > 0


def read_commit(client: ObjectClient, name: CommitName) -> Commit:
    """What a checkpoint is made of. Raises ObjectMissing if it is not there, CorruptCheckpoint, MismatchError."""
    content = client.get(name.key, objects.MOST_COMMIT_BYTES)
    if not content:
        raise ObjectMissing(f"{client.where(name.key)}: {name.told} was removed")
    return Commit.decode(content, client.where(name.key), name)


def read_manifest(client: ObjectClient, name: CommitName, part: Part, rank: int, world_size: int) -> Manifest:
    """Where the part of a rank is. Raises ObjectMissing, CorruptCheckpoint, MismatchError."""
    key = object_key(objects.MANIFESTS, part.name)
    content = client.get(key, part.nbytes)
    if objects.manifest_name(part.name[:16], content) != part.name:
        raise CorruptCheckpoint(f"{client.where(key)}: the manifest does not have the digest in its name")
    manifest = Manifest.decode(content, client.where(key))
    found = (CommitName.of(manifest.record), manifest.record.rank, manifest.record.world_size)
    if found != (name, rank, world_size):
        raise CorruptCheckpoint(
            f"{client.where(key)}: the manifest is that of {found[0].told}, rank {found[1]} of {found[2]}, and stands "
            f"in the commit of {name.told} for rank {rank} of {world_size}"
        )
    return manifest


def find_base(client: ObjectClient, rank: int, job_id: bytes | None = None) -> Base | None:
    """The newest part of a rank, as the base of its next upload; None if there is none that can be read."""
    for name in find_commits(client, job_id)[:1]:
        try:
            commit = read_commit(client, name)
            if rank < len(commit.parts):
                return Base(name, read_manifest(client, name, commit.parts[rank], rank, len(commit.parts)))
        except (ObjectMissing, CorruptCheckpoint, MismatchError):
            return None
    return None


def spared(found: Sequence[CommitName], keep: int, bad: Collection[CommitName] = ()) -> set[CommitName]:
    """Of checkpoints, newest first: the newest `keep`, and the newest that was not judged bad."""
    good = [name for name in found if name not in bad]
    return {*found[: max(1, keep)], *good[:1]}


def retire(client: ObjectClient, name: CommitName) -> None:
    """Take a checkpoint away: from here on nobody finds it, and `sweep` may remove what only it needs.

    May be killed and repeated at any moment. Its name stays, with no byte, so that no late try to commit it succeeds.
    """
    try:
        content = client.get(name.key, objects.MOST_COMMIT_BYTES)
    except ObjectMissing:
        return
    if not content:
        return
    client.put(name.retired_key, content)
    client.put(name.key, b"")
