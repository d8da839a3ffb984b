"""How DistributedDataParallel groups tensors: first buckets of gradients, and broadcasts of parameters and buffers.

The rules are those of torch's reducer (torch 1.7 to 2.14); a test holds them to the installed one.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence

from lastgood.mirror.job.description import ITEM_BYTES, DdpSettings, JobDescription, TensorInfo

__all__ = ["assign", "bucket_bytes", "coalesced", "initial_buckets", "rebuilds"]


def assign(sizes: Sequence[int], kinds: Sequence[Hashable], limits: Sequence[int]) -> list[list[int]]:
    """Places of tensors (bytes, and what must not be mixed) in groups, each closed when it *reaches* its limit.

    Limits hold for one kind's groups one after another, the last one for all that follow. Groups are ordered by their
    smallest place.
    """
    found: list[list[int]] = []
    open_groups: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    turns: dict[Hashable, int] = {}
    for place, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        group = open_groups.setdefault(kind, [])
        group.append(place)
        filled[kind] = filled.get(kind, 0) + size
        turn = turns.setdefault(kind, 0)
        if filled[kind] >= limits[turn]:
            found.append(group)
            del open_groups[kind], filled[kind]
            turns[kind] = min(turn + 1, len(limits) - 1)
    found += open_groups.values()
    return sorted(found)


def initial_buckets(job: JobDescription) -> tuple[tuple[int, ...], ...]:
    """The buckets before any were rebuilt, in the order of their reduction: indices into the trainable parameters."""
    tensors = [job.parameters[index] for index in job.trainable]
    groups = assign([one.nbytes for one in tensors], [one.dtype for one in tensors], _limits(job.ddp))
    return tuple(tuple(group) for group in reversed(groups))


def _limits(ddp: DdpSettings) -> Sequence[int]:
    if ddp.cap_list:
        return ddp.cap_list
    if ddp.static_graph or not ddp.find_unused_parameters:
        return (sys.maxsize,)
    return (ddp.first_cap, ddp.cap) if ddp.first_cap < ddp.cap else (ddp.cap,)


def rebuilds(ddp: DdpSettings) -> bool:
    """Whether buckets are rebuilt in the order in which gradients became ready."""
    return ddp.static_graph or not ddp.find_unused_parameters


def bucket_bytes(job: JobDescription, bucket: Sequence[int]) -> int:
    """Bytes on the wire of a bucket of trainable parameters."""
    return sum(
        job.parameters[index].elements * ITEM_BYTES[job.wire_dtype(index)]
        for index in (job.trainable[one] for one in bucket)
    )


def coalesced(tensors: Sequence[TensorInfo], cap: int) -> list[list[TensorInfo]]:
    """Tensors as they are broadcast: one message for each dtype and `cap` bytes."""
    groups = assign([one.nbytes for one in tensors], [one.dtype for one in tensors], (cap,))
    return [[tensors[place] for place in group] for group in groups]
