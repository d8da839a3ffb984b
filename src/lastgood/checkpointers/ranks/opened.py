"""A job as somebody named it: a directory, one of several ranks, or a bucket; and the views of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lastgood.checkpointers.rank_directory import rank_directories, rank_directory
from lastgood.checkpointers.ranks.checkpoint import JobCheckpoint
from lastgood.checkpointers.ranks.directories import whole_checkpoints
from lastgood.checkpointers.ranks.remote_job import RemoteJob
from lastgood.locations import Location
from lastgood.storage import SlotView
from lastgood.storage.objects.opening import holds_objects, open_objects
from lastgood.storage.objects.s3 import S3Options

__all__ = ["OpenedJob", "open_job"]


@dataclass(frozen=True)
class OpenedJob:
    """What `open_job` found."""

    place: Path | str
    views: Mapping[int, SlotView]
    """By rank; that of 0 alone for a job of one rank."""
    several: bool
    """Whether each rank has a part of its own."""
    remote: RemoteJob | None = None

    def checkpoints(self) -> list[JobCheckpoint]:
        """Those that all ranks hold completely, newest first. Raises as `whole_checkpoints`."""
        return whole_checkpoints(self.place) if self.remote is None else self.remote.checkpoints()

    def where(self, rank: int) -> str:
        """A rank's part, for messages and titles."""
        if self.remote is None:
            return str(rank_directory(self.place, rank) if self.several else self.place)
        return f"{self.place}, rank {rank}" if self.several else str(self.place)


def open_job(place: Path | str | Location, s3: S3Options | None = None) -> OpenedJob:
    """Look at a folder (it need not be there), or at s3://BUCKET/PREFIX, which is reached with `s3`. Takes no lock.

    Raises ConfigError for other URLs, StorageError, and MismatchError for a bucket with several jobs.
    """
    location = Location.parse(place)
    if holds_objects(location):
        remote = RemoteJob(open_objects(location, s3))
        ranks = remote.views()
        return OpenedJob(remote.client.place, ranks, len(ranks) > 1, remote)
    folder = location.path if isinstance(place, Location) else Path(place)  # as it was named
    found = rank_directories(folder)
    views = {rank: SlotView(path) for rank, path in (found or {0: folder}).items()}
    return OpenedJob(folder, views, bool(found))
