"""Ranks that are asked to end choose one step, after which all of them save and end.

A signal may reach some ranks only, and each at another moment. So whoever is asked tells the others through torch's
key-value store, where a thread of each rank looks. Each answers with what it measured: how long its steps and writes
take, and how long it has. Once all have answered, rank 0 decides whether a checkpoint fits, and names the step after
the one that it has just finished. From its answer on, a rank looks into the store at the end of each step. Ranks of one
training wait for each other in each step, so none ends a step before rank 0 has ended the one before it: each reads the
named step before it is over.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lastgood.errors import CorruptCheckpoint
from lastgood.text import parse_json
from lastgood.world import world_of_torch

__all__ = ["POLL_S", "STEPS_TO_AGREE", "AgreedEnd", "Estimate", "LastStep", "agreed_end"]

_log = logging.getLogger("lastgood")

POLL_S = 0.2
"""Between two looks of the thread: one until all have heard, one until all answers are read."""
STEPS_TO_AGREE = 3
"""That may pass meanwhile: the one in which the answers come, the one before the last, and the last."""
_MOST_BYTES = 4096
_DEADLINE = "deadline"

_begun = 0
"""Trainings of this process that were attached: the same number on all ranks."""


@dataclass(frozen=True)
class Estimate:
    """What one rank answers; None: not known (`left_s`: it was not asked itself)."""

    step_s: float | None
    write_s: float | None
    left_s: float | None


@dataclass(frozen=True)
class LastStep:
    """How a training ends."""

    why: str
    """What asked for it: the name of a signal, or ``deadline``."""
    saves: bool
    """Whether there is time for a checkpoint of this step."""
    left_s: float
    """Seconds that are left, from when that was decided on."""


class AgreedEnd:
    """One rank's part in it.

    Args:
        rank: of this process; 0 decides.
        ranks: how many there are.
        store: torch's key-value store, for this training alone.
        estimate: what this rank has measured; called in the thread.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        store: Any,
        estimate: Callable[[], Estimate],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._ranks = ranks
        self._store = store
        self._estimate = estimate
        self._clock = clock
        self._lock = threading.Lock()
        self._round = 0
        """Ends before this one: a training that caught its end may be asked again."""
        self._mine = ""
        self._asked = ""
        """What all were asked by, once this rank has answered."""
        self._answered_s = 0.0
        self._decided: LastStep | None = None
        self._last: int | None = None
        self.ended = threading.Event()
        self.lost = ""
        """Why ranks cannot agree any longer."""

    def ask(self, why: str) -> None:
        """This rank is asked to end. Waits for nothing: it may be called in a signal handler."""
        self._mine = why

    def _key(self, name: str) -> str:
        return f"{self._round}/{name}"

    # -- in the thread ---------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Hear of the others' requests, and answer; rank 0 also decides once all have."""
        if self.lost:
            return
        try:
            with self._lock:
                self._hear()
        except Exception as error:  # torch's own, of many kinds: without a store nothing can be agreed on
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        """The store is gone, as when a training is over: worth a warning only if somebody was asked to end."""
        self.lost = str(error) or repr(error)
        asked = self._asked or self._mine
        _log.log(
            logging.WARNING if asked else logging.DEBUG,
            "rank %d cannot agree with the others on a last step%s, so a signal saves no further one: %s",
            self._rank,
            f" ({asked})" if asked else "",
            self.lost,
        )

    def _hear(self) -> None:
        if not self._asked:
            if self._mine:
                self._store.set(self._key("asked"), self._mine)
            if not self._store.check([self._key("asked")]):
                return
            asked = bytes(self._store.get(self._key("asked")))[:_MOST_BYTES].decode("ascii", "replace")
            mine = self._estimate()
            # The answer comes after it: from then on each end of a step looks.
            self._asked, self._answered_s = asked, self._clock()
            self._store.set(self._key(f"answer/{self._rank}"), json.dumps([mine.step_s, mine.write_s, mine.left_s]))
        if self._rank == 0 and self._decided is None:
            keys = [self._key(f"answer/{rank}") for rank in range(self._ranks)]
            if self._store.check(keys):
                self._decided = self._decide([_read(self._store.get(key)) for key in keys])

    def _decide(self, answers: list[Estimate]) -> LastStep:
        lefts = [one.left_s for one in answers if one.left_s is not None]
        left_s = max(0.0, min(lefts, default=0.0) - (self._clock() - self._answered_s))
        steps = [one.step_s for one in answers if one.step_s is not None]
        writes = [one.write_s for one in answers if one.write_s is not None]
        measured = len(steps) == len(writes) == self._ranks
        fits = measured and max(writes) + 2 * max(steps) <= left_s
        return LastStep(self._asked, fits or self._asked == _DEADLINE, left_s)

    # -- in the training's thread ----------------------------------------------------------------------------------

    def step_over(self, step: int) -> LastStep | None:
        """Called at the end of each step: how the training ends with it; None: it goes on."""
        if not self._asked or self.lost:
            return None
        try:
            with self._lock:
                return self._first(step) if self._rank == 0 else self._other(step)
        except Exception as error:  # as above
            self._lose(error)
            return None

    def _first(self, step: int) -> LastStep | None:
        decided = self._decided
        if decided is None:
            return None
        if self._last is None:
            self._last = step + 1
            self._store.set(self._key("end"), json.dumps([self._last, decided.saves, decided.left_s]))
            if decided.saves:
                return None
        return self._over(decided)

    def _other(self, step: int) -> LastStep | None:
        if self._decided is None:
            if not self._store.check([self._key("end")]):
                return None
            self._last, saves, left_s = _named(self._store.get(self._key("end")))
            self._decided = LastStep(self._asked, saves, left_s)
        decided, last = self._decided, self._last
        if not decided.saves:
            return self._over(decided)
        if last is None or step < last:
            return None
        if step > last:
            _log.warning(
                "rank %d heard after step %d only that the training ends after step %d: ranks that end together wait "
                "for each other in each step, as under DistributedDataParallel",
                self._rank,
                step,
                last,
            )
        return self._over(decided)

    def _over(self, decided: LastStep) -> LastStep:
        self._round += 1
        self._mine = self._asked = ""
        self._decided = self._last = None
        return decided


def _read(answer: bytes) -> Estimate:
    match parse_json(answer, "a rank's answer", most_bytes=_MOST_BYTES):
        case [None | float() | int() as step_s, None | float() | int() as write_s, None | float() | int() as left_s]:
            return Estimate(step_s, write_s, left_s)
    raise CorruptCheckpoint(f"a rank's answer: {answer[:80]!r} is not three numbers")


def _named(note: bytes) -> tuple[int, bool, float]:
    match parse_json(note, "rank 0's last step", most_bytes=_MOST_BYTES):
        case [int() as step, bool() as saves, float() | int() as left_s]:
            return step, saves, float(left_s)
    raise CorruptCheckpoint(f"rank 0's last step: {note[:80]!r} is no step")


def agreed_end(world: tuple[int, int], estimate: Callable[[], Estimate]) -> AgreedEnd | None:
    """For a training of `world` (rank, number of ranks); None if its ranks have no store in common.

    A thread looks until ``ended`` is set, or what is returned is dropped; `estimate`, a bound method, is held weakly.
    """
    global _begun
    if world[1] == 1 or world_of_torch() != world:
        return None
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    _begun += 1
    store = _get_default_store()
    if isinstance(getattr(store, "_underlying_non_prefix_store", None), TCPStore):
        store = store.clone()  # others wait on theirs in calls
    known = weakref.WeakMethod(estimate)

    def ask() -> Estimate:
        found = known()
        return Estimate(None, None, None) if found is None else found()

    made = AgreedEnd(*world, PrefixStore(f"lastgood/end/{_begun}", store), ask)
    threading.Thread(target=_watch, args=(weakref.ref(made), made.ended), name="lastgood-end", daemon=True).start()
    return made


def _watch(alive: weakref.ref[AgreedEnd], ended: threading.Event) -> None:
    """In a thread; it keeps nothing alive that was dropped without `close`."""
    while not ended.wait(POLL_S):
        made = alive()
        if made is None:
            return
        made.look()
        del made
