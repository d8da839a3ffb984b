"""What all threads of a shadow share: what it holds and decides, its memory and its spills, under one lock.

Work in memory is done without the lock by the worker alone, one bucket at a time; whoever must change memory as a whole
(a new layout, a spill that is read back) stops the worker first.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from lastgood.errors import CheckpointError, MismatchError, NoCheckpoint, WaitTimeout
from lastgood.gradients.layout.entries import Saved
from lastgood.gradients.layout.layout import GradientLayout
from lastgood.gradients.protocol.messages import Message
from lastgood.gradients.shadow.actions import DropSide, Open, Tell, Window
from lastgood.gradients.shadow.memory import ShadowMemory, memory_need
from lastgood.gradients.shadow.rank_records import RankRecords
from lastgood.gradients.shadow.receiver import GradientReceiver, OpenReceiver, open_native_receiver
from lastgood.gradients.shadow.settings import Counters, ShadowSettings
from lastgood.gradients.shadow.spill_store import SpillStore
from lastgood.gradients.shadow.state import ShadowState
from lastgood.units import format_bytes
from lastgood.wire.frames import available_memory_bytes

__all__ = ["RECEIVER_S", "WORK_S", "ShadowBody"]

_log = logging.getLogger("lastgood.shadow")
WORK_S = 60.0
"""For one bucket's work to end; it is bounded by the bucket's size."""
RECEIVER_S = 5.0
"""For the threads that receive gradients to end."""


class ShadowBody:
    """See the module. Whatever is read or changed here needs `change` held. `tell` is called so: it must not wait."""

    def __init__(
        self,
        settings: ShadowSettings,
        tell: Callable[[Message, bool], None],
        open_receiver: OpenReceiver = open_native_receiver,
    ) -> None:
        self.settings = settings
        self.state = ShadowState(settings.slots)
        self.counters = Counters()
        self.change = threading.Condition(threading.RLock())
        self._tell = tell
        self._open_receiver = open_receiver
        self.memory: ShadowMemory | None = None
        self.layout: GradientLayout | None = None
        self.receiver: GradientReceiver | None = None
        self.sides = RankRecords(settings.side_limit_bytes)
        self.working = False
        """Whether the worker is in memory."""
        self.paused = 0
        """So many want the worker to stay out of memory."""
        self.readers = 0
        """So many read memory, which does not change meanwhile."""
        self.restored: Saved | None = None
        """What was given back in this incarnation."""
        self.ending = False
        self.store: SpillStore | None = None
        if settings.spill_directory is not None and (settings.spill_directory / "job.json").exists():
            self.store = SpillStore(settings.spill_directory, None, settings.shadow)
            self.state.job = self.store.job

    def settle_memory(self, layout: GradientLayout) -> None:
        """Memory and a receiver for this layout; nothing changes if both are there, or if it does not fit.

        Raises ConfigError if there is no room, WaitTimeout if the old receiver does not end.
        """
        if self.layout is not None and self.layout.digest == layout.digest:
            return
        settings = self.settings
        taken = self.memory.need.total if self.memory else 0
        limit = settings.limit_bytes or available_memory_bytes() + taken
        spills = settings.spill_directory is not None
        need = memory_need(layout, settings.shadow, settings.slots, spills=spills)
        if need.total <= min(limit, available_memory_bytes() + taken):
            self.layout = None
            if self.receiver is not None and not self.receiver.close(RECEIVER_S):
                raise WaitTimeout(
                    f"waited {RECEIVER_S:g} s for the threads that receive gradients to end: they may write into the "
                    "old layout's memory still; declare the new one again"
                )
            self.receiver = None
            if self.memory is not None:  # the old one's memory goes back before the new one's is taken
                self.memory = None
                self.state.emptied()
        else:
            limit = min(limit, available_memory_bytes() + taken)
        memory = ShadowMemory(
            layout, settings.shadow, slots=settings.slots, limit_bytes=limit, threads=settings.threads, spills=spills
        )
        assert self.state.job is not None
        self.receiver = self._open_receiver(self.state.job, self.state.incarnation, layout, memory, settings)
        self.memory, self.layout = memory, layout
        _log.info("%s for this layout: %s", format_bytes(memory.need.total), memory.need)

    def spills(self) -> SpillStore:
        """Raises NoCheckpoint if there are none."""
        if self.store is None:
            raise NoCheckpoint("this shadow spills nothing (--spill-dir)")
        return self.store

    def check_current(self, incarnation: int) -> None:
        """Raises MismatchError for another incarnation than this shadow's."""
        if incarnation != self.state.incarnation:
            raise MismatchError(f"incarnation {incarnation} is fenced off; this shadow's is {self.state.incarnation}")

    def check_fenced(self, incarnation: int) -> None:
        """Raises MismatchError, CheckpointError if no restore is possible now."""
        self.check_current(incarnation)
        if self.state.declared:
            raise CheckpointError(f"training goes on in incarnation {incarnation} already; a restore fences first")

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """With the lock, while nothing is done in memory and nobody reads it."""
        with self.change:
            self.paused += 1
            try:
                if not self.change.wait_for(lambda: not self.working and not self.readers, WORK_S):
                    raise WaitTimeout(f"waited {WORK_S:g} s for the work in memory (or a restore's reader) to end")
                yield
            finally:
                self.paused -= 1
                self.change.notify_all()

    def flow(self) -> None:
        """Do what the state asks for at the border. The caller holds the lock."""
        while outputs := self.state.take():
            for output in outputs:
                if isinstance(output, Tell):
                    self._tell(output.message, output.everyone)
                elif isinstance(output, DropSide):
                    self.sides.drop(output.iteration)
                elif isinstance(output, Open):
                    if self.receiver is not None:
                        self.receiver.reset(output.bucket)
                elif isinstance(output, Window) and self.receiver is not None:
                    placed = self.receiver.set_first(output.bucket, output.first)
                    if output.ask:
                        self.state.window_set(output.bucket, self._held(output) if placed else None)
        self.change.notify_all()

    def _held(self, window: Window) -> list[int]:
        assert self.receiver is not None
        following = range(window.first, window.first + self.settings.slots)
        return [one for one in following if self.receiver.complete(window.bucket, one)]
