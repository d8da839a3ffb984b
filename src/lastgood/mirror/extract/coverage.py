"""Which bytes of a buffer are there. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

__all__ = ["Coverage"]


class Coverage:
    """Disjoint ranges of `nbytes` bytes, in order; neighbours that touch are one."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.held = 0
        """Bytes in all ranges."""
        self._begins: list[int] = []
        self._ends: list[int] = []

    @property
    def complete(self) -> bool:
        """Whether all bytes are there."""
        return self.held == self.nbytes

    def add(self, begin: int, end: int) -> int:
        """Take [begin, end) in; returns how many bytes of it are new. What lies outside of the buffer does not count.

        Time is constant if ranges come in their order, else logarithmic in the ranges that are apart.
        """
        begin, end = max(begin, 0), min(end, self.nbytes)
        if begin >= end:
            return 0
        begins, ends = self._begins, self._ends
        if not ends or begin > ends[-1]:
            begins.append(begin)
            ends.append(end)
            self.held += end - begin
            return end - begin
        first = bisect_left(ends, begin)
        last = bisect_right(begins, end)
        known = sum(ends[i] - begins[i] for i in range(first, last))
        if first < last:
            begin, end = min(begin, begins[first]), max(end, ends[last - 1])
        begins[first:last] = [begin]
        ends[first:last] = [end]
        new = end - begin - known
        self.held += new
        return new

    def missing(self) -> list[tuple[int, int]]:
        """(begin, end) of what is not there, in order."""
        edges = [0, *(edge for pair in zip(self._begins, self._ends, strict=True) for edge in pair), self.nbytes]
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]

    def ranges(self) -> list[tuple[int, int]]:
        """(begin, end) of what is there, in order."""
        return list(zip(self._begins, self._ends, strict=True))

    def overlap(self, other: Coverage) -> int:
        """Bytes that are in both."""
        both = 0
        mine, theirs = self.ranges(), other.ranges()
        i = j = 0
        while i < len(mine) and j < len(theirs):
            begin, end = max(mine[i][0], theirs[j][0]), min(mine[i][1], theirs[j][1])
            both += max(0, end - begin)
            if mine[i][1] < theirs[j][1]:
                i += 1
            else:
                j += 1
        return both
