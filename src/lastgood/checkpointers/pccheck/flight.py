"""PCcheck's checkpoints in progress: each from the training's memory to its slot, and all of them together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lastgood._lazy import torch
from lastgood.checkpointers.agreement.job import JobOfRanks
from lastgood.checkpointers.copies.chunks import Lander, copy_through_pool, host_ranges
from lastgood.checkpointers.copies.device_streams import DeviceStreams
from lastgood.checkpointers.copies.host import CopyFence, freeze
from lastgood.checkpointers.copies.still_weights import StillBlocks
from lastgood.checkpointers.events import CheckpointEvent
from lastgood.errors import CheckpointError, WaitTimeout
from lastgood.locks import finishes_beside
from lastgood.state import FlatState
from lastgood.storage import SlotInfo, SlotStore, SlotWrite

__all__ = ["Flight", "Flights"]

_SLICE_S = 0.2
"""Between two looks at what a wait may be hopeless for."""
_LANDED_S = 10.0
"""For a thread whose checkpoint is finished to end."""


class Flights:
    """What is in progress, at most `most` at once. Safe to use from several threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._flights: list[Flight] = []
        """In the order of their saves; guarded by `_landed`."""
        self._landed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def wait_for_place(self, timeout_s: float, hopeless: Callable[[], str] | None = None) -> bool:
        """Wait until fewer than `most` are in progress, or until `hopeless` says why that would take too long."""
        deadline = time.monotonic() + timeout_s
        with self._landed:
            while len(self._flights) >= self._most:
                left = deadline - time.monotonic()
                if left <= 0 or (hopeless is not None and hopeless()):
                    return False
                self._landed.wait(left if hopeless is None else min(left, _SLICE_S))
            return True

    def take_slot(
        self,
        store: SlotStore,
        event: CheckpointEvent,
        stream_bytes: int,
        timeout_s: float,
        job: JobOfRanks | None,
        *,
        skips: bool,
    ) -> SlotWrite | None:
        """A place among those in progress, and a slot; with `skips`, None if none is free.

        Slots alone do not tell: one may be there for the archive. Raises WaitTimeout, and CheckpointError at once if
        none can come free because the ranks have lost touch.
        """
        if skips:
            return store.try_begin(event.step, stream_bytes, later=True) if self.wait_for_place(0.0) else None
        waits_s = time.perf_counter()
        deadline = time.monotonic() + timeout_s
        place = self.wait_for_place(timeout_s, None if job is None else job.trouble)
        event.phases.append(("wait", waits_s, time.perf_counter()))
        if not place:
            if job is not None and (why := job.trouble()):
                raise CheckpointError(f"{self._most} checkpoints wait for other ranks already: {why}")
            raise WaitTimeout(f"waited {timeout_s:.0f} s for one of {self._most} to finish")
        if job is None:
            return store.begin(event.step, stream_bytes, timeout_s, later=True)
        while True:
            try:
                return store.begin(event.step, stream_bytes, _SLICE_S, later=True)
            except WaitTimeout as error:
                why = job.trouble()
                if why or time.monotonic() >= deadline:
                    raise CheckpointError(f"{error}; {why or 'its checkpoints wait for other ranks'}") from error

    def launch(self, flight: Flight, work: Callable[[Flight], None]) -> None:
        """It begins: call `work` in a thread, which calls `remove` at its end."""
        with self._landed:
            self._flights.append(flight)
        # A daemon: an ending process waits for it for a bounded time, in `end`.
        name = f"pccheck-step-{flight.event.step}"
        thread = threading.Thread(target=work, args=(flight,), name=name, daemon=True)
        finishes_beside(thread)
        thread.start()
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]

    def join(self, timeout_s: float) -> None:
        """Wait for threads whose checkpoint is finished: none inside native code may meet the interpreter's end."""
        deadline = time.monotonic() + min(_LANDED_S, timeout_s)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def wait_for_none(self, timeout_s: float) -> list[int]:
        """The steps that are still in progress after `timeout_s`."""
        with self._landed:
            self._landed.wait_for(lambda: not self._flights, timeout_s)
            return sorted(flight.event.step for flight in self._flights)

    def wait_for_written(self, timeout_s: float) -> list[int]:
        """The steps that are still being written here after `timeout_s`; others may wait for other ranks."""
        deadline = time.monotonic() + timeout_s
        flights = self.all()
        return [
            flight.event.step for flight in flights if not flight.written.wait(max(0.0, deadline - time.monotonic()))
        ]

    def remove(self, flight: Flight) -> None:
        """It has ended, or never began."""
        with self._landed:
            self._flights = [one for one in self._flights if one is not flight]
            self._landed.notify_all()

    def all(self) -> list[Flight]:
        """Those that are in progress now."""
        with self._landed:
            return list(self._flights)

    def sequence_of(self, step: int) -> int | None:
        """Sequence of the newest one of `step`, if it is in progress."""
        return max((flight.sequence for flight in self.all() if flight.event.step == step), default=None)

    def give_up(self, step: int) -> None:
        """Make sure that no checkpoint of `step` commits any more."""
        for flight in self.all():
            if flight.event.step == step:
                flight.give_up()


class Flight:
    """One checkpoint on its way from the training's memory to its slot."""

    def __init__(
        self,
        event: CheckpointEvent,
        slot: SlotWrite,
        flat: FlatState,
        meta: bytes,
        pool_memory: torch.Tensor | None,
        timeout_s: float,
        still: StillBlocks,
    ) -> None:
        self.event = event
        self.fence = CopyFence(f"PCcheck's checkpoint of step {event.step}", flat, still)
        self.sequence = slot.sequence
        self.written = threading.Event()
        """Set once it is durable in this directory, or never will be."""
        self._slot = slot
        self._layout = flat.layout
        self._blocks = freeze(flat, still)
        self._timeout_s = timeout_s
        self._meta = torch.frombuffer(bytearray(meta), dtype=torch.uint8)
        self._pool_memory = pool_memory
        # Side streams continue after what the training's streams have done so far, the frozen copies above included.
        self._streams = DeviceStreams(self._blocks)
        self._lander = None if pool_memory is None else Lander(slot, timeout_s)

    def dismiss(self) -> None:
        """This flight will never run: end what was started for it."""
        if self._lander is not None:
            self._lander.finish()

    def give_up(self) -> None:
        """Make sure that this checkpoint never commits, unless it has already."""
        self._slot.abort()

    def run(self) -> SlotInfo | None:
        """Copy, write and commit; called in a thread of its own. Returns what is durable now, None if superseded."""
        slot = self._slot
        try:
            try:
                self._void()
                self._copy()
            finally:
                self.fence.open()
            slot.commit(
                meta_offset=self._layout.stream_bytes,
                meta_bytes=self._meta.numel(),
                layout_digest=self._layout.digest(),
                timeout_s=self._timeout_s,
            )
        except BaseException:
            slot.abort()
            raise
        finally:
            self.written.set()
            self.event.phases += slot.phases
        self.event.bytes_written = slot.bytes_written
        return slot.info

    def _void(self) -> None:
        """Here and not in save(): a flush takes as long as the disk likes, and only before_update() ends its wait."""
        try:
            self._slot.void()
        except BaseException:
            self.dismiss()
            raise

    def _copy(self) -> None:
        if self._pool_memory is not None and self._lander is not None:
            copy_through_pool(
                self._slot,
                self._layout,
                self._blocks,
                self._meta,
                self._pool_memory,
                self._streams,
                self.fence,
                self._lander,
                self._timeout_s,
            )
        else:
            copied = 0
            for group, numbers in enumerate(self.fence.check.groups):
                self._copy_host(copied, numbers[-1] + 1)
                copied = numbers[-1] + 1
                self.fence.check.look(group)
            self.fence.settle()
            self.fence.open()
            self.event.copied_s = time.perf_counter()
            self._copy_host(copied, len(self._blocks))
            self._slot.copy_host([(self._meta.data_ptr(), self._meta.numel())], self._timeout_s)
        if self.event.copied_s is None:
            self.event.copied_s = time.perf_counter()

    def _copy_host(self, first: int, last: int) -> None:
        """Copy blocks of host memory from number `first` up to `last`; they lie in the stream in this order."""
        ranges = host_ranges(self._blocks[first:last], self._layout.block_bytes[first:last], writes=True)
        self._slot.copy_host(ranges, self._timeout_s)
