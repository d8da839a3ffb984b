"""What follows the checkpoints of one training in the background: the archive, and the remote tier."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lastgood.checkpointers.agreement.decide import Decided
from lastgood.checkpointers.export.archive import Archive
from lastgood.checkpointers.pccheck.options import PCcheckOptions
from lastgood.checkpointers.rank_directory import rank_directory
from lastgood.checkpointers.remote.tier import RemoteTier
from lastgood.checkpointers.slots.follower import Follower
from lastgood.errors import ConfigError, WaitTimeout
from lastgood.files import ReadableBy
from lastgood.storage import SlotInfo, SlotStore

__all__ = ["Beside"]

_log = logging.getLogger("lastgood")


class Beside:
    """Both of one rank, as far as `options` ask for them. Holds neither store nor checkpointer.

    The tier is made here, and touches nothing but its status file. Raises ConfigError for ranks that do not agree, and
    if a package is missing.
    """

    def __init__(
        self,
        directory: Path,
        options: PCcheckOptions,
        world: tuple[int, int],
        readable_by: ReadableBy,
        trouble: Callable[[], str],
        *,
        agrees: bool,
    ) -> None:
        self.archive: Archive | None = None
        self.tier: RemoteTier | None = None
        self._resumed = False
        self._options = options
        self._rank = world[0] if agrees else None
        self._readable_by = readable_by
        place = options.remote_place
        if place is None:
            return
        if world[1] > 1 and not agrees:
            raise ConfigError('pccheck: ranks that do not agree (control="off") cannot have a remote place in common')
        self.tier = RemoteTier(
            place,
            directory,
            every=options.remote_every,
            keep=options.remote_keep,
            mbps=options.remote_mbps,
            world=world if agrees else (0, 1),
            patience_s=options.agreement_timeout_s,
            trouble=trouble,
            mode=readable_by.file_mode,
        )

    def open(self, store: SlotStore) -> None:
        """The store is open. Raises LockHeld, StorageError. May be called again."""
        options = self._options
        if self.archive is None and options.archive_dir is not None and options.archive_every is not None:
            place = Path(options.archive_dir)
            folder = place if self._rank is None else rank_directory(place, self._rank)
            self.archive = Archive(folder, options.archive_every, self._readable_by)
        if self.tier is not None and not self._resumed:
            self._resumed = True
            self.tier.resume(store, store.everywhere())
            store.on_verdict = self.tier.judged

    def durable(self, store: SlotStore, info: SlotInfo, decided: Decided | None) -> None:
        """A checkpoint counts; of several ranks, as they have `decided`. Never raises."""
        if self.archive is not None:
            self.archive.offer(store, info)
        if self.tier is not None:
            self.tier.offer(store, info, chosen=None if decided is None else decided.chosen)

    def facts(self) -> dict[str, Any]:
        """For records."""
        return {} if self.tier is None else {"remote": self.tier.facts()}

    def close(self, timeout_s: float) -> None:
        """Finish what is due in that time; what is not, is told."""
        deadline = time.monotonic() + timeout_s
        followers: list[Follower | None] = [self.archive, self.tier]
        for follower in followers:
            if follower is not None:
                try:
                    follower.close(max(0.0, deadline - time.monotonic()))
                except WaitTimeout as error:
                    _log.warning("%s", error)
