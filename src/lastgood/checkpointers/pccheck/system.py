"""PCcheck (Strati et al., ASPLOS'25): several checkpoints in flight, each written by several threads, in chunks.

A save takes a place (a slot), copies at once what training may change, and returns. A background thread moves the rest
in chunks through a fixed pool of buffers to the slot's writer threads; the next weight update waits until the last byte
has left the training's memory. When a checkpoint is complete it commits: the newest wins, a slower older one is marked
superseded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from lastgood.checkpointers.agreement.decide import Decided, Fate, Wanted
from lastgood.checkpointers.agreement.job import JobOfRanks, Settings
from lastgood.checkpointers.attach.process_end import ends_by_error
from lastgood.checkpointers.base import DEFAULT_TIMEOUT_S, Checkpointer
from lastgood.checkpointers.copies.still_weights import StillWeights
from lastgood.checkpointers.events import CheckpointEvent, Outcome
from lastgood.checkpointers.export.warm_start import Loaded, Rename, load_parts
from lastgood.checkpointers.options import BaseOptions
from lastgood.checkpointers.pccheck.beside import Beside
from lastgood.checkpointers.pccheck.flight import Flight, Flights
from lastgood.checkpointers.pccheck.judging import Judging
from lastgood.checkpointers.pccheck.options import PCcheckOptions
from lastgood.checkpointers.pccheck.rating import Rates
from lastgood.checkpointers.pccheck.room import Room
from lastgood.checkpointers.rank_directory import rank_directory
from lastgood.checkpointers.ranks.job import RankedJob
from lastgood.checkpointers.ranks.replicated import Division
from lastgood.checkpointers.recovery.found_here import words_on_control, words_on_layout
from lastgood.checkpointers.recovery.recovery import Recovery
from lastgood.checkpointers.traits import CostModel, Traits
from lastgood.errors import CheckpointError, NoCheckpoint, StorageError, WaitTimeout
from lastgood.files import ReadableBy, make_directory, storage_errors
from lastgood.locations import Location
from lastgood.sinks import Sink
from lastgood.state.optimizers import optimizers_of
from lastgood.storage import SlotInfo, SlotStore, SlotView
from lastgood.storage.objects.reachable import Reachable, look_at_place
from lastgood.storage.objects.view import RemotePath
from lastgood.storage.reader import READ_THREADS
from lastgood.world import world_of_torch

__all__ = ["PCcheck", "PCcheckOptions"]

_log = logging.getLogger("lastgood")

_STORE_CLOSE_S = 60.0
"""For a disk to let go of what was given up."""


class PCcheck(Rates, Checkpointer):
    """Concurrent, chunked, durable checkpoints in a slot store."""

    name: ClassVar[str] = "pccheck"
    traits: ClassVar[Traits] = Traits(
        label="PCcheck",
        colour="#2E5279",
        order=80,
        safe_in=Sink.DISK,
        keeps="slots",
        ranks_write="each",
        cost=CostModel(waits=False, takes="slower"),
        loss="half_interval_and_writes",
    )
    Options: ClassVar[type[BaseOptions]] = PCcheckOptions
    options: PCcheckOptions

    def __init__(self, directory: Path | str | Location, options: PCcheckOptions | None = None, **given: Any) -> None:
        super().__init__(directory, options, **given)
        self._store: SlotStore | None = None
        self._room = Room(self.options)
        self._flights = Flights(self.options.max_in_flight)
        self._job: JobOfRanks | None = None
        self._division: Division | None = None
        self._judging = Judging(self.directory, self.options.loss_spike, self._flights)
        self._how = ""
        self._beside: Beside | None = None
        self._began_at: SlotInfo | None = None
        self._reached: Reachable | None = None
        self._still = StillWeights()

    @classmethod
    def tuned(
        cls,
        directory: Path | str,
        config: Path | str | None = None,
        *,
        readable_by: ReadableBy | str = ReadableBy.OWNER,
    ) -> PCcheck:
        """With the interval and options that ``lastgood tune DIRECTORY`` chose (or those of another file of that kind).

        Raises ConfigError, naming file and key.
        """
        from lastgood.checkpointers.pccheck.tuning_file import read_tuning_of

        interval_steps, options = read_tuning_of(directory, config)
        return cls(directory, options, interval_steps=interval_steps, readable_by=readable_by)

    # -- begin and end -------------------------------------------------------------------------------------------------

    def _world(self) -> tuple[int, int]:
        """(rank, number of ranks)."""
        given = self.options.model_fields_set & {"rank", "world_size"}
        return (self.options.rank, self.options.world_size) if given else world_of_torch()

    @property
    def saves_until_warm(self) -> int:
        """Each slot is written once: the first time, a file system finds room for it."""
        return self.options.slots

    @property
    def _agrees(self) -> bool:
        """Whether checkpoints count only once all ranks have them."""
        return self.options.control != "off" and self._world()[1] > 1

    def _of_rank(self, directory: Path | str) -> Path:
        """A rank's own part of a directory that the job was given."""
        return rank_directory(directory, self._world()[0]) if self._agrees else Path(directory)

    def _open(self) -> SlotStore:
        if self._store is None:
            if self._agrees:
                self._begin_together(None, Wanted(restore=False))
            else:
                beside = self._make_beside(str)
                found = self._look()
                self._store = self._make_store(None if found is None else found.job_id)
                beside.open(self._store)
        return self._opened()

    def _look(self, disk: bytes | None = None) -> Reachable | None:
        """What an incarnation that begins now can come back from beside its disk. Raises as `look_at_place`."""
        place, own = self.options.remote_place, self._of_rank(self.directory)
        if place is not None and disk is None and own.is_dir():
            disk = next((info.record.job_id for info in SlotStore.peek(own).committed()), None)
        self._reached = None if place is None else look_at_place(place, self._world(), disk)
        return self._reached

    def _make_store(self, job_id: bytes | None) -> SlotStore:
        rank, world_size = self._world()
        reached = self._reached
        if self._agrees:
            with storage_errors(self.directory, "making the job's directory"):
                make_directory(self.directory, self.readable_by.directory_mode)
        return SlotStore(
            self._of_rank(self.directory),
            slots=self.options.slots,
            keep=self.options.keep,
            chunk_bytes=self.options.chunk_bytes,
            writer_threads=self.options.writer_threads,
            pool_bytes=self.options.chunk_bytes,  # a stand-in until the size of the state is known
            job_id=job_id or self._ranked().job_id(),
            rank=rank,
            world_size=world_size,
            agrees=self._agrees if world_size > 1 else None,
            medium=self.options.medium,
            writer_cpus=self.options.writer_cpus,
            readable_by=self.readable_by,
            keep_best=(self.options.keep_best, self.options.best_metric, self.options.best_is == "min"),
            taken=(0, 0) if reached is None else (reached.highest[0], reached.sequence),
        )

    def _folders(self) -> list[Path]:
        archive = self.options.archive_dir
        archives = [] if archive is None else [self._of_rank(archive)]
        return [self._of_rank(self.directory), *archives]

    def _make_beside(self, trouble: Callable[[], str]) -> Beside:
        self._beside = Beside(
            self._of_rank(self.directory), self.options, self._world(), self.readable_by, trouble, agrees=self._agrees
        )
        return self._beside

    def _begin_together(self, state: Mapping[str, Any] | None, wanted: Wanted) -> SlotInfo | None:
        """Join the other ranks, and restore into `state` what all of them restore, if there is something."""
        if self._store is not None:
            raise CheckpointError(
                f"{self.directory}: ranks restore together, before they start; close() and attach() again on all ranks"
            )
        options = self.options
        settings = Settings(*self._world(), options.control, options.join_timeout_s, options.agreement_timeout_s)
        job = JobOfRanks(self._of_rank(self.directory), settings, self._flights)
        beside = self._make_beside(job.trouble)

        tried = set()

        def read(view: SlotView, info: SlotInfo) -> Callable[[], None]:
            key = (info.incarnation, info.step)
            together = options.remote is not None and key not in tried  # the second time it is this rank alone
            tried.add(key)
            return self._recovery().read(view, info, {} if state is None else state, together=together)

        choose = None if beside.tier is None else beside.tier.choose
        self._store, info = job.begin(self._make_store, read, wanted, self._against_layout, choose, self._look)
        self._job = job
        beside.open(self._store)
        return info

    def _against_layout(self) -> str:
        own = self._of_rank(self.directory)
        return words_on_layout(self.directory, *self._world(), parted=self._agrees) or words_on_control(
            own, self._world()[1], agrees=self._agrees
        )

    def _refuse_layout(self) -> None:
        if not self._agrees:  # else all ranks are told, and raise it together
            super()._refuse_layout()

    def _resume(self, state: Mapping[str, Any], step: int | None) -> None:
        limit = self.options.max_failed_restarts
        if self._agrees:
            wanted = Wanted(step=step, max_failed_restarts=limit)
            if step is not None and self._goes_on_from_another(None):
                wanted = Wanted(restore=False)  # it is a step of the other job
            self._began_at = self._begin_together(state, wanted)
            if self._began_at is None and self.options.resume_from is None:
                raise NoCheckpoint(f"{self.directory}: no rank holds a checkpoint")
            elsewhere = self._began_at is None
        else:
            elsewhere = self._goes_on_from_another(self._open())
        if elsewhere:
            self._ranked().restore(state, self._read_threads, step)
        elif not self._agrees:
            self._began_at = self._recovery(self._reached).restore(self._open(), state, step, max_failed_restarts=limit)

    def _goes_on_from_another(self, store: SlotStore | None) -> bool:
        """As `RankedJob.goes_on_from_another`; what this job has sent away is its own as well."""
        if not self._ranked().goes_on_from_another(store):
            return False
        found = self._look() if store is None else self._reached
        return found is None or not found.names

    def _place_of(self, step: int) -> Path:
        if self._began_at is not None:
            return self._began_at.path
        if step == 0 or self.options.resume_from is None:
            return self.directory
        return RemotePath(self.options.resume_from)  # a folder as well

    def _begun(self) -> None:
        if self._began_at is not None and self._store is not None:
            try:
                self._store.count_restart(self._began_at)
            except StorageError as error:
                _log.warning("%s; this restart is not counted", error)

    def _start(self) -> None:
        self._open()
        flat = self._flat(spread=True)
        self._still = StillWeights()
        self._still.find(flat)
        if self.options.replicated != "none" and self._world()[1] > 1:
            self._division = self._ranked().division(self.options.replicated, flat)
        if all(optimizer.state for optimizer in optimizers_of(self.state)):
            # Optimizers make their moments in the first step. Before it, the size is not known yet, and slots made now
            # would all have to be written again; the first save makes them instead.
            self._room.make(self._opened(), flat, len(flat.layout.to_json()), self.drain)

    def _close(self) -> None:
        store = self._store
        if store is None:
            return
        failed = ends_by_error(exiting=self._exiting)
        try:
            self.drain(self._close_s)
            self._judging.finish(store, self._job)
            if not failed:
                store.forget_restarts()  # this incarnation ended in order
        except (StorageError, WaitTimeout) as error:
            _log.warning("%s", error)
        finally:
            job, self._job = self._job, None
            if job is not None:
                job.close(self._close_s, "it ended by an error, or without close()" if failed else "")
            beside, self._beside = self._beside, None
            if beside is not None:
                beside.close(self._close_s)
            self._store = None
            room, self._room = self._room, Room(self.options)
            try:
                store.close(min(_STORE_CLOSE_S, self._close_s))
            finally:
                room.release_pool()

    def exit_drain_s(self) -> float:
        """As the option of that name says."""
        return self.options.exit_drain_s

    def _drain_beside(self, timeout_s: float) -> None:
        # Of several ranks, the others may be gone: what is committed here, a restart finds without them being asked.
        steps = self._flights.wait_for_written(timeout_s)
        if steps:
            raise WaitTimeout(f"waited {timeout_s:.3g} s for the checkpoints of steps {steps} in {self.directory}")
        if self._store is not None:
            self._store.forget_restarts()  # this end was asked for

    def _abandon(self) -> None:
        for flight in self._flights.all():
            flight.give_up()

    def storage_facts(self) -> dict[str, Any]:
        """How bytes reached the disk."""
        direct = self._store.direct_io if self._store is not None and self.options.medium == "file" else None
        return {
            "direct_io": direct,
            "written_by": self._how or None,
            "durability": "data, flush, commit record, flush",
            **({} if self._beside is None else self._beside.facts()),
        }

    # -- saving ----------------------------------------------------------------------------------------------------

    def _save(self, event: CheckpointEvent) -> None:
        """Take a place, copy at once what may change at once, and return."""
        try:
            against = None if self._job is None else self._job.admit(event.step)
        except CheckpointError as error:
            super()._fail(event, error)  # this call failed; the checkpoint of that step may go on
            return
        if against is not None:
            self._end_as(event, against)
            return
        self._begin(event)

    def _begin(self, event: CheckpointEvent) -> None:
        store = self._opened()
        flat = self._flat(spread=True)
        if self._division is not None:
            flat = self._division.apply(flat)
        meta = flat.layout.to_json()
        self._room.make(store, flat, len(meta), self.drain)
        stream_bytes = flat.layout.stream_bytes + len(meta)
        skips = self.options.pressure == "skip"
        slot = self._flights.take_slot(store, event, stream_bytes, self._timeout_s(), self._job, skips=skips)
        if slot is None:
            if self._job is not None:
                self._job.refuse(event.step, Fate.SKIPPED, f"{self.options.max_in_flight} checkpoints were in progress")
            event.finished_s = time.perf_counter()
            event.outcome = Outcome.SKIPPED
            return
        self._how = slot.how
        flight = None
        try:
            still = self._still.find(flat)
            flight = Flight(event, slot, flat, meta, self._room.pool_memory, self._timeout_s(), still)
            self._flights.launch(flight, self._fly)
        except BaseException:
            # No thread will ever finish this one.
            slot.abort()
            if flight is not None:
                self._flights.remove(flight)
                flight.dismiss()
            raise
        if self._job is not None:
            self._job.begun(event.step, flight.sequence)

    def _timeout_s(self) -> float:
        """How long one checkpoint may take: time for a disk of 10 MB/s beyond the usual limit."""
        return DEFAULT_TIMEOUT_S + self._room.capacity / 1e7

    def _fly(self, flight: Flight) -> None:
        event = flight.event
        try:
            self._land(event, flight.run())
        except Exception as error:  # this thread has no caller: the event and the log carry the failure
            job = self._job
            against = None if job is None else job.decided_against(event.step)
            if against is not None:
                self._end_as(event, against)
            else:
                self._fail(event, error)
        finally:
            self._flights.remove(flight)

    def _land(self, event: CheckpointEvent, info: SlotInfo | None) -> None:
        """It is durable here, or superseded if None; of several ranks, all must have it."""
        job, decided = self._job, None
        if info is not None and job is not None:
            asks_s = time.perf_counter()
            decided = job.landed(info, self._timeout_s())
            event.phases.append(("agree", asks_s, time.perf_counter()))
            if decided.fate is not Fate.GLOBAL:
                self._end_as(event, decided)
                return
        event.finished_s = time.perf_counter()
        event.outcome = Outcome.SUPERSEDED if info is None else Outcome.DURABLE
        if info is not None and self._store is not None:
            self._judging.tell_fall_back(self._store)
            self._tell_unmeasured()
            if self._beside is not None:
                self._beside.durable(self._store, info, decided)

    def _end_as(self, event: CheckpointEvent, decided: Decided) -> None:
        """End a checkpoint as the job decided."""
        if decided.fate is Fate.FAILED:
            super()._fail(event, CheckpointError(decided.why))
            return
        event.error = decided.why or None
        event.finished_s = time.perf_counter()
        event.outcome = Outcome.SKIPPED if decided.fate is Fate.SKIPPED else Outcome.SUPERSEDED

    def _fail(self, event: CheckpointEvent, error: BaseException) -> None:
        super()._fail(event, error)
        job = self._job
        if job is not None:
            job.refuse(event.step, Fate.FAILED, event.error or "")

    def before_update(self) -> None:
        """Wait until every checkpoint in progress has left the training's memory."""
        for flight in self._flights.all():
            try:
                self._hooks.wait_at(flight.fence, self._timeout_s())
            except WaitTimeout as error:
                # The training goes on and overwrites what was being copied: that checkpoint must never commit.
                flight.give_up()
                self._fail(flight.event, error)

    def drain(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until nothing is in progress."""
        steps = self._flights.wait_for_none(timeout_s)
        if steps:
            raise WaitTimeout(f"waited {timeout_s:.0f} s for the checkpoints of steps {steps} in {self.directory}")
        self._flights.join(timeout_s)

    def _opened(self) -> SlotStore:
        if self._store is None:
            raise CheckpointError(f"{self.directory}: not open; call start(state) first")
        return self._store

    # -- restoring -------------------------------------------------------------------------------------------------

    def latest(self) -> int | None:
        """Step of the newest committed checkpoint (of all ranks, as far as this one knows) that was not judged bad."""
        return self._recovery().latest(self._store, of_all_ranks=self._agrees)

    def restore(self, state: Mapping[str, Any], step: int | None = None, *, good_only: bool = True) -> int:
        """Read the newest good checkpoint whose checksums hold (or that of `step`, whatever its verdict) into `state`.

        With ``good_only=False`` verdicts do not count. Raises NoCheckpoint (nothing is there), NoGoodCheckpoint (all
        are judged bad), CorruptCheckpoint (some are there, and none can be read), MismatchError.
        """
        self.drain()  # a copy in progress reads what a restore overwrites
        if self._agrees:
            info = self._begin_together(state, Wanted(step=step, good_only=good_only))
            if info is None and self.options.resume_from is None:
                raise NoCheckpoint(f"{self.directory}: no rank holds a checkpoint")
            if info is not None:
                return info.step
        if self._agrees or self._goes_on_from_another(self._store):
            return self._ranked().restore(state, self._read_threads, step, good_only=good_only)
        found = self._look() if self._store is None else self._reached
        return self._recovery(found).restore(self._store, state, step, good_only=good_only).step

    def load(
        self,
        state: Mapping[str, Any],
        *,
        parts: Sequence[str] | None = None,
        rename: Rename | None = None,
        strict: bool = True,
        step: int | None = None,
    ) -> Loaded:
        """Load parts of a checkpoint in this directory into live objects, as `lastgood.load_parts`: a warm start."""
        return load_parts(self.directory, state, parts=parts, rename=rename, strict=strict, step=step)

    def _recovery(self, place: Reachable | None = None) -> Recovery:
        return Recovery(self._of_rank(self.directory), self._read_threads, self._world(), place)

    def _ranked(self) -> RankedJob:
        place = self.options.resume_place
        return RankedJob(
            self._of_rank(self.directory),
            *self._world(),
            self.options.resume_from,
            self.options.resume_buffers,
            self.readable_by,
            None if place is None else place.options,
        )

    @property
    def _read_threads(self) -> int:
        return max(READ_THREADS, self.options.writer_threads)
