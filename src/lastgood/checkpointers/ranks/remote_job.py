"""A job whose checkpoints are objects: the views of its ranks, and the checkpoints, each read when it is needed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from lastgood.checkpointers.ranks.checkpoint import JobCheckpoint, Parts
from lastgood.errors import CorruptCheckpoint, NoCheckpoint
from lastgood.storage.objects.client import ObjectClient, ObjectMissing
from lastgood.storage.objects.commits import find_commits, read_commit
from lastgood.storage.objects.format import CommitName
from lastgood.storage.objects.judged import bad_verdicts
from lastgood.storage.objects.kept_chunks import KeptChunks
from lastgood.storage.objects.view import RemoteView

__all__ = ["RemoteJob"]

_LOOKERS = 16


class RemoteJob:
    """The job below one prefix of a store. Raises StorageError, and MismatchError if there are several."""

    def __init__(self, client: ObjectClient) -> None:
        self.client = client
        self.names = find_commits(client)
        """Newest first."""

    def world_size(self) -> int:
        """Ranks of the job, as the newest commit that can be read says; 1 if none says it."""
        for name in self.names:
            try:
                return len(read_commit(self.client, name).parts)
            except (CorruptCheckpoint, ObjectMissing):
                continue
        return 1

    def views(self) -> dict[int, RemoteView]:
        """By rank."""
        return {rank: RemoteView(self.client, rank) for rank in range(self.world_size())}

    def checkpoints(self) -> list[JobCheckpoint]:
        """All of them, newest first. Raises NoCheckpoint."""
        if not self.names:
            raise NoCheckpoint(
                f"{self.client.place}: there is no checkpoint; nothing was committed there, or all of it was removed"
            )
        bad = bad_verdicts(self.client, self.names)
        return [self.checkpoint(name, bad.get(name)) for name in self.names]

    def checkpoint(self, name: CommitName, bad: str | None = None) -> JobCheckpoint:
        """One of them, which was judged bad for a reason or not; nothing is read yet."""
        return JobCheckpoint(
            self.client.place, name.incarnation, name.step, name.job_id, lambda: _parts_of(self.client, name), bad
        )


def _parts_of(client: ObjectClient, name: CommitName) -> Parts:
    """Raises CorruptCheckpoint, MismatchError, StorageError, each naming the key."""
    commit = read_commit(client, name)
    kept = KeptChunks()
    views = [RemoteView(client, rank, name.job_id, kept) for rank in range(len(commit.parts))]
    with ThreadPoolExecutor(min(_LOOKERS, len(views)), thread_name_prefix="lastgood-look") as pool:
        return tuple(views), tuple(pool.map(lambda view: view.look(name, 0, commit), views))
