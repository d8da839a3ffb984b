"""What each rank sends for each collective over Gloo, and in which order heads pass a port; a naive model."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import groupby

from tests.mirror.support.ddp_life import Collective, Life

PREFIX = {"allgather": 2, "allreduce": 4, "broadcast": 6, "barrier": 7}
DATA, TO_SEND, TO_RECEIVE = 1, 2, 3


@dataclass(frozen=True)
class Sent:
    """A head on the wire from one rank to another."""

    source: int
    destination: int
    opcode: int
    slot: int
    nbytes: int
    tag: int
    begin: int = 0
    end: int = 0
    final: bool = False


def up(value: int, divisor: int) -> int:
    """Divided, rounded up."""
    return -(-value // divisor)


def messages(one: Collective, tag: int, ranks: int) -> list[tuple[int, int, int, int, bool]]:
    """(source, destination, begin, end, final) of all messages with data, in order for each source."""
    found = []
    if one.op == "broadcast":
        for rank in range(ranks):
            bit = 1
            while bit < ranks:
                if rank < bit and rank + bit < ranks:
                    found.append(((rank + one.root) % ranks, (rank + bit + one.root) % ranks, 0, one.nbytes, True))
                bit *= 2
    elif one.op == "allgather":
        for rank in range(ranks):
            for number in range(2 * ranks - 2):
                begin = 8 * ((rank - number // 2) % ranks) + 4 * (number % 2)
                found.append((rank, (rank + 1) % ranks, begin, begin + 4, True))
    elif one.op == "barrier":
        step = 1
        while step < ranks:
            found += [(rank, (rank + step) % ranks, 0, 0, True) for rank in range(ranks)]
            step *= 2
    else:
        largest = one.item * max(1, 2**20 // one.item)
        segments = ranks * up(max(up(one.nbytes, largest), 2 * ranks), ranks)
        size = one.item * up(up(one.nbytes, segments), one.item)
        chunk = segments // ranks
        for rank in range(ranks):
            for first, final in (((rank + 1) * chunk, False), (rank * chunk, True)):
                for number in range(segments - chunk):
                    at = (first + number) % segments * size
                    if at < one.nbytes:
                        found.append((rank, (rank - 1) % ranks, at, min(one.nbytes, at + size), final))
    return found


def heads(life: Life, seed: int = 0, *, announcements: bool = True) -> list[Sent]:
    """All heads of all ranks in one order that two threads in each rank may make."""
    chance = random.Random(seed)
    ranks = life.job.ranks
    found: list[Sent] = []
    for _, tags in groupby(range(len(life.collectives)), key=lambda tag: life.collectives[tag].phase):
        found += _together(life, list(tags), chance, announcements)
    assert all(one.source < ranks for one in found)
    return found


def _together(life: Life, tags: list[int], chance: random.Random, announcements: bool) -> list[Sent]:
    """Collectives that may run at once, two at a time in each rank."""
    ranks = life.job.ranks
    waiting: dict[int, dict[int, list[Sent]]] = {rank: {tag: [] for tag in tags} for rank in range(ranks)}
    for tag in tags:
        one = life.collectives[tag]
        slot = PREFIX[one.op] << 56 | tag << 24
        for source, destination, begin, end, final in messages(one, tag, ranks):
            if announcements:
                waiting[source][tag].append(Sent(source, destination, TO_SEND, slot, end - begin, tag))
                waiting[destination][tag].append(Sent(destination, source, TO_RECEIVE, slot, end - begin, tag))
            waiting[source][tag].append(Sent(source, destination, DATA, slot, end - begin, tag, begin, end, final))
    found = []
    active = {rank: list(tags[:2]) for rank in range(ranks)}
    later = {rank: list(tags[2:]) for rank in range(ranks)}
    while any(active.values()):
        rank = chance.choice([rank for rank in range(ranks) if active[rank]])
        tag = chance.choice(active[rank])
        queue = waiting[rank][tag]
        if queue:
            found.append(queue.pop(0))
        if not queue:
            active[rank].remove(tag)
            if later[rank]:
                active[rank].append(later[rank].pop(0))
    return found
