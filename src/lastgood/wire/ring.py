"""Ring all-reduce: who sends which chunk when, where a chunk lies, and which sends already carry the whole sum.

With N ranks there are 2N-2 send steps. At step s rank r sends chunk (r - 1 - s) mod N to rank r + 1: in the first N - 1
steps partial sums (reduce-scatter), in the others whole ones (all-gather). The arithmetic of chunks is NCCL's; `nccl`
cuts a buffer into channels before. Source: the design of Checkmate (NSDI'26), checked by simulation in the tests.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from lastgood.errors import ConfigError
from lastgood.units import MIB

__all__ = [
    "CHUNK_BYTES",
    "ChannelRange",
    "Chunk",
    "Cover",
    "RingLayout",
    "Send",
    "Turns",
    "check_sizes",
    "is_final",
    "is_marked",
    "marked_send",
    "one_channel",
    "sent_chunk",
    "step_count",
]

CHUNK_BYTES = 2 * MIB
"""A full chunk: half of NCCL's default buffer of 4 MiB."""
MAX_RANKS = 1 << 16
MAX_ELEMENTS = 1 << 50
_GRAIN_BYTES = 16
"""Chunks of the last loop are multiples of it, if no channels take turns."""
_ELEMENT_BYTES = (1, 2, 4, 8)


class Cover(str, enum.Enum):
    """Which of the final sends are marked, so that each chunk is marked exactly once."""

    ARTEFACT = "artefact"
    """The published one: the last rank's N - 1 final sends and rank 0's first one; two links carry all marks."""
    BALANCED = "balanced"
    """Every rank's first final send: each link carries 1/N of the marks."""


@dataclass(frozen=True)
class Turns:
    """How several channels take turns in one run of elements: each loop is for all of them, in chunks of one size."""

    channels: int
    index: int
    """Which of the channels, from 0."""
    grain_elements: int
    """Chunks of the last loop are multiples of it."""
    interleaved: bool
    """True: the loop's chunks 0 of all channels come first, then all chunks 1, and so on. False: channel by channel."""


@dataclass(frozen=True)
class ChannelRange:
    """A run of elements that one channel reduces in loops of `ranks` chunks: alone, or in turns with others."""

    channel: int
    start: int
    elements: int
    chunk_elements: int
    """Of a full chunk."""
    turns: Turns | None = None
    """None: no other channel has a part of this run."""

    def chunks(self, ranks: int, element_bytes: int) -> Iterator[Chunk]:
        """This channel's chunks, `ranks` for each loop, in the order of loops and indices."""
        turns = self.turns
        channels, mine = (1, 0) if turns is None else (turns.channels, turns.index)
        grain = _GRAIN_BYTES // element_bytes if turns is None else turns.grain_elements
        position = loop = 0
        while position < self.elements:
            left = self.elements - position
            size = min(self.chunk_elements, _ceil(_ceil(left, channels * ranks), grain) * grain)
            for index in range(ranks):
                turn = index * channels + mine if turns is not None and turns.interleaved else mine * ranks + index
                before = min(turn * size, left)
                yield Chunk(self.channel, loop, index, self.start + position + before, min(size, left - before))
            position += channels * ranks * self.chunk_elements
            loop += 1


@dataclass(frozen=True)
class Chunk:
    """Elements `start` to `start + elements` of the buffer; `elements` may be 0."""

    channel: int
    loop: int
    index: int
    """Which of the loop's chunks, from 0."""
    start: int
    elements: int


@dataclass(frozen=True)
class Send:
    """What one rank sends to the next one at one step of one loop."""

    rank: int
    step: int
    chunk: Chunk


@dataclass(frozen=True)
class RingLayout:
    """How a buffer of `elements` elements of `element_bytes` bytes is reduced by a ring of `ranks` ranks."""

    elements: int
    element_bytes: int
    ranks: int
    ranges: tuple[ChannelRange, ...]

    def chunks(self) -> Iterator[Chunk]:
        """All chunks, `ranks` for each loop, in the order of channels, loops and indices."""
        for run in self.ranges:
            yield from run.chunks(self.ranks, self.element_bytes)

    def sends(self, rank: int) -> Iterator[Send]:
        """All that `rank` sends, empty chunks too, in the order of channels, loops and steps."""
        for run in self.ranges:
            chunks = run.chunks(self.ranks, self.element_bytes)
            while loop := list(islice(chunks, self.ranks)):
                for step in range(step_count(self.ranks)):
                    yield Send(rank, step, loop[sent_chunk(self.ranks, rank, step)])

    def marked(self, cover: Cover) -> Iterator[Send]:
        """The sends of all ranks that the cover marks and that are not empty, in the order of channels, loops, chunks.

        Each element is in exactly one of them.
        """
        for chunk in self.chunks():
            if chunk.elements:
                rank, step = marked_send(cover, self.ranks, chunk.index)
                yield Send(rank, step, chunk)


def check_sizes(elements: int, element_bytes: int, ranks: int) -> None:
    """Raise ConfigError for what no ring can reduce."""
    if not 0 <= elements <= MAX_ELEMENTS:
        raise ConfigError(f"a buffer has 0 to {MAX_ELEMENTS} elements, not {elements}")
    if element_bytes not in _ELEMENT_BYTES:
        raise ConfigError(f"an element has 1, 2, 4 or 8 bytes, not {element_bytes}")
    if not 2 <= ranks <= MAX_RANKS:
        raise ConfigError(f"a ring has 2 to {MAX_RANKS} ranks, not {ranks}")


def one_channel(elements: int, element_bytes: int, ranks: int, chunk_bytes: int = CHUNK_BYTES) -> RingLayout:
    """The layout of a ring with one channel: Lastgood's own ring, and NCCL's with one channel.

    Raises ConfigError for sizes that no ring has, and for a `chunk_bytes` that is no multiple of 16.
    """
    check_sizes(elements, element_bytes, ranks)
    if chunk_bytes <= 0 or chunk_bytes % _GRAIN_BYTES:
        raise ConfigError(f"a chunk has a multiple of {_GRAIN_BYTES} bytes, not {chunk_bytes}")
    ranges = (ChannelRange(0, 0, elements, chunk_bytes // element_bytes),) if elements else ()
    return RingLayout(elements, element_bytes, ranks, ranges)


def step_count(ranks: int) -> int:
    """Send steps of one loop."""
    return 2 * ranks - 2


def sent_chunk(ranks: int, rank: int, step: int) -> int:
    """The index of the chunk that `rank` sends at `step`."""
    return (rank - 1 - step) % ranks


def is_final(ranks: int, step: int) -> bool:
    """Whether what is sent at `step` carries the sum over all ranks; the same for every rank."""
    return step >= ranks - 1


def marked_send(cover: Cover, ranks: int, chunk: int) -> tuple[int, int]:
    """Rank and step of the one send of a chunk that the cover marks."""
    rank = ranks - 1 if cover is Cover.ARTEFACT and chunk else chunk
    return rank, ranks - 1 + (rank - chunk) % ranks


def is_marked(cover: Cover, ranks: int, rank: int, step: int) -> bool:
    """Whether the cover marks what `rank` sends at `step`."""
    return is_final(ranks, step) and marked_send(cover, ranks, sent_chunk(ranks, rank, step)) == (rank, step)


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)
