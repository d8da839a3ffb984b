"""The memory of a peer: two areas for each machine whose checkpoints it keeps, so that a complete one always stays."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from lastgood import _native
from lastgood.addresses import check_range
from lastgood.errors import CheckpointError, WaitTimeout
from lastgood.host_memory import map_memory
from lastgood.wire.frames import Wire, available_memory_bytes

__all__ = ["DESCRIBED", "Area", "Memory", "Store"]

DESCRIBED = ("sequence", "step", "nbytes", "meta_bytes")
"""What peers and trainers tell each other of a checkpoint."""

_MAX_OWNERS = 1024


class Memory:
    """`size` bytes of fresh anonymous memory, in huge pages if the kernel has them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._map = map_memory(size)
        self._first = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._first)
        self.view = memoryview(self._map)

    def at(self, offset: int, nbytes: int) -> int:
        """The address of a range of it. Raises CorruptCheckpoint if it is not inside."""
        check_range(offset, nbytes, self.size)
        return self.address + offset


@dataclass(eq=False)
class Area:
    """One checkpoint, complete or on its way."""

    memory: Memory | None = None
    complete: bool = False
    sequence: int = 0
    step: int = 0
    nbytes: int = 0
    meta_bytes: int = 0
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    """(offset, length, checksum) of what has arrived, without holes."""
    readers: int = 0

    @property
    def capacity(self) -> int:
        """Bytes of memory that it has."""
        return self.memory.size if self.memory is not None else 0

    def whole(self) -> bool:
        """Whether every chunk's checksum still holds."""
        assert self.memory is not None
        return all(
            _native.crc32c_at(self.memory.at(offset, length), length, _native.chunk_seed(self.sequence, offset))
            == found
            for offset, length, found in self.chunks
        )

    def describe(self) -> dict[str, int]:
        """As it is told to a trainer."""
        return {key: getattr(self, key) for key in DESCRIBED}


@dataclass(eq=False)
class Owner:
    """The two areas of one machine's checkpoints."""

    areas: tuple[Area, Area] = field(default_factory=lambda: (Area(), Area()))
    receiver: Wire | None = None

    def complete(self) -> list[Area]:
        """The complete ones, newest first."""
        return sorted((area for area in self.areas if area.complete), key=lambda area: -area.sequence)


class Store:
    """All memory of a peer. Methods may be called by any connection's thread."""

    def __init__(self, limit_bytes: int, timeout_s: float) -> None:
        self._limit_bytes = limit_bytes
        self._timeout_s = timeout_s
        self._owners: dict[int, Owner] = {}
        self.change = threading.Condition()

    def owner(self, number: int) -> Owner:
        """The areas of machine `number`. The caller holds `change`."""
        if number not in self._owners and len(self._owners) >= _MAX_OWNERS:
            raise CheckpointError(f"a peer keeps the checkpoints of at most {_MAX_OWNERS} machines")
        return self._owners.setdefault(number, Owner())

    def begin(self, number: int, wire: Wire, sizes: dict[str, int]) -> Area:
        """The area to receive the next checkpoint into: never that of the newest complete one.

        Whoever was receiving for this machine before is cut off: a machine has one trainer. Raises WaitTimeout if it
        (or a reader of the area) does not let go, CheckpointError over the limit of memory.
        """
        with self.change:
            owner = self.owner(number)
            if owner.receiver is not None:
                owner.receiver.abort()
            self._wait(lambda: owner.receiver is None, f"the earlier trainer of machine {number}")
            newest = next(iter(owner.complete()), None)
            area = next(area for area in owner.areas if area is not newest)
            self._wait(lambda: area.readers == 0, f"a reader of machine {number}'s older checkpoint")
            self._fit(area, sizes["nbytes"])
            area.complete = False
            area.chunks = []
            area.sequence, area.step = sizes["sequence"], sizes["step"]
            area.nbytes, area.meta_bytes = sizes["nbytes"], sizes["meta_bytes"]
            owner.receiver = wire
            return area

    def forget(self, number: int, after: int) -> None:
        """Give up the complete checkpoints of machine `number` with a sequence above `after`."""
        with self.change:
            for area in self.owner(number).complete():
                if area.sequence > after:
                    area.complete = False

    def end(self, number: int, wire: Wire) -> None:
        """`wire` brings no more for machine `number`."""
        with self.change:
            owner = self.owner(number)
            if owner.receiver is wire:
                owner.receiver = None
                self.change.notify_all()

    def hold(self, number: int, sequence: int) -> Area:
        """A complete checkpoint that nobody overwrites until `let_go`."""
        with self.change:
            for area in self.owner(number).complete():
                if area.sequence == sequence:
                    area.readers += 1
                    return area
        raise CheckpointError(f"checkpoint {sequence} of machine {number} is not held here (any more)")

    def let_go(self, area: Area) -> None:
        """The reader is done."""
        with self.change:
            area.readers -= 1
            self.change.notify_all()

    def _fit(self, area: Area, nbytes: int) -> None:
        """Give the area memory for `nbytes`, unless it has about as much."""
        if nbytes <= area.capacity <= 2 * nbytes:
            return
        used = sum(other.capacity for owner in self._owners.values() for other in owner.areas) - area.capacity
        limit = self._limit_bytes or used + area.capacity + available_memory_bytes()
        if used + nbytes > limit:
            raise CheckpointError(
                f"a checkpoint of {nbytes} bytes does not fit into this peer's memory: {used} of {limit} bytes are "
                "taken by others; give it more (peer_memory_bytes) or a machine with more memory"
            )
        area.complete = False
        area.memory = None  # its memory goes back before the new one comes
        try:
            area.memory = Memory(nbytes)
        except (OSError, MemoryError, OverflowError) as error:
            raise CheckpointError(
                f"this peer's machine has no memory for a checkpoint of {nbytes} bytes: {error}"
            ) from error

    def _wait(self, met: Callable[[], bool], what: str) -> None:
        if not self.change.wait_for(met, self._timeout_s):
            raise WaitTimeout(f"waited {self._timeout_s:g} s for {what}")
