"""The messages that a rank sends on one channel of NCCL's ring for one collective of the sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from lastgood.mirror.conversation.expected import Item
from lastgood.mirror.job.description import JobDescription
from lastgood.wire.nccl import messages, nccl_broadcast, nccl_layout, simple_slices

__all__ = ["NcclMessage", "NcclPlan", "Role", "Variant", "match_roles"]

Role = tuple[int, int]
"""Rank that sends, and channel."""
Variant = tuple[str, int]
"""Protocol, and how many channels are used: NCCL takes fewer for small buffers."""
_LL_GRAIN_BYTES = 8


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
        self.roles = [(rank, channel) for rank in range(job.ranks) for channel in range(job.backend.channels)]
        protocols = (job.backend.protocol,) if job.backend.protocol else ("simple", "ll")
        self._variants = [(protocol, used) for used in range(job.backend.channels, 0, -1) for protocol in protocols]
        # The sizes of an all-reduce, a broadcast or an all-gather decide; a few of them come again and again.
        self._made: Callable[[str, int, int, Variant], dict[Role, list[NcclMessage]]] = lru_cache(maxsize=512)(
            self._make
        )

    def of(self, item: Item, variant: Variant, role: Role) -> list[NcclMessage]:
        """What the role sends, in order. Raises ConfigError for layouts that are not known."""
        return self._all(item, variant).get(role, [])

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
