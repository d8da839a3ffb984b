"""Saves every so many seconds. Ranks have different clocks, and must save at the same step: rank 0 names it.

Ranks of one training wait for each other in each step, so none ends a step before rank 0 has ended the step before it.
What rank 0 says at the end of a step is therefore known to all at the end of the next one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from lastgood.errors import ConfigError
from lastgood.world import world_of_torch

__all__ = ["ByTime", "by_time"]

_log = logging.getLogger("lastgood")

_begun = 0
"""Trainings of this process that were attached with an interval in seconds: the same number on all ranks."""


class ByTime:
    """Says of each step whether to save at its end.

    Args:
        interval_s: seconds from one save to the next; the first is so long after this is made.
        rank: of this process, which says when, if it is 0.
        ranks: how many there are.
        store: torch's key-value store, if there are several.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        interval_s: float,
        rank: int = 0,
        ranks: int = 1,
        store: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval_s = interval_s
        self._rank = rank
        self._several = ranks > 1
        self._store = store
        self._clock = clock
        self._last_s = clock()
        self._named = 0
        """Saves whose step this rank knows."""
        self._next: int | None = None

    def due(self, step: int) -> bool:
        """Whether to save at the end of `step`. Call it once for each step."""
        if self._rank == 0:
            return self._decide(step)
        if self._next is None and self._store.check([str(self._named)]):
            self._next = int(self._store.get(str(self._named)))
            self._named += 1
        if self._next is None or step < self._next:
            return False
        if step > self._next:
            _log.warning(
                "rank %d heard at step %d only that step %d was to be saved: ranks that save by time wait for each "
                "other in each step, as under DistributedDataParallel",
                self._rank,
                step,
                self._next,
            )
        saves, self._next = step == self._next, None
        return saves

    def _decide(self, step: int) -> bool:
        if self._next is not None:
            self._next = None
            return True
        if self._clock() - self._last_s < self._interval_s:
            return False
        self._last_s = self._clock()
        if not self._several:
            return True
        self._next = step + 1
        self._store.set(str(self._named), str(self._next))
        self._named += 1
        return False


def by_time(system: str, interval_s: float, world: tuple[int, int]) -> ByTime:
    """For a training of `world` (rank, number of ranks). Raises ConfigError if its ranks have no store in common."""
    global _begun
    if world[1] == 1:
        return ByTime(interval_s)
    if world_of_torch() != world:
        raise ConfigError(
            f"{system}: interval_s over {world[1]} ranks needs torch.distributed, by which they hear when to save; "
            "call torch.distributed.init_process_group() before, or give interval_steps instead"
        )
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    _begun += 1
    return ByTime(interval_s, *world, PrefixStore(f"lastgood/by-time/{_begun}", _get_default_store()))
