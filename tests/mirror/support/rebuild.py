"""Collectives out of Gloo's messages, by the tables of docs/wire-format.md: an independent, plain reading."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lastgood.wire.gloo import GlooRing
from tests.mirror.support.frames import Message, Messages

ALLGATHER, ALLREDUCE, BROADCAST, BARRIER = 2, 4, 6, 7


@dataclass
class Collective:
    """The messages with data of one collective, as the watched rank saw them."""

    tag: int
    prefix: int
    sent: dict[str, list[Message]]
    """By the address of the other side."""
    received: dict[str, list[Message]]

    def broadcast(self) -> bytes:
        """What rank 0, which is watched, sent to the first one that it sent to."""
        return b"".join(bytes(message.content) for message in next(iter(self.sent.values())))

    def reduced(self, rank: int, addresses: Sequence[str], sizes: Iterable[int], item_bytes: int = 4) -> bytes | None:
        """The sum, if the messages are those of a buffer of one of these sizes."""
        ranks = len(addresses)
        sent = self.sent.get(addresses[rank - 1], [])
        received = self.received.get(addresses[(rank + 1) % ranks], [])
        for size in sizes:
            ring = GlooRing(size, ranks, item_bytes)
            plans = ((ring.sent(rank), sent), (ring.received(rank), received))
            if any([one.end - one.begin for one in plan] != [m.nbytes for m in came] for plan, came in plans):
                continue
            buffer, known = bytearray(size), bytearray(size)
            for plan, came in plans:
                for place, message in zip(plan, came, strict=True):
                    if place.final:
                        assert message.complete
                        part = slice(place.begin, place.end)
                        assert not any(known[part]) or buffer[part] == message.content, "both copies are equal"
                        buffer[part], known[part] = message.content, b"\1" * message.nbytes
            assert all(known)
            return bytes(buffer)
        return None


def collectives(found: Messages, watched: str) -> list[Collective]:
    """All collectives of a process group, in the order of their tags."""
    by_tag: dict[tuple[int, int], Collective] = {}
    for index, flow in found.flows.items():
        for message in found.of(index):
            if message.opcode != 1:
                continue
            key = message.slot >> 24 & 0xFFFFFFFF, message.slot >> 56
            one = by_tag.setdefault(key, Collective(*key, {}, {}))
            if flow.source == watched:
                one.sent.setdefault(flow.destination, []).append(message)
            else:
                one.received.setdefault(flow.source, []).append(message)
    return [by_tag[key] for key in sorted(by_tag)]
