"""How DistributedDataParallel groups tensors: first buckets of gradients, and broadcasts of parameters and buffers.

The rules are those of torch's reducer (torch 1.7 to 2.14); a test holds them to the installed one.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence

from lastgood.mirror.job.description import ITEM_BYTES, DdpSettings, JobDescription, TensorInfo

__all__ = ["assign", "bucket_bytes", "coalesced", "initial_buckets", "likely_buckets", "rebuilds"]


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


def likely_buckets(job: JobDescription) -> tuple[tuple[int, ...], ...]:
    """The buckets of later steps, for a capture that has not seen them: indices into the trainable parameters.

    Certain if buckets are never rebuilt. Otherwise those that gradients make which become ready in the reverse order of
    the module's parameters, as they do in most models; sizes can contradict them, and only the bits of two states
    prove them.
    """
    if not rebuilds(job.ddp):
        return initial_buckets(job)
    order = list(reversed(range(len(job.trainable))))
    tensors = [job.parameters[job.trainable[one]] for one in order]
    limits = job.ddp.cap_list or _caps(job.ddp)
    groups = assign([one.nbytes for one in tensors], [one.dtype for one in tensors], limits)
    return tuple(tuple(order[place] for place in group) for group in groups)


def _limits(ddp: DdpSettings) -> Sequence[int]:
    if ddp.cap_list:
        return ddp.cap_list
    return (sys.maxsize,) if rebuilds(ddp) else _caps(ddp)


def _caps(ddp: DdpSettings) -> Sequence[int]:
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
