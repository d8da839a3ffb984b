"""GPM (Pandey et al., ASPLOS'22), as PCcheck's paper compares it: training stops while a device stores its state.

GPM lets the threads of a GPU store straight into persistent memory that is mapped into their address space. Its
checkpoints go to two copies that alternate, and the newer one counts only once it is durable. Nothing overlaps with
training: a save does it all before it returns.

Here the memory is a shared mapping of a file. If the driver registers such a mapping (tmpfs, DAX), a Triton kernel
stores into it. If it refuses (ext4 and other file systems that must see each write), the state goes through a pinned
area, and CPU threads store it. `storage_facts` says which. A state in host memory is stored by CPU threads. Then msync
makes it durable; `storage.mapped_areas` says in which order, and why a crash always leaves one checkpoint intact.

A device's stores leave no dirty page behind: the kernel sees only those of the CPU. So the CPU stores one byte of each
page again before msync.

The paper's checkpoints have no checksums. These have, since nothing else would see a store that never reached its
disk; for them the CPU reads what a device stored once more.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from lastgood._lazy import torch
from lastgood.checkpointers.base import DEFAULT_TIMEOUT_S, Checkpointer
from lastgood.checkpointers.copies.chunks import stream_buffers
from lastgood.checkpointers.copies.device_streams import DeviceStreams
from lastgood.checkpointers.copies.host import PinnedMemory
from lastgood.checkpointers.events import CheckpointEvent, Outcome
from lastgood.checkpointers.gpm.copies import (
    Registrar,
    copy_through_pinned,
    store_from_devices,
    store_from_host,
)
from lastgood.checkpointers.options import BaseOptions
from lastgood.checkpointers.recovery.recovery import Recovery
from lastgood.checkpointers.slots.making_room import room_for
from lastgood.checkpointers.traits import CostModel, Traits
from lastgood.errors import CheckpointError
from lastgood.locations import Location
from lastgood.notices import told_if_slow
from lastgood.sinks import Sink
from lastgood.state import FlatState
from lastgood.state.optimizers import optimizers_of
from lastgood.storage import SlotInfo
from lastgood.storage.mapped_areas import AreaStore, AreaWrite
from lastgood.storage.reader import READ_THREADS
from lastgood.units import MIB

__all__ = ["GPM", "GPMOptions"]

_PINNED_CHUNKS = 16
"""Chunks that the pinned area holds."""


class GPMOptions(BaseOptions):
    """Options of GPM; the paper has none. Two areas on the disk, and no host memory that grows with the state."""

    copy_threads: int = Field(default=4, ge=1, le=64)
    """CPU threads that store into the mapping, and that sum what a device stored."""
    chunk_bytes: int = Field(default=4 * MIB, ge=4096, multiple_of=4096, le=256 * MIB)
    """Unit of checksums, and of copies through the pinned area, which holds 16 of them."""


class GPM(Checkpointer):
    """Stores into mapped storage while training stands still, in two areas that alternate."""

    name: ClassVar[str] = "gpm"
    traits: ClassVar[Traits] = Traits(
        label="GPM",
        colour="#2482E6",
        order=30,
        safe_in=Sink.DISK,
        keeps="slots",
        maps_storage=True,
        cost=CostModel(waits=True, takes="slower"),
        loss="half_interval",
    )
    Options: ClassVar[type[BaseOptions]] = GPMOptions
    options: GPMOptions

    def __init__(self, directory: Path | str | Location, options: GPMOptions | None = None, **given: Any) -> None:
        super().__init__(directory, options, **given)
        self._store: AreaStore | None = None
        self._restored: SlotInfo | None = None
        self._capacity = 0
        self._registrar = Registrar()
        self._pinned: PinnedMemory | None = None
        self._how: str | None = None

    # -- begin and end -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        flat = self._flat()
        self._store = AreaStore(
            self.directory,
            chunk_bytes=self.options.chunk_bytes,
            restored=self._restored,
            readable_by=self.readable_by,
        )
        if all(optimizer.state for optimizer in optimizers_of(self.state)):
            # Before an optimizer's first step the size is not known yet; then the first save makes the areas.
            self._make_room(self._store, flat, len(flat.layout.to_json()))

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._pinned is not None:
            self._pinned.release()
            self._pinned = None
        self._capacity = 0

    def storage_facts(self) -> dict[str, Any]:
        """How bytes reached the mapping: by stores of CPU threads, of a device, or through a pinned area, and why."""
        return {
            "direct_io": False,
            "written_by": self._how,
            "durability": "stores into a shared mapping, msync, commit record, msync",
        }

    # -- saving ----------------------------------------------------------------------------------------------------

    def _save(self, event: CheckpointEvent) -> None:
        """Store the state and make it durable; training goes on when it is."""
        if self._store is None:
            raise CheckpointError(f"{self.directory}: not open; call start(state) first")
        flat = self._flat()
        meta = flat.layout.to_json()
        for device in {block.device for block in flat.blocks if block.is_cuda}:
            torch.cuda.synchronize(device)  # training stops
        self._make_room(self._store, flat, len(meta))
        write = self._store.begin(event.step, flat.layout.stream_bytes + len(meta))
        checksums = self._copy(write, flat, meta)
        event.copied_s = time.perf_counter()
        write.commit(flat.layout.stream_bytes, len(meta), flat.layout.digest(), checksums)
        self._restored = None  # a newer one is the one that must stay, also in a later start()
        event.bytes_written = write.bytes_written
        event.finished_s = time.perf_counter()
        event.outcome = Outcome.DURABLE

    def _make_room(self, store: AreaStore, flat: FlatState, meta_bytes: int) -> None:
        """Areas for a state of this size; they grow only when the state has outgrown them."""
        needed = flat.layout.stream_bytes + meta_bytes
        capacity = self._capacity
        if needed > capacity:
            # Plain values change the length of the layout from save to save; a little room spares a second round.
            capacity = needed + max(64 * 1024, meta_bytes // 4)
        with told_if_slow(*room_for(self.directory, 2 * capacity)):
            store.reserve(capacity)
        self._capacity = capacity

    def _copy(self, write: AreaWrite, flat: FlatState, meta: bytes) -> list[int]:
        """Store the stream by the way that there is; returns the chunks' checksums."""
        tail = bytearray(meta.ljust(write.padded_bytes - flat.layout.stream_bytes, b"\0"))
        stream = stream_buffers(flat.layout, flat.blocks, torch.frombuffer(tail, dtype=torch.uint8))
        place = (self.options.chunk_bytes, self.options.copy_threads)
        device = next((block.device for block in flat.blocks if block.is_cuda), None)
        if device is None:
            self._how = "CPU stores into the mapping"
            return store_from_host(write, stream, *place)
        if self._registrar.register(write.mapped, device):
            self._how = "device stores into the mapping"
            return store_from_devices(write, stream, *place)
        self._how = f"through a pinned area, because {self._registrar.refused}"
        if self._pinned is None:
            self._pinned = PinnedMemory(_PINNED_CHUNKS * self.options.chunk_bytes)
        return copy_through_pinned(
            write, stream, *place, DeviceStreams(flat.blocks), self._pinned.tensor, DEFAULT_TIMEOUT_S
        )

    def before_update(self) -> None:
        """Nothing is ever in progress here."""

    def drain(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Nothing is ever in progress here."""

    # -- restoring -------------------------------------------------------------------------------------------------

    def _place_of(self, step: int) -> Path:
        del step
        return self.directory if self._restored is None else self._restored.path

    def latest(self) -> int | None:
        """Step of the newest area with a sound commit record."""
        return self._recovery().latest(None)

    def restore(self, state: Mapping[str, Any], step: int | None = None) -> int:
        """Read the newest area whose checksums hold (or that of `step`) into `state`.

        What was restored stays until a newer checkpoint is durable, also if the other area has a higher step.
        Raises NoCheckpoint (nothing is there), CorruptCheckpoint (something is, and cannot be read), MismatchError.
        """
        info = self._recovery().restore(None, state, step)
        if self._store is None:
            self._restored = info
        elif state is self._state:
            self._store.protect(info)
        return info.step

    def _recovery(self) -> Recovery:
        return Recovery(self.directory, READ_THREADS, (0, 1))
