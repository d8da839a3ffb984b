"""PCcheck (Strati et al., ASPLOS'25): several checkpoints in flight, each written by several threads, in chunks.

A save takes a place (a slot), copies at once what training may change, and returns. A background thread moves the rest
in chunks through a fixed pool of buffers to the slot's writer threads; the next weight update waits until the last byte
has left the training's memory. When a checkpoint is whole it commits: the newest wins, a slower older one is marked
superseded.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from lastgood._lazy import lazy_module
from lastgood.checkpointers.base import DEFAULT_TIMEOUT_S, BaseOptions, Checkpointer, CheckpointEvent, Outcome
from lastgood.checkpointers.chunks import Lander, copy_through_pool, host_ranges, padding_block
from lastgood.checkpointers.endings import EXIT_DRAIN_S, ends_by_error
from lastgood.checkpointers.loss_watch import BadLoss, LossWatch
from lastgood.checkpointers.recovery import Recovery
from lastgood.checkpointers.snapshot import CopyFence, DeviceStreams, PinnedMemory, freeze
from lastgood.errors import CheckpointError, StorageError, WaitTimeout
from lastgood.state import FlatState, flatten
from lastgood.units import MIB

if TYPE_CHECKING:
    import torch

    from lastgood.checkpointers.archive import Archive
    from lastgood.storage import SlotInfo, SlotStore, SlotWrite
else:
    torch = lazy_module("torch")

__all__ = ["PCcheck", "PCcheckOptions"]

_log = logging.getLogger("lastgood")

READ_THREADS = 4
"""Reads under way at once in a restore, at least."""
_STORE_CLOSE_S = 60.0
"""For a disk to let go of what was given up."""
_LANDED_S = 10.0
"""For a thread whose checkpoint is finished to end."""


class PCcheckOptions(BaseOptions):
    """Knobs of PCcheck; N, p and b are the paper's names."""

    max_in_flight: int = Field(default=2, ge=1, le=64)
    """N: checkpoints under way at once."""
    writer_threads: int = Field(default=2, ge=1, le=64)
    """p: writer threads of each."""
    chunk_bytes: int = Field(default=4 * MIB, ge=4096, multiple_of=4096, le=1 << 30)
    """b: what one write takes."""
    pool_bytes: int | None = Field(default=None, ge=2 * 4096)
    """Host memory for copies on their way to storage; None for the size of one checkpoint."""
    keep: int = Field(default=2, ge=1, le=64)
    """K: whole checkpoints kept; 1 is the paper's setting."""
    pressure: Literal["wait", "skip"] = "wait"
    """What a save does when N are under way: wait for a place, as in the paper, or skip and be counted."""
    medium: Literal["file", "pmem"] = "file"
    """How slots are written: direct I/O, or stores into mapped persistent memory (a directory on a DAX file system)."""
    writer_cpus: tuple[int, ...] = ()
    """CPUs that writer threads stay on, in turn; none: wherever the kernel likes."""
    rank: int = Field(default=0, ge=0)
    """Whose part of a job of several ranks this is; each rank has a directory of its own."""
    world_size: int = Field(default=1, ge=1)
    """Ranks of the job; checkpoints of another number are refused."""
    loss_spike: float | None = Field(default=8.0, gt=0)
    """How many spreads above the median a loss given to step() is bad (`loss_watch`); None: only NaN and infinity."""
    archive_every: int | None = Field(default=None, ge=1)
    """M: every M-th checkpoint is exported to `archive_dir` in the background, and stays there; None: none is."""
    archive_dir: str | None = None
    """Directory of the archive (safetensors files), of this job and rank alone."""
    max_failed_restarts: int | None = Field(default=3, ge=1)
    """F: after so many lives from one checkpoint without a newer one, the next older is taken; None: never."""
    exit_drain_s: float = Field(default=EXIT_DRAIN_S, ge=0)
    """How long an ending process waits for checkpoints under way before it gives them up."""

    @field_validator("writer_cpus")
    @classmethod
    def _cpus_exist(cls, cpus: tuple[int, ...]) -> tuple[int, ...]:
        allowed = os.sched_getaffinity(0)
        if not allowed.issuperset(cpus):
            raise ValueError(f"this process may use CPUs {sorted(allowed)}, not {sorted(set(cpus) - allowed)}")
        return cpus

    @model_validator(mode="after")
    def _archive_has_both(self) -> PCcheckOptions:
        if (self.archive_every is None) != (self.archive_dir is None):
            raise ValueError("archive_every and archive_dir go together")
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} is not below world_size {self.world_size}")
        return self

    @property
    def slots(self) -> int:
        """Slot files: one for each checkpoint in flight, for each that is kept, and for one that is being archived."""
        return self.max_in_flight + self.keep + (self.archive_every is not None)

    def disk_bytes(self, state_bytes: int) -> int:
        """All slots."""
        return self.slots * state_bytes

    def host_bytes(self, state_bytes: int) -> int:
        """The pool."""
        return state_bytes if self.pool_bytes is None else self.pool_bytes


class PCcheck(Checkpointer):
    """Concurrent, chunked, durable checkpoints in a slot store."""

    name: ClassVar[str] = "pccheck"
    Options: ClassVar[type[BaseOptions]] = PCcheckOptions

    def __init__(self, directory: Path | str, options: PCcheckOptions | None = None, **knobs: Any) -> None:
        super().__init__(directory, options, **knobs)
        assert isinstance(self.options, PCcheckOptions)
        self.knobs = self.options
        self._store: SlotStore | None = None
        self._capacity = 0
        self._pool_memory: PinnedMemory | None = None
        self._in_flight: dict[int, _Flight] = {}
        """By number of the save; guarded by `_landed`."""
        self._landed = threading.Condition()
        self._saves = 0
        self._watch = LossWatch(self.knobs.loss_spike)
        self._how = ""
        self._archive: Archive | None = None
        self._began_at: SlotInfo | None = None
        self._threads: list[threading.Thread] = []

    @classmethod
    def tuned(cls, directory: Path | str, config: Path | str | None = None) -> PCcheck:
        """With the interval and knobs that ``lastgood tune DIRECTORY`` chose (or those of another file of that kind).

        Raises ConfigError, naming file and key.
        """
        from lastgood.checkpointers.tuned import TUNING_FILE, read_tuning

        interval_steps, options = read_tuning(Path(directory, TUNING_FILE) if config is None else config)
        return cls(directory, options, interval_steps=interval_steps)

    # -- life ------------------------------------------------------------------------------------------------------

    def _open(self) -> SlotStore:
        from lastgood.storage import SlotStore

        if self._store is None:
            self._store = SlotStore(
                self.directory,
                slots=self.knobs.slots,
                keep=self.knobs.keep,
                chunk_bytes=self.knobs.chunk_bytes,
                writer_threads=self.knobs.writer_threads,
                pool_bytes=self.knobs.chunk_bytes,  # a stand-in until the size of the state is known
                rank=self.knobs.rank,
                world_size=self.knobs.world_size,
                medium=self.knobs.medium,
                writer_cpus=self.knobs.writer_cpus,
            )
            self._open_archive()
        return self._store

    def _open_archive(self) -> None:
        from lastgood.checkpointers.archive import Archive

        if self.knobs.archive_dir is not None and self.knobs.archive_every is not None:
            self._archive = Archive(self.knobs.archive_dir, self.knobs.archive_every)

    def _resume(self, state: Mapping[str, Any], step: int | None) -> None:
        store = self._open()
        limit = self.knobs.max_failed_restarts
        self._began_at = self._recovery().restore(store, state, step, max_failed_restarts=limit)

    def _begun(self) -> None:
        if self._began_at is not None and self._store is not None:
            try:
                self._store.count_restart(self._began_at)
            except StorageError as error:
                _log.warning("%s; this restart is not counted", error)

    def _start(self) -> None:
        self._open()
        flat = flatten(self.state)
        optimizers = [value for value in self.state.values() if isinstance(value, torch.optim.Optimizer)]
        if all(optimizer.state for optimizer in optimizers):
            # Optimizers make their moments in the first step. Before it, the size is not known yet, and slots made now
            # would all have to be written again; the first save makes them instead.
            self._make_room(flat, len(flat.layout.to_json()))

    def _close(self) -> None:
        store = self._store
        if store is None:
            return
        try:
            self.drain(self._close_s)
            self._judge_by(self._watch.finish())
            if not ends_by_error(exiting=self._exiting):
                store.forget_restarts()  # this life ended in order
        except (StorageError, WaitTimeout) as error:
            _log.warning("%s", error)
        finally:
            self._close_archive()
            self._store = None
            self._capacity = 0
            try:
                store.close(min(_STORE_CLOSE_S, self._close_s))
            finally:
                self._release_pool()

    def _close_archive(self) -> None:
        archive, self._archive = self._archive, None
        if archive is not None:
            try:
                archive.close(self._close_s)
            except WaitTimeout as error:
                _log.warning("%s", error)

    def _exit_drain_s(self) -> float:
        return self.knobs.exit_drain_s

    def _abandon(self) -> None:
        with self._landed:
            flights = list(self._in_flight.values())
        for flight in flights:
            flight.give_up()

    def storage_facts(self) -> dict[str, Any]:
        """How bytes reached the disk."""
        direct = self._store.direct_io if self._store is not None and self.knobs.medium == "file" else None
        return {
            "direct_io": direct,
            "written_by": self._how or None,
            "durability": "data, flush, commit record, flush",
        }

    # -- saving ----------------------------------------------------------------------------------------------------

    def save(self, step: int) -> None:
        """Take a place, copy at once what may change at once, and return."""
        event = self._request(step)
        try:
            self._begin(event)
        except Exception as error:  # a save never stops training: whatever went wrong is counted and logged
            self._fail(event, error)

    def _begin(self, event: CheckpointEvent) -> None:
        store = self._opened()
        flat = flatten(self.state)
        meta = flat.layout.to_json()
        self._make_room(flat, len(meta))
        stream_bytes = flat.layout.stream_bytes + len(meta)
        if self.knobs.pressure == "skip":
            slot = store.try_begin(event.step, stream_bytes) if self._has_place(0.0) else None
            if slot is None:
                event.outcome = Outcome.SKIPPED
                event.finished_s = time.perf_counter()
                return
        else:
            waits_s = time.perf_counter()
            place = self._has_place(self._timeout_s())
            event.phases.append(("wait", waits_s, time.perf_counter()))
            if not place:
                raise WaitTimeout(f"waited {self._timeout_s():.0f} s for one of {self.knobs.max_in_flight} to finish")
            slot = store.begin(event.step, stream_bytes, self._timeout_s())
        self._saves += 1
        number = self._saves
        self._how = slot.how
        flight = None
        try:
            pool_memory = None if self._pool_memory is None else self._pool_memory.tensor
            flight = _Flight(event, slot, flat, meta, pool_memory, self._timeout_s())
            with self._landed:
                self._in_flight[number] = flight
            # A daemon: an ending process waits for it for a bounded time, in `end`.
            name = f"pccheck-step-{event.step}"
            thread = threading.Thread(target=self._fly, args=(number, flight), name=name, daemon=True)
            thread.start()
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        except BaseException:
            # No thread will ever finish this one.
            with self._landed:
                self._in_flight.pop(number, None)
            slot.abort()
            if flight is not None:
                flight.dismiss()
            raise

    def _has_place(self, timeout_s: float) -> bool:
        """Wait until fewer than N are under way. Slots alone do not tell: one may be there for the archive."""
        with self._landed:
            return self._landed.wait_for(lambda: len(self._in_flight) < self.knobs.max_in_flight, timeout_s)

    def _timeout_s(self) -> float:
        """How long one checkpoint may take: time for a disk of 10 MB/s beyond the usual limit."""
        return DEFAULT_TIMEOUT_S + self._capacity / 1e7

    def _fly(self, number: int, flight: _Flight) -> None:
        try:
            info = flight.run()
            if info is not None and self._archive is not None and self._store is not None:
                self._archive.offer(self._store, info)
        except Exception as error:  # this thread has no caller: the event and the log carry the failure
            self._fail(flight.event, error)
        finally:
            with self._landed:
                del self._in_flight[number]
                self._landed.notify_all()

    def before_update(self) -> None:
        """Wait until every checkpoint under way has left the training's memory."""
        with self._landed:
            flights = list(self._in_flight.values())
        for flight in flights:
            try:
                self._wait_for(flight.fence, self._timeout_s())
            except WaitTimeout as error:
                # The training goes on and overwrites what was being copied: that checkpoint must never commit.
                flight.give_up()
                self._fail(flight.event, error)

    def drain(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until nothing is under way."""
        with self._landed:
            if not self._landed.wait_for(lambda: not self._in_flight, timeout_s):
                steps = sorted(flight.event.step for flight in self._in_flight.values())
                raise WaitTimeout(f"waited {timeout_s:.0f} s for the checkpoints of steps {steps} in {self.directory}")
        # They have landed, but a thread inside native code must not meet the interpreter's end.
        deadline = time.monotonic() + min(_LANDED_S, timeout_s)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _make_room(self, flat: FlatState, meta_bytes: int) -> None:
        """Slots and a pool for a state of this size; made again only when the state has outgrown them."""
        from lastgood._native import ChunkPool

        needed = flat.layout.stream_bytes + meta_bytes
        on_device = any(block.is_cuda for block in flat.blocks)
        if needed <= self._capacity and on_device == (self._pool_memory is not None):
            return
        self.drain()
        store = self._opened()
        # Plain values change the length of the layout from save to save; a little room spares a second round.
        capacity = needed + max(64 * 1024, meta_bytes // 4)
        store.reserve(capacity)
        chunk = self.knobs.chunk_bytes
        least = (self.knobs.writer_threads + 1) * chunk
        chunks = -(-max(self.knobs.pool_bytes or capacity, least) // chunk)
        self._release_pool()
        if on_device:
            self._pool_memory = PinnedMemory(chunks * chunk)
            memory = self._pool_memory.tensor
            store.pool = ChunkPool(memory.data_ptr(), chunks * chunk, chunk, memory)
        else:
            store.pool = ChunkPool(0, chunks * chunk, chunk)
        self._capacity = capacity

    def _release_pool(self) -> None:
        if self._pool_memory is not None:
            self._pool_memory.release()
            self._pool_memory = None

    def _opened(self) -> SlotStore:
        if self._store is None:
            raise CheckpointError(f"{self.directory}: not open; call start(state) first")
        return self._store

    # -- judging ---------------------------------------------------------------------------------------------------

    def verdict(self, step: int, ok: bool, reason: str = "") -> bool:
        """Judge the checkpoint of `step`, durable or still under way; returns whether there is one.

        `restore` passes a bad one over, and retention never drops the newest good one. A later verdict replaces an
        earlier one. `reason` is kept on the disk with it. Needs `attach` or `start`. Raises StorageError.
        """
        from lastgood.storage import Verdict

        store = self._opened()
        with self._landed:
            found = [flight.sequence for flight in self._in_flight.values() if flight.event.step == step]
        found += [info.sequence for info in store.committed() if info.step == step]
        if not found:
            return False
        store.judge(max(found), Verdict(step, ok, reason))
        if not ok:
            _log.warning("%s: the checkpoint of step %d is judged bad: %s", self.directory, step, reason or "no reason")
        return True

    def _observe_loss(self, step: int, loss: Any) -> None:
        self._judge_by(self._watch.observe(step, loss))

    def _judge_by(self, found: Sequence[BadLoss]) -> None:
        """Judge the checkpoints that bad losses speak against: the rule of `loss_watch`."""
        for bad in found:
            for step in (bad.step - 1, bad.step):
                try:
                    self.verdict(step, ok=False, reason=bad.reason)
                except StorageError as error:
                    # Training goes on; the verdict holds in memory, and is written with the next one.
                    _log.error("%s", error)

    # -- restoring -------------------------------------------------------------------------------------------------

    def latest(self) -> int | None:
        """Step of the newest committed checkpoint that was not judged bad."""
        return self._recovery().latest(self._store)

    def restore(self, state: Mapping[str, Any], step: int | None = None, *, good_only: bool = True) -> int:
        """Read the newest good checkpoint whose checksums hold (or that of `step`, whatever its verdict) into `state`.

        With ``good_only=False`` verdicts do not count. Raises NoCheckpoint (nothing is there), NoGoodCheckpoint (all
        are judged bad), CorruptCheckpoint (some are there, and none can be read), MismatchError.
        """
        self.drain()  # a copy under way reads what a restore overwrites
        return self._recovery().restore(self._store, state, step, good_only=good_only).step

    def _recovery(self) -> Recovery:
        return Recovery(
            self.directory, max(READ_THREADS, self.knobs.writer_threads), (self.knobs.rank, self.knobs.world_size)
        )


class _Flight:
    """One checkpoint on its way from the training's memory to its slot."""

    def __init__(
        self,
        event: CheckpointEvent,
        slot: SlotWrite,
        flat: FlatState,
        meta: bytes,
        pool_memory: torch.Tensor | None,
        timeout_s: float,
    ) -> None:
        self.event = event
        self.fence = CopyFence(f"PCcheck's checkpoint of step {event.step}", flat)
        self.sequence = slot.sequence
        self._slot = slot
        self._layout = flat.layout
        self._deferred = flat.deferred
        self._frozen = freeze(flat.immediate)
        self._timeout_s = timeout_s
        self._meta = torch.frombuffer(bytearray(meta), dtype=torch.uint8)
        self._pool_memory = pool_memory
        # Side streams go on behind what the training's streams have done so far, the frozen copies above included.
        self._streams = DeviceStreams([*flat.deferred, *self._frozen])
        self._lander = None if pool_memory is None else Lander(slot, timeout_s)

    def dismiss(self) -> None:
        """This flight will never run: end what was started for it."""
        if self._lander is not None:
            self._lander.finish()

    def give_up(self) -> None:
        """Make sure that this checkpoint never commits. Called by the training's thread."""
        self._slot.abort()

    def run(self) -> SlotInfo | None:
        """Copy, write and commit; called in a thread of its own. Returns what is durable now, if it is."""
        slot = self._slot
        try:
            try:
                self._copy()
            finally:
                self.fence.open()
            slot_outcome = slot.commit(
                meta_offset=self._layout.stream_bytes,
                meta_bytes=self._meta.numel(),
                layout_digest=self._layout.digest(),
                timeout_s=self._timeout_s,
            )
        except BaseException:
            slot.abort()
            raise
        finally:
            self.event.phases += slot.phases
        self.event.bytes_written = slot.bytes_written
        self.event.finished_s = time.perf_counter()
        self.event.outcome = Outcome.DURABLE if slot_outcome == "durable" else Outcome.SUPERSEDED
        return slot.info

    def _copy(self) -> None:
        blocks = [*self._deferred, *self._frozen]
        if self._pool_memory is not None and self._lander is not None:
            copy_through_pool(
                self._slot,
                self._layout,
                blocks,
                self._meta,
                self._pool_memory,
                self._streams,
                self.fence,
                self._lander,
                self._timeout_s,
            )
        else:
            count = self._layout.deferred_blocks
            sizes = self._layout.block_bytes
            padding = padding_block()
            self._slot.copy_host(host_ranges(blocks[:count], sizes[:count], padding), self._timeout_s)
            self.fence.settle()
            self.fence.open()
            self.event.copied_s = time.perf_counter()
            rest = host_ranges(blocks[count:], sizes[count:], padding)
            self._slot.copy_host([*rest, (self._meta.data_ptr(), self._meta.numel())], self._timeout_s)
        if self.event.copied_s is None:
            self.event.copied_s = time.perf_counter()
