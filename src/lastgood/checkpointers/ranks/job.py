"""A rank's place in its job, for a checkpointer of one directory per rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lastgood.checkpointers.rank_directory import job_of, rank_directory
from lastgood.checkpointers.ranks.directories import Buffers, shared_job_id, whole_checkpoints
from lastgood.checkpointers.ranks.replicated import Declared, Division, StoreExchange
from lastgood.errors import CheckpointError, ConfigError, NoCheckpoint
from lastgood.files import ReadableBy
from lastgood.state import FlatState

if TYPE_CHECKING:
    from lastgood.storage import SlotView

__all__ = ["Buffers", "RankedJob"]

_log = logging.getLogger("lastgood")


class RankedJob:
    """What a rank does because there are others. `other_job` is where it goes on from while its own job has nothing.

    `directory` is the rank's own; `buffers` is what `restore_ranks` takes.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        world_size: int,
        other_job: str | None,
        buffers: Buffers = "equal",
        readable_by: ReadableBy = ReadableBy.OWNER,
    ) -> None:
        self._directory = directory
        self._rank = rank
        self._world_size = world_size
        self._other_job = other_job
        self._buffers = buffers
        self._readable_by = readable_by
        self._job = job_of(directory) if world_size > 1 else None

    def job_id(self) -> bytes | None:
        """One for all ranks, where their directories lie in one; None for what the directory has, or a new one."""
        if self._job is None or (self._directory / "job.json").exists():
            return None
        return shared_job_id(self._job, self._readable_by)

    def goes_on_from_another(self, view: SlotView | None) -> bool:
        """Whether to restore from the other job: there is one named, and this one has no checkpoint of all ranks.

        Raises MismatchError, StorageError where this job has something, and its ranks do not belong together.
        """
        if self._other_job is None:
            return False
        if view is None:
            from lastgood.storage import SlotStore

            view = SlotStore.peek(self._directory)
        own = view.committed() if self._directory.is_dir() else []
        if self._job is None or not own:
            return not own
        try:
            return not whole_checkpoints(self._job)
        except NoCheckpoint:
            return True  # others never came so far

    def restore(self, state: Mapping[str, Any], threads: int, step: int | None, *, good_only: bool = True) -> int:
        """Restore from the other job; returns the step. Raises as `restore_ranks`, and CheckpointError for nothing."""
        from lastgood.checkpointers.ranks.reshard import restore_ranks

        assert self._other_job is not None
        world = (self._rank, self._world_size)
        try:
            found = restore_ranks(
                self._other_job, state, world, threads, step, good_only=good_only, buffers=self._buffers
            )
        except NoCheckpoint as error:
            # Not as NoCheckpoint: a job that was told to go on must not begin again without a message.
            raise CheckpointError(f"resume_from: {error}") from error
        _log.info("%s: goes on from step %d of %s", self._directory, found, self._other_job)
        return found

    def division(self, declared: Declared, flat: FlatState) -> Division:
        """Who writes what ranks hold alike; compares with all other ranks that they do hold it alike.

        Raises ConfigError for a directory that other ranks could not find; StateError, WaitTimeout.
        """
        if self._job is None:
            raise ConfigError(
                f"{self._directory}: with replicated={declared!r} ranks read each other's directories, and this one is "
                f"not named as theirs; use {rank_directory(self._directory.parent, self._rank)}"
            )
        division = Division(declared, self._rank, self._world_size, StoreExchange(self._rank, self._world_size))
        division.check_equal(flat)
        return division
