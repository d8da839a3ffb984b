"""The side records that a shadow keeps in memory, by iteration and rank."""

from __future__ import annotations

from lastgood.errors import NoCheckpoint
from lastgood.gradients.layout.entries import Side
from lastgood.gradients.shadow.spill_store import SideRecord

__all__ = ["RankRecords"]


class RankRecords:
    """Not safe for several threads: the caller holds the shadow's lock."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held: dict[int, dict[int, SideRecord]] = {}
        self._layouts: dict[int, Side] = {}
        self._bytes = 0

    def reserve(self, nbytes: int) -> bool:
        """Set room aside for a record that is arriving, until `release`; False if there is none."""
        if self._bytes + nbytes > self._limit_bytes:
            return False
        self._bytes += nbytes
        return True

    def release(self, nbytes: int) -> None:
        """What was set aside is put, or did not come."""
        self._bytes -= nbytes

    def described(self, message: Side) -> Side | None:
        """The message with its layout, which a rank sends when it changes; None if it was never sent."""
        if message.layout is not None:
            self._layouts[message.rank] = message
        known = self._layouts.get(message.rank)
        return None if known is None else message.model_copy(update={"layout": known.layout})

    def forget_layouts(self) -> None:
        """A new incarnation: its ranks send their layouts again."""
        self._layouts.clear()

    def put(self, record: SideRecord) -> None:
        """Keep a record, in place of an older one of the same rank and iteration. Its room is the caller's affair."""
        held = self._held.setdefault(record.message.iteration, {})
        older = held.get(record.message.rank)
        held[record.message.rank] = record
        self._bytes += len(record.content) - (len(older.content) if older else 0)

    def drop(self, iteration: int) -> None:
        """Records of this iteration are of no use any more."""
        self._bytes -= sum(len(one.content) for one in self._held.pop(iteration, {}).values())

    def get(self, iteration: int, rank: int) -> SideRecord:
        """Raises NoCheckpoint if it is not held."""
        record = self._held.get(iteration, {}).get(rank)
        if record is None:
            raise NoCheckpoint(f"no side record of rank {rank} is held for iteration {iteration}")
        return record

    def all_of(self, iteration: int) -> dict[int, SideRecord]:
        """All records of an iteration, by rank."""
        return dict(self._held.get(iteration, {}))
