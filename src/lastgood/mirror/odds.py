"""How often a mirror's losses cost a step: copies of each chunk, formula, simulation, and which ranks to watch.

In NCCL's ring of k ranks each final chunk passes k - 1 links: chunk c all but the one that leads to rank c. A watched
rank r shows the links from r - 1 and from r. So chunks r and r + 1 come once, all others twice, and with two ranks
nothing comes twice. A step is lost if some packet of the reduced gradient is missing in every copy.

The formula takes losses of different copies as independent. That is the weak part: both directions mirrored into one
port of the same speed overload it, and then lose together; bursts are in the simulation, not in the formula.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from lastgood.errors import ConfigError

__all__ = ["Loss", "RingJob", "Watching", "chunk_copies", "lost_step_probability", "propose", "simulate"]

_MOST_CHOICES = 20_000
_MOST_SIMULATED = 200_000_000


@dataclass(frozen=True)
class RingJob:
    """A training whose gradients go through one ring."""

    ranks: int
    gradient_bytes: int
    """Of one step, as reduced."""
    packet_bytes: int
    """Payload of a packet: the MTU; with protocol LL half of it is data."""

    def __post_init__(self) -> None:
        if not 2 <= self.ranks <= 1 << 16:
            raise ConfigError(f"a ring has 2 to {1 << 16} ranks, not {self.ranks}")
        if self.gradient_bytes < 1 or self.packet_bytes < 1:
            raise ConfigError("gradients and packets have at least 1 byte")

    @property
    def chunk_packets(self) -> int:
        """Packets that carry one rank's chunk of all gradients of a step."""
        return max(1, math.ceil(self.gradient_bytes / self.ranks / self.packet_bytes))


@dataclass(frozen=True)
class Loss:
    """How a mirror loses packets."""

    probability: float
    """Mean share of lost packets of one copy."""
    burst: float = 1.0
    """Mean length of a loss, in packets of one direction of a link."""

    def __post_init__(self) -> None:
        if not 0 <= self.probability < 1 or self.burst < 1:
            raise ConfigError("a loss has a probability from 0 to below 1, and bursts of at least 1 packet")


@dataclass(frozen=True)
class Watching:
    """A choice of watched ranks, and what it gives."""

    watched: tuple[int, ...]
    copies: dict[int, int]
    """How many chunks come so many times."""
    probability: float
    """That a step is lost."""


def chunk_copies(ranks: int, watched: Sequence[int]) -> list[int]:
    """How many copies of each final chunk the mirrors of the watched ranks show.

    A link between two watched ranks is mirrored at both of its ends, and counts twice.
    """
    if len(set(watched)) != len(watched) or not set(watched) <= set(range(ranks)):
        raise ConfigError(f"watched ranks are different ones of 0 to {ranks - 1}, not {list(watched)}")
    copies = [0] * ranks
    for rank in watched:
        for link in ((rank - 1) % ranks, rank):
            for chunk in range(ranks):
                # The next rank has this chunk's sum first: it is not sent to it.
                if chunk != (link + 1) % ranks:
                    copies[chunk] += 1
    return copies


def lost_step_probability(job: RingJob, watched: Sequence[int], probability: float) -> float:
    """1 - the product over all chunks of (1 - p^copies)^packets, without losing small numbers."""
    if probability <= 0:
        return 0.0
    together = 0.0
    for copies in chunk_copies(job.ranks, watched):
        missing = probability**copies
        if missing >= 1:
            return 1.0
        together += job.chunk_packets * math.log1p(-missing)
    return -math.expm1(together)


def simulate(job: RingJob, watched: Sequence[int], loss: Loss, steps: int, seed: int = 0) -> float:
    """The share of lost steps among so many simulated ones.

    Each watched port loses in bursts of its own in each direction, over the final packets in the order in which they
    pass. Raises ConfigError for more packets than can be simulated.
    """
    packets = job.ranks * job.chunk_packets
    if steps * packets * 2 * len(watched) * max(loss.probability, 1e-3) > _MOST_SIMULATED:
        raise ConfigError("that many packets cannot be simulated; ask for fewer steps, or less gradient")
    dice = random.Random(seed)
    lost_steps = 0
    lanes = [
        [(link - number) % job.ranks for number in range(job.ranks - 1)]
        for rank in watched
        for link in ((rank - 1) % job.ranks, rank)
    ]
    needed = chunk_copies(job.ranks, watched)
    left = [0] * len(lanes)
    for _ in range(steps):
        missing: Counter[tuple[int, int]] = Counter()
        for lane, chunks in enumerate(lanes):
            left[lane] = _lose_lane(dice, loss, chunks, job.chunk_packets, missing, left[lane])
        lost_steps += any(count >= needed[chunk] for (chunk, _), count in missing.items()) or 0 in needed
    return lost_steps / steps


def propose(job: RingJob, count: int, probability: float) -> list[Watching]:
    """Choices of `count` ranks to watch, best first; of those that are alike, the one with the lowest ranks.

    Neighbours share a link: two ranks that are apart show most chunks as often, and none as rarely.
    """
    if not 1 <= count <= min(job.ranks, 8):
        raise ConfigError(f"1 to {min(job.ranks, 8)} ranks can be watched, not {count}")
    found: dict[tuple[tuple[int, int], ...], Watching] = {}
    for watched in _choices(job.ranks, count):
        copies = Counter(chunk_copies(job.ranks, watched))
        key = tuple(sorted(copies.items()))
        if key not in found:
            chance = lost_step_probability(job, watched, probability)
            found[key] = Watching(watched, dict(sorted(copies.items())), chance)
    return sorted(found.values(), key=lambda one: (one.probability, tuple(one.copies.items()), one.watched))


def _choices(ranks: int, count: int) -> list[tuple[int, ...]]:
    """Rank 0 and others: all, or if those are too many, ones next to each other and ones spread out."""
    if math.comb(ranks - 1, count - 1) <= _MOST_CHOICES and ranks <= 64:
        return [(0, *others) for others in combinations(range(1, ranks), count - 1)]
    spread = tuple(number * ranks // count for number in range(count))
    return [tuple(range(count)), spread]


def _lose_lane(
    dice: random.Random, loss: Loss, chunks: list[int], packets: int, missing: Counter[tuple[int, int]], left: int
) -> int:
    """Lose packets of one direction in one step; returns how many more the last burst takes from the next step."""
    total = len(chunks) * packets
    begin = loss.probability / (loss.burst * (1 - loss.probability) + loss.probability)
    at = 0
    while at < total:
        if left == 0:
            if begin <= 0:
                return 0
            # How many packets pass before the next loss begins, drawn at once.
            at += int(math.log(1 - dice.random()) / math.log1p(-begin)) if begin < 1 else 0
            left = 1
            while loss.burst > 1 and dice.random() > 1 / loss.burst:
                left += 1
            if at >= total:
                return 0
        take = min(left, total - at)
        for place in range(at, at + take):
            missing[chunks[place // packets], place % packets] += 1
        at += take
        left -= take
    return left
