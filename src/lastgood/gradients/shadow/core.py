"""A shadow without its connections: state, memory, receiver and spills, and the two threads that move them.

One lock guards all that is decided. Work in memory is done outside of it by the worker alone, one bucket at a time;
whoever must change memory as a whole (a new layout, a spill that is read back) stops the worker first.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from lastgood import _native
from lastgood.errors import CheckpointError, ConfigError, MismatchError, NoCheckpoint, WaitTimeout
from lastgood.gradients.layout.entries import Saved, Side
from lastgood.gradients.layout.layout import GradientLayout
from lastgood.gradients.protocol.messages import (
    Absent,
    Complete,
    Declare,
    Hello,
    Message,
    Seed,
    Status,
    Step,
    Verify,
    Welcome,
)
from lastgood.gradients.shadow.actions import DropSide, Open, Tell, Window
from lastgood.gradients.shadow.memory import BucketValue, ShadowMemory, memory_need
from lastgood.gradients.shadow.rank_records import SideShelf
from lastgood.gradients.shadow.settings import Counters, ShadowSettings
from lastgood.gradients.shadow.spill_store import SideRecord, SpillStore
from lastgood.gradients.shadow.state import ShadowState
from lastgood.gradients.shadow.worker import ShadowWorker
from lastgood.units import format_bytes
from lastgood.wire.frames import available_memory_bytes
from lastgood.wire.gate import FewLines

__all__ = ["ShadowCore"]

_log = logging.getLogger("lastgood.shadow")
_TICK_S = 0.2
_WORK_S = 60.0
"""For one bucket's work to end; it is bounded by the bucket's size."""
_RECEIVER_S = 5.0


class ShadowCore:
    """See the module. `tell` is called with the lock held: it must not wait."""

    def __init__(self, settings: ShadowSettings, tell: Callable[[Message, bool], None]) -> None:
        self.settings = settings
        self.state = ShadowState(settings.slots)
        self.counters = Counters()
        self._refused: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._odd_events = FewLines(_log.error, "records were received, and an error follows from them")
        self.change = threading.Condition(threading.RLock())
        self._tell = tell
        self.memory: ShadowMemory | None = None
        self.layout: GradientLayout | None = None
        self.receiver: _native.Receiver | None = None
        self.sides = SideShelf(settings.side_limit_bytes)
        self._data: dict[int, set[int]] = {}
        self.working = False
        self.paused = 0
        self.readers = 0
        self.restored: Saved | None = None
        self.ending = False
        self.store: SpillStore | None = None
        if settings.spill_directory is not None and (settings.spill_directory / "job.json").exists():
            self.store = SpillStore(settings.spill_directory, None, settings.shadow)
            self.state.job = self.store.job
        self._threads = [
            threading.Thread(target=ShadowWorker(self).run, name="worker", daemon=True),
            threading.Thread(target=self._listen, name="events", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads, the receiver and the spill that is under way."""
        with self.change:
            self.ending = True
            self.change.notify_all()
        for thread in self._threads:
            thread.join(_WORK_S)
        if self.receiver is not None:
            self.receiver.close(_RECEIVER_S)
        if self.store is not None:
            self.store.close()

    # -- what is so ------------------------------------------------------------------------------------------------

    def welcome(self) -> Welcome:
        """What a connection is told first."""
        with self.change:
            return Welcome(
                shadow=self.settings.shadow,
                shadows=self.settings.shadows,
                job=self.state.job,
                epoch=self.state.epoch,
                layout=self.state.layout if self.state.declared else None,
                gradient_slots=self.settings.slots,
                unseeded=tuple(self.state.unlanded) if self.state.declared else (),
                seeds=self.state.seeds if self.state.declared else (),
                spills=self._durable(),
                spilling=self.state.spilling if self.state.declared else (),
            )

    def status(self) -> Status:
        """What is held now."""
        with self.change:
            return Status(
                shadow=self.settings.shadow,
                shadows=self.settings.shadows,
                job=self.state.job,
                epoch=self.state.epoch,
                layout=self.state.layout,
                whole=self.state.whole,
                applied=self.state.applied,
                have=self.state.have,
                memory=tuple(self.state.restorable()),
                durable=self._durable(),
                promised=self.state.promised,
                refused=self.all_refused(),
            )

    def _durable(self) -> tuple[Saved, ...]:
        return tuple(spill.saved for spill in self.store.durable()) if self.store else ()

    def all_refused(self) -> dict[str, int]:
        """Records and connections that were refused, by cause."""
        with self.change:
            with self._counting:
                found = dict(self._refused)
            for cause, count in (self.receiver.refused() if self.receiver else {}).items():
                found[cause] = found.get(cause, 0) + count
            return found

    def receiver_counters(self) -> dict[str, float]:
        """Of the records received; empty before a layout is declared."""
        with self.change:
            return self.receiver.counters() if self.receiver else {}

    def memory_bytes(self) -> int:
        """What the declared layout was given."""
        with self.change:
            return self.memory.need.total if self.memory else 0

    def refuse(self, cause: str) -> None:
        """Count something that was refused. Never waits for what is done to the state."""
        with self._counting:
            self._refused[cause] += 1

    # -- epochs ----------------------------------------------------------------------------------------------------

    def fence(self, job: str | None, epoch: int) -> None:
        """Begin an epoch. Raises MismatchError for another job or an old epoch, StorageError for the spill's folder."""
        with self.change:
            job = job or self.state.job
            if job is None:
                raise MismatchError("this shadow has no job yet, and the fence names none")
            if self.store is None and self.settings.spill_directory is not None and self.state.job in (None, job):
                self.store = SpillStore(self.settings.spill_directory, job, self.settings.shadow)
            self.state.fence(job, epoch)
            if self.store is not None:
                self.store.fence(epoch)
            self.counters.fences += 1
            self._data.clear()
            self.restored = None
            if self.receiver is not None:
                self.receiver.begin(epoch, keep=True)
                self._count_whole()
            self.flow()
        _log.info("epoch %d", epoch)

    def declare(self, epoch: int, message: Declare, answer: Callable[[Welcome], None]) -> None:
        """The trainers' layout; `answer` is called before anything else is told to them.

        Raises MismatchError for another epoch, ConfigError where there is no room, CorruptCheckpoint for no layout.
        """
        layout = GradientLayout.from_data(message.layout, "the trainers")
        settings = self.settings
        if layout.shadows != settings.shadows or settings.trainers not in (None, layout.ranks):
            raise MismatchError(
                f"the trainers are {layout.ranks} ranks with {layout.shadows} shadows; this one was started for "
                f"{settings.trainers or 'any number of'} ranks with {settings.shadows} shadows"
            )
        owned = layout.buckets_of(settings.shadow)
        if not owned:
            raise ConfigError(
                f"the layout's {len(layout.buckets)} buckets leave none for shadow {settings.shadow}; use fewer shadows"
            )
        if self.store is not None:
            self.store.wait(_WORK_S)  # without the lock, which a spill's end takes
        with self.stopped():
            if epoch != self.state.epoch:
                raise MismatchError(f"epoch {epoch} is fenced off; this shadow's is {self.state.epoch}")
            if self.state.declared:
                if layout.digest != self.state.layout:
                    raise MismatchError("another layout was declared in this epoch; fence before a new one")
                answer(self.welcome())
                return
            self.settle_memory(layout)
            if self.store is not None:
                # Before anything is declared: where it fails, the trainers come again, and all of this is done again.
                kept = self.state.keeps(layout.digest, message.adopt)
                self.store.begin_epoch(epoch, message.adopt, self.restored if kept else None)
            kept = self.state.declare(
                layout.digest, owned, layout.side_ranks_of(settings.shadow), layout.ranks, message.adopt
            )
            assert self.memory is not None and self.receiver is not None
            self.memory.drop_landed()
            if not kept:
                for bucket in owned:
                    self.memory.drop(bucket)
            self.sides.forget_layouts()
            self.receiver.begin(epoch, keep=False)
            answer(self.welcome())
            self.flow()
        _log.info("layout of %d buckets declared, %s", len(layout.buckets), "state kept" if kept else "no values yet")

    def settle_memory(self, layout: GradientLayout) -> None:
        """Memory and a receiver for this layout; nothing changes where both are there, or where it does not fit.

        Raises ConfigError where there is no room, WaitTimeout where the old receiver does not end.
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
            if self.receiver is not None and not self.receiver.close(_RECEIVER_S):
                raise WaitTimeout(
                    f"waited {_RECEIVER_S:g} s for the threads that receive gradients to end: they may write into the "
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
        self.receiver = _native.Receiver(
            int.from_bytes(bytes.fromhex(self.state.job)[:8], "little"),
            self.state.epoch,
            [(bucket, layout.buckets[bucket].nbytes, layout.buckets[bucket].dtype) for bucket in memory.owned],
            memory.slot_addresses(),
            threads=settings.receive_threads,
            cpus=settings.receive_cpus,
            stall_s=settings.timeout_s,
            owner=memory,
        )
        self.memory, self.layout = memory, layout
        _log.info("%s for this layout: %s", format_bytes(memory.need.total), memory.need)

    # -- from trainers ---------------------------------------------------------------------------------------------

    def admit(self, hello: Hello) -> None:
        """Check a hello of a trainer. Raises MismatchError, saying why it is refused."""
        with self.change:
            state = self.state
            if hello.job != state.job or state.job is None:
                raise MismatchError(f"this shadow's job is {state.job}, not {hello.job}; fence first")
            if hello.epoch != state.epoch:
                raise MismatchError(f"epoch {hello.epoch} is fenced off; this shadow's is {state.epoch}")
            if hello.role == "data" or hello.layout is not None:
                if not state.declared:
                    raise MismatchError("no layout is declared in this epoch yet; try again")
                if hello.layout != state.layout:
                    raise MismatchError("another layout is declared in this epoch")
            if state.declared and self.layout is not None and hello.rank >= self.layout.ranks:
                raise MismatchError(f"rank {hello.rank} of {self.layout.ranks}")

    def receive_from(self, descriptor: int, hello: Hello) -> None:
        """Read a rank's records from now on. Raises MismatchError where its epoch is over."""
        with self.change:
            self.admit(hello)
            assert self.receiver is not None
            number = self.receiver.add(descriptor, hello.rank)
            self._data.setdefault(hello.rank, set()).add(number)
            self.state.connected(hello.rank)

    def greet(self, rank: int, tell: Callable[[Message], None]) -> None:
        """A rank's control connection is there (again). What only this rank needs to hear goes to `tell`."""
        with self.change:
            if rank == 0:
                self.state.greet()
                self.flow()
            else:
                for message in self.state.news():
                    tell(message)

    def step(self, epoch: int, message: Step) -> None:
        """See `Step`."""
        with self._current(epoch):
            self.state.step(message)
            assert self.layout is not None
            for bucket in self.layout.buckets_of(self.settings.shadow):
                if self.layout.buckets[bucket].nbytes == 0:  # no record ever comes for it
                    self.state.received(bucket, message.iteration)

    def absent(self, epoch: int, rank: int, message: Absent) -> None:
        """See `Absent`."""
        with self._current(epoch):
            self.state.absent(rank, message)

    def complete(self, epoch: int, message: Complete) -> None:
        """See `Complete`."""
        with self._current(epoch):
            self.state.complete(message)

    def verify(self, epoch: int, message: Verify) -> None:
        """See `Verify`."""
        with self._current(epoch):
            self.state.check(message.bucket, message.iteration, message.checksum)

    @contextlib.contextmanager
    def side_room(self, message: Side) -> Iterator[bool]:
        """Room for a side record while it arrives, which others do not get meanwhile; False where there is none."""
        with self.change:
            found = self.sides.reserve(message.nbytes)
        try:
            yield found
        finally:
            if found:
                with self.change:
                    self.sides.release(message.nbytes)

    def side(self, epoch: int, message: Side, content: bytes | None) -> None:
        """A side record, or None where it was too long to keep."""
        with self._current(epoch):
            described = self.sides.described(message)
            if content is None or described is None:
                why = "its layout was never sent" if described is None else "side records take all their memory"
                self.state.side_refused(message.rank, message.iteration, why)
            elif self.state.side(message.rank, message.iteration):
                self.sides.put(SideRecord(described, content))
                self.counters.side_bytes += len(content)

    # -- seeds -----------------------------------------------------------------------------------------------------

    def begin_seed(self, epoch: int, message: Seed, other: str) -> tuple[BucketValue, list[memoryview]]:
        """Memory for a seed. Raises CheckpointError where it is not wanted now, or is none."""
        with self._current(epoch):
            if self.memory is None or message.bucket not in self.memory.owned:
                raise MismatchError(f"bucket {message.bucket} is not this shadow's")
            value = self.memory.new_value(message.bucket)
            views = value.targets(message.entries, other)
            self.state.seed_begun(message.bucket, message.iteration)
            return value, views

    def end_seed(self, epoch: int, message: Seed, value: BucketValue) -> None:
        """All of it is there. Raises MismatchError where it is not this optimizer's state."""
        value.finish()
        with self._current(epoch):
            if self.memory is not None and self.state.is_landing(message.bucket, message.iteration):
                self.memory.keep(value)
                self.state.seed_landed(message.bucket)
                self.counters.seeds += 1
                self.counters.seed_bytes += sum(entry.nbytes for entry in message.entries)

    def fail_seed(self, epoch: int, message: Seed) -> None:
        """It will not come whole."""
        with self.change:
            if epoch == self.state.epoch and self.state.is_landing(message.bucket, message.iteration):
                self.state.seed_failed(message.bucket)
                self.flow()

    # -- for its worker and for restores -----------------------------------------------------------------------------

    def spills(self) -> SpillStore:
        """Raises NoCheckpoint where there are none."""
        if self.store is None:
            raise NoCheckpoint("this shadow spills nothing (--spill-dir)")
        return self.store

    def check_fenced(self, epoch: int) -> None:
        """Raises MismatchError, CheckpointError where no restore is possible now."""
        if epoch != self.state.epoch:
            raise MismatchError(f"epoch {epoch} is fenced off; this shadow's is {self.state.epoch}")
        if self.state.declared:
            raise CheckpointError(f"training goes on in epoch {epoch} already; a restore fences first")

    # -- inside ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _current(self, epoch: int) -> Iterator[None]:
        """For a trainer's message: with the lock, and what follows from it afterwards."""
        with self.change:
            if epoch != self.state.epoch or not self.state.declared:
                self.refuse("stale message")
                raise MismatchError(f"epoch {epoch} is fenced off, or has no layout yet")
            yield
            self.flow()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """With the lock, while nothing is done in memory and nobody reads it."""
        with self.change:
            self.paused += 1
            try:
                if not self.change.wait_for(lambda: not self.working and not self.readers, _WORK_S):
                    raise WaitTimeout(f"waited {_WORK_S:g} s for the work in memory (or a restore's reader) to end")
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

    def _listen(self) -> None:
        """Take the receiver's events."""
        while not self.ending:
            with self.change:
                if self.receiver is None:
                    self.change.wait(_TICK_S)
                receiver = self.receiver
            if receiver is not None:
                # Waiting is done without the lock; what is taken, with it, so that a fence misses nothing.
                events = receiver.poll(_TICK_S)
                with self.change:
                    if receiver is self.receiver:
                        self._obey(events)
                        self.flow()

    def _count_whole(self) -> None:
        """Iterations that are whole in their slots, and whose events are lost, or on their way to `_obey`."""
        assert self.receiver is not None
        for bucket, at in self.state.positions.items():
            for iteration in range((at or 0) + 1, (at or 0) + 1 + self.settings.slots):
                if self.receiver.complete(bucket, iteration):
                    self.state.received(bucket, iteration)

    def _obey(self, events: Sequence[_native.ReceiverEvent]) -> None:
        for event in events:
            try:
                self._obey_one(event)
            except Exception as error:  # whatever one rank's records bring, the other ranks' events must still be heard
                self._odd_events(f"rank {event.rank}: {error!r}")

    def _obey_one(self, event: _native.ReceiverEvent) -> None:
        assert self.receiver is not None
        if event.kind == "complete":
            # It may have been overwritten since, where the bucket waits for a seed.
            if self.receiver.complete(event.bucket, event.iteration):
                self.state.received(event.bucket, event.iteration)
        elif event.kind == "end":
            if event.connection in self._data.get(event.rank, ()):
                self.state.ended(event.rank, event.iteration)
        else:
            held = self._data.get(event.rank, set())
            if event.connection in held:
                held.discard(event.connection)
                if event.cause:
                    _log.warning("rank %d's records end: %s", event.rank, event.cause)
                if not held:
                    self.state.gone(event.rank)

    @staticmethod
    def process_usage() -> tuple[float, int]:
        """CPU seconds (user and system) and peak resident bytes of this process."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024
