"""A shadow without its connections: what each message of the trainers does to it, and what its receiver hears."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from lastgood.errors import ConfigError, MismatchError
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
from lastgood.gradients.shadow.body import RECEIVER_S, WORK_S, ShadowBody
from lastgood.gradients.shadow.memory import BucketValue
from lastgood.gradients.shadow.receiver import OpenReceiver, ReceiverEvent, open_native_receiver
from lastgood.gradients.shadow.settings import ShadowSettings
from lastgood.gradients.shadow.spill_store import SideRecord, SpillStore
from lastgood.gradients.shadow.worker import ShadowWorker
from lastgood.wire.gate import FewLines

__all__ = ["ShadowCore"]

_log = logging.getLogger("lastgood.shadow")
_TICK_S = 0.2


class ShadowCore:
    """See the module. `tell` is called with the lock held: it must not wait."""

    def __init__(
        self,
        settings: ShadowSettings,
        tell: Callable[[Message, bool], None],
        open_receiver: OpenReceiver = open_native_receiver,
    ) -> None:
        self.body = ShadowBody(settings, tell, open_receiver)
        self._state = self.body.state
        self.settings = settings
        self._refused: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._odd_events = FewLines(_log.error, "records were received, and an error follows from them")
        self._data: dict[int, set[int]] = {}
        self._threads = [
            threading.Thread(target=ShadowWorker(self.body).run, name="worker", daemon=True),
            threading.Thread(target=self._listen, name="events", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads, the receiver and the spill that is in progress."""
        with self.body.change:
            self.body.ending = True
            self.body.change.notify_all()
        for thread in self._threads:
            thread.join(WORK_S)
        if self.body.receiver is not None:
            self.body.receiver.close(RECEIVER_S)
        if self.body.store is not None:
            self.body.store.close()

    # -- what is so ------------------------------------------------------------------------------------------------

    def welcome(self) -> Welcome:
        """What a connection is told first."""
        with self.body.change:
            return Welcome(
                shadow=self.settings.shadow,
                shadows=self.settings.shadows,
                job=self._state.job,
                epoch=self._state.incarnation,
                layout=self._state.layout if self._state.declared else None,
                gradient_slots=self.settings.slots,
                unseeded=tuple(self._state.held.unlanded) if self._state.declared else (),
                seeds=self._state.seeds if self._state.declared else (),
                spills=self._durable(),
                spilling=self._state.spill.open if self._state.declared else (),
            )

    def status(self) -> Status:
        """What is held now."""
        with self.body.change:
            return Status(
                shadow=self.settings.shadow,
                shadows=self.settings.shadows,
                job=self._state.job,
                epoch=self._state.incarnation,
                layout=self._state.layout,
                whole=self._state.held.whole,
                applied=self._state.held.applied,
                have=self._state.held.have,
                memory=tuple(self._state.held.restorable()),
                durable=self._durable(),
                promised=self._state.promised,
                refused=self.all_refused(),
            )

    def _durable(self) -> tuple[Saved, ...]:
        return tuple(spill.saved for spill in self.body.store.durable()) if self.body.store else ()

    def all_refused(self) -> dict[str, int]:
        """Records and connections that were refused, by cause."""
        with self.body.change:
            with self._counting:
                found = dict(self._refused)
            for cause, count in (self.body.receiver.refused() if self.body.receiver else {}).items():
                found[cause] = found.get(cause, 0) + count
            return found

    def refuse(self, cause: str) -> None:
        """Count something that was refused. Never waits for what is done to the state."""
        with self._counting:
            self._refused[cause] += 1

    # -- incarnations ----------------------------------------------------------------------------------------------

    def fence(self, job: str | None, incarnation: int) -> None:
        """Begin an incarnation. Raises MismatchError for another job or an older one, StorageError for spills."""
        with self.body.change:
            job = job or self._state.job
            if job is None:
                raise MismatchError("this shadow has no job yet, and the fence names none")
            folder = self.settings.spill_directory
            if self.body.store is None and folder is not None and self._state.job in (None, job):
                self.body.store = SpillStore(folder, job, self.settings.shadow)
            self._state.fence(job, incarnation)
            if self.body.store is not None:
                self.body.store.fence(incarnation)
            self.body.counters.fences += 1
            self._data.clear()
            self.body.restored = None
            if self.body.receiver is not None:
                self.body.receiver.begin(incarnation, keep=True)
                self._count_whole()
            self.body.flow()
        _log.info("incarnation %d", incarnation)

    def distrust(self, incarnation: int, iteration: int) -> None:
        """Begin an incarnation without what was made of an iteration that is not the trainers': no value is held then.

        Raises as `fence`, and WaitTimeout.
        """
        with self.body.stopped():
            self.fence(None, incarnation)
            if self.body.memory is not None:
                self.body.memory.forget(values=True)
            self._state.emptied()
            if self.body.store is not None:
                self.body.store.distrust(iteration)
            self.body.flow()

    def declare(self, incarnation: int, message: Declare, answer: Callable[[Welcome], None]) -> None:
        """The trainers' layout; `answer` is called before anything else is told to them.

        Raises MismatchError for another incarnation, ConfigError if there is no room, CorruptCheckpoint for no layout.
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
        if self.body.store is not None:
            self.body.store.wait(WORK_S)  # without the lock, which a spill's end takes
        with self.body.stopped():
            self.body.check_current(incarnation)
            if self._state.declared:
                if layout.digest != self._state.layout:
                    raise MismatchError("another layout was declared in this incarnation; fence before a new one")
                answer(self.welcome())
                return
            self.body.settle_memory(layout)
            if self.body.store is not None:
                # Before anything is declared: if it fails, the trainers come again, and all of this is done again.
                kept = self._state.keeps(layout.digest, message.adopt)
                self.body.store.begin_incarnation(incarnation, message.adopt, self.body.restored if kept else None)
            kept = self._state.declare(
                layout.digest, owned, layout.side_ranks_of(settings.shadow), layout.ranks, message.adopt
            )
            assert self.body.memory is not None and self.body.receiver is not None
            self.body.memory.forget(values=not kept)
            self.body.sides.forget_layouts()
            self.body.receiver.begin(incarnation, keep=False)
            answer(self.welcome())
            self.body.flow()
        _log.info("layout of %d buckets declared, %s", len(layout.buckets), "state kept" if kept else "no values yet")

    # -- from trainers ---------------------------------------------------------------------------------------------

    def admit(self, hello: Hello) -> None:
        """Check a hello of a trainer. Raises MismatchError, saying why it is refused."""
        with self.body.change:
            state = self._state
            if hello.job != state.job or state.job is None:
                raise MismatchError(f"this shadow's job is {state.job}, not {hello.job}; fence first")
            self.body.check_current(hello.epoch)
            if hello.role == "data" or hello.layout is not None:
                if not state.declared:
                    raise MismatchError("no layout is declared in this incarnation yet; try again")
                if hello.layout != state.layout:
                    raise MismatchError("another layout is declared in this incarnation")
            if state.declared and self.body.layout is not None and hello.rank >= self.body.layout.ranks:
                raise MismatchError(f"rank {hello.rank} of {self.body.layout.ranks}")

    def receive_from(self, descriptor: int, hello: Hello) -> None:
        """Read a rank's records from now on. Raises MismatchError if its incarnation is over."""
        with self.body.change:
            self.admit(hello)
            assert self.body.receiver is not None
            number = self.body.receiver.add(descriptor, hello.rank)
            self._data.setdefault(hello.rank, set()).add(number)
            self._state.connected(hello.rank)

    def greet(self, rank: int, tell: Callable[[Message], None]) -> None:
        """A rank's control connection is there (again). What only this rank needs to hear goes to `tell`."""
        with self.body.change:
            if rank == 0:
                self._state.greet()
                self.body.flow()
            else:
                for message in self._state.news():
                    tell(message)

    def hear(self, incarnation: int, rank: int, message: Step | Absent | Complete | Verify) -> None:
        """What needs no stream after it; see these messages."""
        with self._current(incarnation):
            if isinstance(message, Step):
                self._state.step(message)
                assert self.body.layout is not None
                for bucket in self.body.layout.buckets_of(self.settings.shadow):
                    if self.body.layout.buckets[bucket].nbytes == 0:  # no record ever comes for it
                        self._state.received(bucket, message.iteration)
            elif isinstance(message, Absent):
                self._state.absent(rank, message)
            elif isinstance(message, Complete):
                self._state.complete(message)
            else:
                self._state.check(message.bucket, message.iteration, message.checksum)

    @contextlib.contextmanager
    def side_room(self, message: Side) -> Iterator[bool]:
        """Room for a side record while it arrives, which others do not get meanwhile; False if there is none."""
        with self.body.change:
            found = self.body.sides.reserve(message.nbytes)
        try:
            yield found
        finally:
            if found:
                with self.body.change:
                    self.body.sides.release(message.nbytes)

    def side(self, incarnation: int, message: Side, content: bytes | None) -> None:
        """A side record, or None if it was too long to keep."""
        with self._current(incarnation):
            described = self.body.sides.described(message)
            if content is None or described is None:
                why = "its layout was never sent" if described is None else "side records take all their memory"
                self._state.side_refused(message.rank, message.iteration, why)
            elif self._state.side(message.rank, message.iteration):
                self.body.sides.put(SideRecord(described, content))
                self.body.counters.side_bytes += len(content)

    # -- seeds -----------------------------------------------------------------------------------------------------

    def begin_seed(self, incarnation: int, message: Seed, other: str) -> tuple[BucketValue, list[memoryview]]:
        """Memory for a seed. Raises CheckpointError if it is not wanted now, or is none."""
        with self._current(incarnation):
            if self.body.memory is None or message.bucket not in self.body.memory.owned:
                raise MismatchError(f"bucket {message.bucket} is not this shadow's")
            value = self.body.memory.new_value(message.bucket)
            views = value.targets(message.entries, other)
            self._state.seed_begun(message.bucket, message.iteration)
            return value, views

    def end_seed(self, incarnation: int, message: Seed, value: BucketValue) -> None:
        """All of it is there. Raises MismatchError if it is not this optimizer's state."""
        value.finish()
        with self._current(incarnation):
            if self.body.memory is not None and self._state.is_landing(message.bucket, message.iteration):
                self.body.memory.keep(value)
                self._state.seed_landed(message.bucket)
                self.body.counters.seeds += 1
                self.body.counters.seed_bytes += sum(entry.nbytes for entry in message.entries)

    def fail_seed(self, incarnation: int, message: Seed) -> None:
        """It will not come completely."""
        with self.body.change:
            landing = self._state.is_landing(message.bucket, message.iteration)
            if incarnation == self._state.incarnation and landing:
                self._state.seed_failed(message.bucket)
                self.body.flow()

    # -- inside ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _current(self, incarnation: int) -> Iterator[None]:
        """For a trainer's message: with the lock, and what follows from it afterwards."""
        with self.body.change:
            if incarnation != self._state.incarnation or not self._state.declared:
                self.refuse("stale message")
                raise MismatchError(f"incarnation {incarnation} is fenced off, or has no layout yet")
            yield
            self.body.flow()

    def _listen(self) -> None:
        """Take the receiver's events."""
        while not self.body.ending:
            with self.body.change:
                if self.body.receiver is None:
                    self.body.change.wait(_TICK_S)
                receiver = self.body.receiver
            if receiver is not None:
                # Waiting is done without the lock; what is taken, with it, so that a fence misses nothing.
                events = receiver.poll(_TICK_S)
                with self.body.change:
                    if receiver is self.body.receiver:
                        self._obey(events)
                        self.body.flow()

    def _count_whole(self) -> None:
        """Iterations that are complete in their slots, and whose events are lost, or on their way to `_obey`."""
        assert self.body.receiver is not None
        for bucket, base in self._state.held.bases.items():
            for iteration in range(base + 1, base + 1 + self.settings.slots):
                if self.body.receiver.complete(bucket, iteration):
                    self._state.received(bucket, iteration)

    def _obey(self, events: Sequence[ReceiverEvent]) -> None:
        for event in events:
            try:
                self._obey_one(event)
            except Exception as error:  # whatever one rank's records bring, the other ranks' events must still be heard
                self._odd_events(f"rank {event.rank}: {error!r}")

    def _obey_one(self, event: ReceiverEvent) -> None:
        assert self.body.receiver is not None
        if event.kind == "complete":
            # It may have been overwritten since, if the bucket waits for a seed.
            if self.body.receiver.complete(event.bucket, event.iteration):
                self._state.received(event.bucket, event.iteration)
        elif event.kind == "end":
            if event.connection in self._data.get(event.rank, ()):
                self._state.ended(event.rank, event.iteration)
        else:
            held = self._data.get(event.rank, set())
            if event.connection in held:
                held.discard(event.connection)
                if event.cause:
                    _log.warning("rank %d's records end: %s", event.rank, event.cause)
                if not held:
                    self._state.gone(event.rank)
