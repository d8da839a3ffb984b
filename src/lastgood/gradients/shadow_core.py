"""A shadow without its connections: state, memory, receiver and spills, and the two threads that move them.

One lock guards all that is decided. Work in memory is done outside of it by the worker alone, one bucket at a time;
whoever must change memory as a whole (a new layout, a spill that is read back) stops the worker first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lastgood import _native
from lastgood.errors import CheckpointError, ConfigError, LastgoodError, MismatchError, NoCheckpoint, WaitTimeout
from lastgood.gradients.layout import GradientLayout
from lastgood.gradients.messages import (
    Complete,
    Declare,
    Entry,
    Hello,
    Message,
    Saved,
    Seed,
    Side,
    Status,
    Step,
    Verify,
    Welcome,
)
from lastgood.gradients.shadow_actions import Apply, Check, Commit, Copy, DropSide, Open, Tell, Window, Work
from lastgood.gradients.shadow_memory import BucketValue, ShadowMemory, memory_need, tensor_bytes
from lastgood.gradients.shadow_state import ShadowState
from lastgood.gradients.spill import SideRecord, SpillCopy, SpillStore
from lastgood.units import GIB, format_bytes
from lastgood.wire.frames import available_memory_bytes

__all__ = ["Counters", "ShadowCore", "ShadowSettings"]

_log = logging.getLogger("lastgood.shadow")
_TICK_S = 0.2
_WORK_S = 60.0
"""For one bucket's work to end; it is bounded by the bucket's size."""
_LOAD_S = 600.0


@dataclass(frozen=True)
class ShadowSettings:
    """How one shadow is to run."""

    shadow: int
    shadows: int
    trainers: int | None = None
    """Ranks that may declare; None: whatever they say."""
    slots: int = 4
    """Gradients of how many iterations each bucket can hold."""
    limit_bytes: int = 0
    """Memory for all that a layout needs; 0: what is available when it is declared."""
    side_limit_bytes: int = GIB
    """Memory for all side records."""
    threads: int = 1
    """Of the optimizer."""
    receive_threads: int = 1
    cpus: tuple[int, ...] = ()
    """Where the optimizer stays; none: wherever the kernel likes."""
    receive_cpus: tuple[int, ...] = ()
    spill_directory: Path | None = None
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.shadow < self.shadows:
            raise ConfigError(f"shadow {self.shadow} of {self.shadows}: its number must be below theirs")
        if self.slots < 2:
            raise ConfigError(
                f"{self.slots} gradient slots: at least 2 are needed, so that one fills while one is kept"
            )
        if min(self.threads, self.receive_threads) < 1:
            raise ConfigError("a shadow needs at least one thread for each of its two tasks")


@dataclass
class Counters:
    """What a shadow has done since it began."""

    applied_iterations: int = 0
    applied_buckets: int = 0
    optimizer_s: float = 0.0
    seeds: int = 0
    seed_bytes: int = 0
    spills: int = 0
    spill_errors: int = 0
    diverged: int = 0
    checks: int = 0
    fences: int = 0
    side_bytes: int = 0


class ShadowCore:
    """See the module. `tell` is called with the lock held: it must not wait."""

    def __init__(self, settings: ShadowSettings, tell: Callable[[Message, bool], None]) -> None:
        self.settings = settings
        self.state = ShadowState(settings.slots)
        self.counters = Counters()
        self.refused: dict[str, int] = {}
        self.change = threading.Condition(threading.RLock())
        self._tell = tell
        self._memory: ShadowMemory | None = None
        self._layout: GradientLayout | None = None
        self._receiver: _native.Receiver | None = None
        self._sides: dict[int, dict[int, SideRecord]] = {}
        self._side_layouts: dict[int, Side] = {}
        self._side_bytes = 0
        self._data: dict[int, set[int]] = {}
        self._copy: SpillCopy | None = None
        self._working = False
        self._paused = 0
        self._readers = 0
        self._loading = threading.Lock()
        self._restored: Saved | None = None
        self._ending = False
        self._store: SpillStore | None = None
        if settings.spill_directory is not None and (settings.spill_directory / "job.json").exists():
            self._store = SpillStore(settings.spill_directory, None, settings.shadow)
            self.state.job = self._store.job
        self._threads = [
            threading.Thread(target=self._work, name="worker", daemon=True),
            threading.Thread(target=self._listen, name="events", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads, the receiver and the spill that is under way."""
        with self.change:
            self._ending = True
            self.change.notify_all()
        for thread in self._threads:
            thread.join(_WORK_S)
        if self._receiver is not None:
            self._receiver.close(5.0)
        if self._store is not None:
            self._store.close()

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
                unseeded=tuple(self.state.unseeded) if self.state.declared else (),
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
                durable=tuple(spill.saved for spill in self._store.durable()) if self._store else (),
                refused=self.all_refused(),
            )

    def all_refused(self) -> dict[str, int]:
        """Records and connections that were refused, by cause."""
        with self.change:
            found = dict(self.refused)
            for cause, count in (self._receiver.refused() if self._receiver else {}).items():
                found[cause] = found.get(cause, 0) + count
            return found

    def receiver_counters(self) -> dict[str, float]:
        """Of the records received; empty before a layout is declared."""
        with self.change:
            return self._receiver.counters() if self._receiver else {}

    def memory_bytes(self) -> int:
        """What the declared layout was given."""
        with self.change:
            return self._memory.need.total if self._memory else 0

    def refuse(self, cause: str) -> None:
        """Count something that was refused."""
        with self.change:
            self.refused[cause] = self.refused.get(cause, 0) + 1

    # -- epochs ----------------------------------------------------------------------------------------------------

    def fence(self, job: str | None, epoch: int) -> None:
        """Begin an epoch. Raises MismatchError for another job or an old epoch, StorageError for the spill's folder."""
        with self.change:
            job = job or self.state.job
            if job is None:
                raise MismatchError("this shadow has no job yet, and the fence names none")
            if self._store is None and self.settings.spill_directory is not None and self.state.job in (None, job):
                self._store = SpillStore(self.settings.spill_directory, job, self.settings.shadow)
            self.state.fence(job, epoch)
            self.counters.fences += 1
            self._data.clear()
            self._restored = None
            if self._receiver is not None:
                self._receiver.begin(epoch, keep=True)
                self._count_whole()
            self._flow()
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
        if self._store is not None:
            self._store.wait(_WORK_S)  # without the lock, which a spill's end takes
        with self._stopped():
            if epoch != self.state.epoch:
                raise MismatchError(f"epoch {epoch} is fenced off; this shadow's is {self.state.epoch}")
            if self.state.declared:
                if layout.digest != self.state.layout:
                    raise MismatchError("another layout was declared in this epoch; fence before a new one")
                answer(self.welcome())
                return
            self._settle_memory(layout)
            restored = self._restored
            kept = self.state.declare(
                layout.digest, owned, layout.side_ranks_of(settings.shadow), layout.ranks, message.adopt
            )
            assert self._memory is not None and self._receiver is not None
            self._memory.drop_landed()
            if not kept:
                for bucket in owned:
                    self._memory.drop(bucket)
            self._side_layouts.clear()
            self._copy = None
            self._receiver.begin(epoch, keep=False)
            if self._store is not None:
                self._store.begin_epoch(epoch, restored if kept else None)
            answer(self.welcome())
            self._flow()
        _log.info("layout of %d buckets declared, %s", len(layout.buckets), "state kept" if kept else "no values yet")

    def _settle_memory(self, layout: GradientLayout) -> None:
        """Memory and a receiver for this layout; nothing changes where both are there, or where it does not fit."""
        if self._layout is not None and self._layout.digest == layout.digest:
            return
        settings = self.settings
        taken = self._memory.need.total if self._memory else 0
        limit = settings.limit_bytes or available_memory_bytes() + taken
        spills = settings.spill_directory is not None
        need = memory_need(layout, settings.shadow, settings.slots, spills=spills)
        if need.total <= min(limit, available_memory_bytes() + taken):
            self._memory = None  # the old one's memory goes back before the new one's is taken
            if self._receiver is not None:
                self._receiver.close(5.0)
                self._receiver = None
        else:
            limit = min(limit, available_memory_bytes() + taken)
        memory = ShadowMemory(
            layout, settings.shadow, slots=settings.slots, limit_bytes=limit, threads=settings.threads, spills=spills
        )
        assert self.state.job is not None
        self._receiver = _native.Receiver(
            int.from_bytes(bytes.fromhex(self.state.job)[:8], "little"),
            self.state.epoch,
            [(bucket, layout.buckets[bucket].nbytes, layout.buckets[bucket].dtype) for bucket in memory.owned],
            memory.slot_addresses(),
            threads=settings.receive_threads,
            cpus=settings.receive_cpus,
            stall_s=settings.timeout_s,
            owner=memory,
        )
        self._memory, self._layout = memory, layout
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
            if state.declared and self._layout is not None and hello.rank >= self._layout.ranks:
                raise MismatchError(f"rank {hello.rank} of {self._layout.ranks}")

    def receive_from(self, descriptor: int, hello: Hello) -> None:
        """Read a rank's records from now on. Raises MismatchError where its epoch is over."""
        with self.change:
            self.admit(hello)
            assert self._receiver is not None
            number = self._receiver.add(descriptor, hello.rank)
            self._data.setdefault(hello.rank, set()).add(number)
            self.state.connected(hello.rank)

    def greet(self) -> None:
        """Rank 0's control connection is there (again)."""
        with self.change:
            self.state.greet()
            self._flow()

    def step(self, epoch: int, message: Step) -> None:
        """See `Step`."""
        with self._current(epoch):
            self.state.step(message)
            assert self._layout is not None
            for bucket in self._layout.buckets_of(self.settings.shadow):
                if self._layout.buckets[bucket].nbytes == 0:  # no record ever comes for it
                    self.state.received(bucket, message.iteration)

    def complete(self, epoch: int, message: Complete) -> None:
        """See `Complete`."""
        with self._current(epoch):
            self.state.complete(message)
            store = self._store
        if store is not None and message.durable:
            store.confirm(message.durable, epoch)

    def verify(self, epoch: int, message: Verify) -> None:
        """See `Verify`."""
        with self._current(epoch):
            self.state.check(message.bucket, message.iteration, message.checksum)

    def side_room(self, message: Side) -> bool:
        """Whether a side record of this length can be kept."""
        with self.change:
            return self._side_bytes + message.nbytes <= self.settings.side_limit_bytes

    def side(self, epoch: int, message: Side, content: bytes | None) -> None:
        """A side record, or None where it was too long to keep."""
        with self._current(epoch):
            if message.layout is not None:
                self._side_layouts[message.rank] = message
            known = self._side_layouts.get(message.rank)
            if content is None or known is None:
                why = "side records take all memory set aside for them" if known else "its layout was never sent"
                self.state.side_refused(message.iteration, f"rank {message.rank}: {why}")
                return
            described = message.model_copy(update={"layout": known.layout})
            if self.state.side(message.rank, message.iteration):
                self._sides.setdefault(message.iteration, {})[message.rank] = SideRecord(described, content)
                self._side_bytes += len(content)
                self.counters.side_bytes += len(content)

    # -- seeds -----------------------------------------------------------------------------------------------------

    def begin_seed(self, epoch: int, message: Seed, other: str) -> tuple[BucketValue, list[memoryview]]:
        """Memory for a seed. Raises CheckpointError where it is not wanted now, or is none."""
        with self._current(epoch):
            if self._memory is None or message.bucket not in self._memory.owned:
                raise MismatchError(f"bucket {message.bucket} is not this shadow's")
            value = self._memory.new_value(message.bucket)
            views = value.targets(message.entries, other)
            self.state.seed_begun(message.bucket, message.iteration)
            return value, views

    def end_seed(self, epoch: int, message: Seed, value: BucketValue) -> None:
        """All of it is there. Raises MismatchError where it is not this optimizer's state."""
        value.finish()
        with self._current(epoch):
            if self._memory is not None and self.state.is_landing(message.bucket, message.iteration):
                self._memory.keep(value)
                self.state.seed_landed(message.bucket)
                self.counters.seeds += 1
                self.counters.seed_bytes += sum(entry.nbytes for entry in message.entries)

    def fail_seed(self, epoch: int, message: Seed) -> None:
        """It will not come whole."""
        with self.change:
            if epoch == self.state.epoch and self.state.is_landing(message.bucket, message.iteration):
                self.state.seed_failed(message.bucket)
                self._flow()

    # -- restores --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def fetched(self, epoch: int, saved: Saved, source: str) -> Iterator[list[tuple[Entry, memoryview]]]:
        """All tensors at a saved iteration; they do not change before this is left.

        Raises MismatchError for another epoch, CheckpointError or NoCheckpoint where it cannot be given back.
        """
        if source == "durable":
            self._read_back(epoch, saved)
        with self.change:
            self._check_fenced(epoch)
            if not self.state.restored(saved):
                self.state.restore_to(saved)
                self._flow()
                done = self.change.wait_for(
                    lambda: self.state.restored(saved) or self.state.epoch != epoch or self.state.declared,
                    _LOAD_S,
                )
                self._check_fenced(epoch)
                if not done:
                    raise WaitTimeout(f"waited {_LOAD_S:g} s for iteration {saved.iteration} to be applied")
            self._restored = saved
            self._readers += 1
        try:
            assert self._memory is not None
            yield [
                (entry, tensor_bytes(tensor))
                for bucket in self._memory.owned
                for entry, tensor in self._memory.value(bucket).tensors()
            ]
        finally:
            with self.change:
                self._readers -= 1
                self.change.notify_all()

    def fetch_side(self, epoch: int, saved: Saved, rank: int, source: str) -> SideRecord:
        """A rank's side record. Raises as `fetched` does."""
        with self.change:
            if epoch != self.state.epoch:
                raise MismatchError(f"epoch {epoch} is fenced off; this shadow's is {self.state.epoch}")
            if source == "memory":
                record = self._sides.get(saved.iteration, {}).get(rank)
                if record is None or self.state.saved_at(saved.iteration) != saved:
                    raise NoCheckpoint(f"no side record of rank {rank} is held for iteration {saved.iteration}")
                return record
            store = self._spills()
        return store.read_side(store.find(saved), rank)

    def _read_back(self, epoch: int, saved: Saved) -> None:
        """Make a spill this shadow's state, unless it is already."""
        with self._loading, self._stopped():
            self._check_fenced(epoch)
            store = self._spills()
            spill = store.find(saved)
            if self._restored == saved and self.state.restored(saved):
                return
            if self._memory is not None:
                store.verify(spill)  # before what is in memory is given up for it
            self._settle_memory(spill.layout)
            memory = self._memory
            assert memory is not None
            memory.drop_landed()
            for bucket in memory.owned:
                memory.drop(bucket)
            self.state.emptied()
            values: dict[int, BucketValue] = {}

            def take(bucket: int, entries: Sequence[Entry]) -> list[memoryview]:
                values[bucket] = memory.new_value(bucket)
                return values[bucket].targets(entries, str(spill.info.path))

            store.read(spill, take)
            sides = {side.rank: store.read_side(spill, side.rank) for side in spill.sides}
            for value in values.values():
                value.finish()
                memory.put(value)
            self.state.replaced(saved, spill.layout.digest, memory.owned, list(sides))
            self._flow()
            self._sides[saved.iteration] = sides
            self._side_bytes = sum(len(one.content) for held in self._sides.values() for one in held.values())
            self._restored = saved
        _log.info("iteration %d of epoch %d read back from %s", saved.iteration, saved.epoch, spill.info.path)

    def _spills(self) -> SpillStore:
        if self._store is None:
            raise NoCheckpoint("this shadow spills nothing (--spill-dir)")
        return self._store

    def _check_fenced(self, epoch: int) -> None:
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
            self._flow()

    @contextlib.contextmanager
    def _stopped(self) -> Iterator[None]:
        """With the lock, while nothing is done in memory and nobody reads it."""
        with self.change:
            self._paused += 1
            try:
                if not self.change.wait_for(lambda: not self._working and not self._readers, _WORK_S):
                    raise WaitTimeout(f"waited {_WORK_S:g} s for the work in memory (or a restore's reader) to end")
                yield
            finally:
                self._paused -= 1
                self.change.notify_all()

    def _flow(self) -> None:
        """Do what the state asks for at the border. The caller holds the lock."""
        while outputs := self.state.take():
            for output in outputs:
                if isinstance(output, Tell):
                    self._tell(output.message, output.everyone)
                elif isinstance(output, DropSide):
                    dropped = self._sides.pop(output.iteration, {})
                    self._side_bytes -= sum(len(one.content) for one in dropped.values())
                elif isinstance(output, Open):
                    if self._receiver is not None:
                        self._receiver.reset(output.bucket)
                elif isinstance(output, Window) and self._receiver is not None:
                    placed = self._receiver.set_first(output.bucket, output.first)
                    if output.ask:
                        self.state.window_set(output.bucket, self._held(output) if placed else None)
        self.change.notify_all()

    def _held(self, window: Window) -> list[int]:
        assert self._receiver is not None
        following = range(window.first, window.first + self.settings.slots)
        return [one for one in following if self._receiver.complete(window.bucket, one)]

    def _listen(self) -> None:
        """Take the receiver's events."""
        while not self._ending:
            with self.change:
                if self._receiver is None:
                    self.change.wait(_TICK_S)
                receiver = self._receiver
            if receiver is not None:
                # Waiting is done without the lock; what is taken, with it, so that a fence misses nothing.
                events = receiver.poll(_TICK_S)
                with self.change:
                    if receiver is self._receiver:
                        self._obey(events)
                        self._flow()

    def _count_whole(self) -> None:
        """Iterations that are whole in their slots, and whose events are lost, or on their way to `_obey`."""
        assert self._receiver is not None
        for bucket, at in self.state.positions.items():
            for iteration in range((at or 0) + 1, (at or 0) + 1 + self.settings.slots):
                if self._receiver.complete(bucket, iteration):
                    self.state.received(bucket, iteration)

    def _obey(self, events: Sequence[_native.ReceiverEvent]) -> None:
        assert self._receiver is not None
        for event in events:
            if event.kind == "complete":
                # It may have been overwritten since, where the bucket waits for a seed.
                if self._receiver.complete(event.bucket, event.iteration):
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

    def _work(self) -> None:
        if self.settings.cpus:
            os.sched_setaffinity(0, self.settings.cpus)
        while True:
            with self.change:
                work = None
                while not self._ending:
                    if not self._paused and not self._readers:
                        work = self.state.next_work()
                        self._flow()
                        if work is not None:
                            break
                    self.change.wait(_TICK_S)
                if work is None:
                    return
                self._working = True
            why = self._do(work)
            with self.change:
                self._working = False
                if why is None:
                    before = self.state.applied
                    self.state.done(work)
                    if isinstance(work, Apply):
                        self.counters.applied_iterations += self.state.applied - before
                else:
                    _log.error("bucket %d, iteration %d: %s", work.bucket, work.iteration, why)
                    self.state.failed(work, why)
                if isinstance(work, Copy):
                    self._spill_if_whole()
                self._flow()

    def _do(self, work: Work) -> str | None:
        """Do one piece of work; say what failed, if something did."""
        memory = self._memory
        assert memory is not None
        try:
            if isinstance(work, Apply):
                began = time.perf_counter()
                memory.apply(work.bucket, work.iteration, work.step)
                self.counters.optimizer_s += time.perf_counter() - began
                self.counters.applied_buckets += 1
            elif isinstance(work, Commit):
                memory.commit(work.bucket)
            elif isinstance(work, Check):
                self.counters.checks += 1
                found = memory.checksum(work.bucket)
                if found != work.checksum:
                    self.counters.diverged += 1
                    return f"its checksum is {found:08x}, the trainers' is {work.checksum:08x}; it is not their model"
            else:
                self._copy_bucket(memory, work)
        except (LastgoodError, RuntimeError, ValueError, MemoryError) as error:
            return str(error) or repr(error)
        return None

    def _copy_bucket(self, memory: ShadowMemory, work: Copy) -> None:
        self._spills()
        if self._copy is None or self._copy.saved.iteration != work.iteration:
            with self.change:
                saved = self.state.saved_at(work.iteration)
                self._copy = SpillCopy(saved, sides=dict(self._sides.get(work.iteration, {})))
        held = list(memory.value(work.bucket).tensors())
        content = bytearray()
        for entry, tensor in held:
            if entry.nbytes:
                content += tensor_bytes(tensor)
        self._copy.buckets[work.bucket] = (tuple(entry for entry, _ in held), content)

    def _spill_if_whole(self) -> None:
        iteration = self.state.spill_copied
        copy = self._copy
        if iteration is None or copy is None or copy.saved.iteration != iteration or self._layout is None:
            return
        self._copy = None
        self._spills().write(copy, self._layout, self._spilled)

    def _spilled(self, iteration: int, error: str | None) -> None:
        with self.change:
            self.counters.spills += error is None
            self.counters.spill_errors += error is not None
            self.state.spill_over(iteration, error)
            self._flow()

    @staticmethod
    def process_usage() -> tuple[float, int]:
        """CPU seconds (user and system) and peak resident bytes of this process."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024
