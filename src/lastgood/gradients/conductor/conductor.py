"""A rank's side of the conversation with all shadows, in the background of the training.

On rank 0 it decides which iteration is complete (`ConductorState` does) and tells every shadow; the other ranks
hear it from them. Every rank seeds the buckets that it owns. The training hands over what an iteration needs beside
gradients, and asks which buckets to copy; it waits for nothing here but the first seeds, and, if a policy says so,
for room.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lastgood import _native
from lastgood.errors import CheckpointError, WaitTimeout
from lastgood.gradients.conductor.state import ConductorState
from lastgood.gradients.layout.entries import Saved, Side
from lastgood.gradients.link.any_link import LinkMaker
from lastgood.gradients.link.data_link import DataSettings
from lastgood.gradients.link.shadow_link import Identity, ShadowLink
from lastgood.gradients.protocol.messages import (
    Absent,
    Complete,
    Diverged,
    Have,
    Message,
    Refused,
    Seed,
    Seeded,
    Spilled,
    Step,
    Torn,
    Verify,
    Welcome,
)
from lastgood.gradients.protocol.spills import SpillPlan
from lastgood.gradients.trainer.parameters import BucketCopy

__all__ = ["Conductor", "ConductorSettings"]

_log = logging.getLogger("lastgood")

_TICK_S = 0.05
_END_S = 5.0


@dataclass(frozen=True)
class ConductorSettings:
    """How to treat shadows."""

    timeout_s: float
    """How long a connection may say nothing that was asked for."""
    behind_s: float
    """How long a shadow may lag before the others go on without it."""
    data: DataSettings


class Conductor:
    """All shadows, from one rank. `start`, then `wait_whole` once the first seeds are on their way, then `close`.

    `on_complete` is called, in some thread, with rank 0's word on what became of iterations: on every rank the same.
    `link` makes the way to each shadow: over sockets, or to one in this process (a mirror node's).
    """

    def __init__(
        self,
        identity: Identity,
        base: int,
        addresses: Sequence[str],
        token: bytes,
        settings: ConductorSettings,
        owned: Callable[[int], bool],
        on_complete: Callable[[Complete], None],
        link: LinkMaker = ShadowLink,
    ) -> None:
        self._identity = identity
        self._settings = settings
        self._owned = owned
        self._on_complete = on_complete
        self._state = ConductorState(len(addresses), base)
        self._spills = SpillPlan(len(addresses))
        self._spill_due = False
        self._changed = threading.Condition()
        self.fenced: str | None = None
        """Why nothing is kept any more: another incarnation of this job has taken over."""
        self._behind_since: dict[int, float] = {}
        self._last_progress: dict[int, tuple[int, int]] = {}
        self._why: dict[int, str] = {}
        self._diverged = 0
        self._torn = 0
        self._stop = threading.Event()
        self._ticker: threading.Thread | None = None
        self.links = [
            link(number, address, token, identity, self, settings.timeout_s, settings.data)
            for number, address in enumerate(addresses)
        ]

    # -- start and end ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to connect to all shadows."""
        for link in self.links:
            link.start()
        self._ticker = threading.Thread(target=self._tick, name="checkmate-conductor", daemon=True)
        self._ticker.start()

    def close(self) -> None:
        """End all threads and connections, within a bounded time."""
        self._stop.set()
        closers = [threading.Thread(target=link.close, daemon=True) for link in self.links]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(3 * _END_S)
        if self._ticker is not None:
            self._ticker.join(_END_S)

    def wait_connected(self, timeout_s: float) -> None:
        """Return when every shadow has taken the layout, and takes gradients. Raises WaitTimeout, CheckpointError."""
        self._wait(
            lambda number: not (self._state.shadows[number].connected and self.links[number].data.connected),
            timeout_s,
            "to take part",
        )

    def wait_whole(self, timeout_s: float) -> None:
        """Return when no shadow wants a seed any more. Raises WaitTimeout, naming those that do."""
        self._wait(
            lambda number: bool(self._state.shadows[number].wants) or not self._state.shadows[number].connected,
            timeout_s,
            "to take their first seeds",
        )

    def wait_seeded(self, timeout_s: float) -> None:
        """Return when all seeds on their way have arrived, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: not any(known.on_the_way for known in self._state.shadows), timeout_s)

    def _wait(self, is_late: Callable[[int], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while late := [number for number in range(len(self.links)) if is_late(number)]:
                if self.fenced is not None:
                    raise CheckpointError(self.fenced)
                if time.monotonic() > deadline:
                    names = [f"{self.links[number].address} ({self._why.get(number, 'no answer')})" for number in late]
                    raise WaitTimeout(f"waited {timeout_s:g} s for shadows {what}: {', '.join(names)}")
                self._changed.wait(_TICK_S)

    # -- from the training -----------------------------------------------------------------------------------------

    @property
    def spilled(self) -> Saved | None:
        """The newest step that all shadows have spilled, as far as rank 0 has heard."""
        with self._changed:
            return self._spills.common

    @property
    def reachable(self) -> bool:
        """Whether any shadow is connected."""
        return any(known.connected for known in self._state.shadows)

    def step(self, step: Step) -> None:
        """Rank 0: say what an iteration's update was. `step.spill`: it is time for a spill.

        That is of this iteration, or of the next saved one that finds all shadows there and done with the last spill.
        """
        with self._changed:
            self._spill_due |= step.spill
            spill = self._spill_due and step.saved and self._spills.ready
            keep = None
            if spill:
                saved = Saved(epoch=self._identity.incarnation, iteration=step.iteration, step=step.step or 0)
                self._spill_due, keep = False, self._spills.ask(saved)
        step = step.model_copy(update={"spill": spill, "keep": keep})
        for link in self.links:
            link.post(step, step.iteration)
        self.closed(step.iteration)

    def absent(self, absent: Absent) -> None:
        """Another rank than 0: say which of its own parameters had no gradient."""
        for link in self.links:
            link.post(absent, absent.iteration)

    def closed(self, iteration: int) -> None:
        """An iteration's update is done."""
        with self._changed:
            self._state.close_iteration(iteration)
            self._decide()

    def side(self, side: Side, record: memoryview, arrives: Any) -> None:
        """Send this rank's side record to the shadow that keeps it, once the CUDA event `arrives` has come."""
        self.links[side.rank % len(self.links)].post(side, side.iteration, record, arrives)

    def wanted_seeds(self, limit_bytes: int, bucket_bytes: Callable[[int], int]) -> list[tuple[int, int]]:
        """(shadow, bucket) to be copied now and given to `seed`: at least one if any is wanted, up to a limit."""
        with self._changed:
            found: list[tuple[int, int]] = []
            room = limit_bytes
            for shadow, bucket in self._state.wanted_seeds(self._owned):
                room -= bucket_bytes(bucket)
                if room < 0 and found:
                    break
                found.append((shadow, bucket))
            return found

    def seed(self, shadow: int, copy: BucketCopy) -> None:
        """Send a bucket as it is after `copy.iteration`."""
        with self._changed:
            self._state.seeding(shadow, copy.bucket, copy.iteration)
        message = Seed(bucket=copy.bucket, iteration=copy.iteration, entries=copy.entries)
        self.links[shadow].post(message, copy.iteration, memoryview(copy.memory.numpy().data))

    def verify(self, shadow: int, copy: BucketCopy) -> None:
        """Let a shadow compare a bucket with the training's."""
        checksum = _native.crc32c(memoryview(copy.memory.numpy().data))
        message = Verify(iteration=copy.iteration, bucket=copy.bucket, checksum=checksum)
        self.links[shadow].post(message, copy.iteration)

    def distrust(self, buckets: Callable[[int], Sequence[int]], iteration: int) -> None:
        """What was sent is not what the training used in this iteration."""
        with self._changed:
            self._state.distrust(buckets, iteration)

    def seeds_are_outrun(self) -> bool:
        """Whether the training should wait for the seeds on their way, since it outran them before."""
        with self._changed:
            return self._state.torn_often()

    def spoiled(self) -> set[int]:
        """Newer iterations than what is complete that some shadow lacks a side record of, permanently."""
        with self._changed:
            return {iteration for known in self._state.shadows for iteration in known.spoiled}

    def tell_without_seeds(self) -> bool:
        """Rank 0: go on without shadows that want seeds, which are not sent now; whether it still waits for others.

        Only this rank says what became of the other ranks' saves.
        """
        with self._changed:
            if self._identity.rank != 0 or self.fenced is not None:
                return False
            for number, known in enumerate(self._state.shadows):
                if known.wants and self._state.lags(number):
                    self._state.give_up(number)
            self._decide()
            return self.reachable and self._state.closed > self._state.complete

    # -- from shadows ----------------------------------------------------------------------------------------------

    def connected(self, shadow: int, welcome: Welcome) -> None:
        """A link has opened its control connection."""
        with self._changed:
            seeds = [(seeded.bucket, seeded.iteration) for seeded in welcome.seeds]
            self._state.connected(shadow, welcome.unseeded, welcome.gradient_slots, seeds)
            self._spills.connected(shadow, welcome.spills, welcome.spilling)
            self._why.pop(shadow, None)
            self._decide()

    def disconnected(self, shadow: int, why: str) -> None:
        """A link has lost its control connection."""
        with self._changed:
            self._state.disconnected(shadow)
            self._spills.disconnected(shadow)
            self._why[shadow] = why
            self._decide()

    def failing(self, shadow: int, why: str) -> None:
        """Remember why a link cannot connect; it is reported only if a wait times out."""
        with self._changed:
            self._why[shadow] = why

    def refused(self, shadow: int) -> None:
        """A shadow's process has ended, and what it held with it: there is nothing to wait for."""
        with self._changed:
            if self._state.lags(shadow):
                self._state.give_up(shadow)
                self._decide()

    def fenced_off(self, shadow: int, incarnation: int) -> None:
        """Another incarnation of this job has begun."""
        with self._changed:
            self._end_deciding(shadow, incarnation)

    def _end_deciding(self, shadow: int, incarnation: int) -> None:
        """From here on nothing is complete: shadows that are not fenced yet keep what the fenced ones hold as well."""
        if self.fenced is None:
            self.fenced = (
                f"shadow {self.links[shadow].address} is at incarnation {incarnation}, this training at "
                f"{self._identity.incarnation}: another incarnation of this job has taken over; nothing more is kept "
                "from here"
            )
            _log.error("checkmate: %s", self.fenced)
        self._changed.notify_all()

    def heard(self, shadow: int, message: Message) -> None:
        """A message of a shadow."""
        with self._changed:
            state = self._state
            if isinstance(message, Have):
                state.have(shadow, message.iteration)
            elif isinstance(message, Complete):
                if self._identity.rank != 0 and state.follow(message.iteration, message.lost):
                    self._announce(message)
            elif isinstance(message, Torn):
                if not set(message.buckets) <= state.shadows[shadow].wants.keys() or not message.buckets:
                    self._torn += 1
                    _log.warning("checkmate: shadow %d, iteration %d: %s", shadow, message.iteration, message.why)
                state.torn(shadow, message.iteration, message.buckets)
            elif isinstance(message, Diverged):
                self._diverged += 1
                _log.error(
                    "checkmate: bucket %d of shadow %d is not the training's after iteration %d; it is seeded again",
                    message.bucket,
                    shadow,
                    message.iteration,
                )
                state.diverged(shadow, message.bucket)
            elif isinstance(message, Seeded):
                state.seeded(shadow, message.bucket, message.iteration)
            elif isinstance(message, Refused) and message.fenced is not None:
                self._end_deciding(shadow, message.fenced)
            elif isinstance(message, Refused):
                _log.warning("checkmate: shadow %d: %s", shadow, message.why)
                state.seed_refused(shadow)
            elif isinstance(message, Spilled):
                self._spills.spilled(shadow, message.iteration, message.error is None)
                if message.error is not None:
                    _log.error("checkmate: shadow %d made nothing durable: %s", shadow, message.error)
            self._decide()

    def _decide(self) -> None:
        """Say what is complete now. Called with the lock held, whenever something has changed."""
        self._changed.notify_all()
        if self._identity.rank != 0 or self.fenced is not None:
            return
        while (complete := self._state.decide()) is not None:
            for link in self.links:
                link.post(complete, complete.iteration)
            self._announce(complete)

    def _announce(self, word: Complete) -> None:
        for number, link in enumerate(self.links):
            link.completed(word.iteration)
            link.data.patient = number not in word.lost
        self._on_complete(word)

    def _tick(self) -> None:
        """Rank 0: continue without shadows that lag for too long."""
        while not self._stop.wait(_TICK_S):
            if self._identity.rank != 0:
                continue
            now = time.monotonic()
            with self._changed:
                for number, known in enumerate(self._state.shadows):
                    progress = known.have or 0, self._state.complete
                    if not self._state.lags(number):
                        self._behind_since.pop(number, None)
                        self._last_progress.pop(number, None)
                        continue
                    if self._last_progress.get(number) != progress:
                        self._last_progress[number] = progress
                        self._behind_since[number] = now
                    if now - self._behind_since[number] > self._settings.behind_s:
                        _log.warning(
                            "checkmate: shadow %s has been behind for %g s; the others go on without it",
                            self.links[number].address,
                            self._settings.behind_s,
                        )
                        self._state.give_up(number)
                        self._decide()

    # -- facts -----------------------------------------------------------------------------------------------------

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients, side records and seeds that this rank has sent."""
        return sum(link.sent_bytes + link.data.sent_bytes for link in self.links)

    def facts(self) -> dict[str, Any]:
        """Counts of what went wrong and was healed; why nothing is kept any more, if so."""
        return {
            "fenced": self.fenced,
            "torn": self._torn,
            "diverged": self._diverged,
            "cut_off": sum(link.data.cuts for link in self.links),
            "waits": sum(link.data.waits for link in self.links),
        }
