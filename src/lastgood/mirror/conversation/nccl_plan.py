"""The messages that a rank sends on one lane of NCCL's ring for one collective of the sequence.

A lane is a channel; with several queue pairs a connection (NCCL_IB_QPS_PER_CONNECTION), one of them. Either they take
turns, message by message through the whole life of the connection, or each message is cut into as many parts, multiples
of 128 bytes on the wire (NCCL_IB_SPLIT_DATA_ON_QPS); parts for which nothing is left are sent empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from lastgood.mirror.conversation.expected import Item
from lastgood.mirror.job.description import JobDescription
from lastgood.wire.nccl import messages, nccl_broadcast, nccl_layout, simple_slices

__all__ = ["NcclMessage", "NcclPlan", "Role", "Variant", "match_roles"]

Role = tuple[int, int]
"""Rank that sends, and lane (`NcclPlan.of`), or channel."""
Variant = tuple[str, int]
"""Protocol, and how many channels are used: NCCL takes fewer for small buffers."""
_LL_GRAIN_BYTES = 8
_SPLIT_BYTES = 128


@dataclass(frozen=True)
class NcclMessage:
    """Bytes `begin` to `end` of the buffer; `nbytes` is what the message carries (protocol LL rounds up)."""

    begin: int
    end: int
    nbytes: int
    final: bool


class NcclPlan:
    """The plans of one job, by collective, variant and role."""

    def __init__(self, job: JobDescription) -> None:
        self._ranks = job.ranks
        self._backend = job.backend
        self._queues = job.backend.queue_pairs
        lanes = job.backend.channels * self._queues
        self.roles = [(rank, lane) for rank in range(job.ranks) for lane in range(lanes)]
        protocols = (job.backend.protocol,) if job.backend.protocol else ("simple", "ll")
        self._variants = [(protocol, used) for used in range(job.backend.channels, 0, -1) for protocol in protocols]
        # The sizes of an all-reduce, a broadcast or an all-gather decide; a few of them come again and again.
        self._made: Callable[[str, int, int, Variant], dict[Role, list[NcclMessage]]] = lru_cache(maxsize=512)(
            self._make
        )

    def of(self, item: Item, variant: Variant, role: Role, before: Mapping[Role, int]) -> list[NcclMessage]:
        """What the role sends, in order; lane `n` is queue pair n mod (queue pairs) of channel n // (queue pairs).

        `before` says how many messages each rank has sent on each channel before. Raises ConfigError for layouts that
        are not known.
        """
        if self._queues == 1:
            return self._all(item, variant).get(role, [])
        rank, lane = role
        channel, queue = divmod(lane, self._queues)
        sent = self._all(item, variant).get((rank, channel), [])
        if self._backend.split_data:
            return [_part(one, variant[0], queue, self._queues) for one in sent]
        return sent[(queue - before.get((rank, channel), 0)) % self._queues :: self._queues]

    def counted(self, item: Item, variant: Variant, before: Mapping[Role, int]) -> Mapping[Role, int]:
        """What `before` is after this collective, up to whole turns."""
        if self._queues == 1 or self._backend.split_data:
            return before
        found = dict(before)
        for place, sent in self._all(item, variant).items():
            found[place] = (found.get(place, 0) + len(sent)) % self._queues
        return found

    def _all(self, item: Item, variant: Variant) -> dict[Role, list[NcclMessage]]:
        assert item.nbytes is not None
        return self._made(item.op, item.nbytes, item.item_bytes, variant)

    def variants(self, item: Item) -> list[Variant]:
        """Those that differ for this collective."""
        found: list[Variant] = []
        for variant in self._variants:
            if all(self._all(item, variant) != self._all(item, one) for one in found):
                found.append(variant)
        return found

    def _make(self, op: str, nbytes: int, item_bytes: int, variant: Variant) -> dict[Role, list[NcclMessage]]:
        backend, ranks = self._backend, self._ranks
        protocol, channels = variant
        found: dict[Role, list[NcclMessage]] = {}

        def add(rank: int, channel: int, begin: int, end: int, final: bool) -> None:
            size = end - begin
            if protocol == "ll":
                size = -(-size // _LL_GRAIN_BYTES) * _LL_GRAIN_BYTES
            found.setdefault((rank, channel), []).append(NcclMessage(begin, end, size, final))

        if op == "broadcast":
            chunks = nccl_broadcast(
                nbytes,
                ranks,
                channels=channels,
                version=backend.version,
                protocol=protocol,
                buffer_bytes=backend.buffer_bytes,
                threads=backend.threads,
            )
            for chunk in chunks:
                for rank in range(ranks - 1):  # from rank 0 to the last one
                    add(rank, chunk.channel, chunk.start, chunk.start + chunk.elements, True)
        elif op == "allgather":
            block = nbytes // ranks
            parts = (block,) if protocol == "ll" else simple_slices(block, 1, backend.buffer_bytes)
            for rank in range(ranks):
                for step in range(ranks - 1):
                    at = block * ((rank - step) % ranks)
                    for part in parts:
                        add(rank, 0, at, at + part, True)
                        at += part
        else:
            layout = nccl_layout(
                nbytes // item_bytes,
                item_bytes,
                ranks,
                channels=channels,
                version=backend.version,
                protocol=protocol,
                buffer_bytes=backend.buffer_bytes,
                threads=backend.threads,
            )
            for rank in range(ranks):
                for one in messages(layout, rank, protocol=protocol, buffer_bytes=backend.buffer_bytes):
                    begin = one.start * item_bytes
                    final = one.send.step >= ranks - 1
                    add(rank, one.send.chunk.channel, begin, begin + one.elements * item_bytes, final)
        return found


def _part(message: NcclMessage, protocol: str, queue: int, queues: int) -> NcclMessage:
    """What of a message one of its queue pairs carries."""
    coded = 2 if protocol == "ll" else 1  # bytes on the wire for each byte of data
    wire = message.nbytes * coded
    part = _up(_up(wire, queues), _SPLIT_BYTES) * _SPLIT_BYTES // coded
    first = min(queue * part, message.nbytes)
    last = min(first + part, message.nbytes)
    begin = min(message.begin + first, message.end)
    return NcclMessage(begin, min(message.begin + last, message.end), last - first, message.final)


def _up(value: int, divisor: int) -> int:
    return -(-value // divisor)


def match_roles(allowed: dict[int, list[Role]]) -> bool:
    """Whether each flow can have one of its roles, and no role is that of two flows."""
    owner: dict[Role, int] = {}

    def find(flow: int, tried: set[Role]) -> bool:
        for role in allowed[flow]:
            if role not in tried:
                tried.add(role)
                if role not in owner or find(owner[role], tried):
                    owner[role] = flow
                    return True
        return False

    return all(find(flow, set()) for flow in allowed)
