"""Buffers of the collectives that are open, and which of their bytes are there.

A buffer is complete only if every byte of it was placed. Bytes come from several sources: both directions of a watched
rank's link, and other watched ranks. What one source has lost another one may bring; that is counted as healed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lastgood.mirror.conversation.places import Expect
from lastgood.mirror.extract.coverage import Coverage
from lastgood.mirror.extract.scatter import scatter
from lastgood.units import format_bytes

__all__ = ["Filled", "Gone", "GradientSlots"]

Buffer = npt.NDArray[np.uint8]
Scatter = Callable[[Buffer, int, int, npt.NDArray[Any]], list[tuple[int, int]]]

_NAMED = 3
"""Ranges that a reason names."""


@dataclass(frozen=True)
class Filled:
    """A collective's buffer is complete. It may be used until it is given back by `GradientSlots.free`."""

    expected: Expect
    memory: Buffer


@dataclass(frozen=True)
class Gone:
    """A collective can no longer become complete."""

    expected: Expect
    why: str


@dataclass
class _Slot:
    expected: Expect
    memory: Buffer
    held: Coverage
    by_source: dict[int, int] = field(default_factory=dict)
    """Bytes that each source brought, those that were there already too."""
    missed: Coverage | None = None
    """What some source has lost."""


class GradientSlots:
    """Buffers of the open collectives. Not thread-safe.

    Args:
        limit_bytes: of all buffers together; a collective that finds no room is gone at once.
        copy: moves bytes to their places (`scatter`).
    """

    def __init__(self, limit_bytes: int, copy: Scatter = scatter) -> None:
        self._limit_bytes = limit_bytes
        self._copy = copy
        self._open: dict[int, _Slot] = {}
        self._open_bytes = 0
        self._spare: dict[int, list[Buffer]] = {}
        self._spare_bytes = 0
        self._out: list[Filled | Gone] = []
        self.counters: Counter[str] = Counter()
        """placed, again (bytes that were there already), healed (lost by a source, and there all the same): bytes;
        complete, gone: collectives."""

    def expect(self, expected: Expect) -> None:
        """A collective begins."""
        nbytes = expected.nbytes
        if self._open_bytes + nbytes > self._limit_bytes:
            self._gone(expected, f"its {format_bytes(nbytes)} find no room beside others that are open")
            return
        self._open[expected.collective] = _Slot(expected, self._take(nbytes), Coverage(nbytes))
        self._open_bytes += nbytes
        self._look(expected.collective)

    def place(self, collective: int, source: int, begin: int, end: int, pieces: npt.NDArray[Any]) -> None:
        """Copy pieces (PIECE) of one message, whose payload is bytes `begin` to `end` of the collective."""
        slot = self._open.get(collective)
        if slot is None:
            self.counters["late"] += int(pieces["nbytes"].sum())
            return
        brought = 0
        for low, high in self._copy(slot.memory, begin, min(end, len(slot.memory)), pieces):
            new = slot.held.add(low, high)
            self.counters["placed"] += new
            self.counters["again"] += high - low - new
            brought += high - low
        slot.by_source[source] = slot.by_source.get(source, 0) + brought
        self._look(collective)

    def has(self, collective: int) -> bool:
        """Whether a collective is open."""
        return collective in self._open

    def lost(self, collective: int, begin: int, end: int) -> None:
        """A source will not bring these bytes; others may."""
        slot = self._open.get(collective)
        if slot is not None:
            slot.missed = slot.missed or Coverage(len(slot.memory))
            slot.missed.add(begin, end)

    def missing(self, collective: int) -> list[tuple[int, int]]:
        """(begin, end) of what an open collective lacks; [] for one that is not open."""
        slot = self._open.get(collective)
        return [] if slot is None else slot.held.missing()

    def close(self, collective: int) -> None:
        """Nothing more comes of it: if it is not complete, it is gone."""
        slot = self._open.get(collective)
        if slot is not None:
            holes = slot.held.missing()
            named = ", ".join(f"{begin} to {end}" for begin, end in holes[:_NAMED])
            more = f" and {len(holes) - _NAMED} more" if len(holes) > _NAMED else ""
            self._drop(collective)
            lacking = len(slot.memory) - slot.held.held
            self._gone(
                slot.expected,
                f"{lacking} of {len(slot.memory)} bytes of its {slot.expected.kind} never came (bytes {named}{more})",
            )

    def forget(self) -> None:
        """What is open is of no use any more."""
        for collective in list(self._open):
            self._drop(collective)

    def take(self) -> list[Filled | Gone]:
        """What became of collectives since the last call."""
        out, self._out = self._out, []
        return out

    def free(self, memory: Buffer) -> None:
        """A complete buffer is read; it may be used again."""
        if self._spare_bytes + len(memory) <= self._limit_bytes:
            self._spare.setdefault(len(memory), []).append(memory)
            self._spare_bytes += len(memory)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _take(self, nbytes: int) -> Buffer:
        spare = self._spare.get(nbytes)
        if spare:
            self._spare_bytes -= nbytes
            return spare.pop()
        return np.zeros(nbytes, np.uint8)

    def _drop(self, collective: int) -> None:
        slot = self._open.pop(collective)
        self._open_bytes -= len(slot.memory)

    def _gone(self, expected: Expect, why: str) -> None:
        self.counters["gone"] += 1
        self._out.append(Gone(expected, why))

    def _look(self, collective: int) -> None:
        slot = self._open[collective]
        if not slot.held.complete:
            return
        self._drop(collective)
        self.counters["complete"] += 1
        if slot.missed is not None:
            self.counters["healed"] += slot.missed.held
        self._out.append(Filled(slot.expected, slot.memory))
