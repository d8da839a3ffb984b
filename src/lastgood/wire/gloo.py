"""Gloo's ring all-reduce: who sends which bytes when, and which messages already carry the whole sum.

A buffer of T bytes is cut into S segments, P = S / N for each of the N chunks. Rank r sends to rank r - 1 and receives
from rank r + 1 (NCCL's ring goes the other way). First the segments of N - 1 chunks as partial sums (reduce-scatter),
then those of N - 1 chunks as whole ones (all-gather); empty segments are not sent. Gloo has no other algorithm for
all-reduce unless one is asked for, and torch asks for none. tests/wire/test_gloo.py holds this to the installed torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from lastgood.errors import ConfigError
from lastgood.units import MIB
from lastgood.wire.ring import MAX_RANKS

__all__ = ["MAX_SEGMENT_BYTES", "GlooMessage", "GlooRing"]

MAX_SEGMENT_BYTES = MIB
"""Rounded down to whole elements; an element is sent in one part all the same."""
_MAX_BYTES = 1 << 53
_MAX_ITEM_BYTES = 16


@dataclass(frozen=True)
class GlooMessage:
    """Bytes `begin` to `end` of the buffer, in one message."""

    segment: int
    begin: int
    end: int
    final: bool
    """Whether it carries the sum over all ranks."""


@dataclass(frozen=True)
class GlooRing:
    """How a buffer of `nbytes` bytes, of elements of `item_bytes` bytes, is reduced by a ring of `ranks` ranks.

    Raises ConfigError for sizes that no ring has.
    """

    nbytes: int
    ranks: int
    item_bytes: int

    def __post_init__(self) -> None:
        if not 2 <= self.ranks <= MAX_RANKS:
            raise ConfigError(f"a ring has 2 to {MAX_RANKS} ranks, not {self.ranks}")
        if not 1 <= self.item_bytes <= _MAX_ITEM_BYTES:
            raise ConfigError(f"an element has 1 to {_MAX_ITEM_BYTES} bytes, not {self.item_bytes}")
        if not 0 <= self.nbytes <= _MAX_BYTES or self.nbytes % self.item_bytes:
            raise ConfigError(f"a buffer of {self.nbytes} bytes, of elements of {self.item_bytes} bytes")

    @property
    def segments(self) -> int:
        """How many segments there are; the last ones may be empty."""
        largest = self.item_bytes * max(1, MAX_SEGMENT_BYTES // self.item_bytes)
        return _round_up(max(-(-self.nbytes // largest), 2 * self.ranks), self.ranks)

    @property
    def segment_bytes(self) -> int:
        """Bytes of a full segment."""
        return _round_up(-(-self.nbytes // self.segments), self.item_bytes)

    def span(self, segment: int) -> tuple[int, int]:
        """First byte of a segment, and the one after its last."""
        size = self.segment_bytes
        return min(self.nbytes, segment * size), min(self.nbytes, (segment + 1) * size)

    def sent(self, rank: int) -> list[GlooMessage]:
        """What a rank sends to the rank before it, in order."""
        return self._messages(rank + 1, rank)

    def received(self, rank: int) -> list[GlooMessage]:
        """What a rank receives from the rank after it, in order: what that one sends."""
        return self.sent((rank + 1) % self.ranks)

    def _messages(self, partial_chunk: int, final_chunk: int) -> list[GlooMessage]:
        segments = self.segments
        chunk = segments // self.ranks
        found = []
        for first, final in ((partial_chunk * chunk, False), (final_chunk * chunk, True)):
            for number in range(segments - chunk):
                segment = (first + number) % segments
                begin, end = self.span(segment)
                if begin < end:
                    found.append(GlooMessage(segment, begin, end, final))
        return found


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
