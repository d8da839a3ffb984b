"""Room for PCcheck's checkpoints: slots on the disk and buffers in memory, as large as the state needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lastgood.checkpointers.copies.host import PinnedMemory, make_pool
from lastgood.checkpointers.pccheck.options import PCcheckOptions
from lastgood.checkpointers.slots.making_room import room_for
from lastgood.notices import told_if_slow
from lastgood.state import FlatState
from lastgood.storage import SlotStore

if TYPE_CHECKING:
    import torch

__all__ = ["Room"]

_SPARE_BYTES = 64 * 1024
"""Plain values change the length of the layout from save to save; a little room spares a second round."""


class Room:
    """What a store's slots hold, and the page-locked memory that checkpoints of a state on a device go through."""

    def __init__(self, options: PCcheckOptions) -> None:
        self.capacity = 0
        """Bytes of a stream that slots and pool are made for."""
        self._options = options
        self._pinned: PinnedMemory | None = None

    @property
    def pool_memory(self) -> torch.Tensor | None:
        """The pool's page-locked memory; None for a state in host memory."""
        return None if self._pinned is None else self._pinned.tensor

    def make(self, store: SlotStore, flat: FlatState, meta_bytes: int, drain: Callable[[], None]) -> None:
        """Slots and a pool for a state of this size; made again only when the state has outgrown them.

        `drain` ends what still uses the old ones. Raises StorageError, and what `drain` raises.
        """
        needed = flat.layout.stream_bytes + meta_bytes
        on_device = any(block.is_cuda for block in flat.blocks)
        if needed <= self.capacity and on_device == (self._pinned is not None):
            return
        drain()
        capacity = needed + max(_SPARE_BYTES, meta_bytes // 4)
        options = self._options
        with told_if_slow(*room_for(store.directory, options.slots * store.slot_file_bytes(capacity))):
            store.reserve(capacity)
        chunk = options.chunk_bytes
        least = (options.writer_threads + 1) * chunk
        self.release_pool()
        store.pool, self._pinned = make_pool(
            -(-max(options.pool_bytes or capacity, least) // chunk), chunk, pinned=on_device
        )
        self.capacity = capacity

    def release_pool(self) -> None:
        """Give page-locked memory back. May be called again."""
        if self._pinned is not None:
            self._pinned.release()
            self._pinned = None
