"""A rank's place in its job, for a checkpointer of one directory per rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastgood.checkpointers.rank_directory import job_of, rank_directory
from lastgood.checkpointers.ranks.directories import Buffers, shared_job_id, whole_checkpoints
from lastgood.checkpointers.ranks.replicated import Declared, Division, StoreExchange
from lastgood.checkpointers.ranks.reshard import restore_ranks
from lastgood.errors import CheckpointError, ConfigError, NoCheckpoint
from lastgood.files import ReadableBy
from lastgood.state import FlatState
from lastgood.storage import SlotStore, SlotView
from lastgood.storage.objects.s3 import S3Options

__all__ = ["Buffers", "RankedJob"]

_log = logging.getLogger("lastgood")


@dataclass(frozen=True)
class RankedJob:
    """What a rank does because there are others."""

    directory: Path
    """The rank's own."""
    rank: int
    world_size: int
    other_job: str | None
    """Where it goes on from while its own job has nothing: a directory, or s3://BUCKET/PREFIX."""
    buffers: Buffers
    """What `restore_ranks` takes."""
    readable_by: ReadableBy
    s3: S3Options | None = None
    """How a bucket is reached."""

    @property
    def _job(self) -> Path | None:
        return job_of(self.directory) if self.world_size > 1 else None

    def job_id(self) -> bytes | None:
        """One for all ranks, if their directories lie in one; None for what the directory has, or a new one."""
        if self._job is None or (self.directory / "job.json").exists():
            return None
        return shared_job_id(self._job, self.readable_by)

    def goes_on_from_another(self, view: SlotView | None) -> bool:
        """Whether to restore from the other job: there is one named, and this one has no checkpoint of all ranks.

        Raises MismatchError, StorageError if this job has something, and its ranks do not belong together.
        """
        if self.other_job is None:
            return False
        if view is None:
            view = SlotStore.peek(self.directory)
        own = view.committed() if self.directory.is_dir() else []
        if self._job is None or not own:
            return not own
        try:
            return not whole_checkpoints(self._job)
        except NoCheckpoint:
            return True  # others never came so far

    def restore(self, state: Mapping[str, Any], threads: int, step: int | None, *, good_only: bool = True) -> int:
        """Restore from the other job; returns the step. Raises as `restore_ranks`, and CheckpointError for nothing."""
        assert self.other_job is not None
        world = (self.rank, self.world_size)
        try:
            found = restore_ranks(
                self.other_job,
                state,
                world,
                threads,
                step,
                good_only=good_only,
                buffers=self.buffers,
                s3=self.s3,
                together=True,
            )
        except NoCheckpoint as error:
            # Not as NoCheckpoint: a job that was told to go on must not begin again without a message.
            raise CheckpointError(f"resume_from: {error}") from error
        _log.info("%s: goes on from step %d of %s", self.directory, found, self.other_job)
        return found

    def division(self, declared: Declared, flat: FlatState) -> Division:
        """Who writes what ranks hold alike; compares with all other ranks that they do hold it alike.

        Raises ConfigError for a directory that other ranks could not find; StateError, WaitTimeout.
        """
        if self._job is None:
            raise ConfigError(
                f"{self.directory}: with replicated={declared!r} ranks read each other's directories, and this one is "
                f"not named as theirs; use {rank_directory(self.directory.parent, self.rank)}"
            )
        division = Division(declared, self.rank, self.world_size, StoreExchange(self.rank, self.world_size))
        division.check_equal(flat)
        return division
