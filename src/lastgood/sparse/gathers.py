"""What of an exchange is in progress on this rank: for each layer of an iteration the blocks that have come so far.

No I/O. A future gives the blocks of all ranks or an error, never a part of them.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from lastgood.errors import CheckpointError, ConfigError, MismatchError
from lastgood.sparse.blocks import SparseGradient

__all__ = ["Gathered", "GatheredGroups", "Gathers", "Key", "Part", "Waiting"]

Gathered = list[SparseGradient]
"""One of each rank, in the order of ranks."""
GatheredGroups = list[tuple[SparseGradient, ...]]
"""The same of a layer of several tensors."""
Part = SparseGradient | tuple[SparseGradient, ...]
"""What one rank gives of a layer."""


class Key(NamedTuple):
    """What a block is of. Lower ones are more urgent."""

    iteration: int
    layer: int

    def __str__(self) -> str:
        return f"iteration {self.iteration}, layer {self.layer}"


@dataclass(frozen=True)
class Waiting:
    """A gather that this rank has begun, and what it lacks."""

    key: Key
    missing: list[int]
    """Ranks."""
    since: float
    """Of time.monotonic."""


@dataclass
class _Gather:
    results: list[Part | None]
    future: Future[Any] | None = None
    begun_at: float = 0.0

    def missing(self) -> list[int]:
        return [rank for rank, result in enumerate(self.results) if result is None]


class Gathers:
    """Of rank `rank` of `ranks`, of which others may be `ahead` iterations ahead. For any thread."""

    def __init__(self, rank: int, ranks: int, ahead: int) -> None:
        self._rank, self._ranks, self._ahead = rank, ranks, ahead
        self._lock = threading.Lock()
        self._gathers: dict[Key, _Gather] = {}
        self._newest = -1
        self._own: dict[int, int] = {}
        """By layer, the newest iteration that this rank has begun."""
        self._beyond: set[int] = set()
        """Iterations after all of these, of which others have sent something."""
        self._left: dict[int, str] = {}
        self._error: CheckpointError | None = None
        self.gathered = 0
        self.gather_s = 0.0

    @property
    def error(self) -> CheckpointError | None:
        """What has ended all of it, if something did."""
        return self._error

    def begin(self, key: Key, sparse: Part) -> tuple[Future[Any], bool]:
        """This rank's block of a layer. The future has failed, and the block goes nowhere, if the second is False.

        Raises ConfigError if a layer's iterations do not ascend.
        """
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # it cannot be taken back: other ranks wait for it
        with self._lock:
            if key.iteration <= self._own.get(key.layer, -1):
                raise ConfigError(f"{key} cannot be exchanged after iteration {self._own[key.layer]} of that layer")
            error = self._error
            if error is None:
                self._own[key.layer] = key.iteration
                self._newest = max(self._newest, key.iteration)
                self._beyond = {iteration for iteration in self._beyond if iteration > self._newest}
                gather = self._gathers.setdefault(key, _Gather([None] * self._ranks))
                gather.future, gather.begun_at = future, time.monotonic()
                gather.results[self._rank] = sparse
        if error is not None:
            future.set_exception(error)
            return future, False
        self._finish(key)
        return future, True

    def check_ahead(self, iteration: int, name: str) -> None:
        """Another rank, `name`, begins to send of this iteration.

        Raises MismatchError if that is more iterations ahead than may be: their blocks would fill this one's memory.
        """
        with self._lock:
            if iteration > self._newest:
                self._beyond.add(iteration)
            if len(self._beyond) > self._ahead:
                raise MismatchError(
                    f"{name} is at iteration {iteration}, {len(self._beyond)} iterations ahead of rank {self._rank}; "
                    f"{self._ahead} may be"
                )

    def add(self, key: Key, origin: int, sparse: Part) -> None:
        """Another rank's block has come."""
        with self._lock:
            if self._error is not None:
                return
            self._gathers.setdefault(key, _Gather([None] * self._ranks)).results[origin] = sparse
        self._finish(key)

    def _finish(self, key: Key) -> None:
        with self._lock:
            gather = self._gathers.get(key)
            if gather is None or gather.future is None:
                return
            results = [result for result in gather.results if result is not None]
            if len(results) < self._ranks:
                return
            del self._gathers[key]
            self.gathered += 1
            self.gather_s += time.monotonic() - gather.begun_at
        gather.future.set_result(results)

    def leave(self, origin: int, name: str) -> None:
        """Another rank takes part no more; all that it sent has been added."""
        with self._lock:
            self._left[origin] = name

    def hopeless(self) -> CheckpointError | None:
        """Why a gather in progress cannot become complete any more."""
        with self._lock:
            for key, gather in sorted(self._gathers.items()):
                for rank, name in self._left.items():
                    if gather.future is not None and gather.results[rank] is None:
                        return CheckpointError(f"{name} has left the exchange, without its part of {key}")
        return None

    def oldest(self) -> Waiting | None:
        """The most urgent gather that this rank has begun and that is not complete."""
        with self._lock:
            begun = [(key, gather) for key, gather in self._gathers.items() if gather.future is not None]
            if not begun:
                return None
            key, gather = min(begun, key=lambda one: one[0])
            return Waiting(key, gather.missing(), gather.begun_at)

    def fail(self, error: CheckpointError) -> bool:
        """Give all futures this error, those to come as well; False if one has done so before."""
        with self._lock:
            if self._error is not None:
                return False
            self._error = error
            futures = [gather.future for gather in self._gathers.values() if gather.future is not None]
            self._gathers.clear()
        for future in futures:
            future.set_exception(error)
        return True
