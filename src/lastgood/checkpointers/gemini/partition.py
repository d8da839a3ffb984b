"""How a checkpoint is cut into chunks that fit the idle timespans of the network (Gemini, SOSP'23, section 5)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["LEAST_CHUNK_BYTES", "Network", "chunks_for_gap", "partition"]

LEAST_CHUNK_BYTES = 4096
"""What is left of a gap after its last chunk is given up if it would hold less than this."""


@dataclass(frozen=True)
class Network:
    """How long a chunk takes: `latency_s` for each, and its bytes at `bytes_per_s`."""

    bytes_per_s: float
    latency_s: float

    def seconds(self, nbytes: int) -> float:
        """The paper's f(s): seconds for a chunk of `nbytes`."""
        return self.latency_s + nbytes / self.bytes_per_s

    def least_span_s(self, nbytes: int) -> float:
        """The shortest gap in which it is worth to begin, with `nbytes` still to send."""
        return self.seconds(min(nbytes, LEAST_CHUNK_BYTES))


def chunks_for_gap(span_s: float, nbytes: int, part_bytes: int, network: Network) -> Iterator[int]:
    """Sizes of the chunks that fit into a gap of `span_s` seconds (perhaps infinite), of `nbytes` still to send.

    The inner loop of the paper's Algorithm 2. A chunk is at most `part_bytes`, one of the buffers at the receiver, so
    that the next one is received while it is copied.
    """
    while nbytes > 0:
        size = min(nbytes, part_bytes)
        if span_s < network.seconds(size):
            size = math.floor((span_s - network.latency_s) * network.bytes_per_s)
            if size < min(nbytes, LEAST_CHUNK_BYTES):
                return
        yield size
        nbytes -= size
        span_s -= network.seconds(size)


def partition(
    gaps_s: Sequence[float], nbytes: int, part_bytes: int, network: Network, gamma: float
) -> list[tuple[int, int]]:
    """Cut `nbytes` into (gap, chunk bytes) for iterations with idle timespans `gaps_s`, of which `gamma` is used.

    Gaps are numbered on over the iterations: with d of them, gap k d + i is the i-th of iteration k. The paper takes
    the last gap of the first iteration as endless, so that a checkpoint never takes longer than one iteration, and
    says to checkpoint less often where that slows training down; here what does not fit waits for the next iteration.
    Only if no gap holds any chunk is the last one taken as endless.
    """
    chunks: list[tuple[int, int]] = []
    number = 0
    while nbytes > 0:
        before = nbytes
        for span_s in gaps_s:
            for size in chunks_for_gap(gamma * span_s, nbytes, part_bytes, network):
                chunks.append((number, size))
                nbytes -= size
            number += 1
        if nbytes == before:
            last = max(number - 1, 0)
            chunks += [(last, size) for size in chunks_for_gap(math.inf, nbytes, part_bytes, network)]
            nbytes = 0
    return chunks
