"""Which rank an address is: what rings, trees and sizes of segments leave possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal

__all__ = ["Edge", "RankFinder"]

Edge = Literal["down", "up", "tree"]
"""To rank - 1 (Gloo's all-reduce), to rank + 1 (all-gathers, NCCL's ring), or down a broadcast's tree from rank 0."""
_MAX_EDGES: Final = 4096


class RankFinder:
    """Candidates for the rank of each address; every fact makes them fewer. One rank for each address."""

    def __init__(self, world: int, known: Mapping[str, int] | None = None) -> None:
        self.world = world
        self._may: dict[str, set[int]] = {address: {rank} for address, rank in (known or {}).items()}
        self._edges: set[tuple[str, str, Edge]] = set()
        self.changed = False
        """Whether a rank became known since it was last set to False."""

    def candidates(self, address: str) -> set[int]:
        """Ranks that an address may have."""
        return self._may.setdefault(address, set(range(self.world)))

    def rank(self, address: str) -> int | None:
        """The rank of an address, if it is certain."""
        may = self.candidates(address)
        return next(iter(may)) if len(may) == 1 else None

    def known(self) -> tuple[tuple[str, int], ...]:
        """(address, rank) of those that are certain, by rank."""
        found = [(rank, address) for address in self._may if (rank := self.rank(address)) is not None]
        return tuple((address, rank) for rank, address in sorted(found))

    def edge(self, source: str, destination: str, kind: Edge) -> bool:
        """`source` sends to `destination` in such a pattern. False if that cannot be (and nothing is changed)."""
        if (source, destination, kind) in self._edges or len(self._edges) >= _MAX_EDGES:
            return True
        return self._apply(lambda: self._edges.add((source, destination, kind)))

    def keep(self, address: str, allowed: Callable[[int], bool]) -> bool:
        """Only these ranks fit. False if none would be left (and nothing is changed)."""
        left = {rank for rank in self.candidates(address) if allowed(rank)}
        if left == self.candidates(address):
            return True
        return bool(left) and self._apply(lambda: self._may.update({address: left}))

    def _apply(self, change: Callable[[], None]) -> bool:
        before, edges = {address: set(may) for address, may in self._may.items()}, set(self._edges)
        known = len(self.known())
        change()
        if not self._settle():
            self._may, self._edges = before, edges
            return False
        self.changed = self.changed or len(self.known()) > known
        return True

    def _settle(self) -> bool:
        again = True
        while again:
            again = False
            for source, destination, kind in self._edges:
                before = len(self.candidates(source)) + len(self.candidates(destination))
                pairs = [
                    (one, other)
                    for one in self.candidates(source)
                    for other in self._partners(one, kind)
                    if other in self.candidates(destination)
                ]
                self._may[source] = {one for one, _ in pairs}
                self._may[destination] = {other for _, other in pairs}
                again |= len(self._may[source]) + len(self._may[destination]) < before
            for address, rank in self.known():
                for other, may in self._may.items():
                    if other != address and rank in may:
                        may.discard(rank)
                        again = True
            if not all(self._may.values()):
                return False
        return True

    def _partners(self, rank: int, kind: Edge) -> list[int]:
        """To whom a rank sends."""
        if kind == "down":
            return [(rank - 1) % self.world]
        if kind == "up":
            return [(rank + 1) % self.world]
        found, bit = [], 1
        while bit < self.world:
            if rank < bit and rank + bit < self.world:
                found.append(rank + bit)
            bit <<= 1
        return found
