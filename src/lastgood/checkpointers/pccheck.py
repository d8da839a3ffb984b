"""PCcheck (Strati et al., ASPLOS'25): several checkpoints in flight, each written by several threads, in chunks.

A save takes a place (a slot), copies at once what training may change, and returns. A background thread moves the rest
in chunks through a fixed pool of buffers to the slot's writer threads; the next weight update waits until the last byte
has left the training's memory. When a checkpoint is whole it commits: the newest wins, a slower older one is marked
superseded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from lastgood._lazy import lazy_module
from lastgood.checkpointers.base import DEFAULT_TIMEOUT_S, BaseOptions, Checkpointer, CheckpointEvent, Outcome
from lastgood.checkpointers.chunks import copy_through_pool, host_ranges, padding_block, pinned_pool_memory
from lastgood.checkpointers.snapshot import CopyFence, DeviceStreams, freeze
from lastgood.errors import CorruptCheckpoint, NoCheckpoint, WaitTimeout
from lastgood.state import FlatState, Layout, apply_tree, flatten, unflatten
from lastgood.units import MIB

if TYPE_CHECKING:
    import torch

    from lastgood.storage import SlotInfo, SlotStore, SlotView, SlotWrite
else:
    torch = lazy_module("torch")

__all__ = ["PCcheck", "PCcheckOptions"]

_log = logging.getLogger("lastgood")


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

    @property
    def slots(self) -> int:
        """Slot files: one for each checkpoint in flight, and for each that is kept."""
        return self.max_in_flight + self.keep

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

    def __init__(self, directory: Path | str, options: PCcheckOptions | None = None) -> None:
        super().__init__(directory, options)
        self.knobs = options or PCcheckOptions()
        self._store: SlotStore | None = None
        self._capacity = 0
        self._pool_memory: torch.Tensor | None = None
        self._in_flight: dict[int, _Flight] = {}
        """By number of the save; guarded by `_landed`."""
        self._landed = threading.Condition()
        self._saves = 0

    # -- life ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        from lastgood.storage import SlotStore

        self._store = SlotStore(
            self.directory,
            slots=self.knobs.slots,
            keep=self.knobs.keep,
            chunk_bytes=self.knobs.chunk_bytes,
            writer_threads=self.knobs.writer_threads,
            pool_bytes=self.knobs.chunk_bytes,  # a stand-in until the size of the state is known
        )
        flat = flatten(self.state)
        optimizers = [value for value in self.state.values() if isinstance(value, torch.optim.Optimizer)]
        if all(optimizer.state for optimizer in optimizers):
            # Optimizers make their moments in the first step. Before it, the size is not known yet, and slots made now
            # would all have to be written again; the first save makes them instead.
            self._make_room(flat, len(flat.layout.to_json()))

    def _close(self) -> None:
        if self._store is None:
            return
        try:
            self.drain()
        finally:
            self._store.close()
            self._store = None
            self._capacity = 0
            self._pool_memory = None

    def storage_facts(self) -> dict[str, Any]:
        """Whether writes were direct."""
        direct = self._store.direct_io if self._store is not None else None
        return {"direct_io": direct, "durability": "data, fdatasync, commit record, fdatasync"}

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
            slot = store.try_begin(event.step, stream_bytes)
            if slot is None:
                event.outcome = Outcome.SKIPPED
                event.finished_s = time.perf_counter()
                return
        else:
            slot = store.begin(event.step, stream_bytes, self._timeout_s())
        self._saves += 1
        number = self._saves
        try:
            flight = _Flight(event, slot, flat, meta, self._pool_memory, self._timeout_s())
            with self._landed:
                self._in_flight[number] = flight
            threading.Thread(target=self._fly, args=(number, flight), name=f"pccheck-step-{event.step}").start()
        except BaseException:
            # No thread will ever finish this one.
            with self._landed:
                self._in_flight.pop(number, None)
            slot.abort()
            raise

    def _timeout_s(self) -> float:
        """How long one checkpoint may take: time for a disk of 10 MB/s beyond the usual limit."""
        return DEFAULT_TIMEOUT_S + self._capacity / 1e7

    def _fly(self, number: int, flight: _Flight) -> None:
        try:
            flight.run()
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
        self._pool_memory = None
        if on_device:
            self._pool_memory, address = pinned_pool_memory(chunks * chunk)
            store.pool = ChunkPool(address, chunks * chunk, chunk, self._pool_memory)
        else:
            store.pool = ChunkPool(0, chunks * chunk, chunk)
        self._capacity = capacity

    def _opened(self) -> SlotStore:
        if self._store is None:
            raise NoCheckpoint(f"{self.directory}: not open; call start(state) first")
        return self._store

    # -- restoring -------------------------------------------------------------------------------------------------

    def latest(self) -> int | None:
        """Step of the newest committed checkpoint."""
        if self._store is not None:
            return next((info.step for info in self._store.committed()), None)
        from lastgood.storage import SlotStore

        if not self.directory.is_dir():
            return None
        return next((info.step for info in SlotStore.peek(self.directory).committed()), None)

    def restore(self, state: Mapping[str, Any], step: int | None = None) -> int:
        """Read the newest checkpoint whose checksums hold (or that of `step`) into `state`."""
        from lastgood.storage import SlotStore

        if self._store is not None:
            self.drain()  # a copy under way reads what a restore overwrites
            return self._restore_from(self._store, state, step)
        if not self.directory.is_dir():
            raise NoCheckpoint(f"{self.directory}: there is no such directory")
        return self._restore_from(SlotStore.peek(self.directory), state, step)

    def _restore_from(self, store: SlotView, state: Mapping[str, Any], step: int | None) -> int:
        known = store.committed()
        refused = []
        for info in known:
            if step is not None and info.step != step:
                continue
            try:
                tree = _read_tree(store, info, self.knobs.writer_threads)
            except CorruptCheckpoint as error:
                _log.warning("%s; trying the checkpoint before it", error)
                refused.append(str(error))
                continue
            apply_tree(state, tree, f"{info.path}, step {info.step}")
            return info.step
        asked = "whole checkpoint" if step is None else f"whole checkpoint of step {step}"
        found = [info.step for info in known] or "none"
        raise NoCheckpoint(
            f"{self.directory}: no {asked}; committed steps: {found}" + "".join(f"; {why}" for why in refused)
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
        self._slot = slot
        self._layout = flat.layout
        self._deferred = flat.deferred
        self._frozen = freeze(flat.immediate)
        self._timeout_s = timeout_s
        self._meta = torch.frombuffer(bytearray(meta), dtype=torch.uint8)
        self._pool_memory = pool_memory
        # Side streams go on behind what the training's streams have done so far, the frozen copies above included.
        self._streams = DeviceStreams([*flat.deferred, *self._frozen])

    def give_up(self) -> None:
        """Make sure that this checkpoint never commits. Called by the training's thread."""
        self._slot.abort()

    def run(self) -> None:
        """Copy, write and commit; called in a thread of its own."""
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
        self.event.bytes_written = slot.bytes_written
        self.event.finished_s = time.perf_counter()
        self.event.outcome = Outcome.DURABLE if slot_outcome == "durable" else Outcome.SUPERSEDED

    def _copy(self) -> None:
        blocks = [*self._deferred, *self._frozen]
        if self._pool_memory is not None:
            copy_through_pool(
                self._slot,
                self._layout,
                blocks,
                self._meta,
                self._pool_memory,
                self._streams,
                self.fence,
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


def _read_tree(store: SlotView, info: SlotInfo, threads: int) -> dict[str, Any]:
    """Read and check one checkpoint into fresh host memory."""
    where = str(info.path)
    layout = Layout.from_json(store.read_meta(info), where)
    if layout.digest() != info.layout_digest or layout.stream_bytes != info.record.meta_offset:
        raise CorruptCheckpoint(f"{where}: the layout does not match the commit record")
    blocks: Sequence[torch.Tensor] = [torch.empty(size, dtype=torch.uint8) for size in layout.block_bytes]
    store.read_into(info, host_ranges(blocks, layout.block_bytes, None), threads)
    return unflatten(layout, blocks, where)
