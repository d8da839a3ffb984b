"""The sequence of collectives of a DistributedDataParallel training, one life long.

    start: count, sizes and strides, parameters and buffers
    for each reduction: the order of the rebuilt buckets (once), buffers, gradients, map of used parameters

A group's collectives follow one another directly, but for those of gradients. Buffers may come more than once (a
forward without backward), and are not there if no buffers are broadcast. See docs/wire-format.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final, Literal

import numpy as np

from lastgood.mirror.conversation.places import Kind
from lastgood.mirror.job.ddp import bucket_bytes, coalesced, initial_buckets, rebuilds
from lastgood.mirror.job.description import ITEM_BYTES, JobDescription

__all__ = ["Buckets", "CollectiveSequence", "Group", "Item", "Op", "known_buckets", "shapes_difference"]

Op = Literal["allgather", "broadcast", "allreduce"]
Group = Literal["start", "rebuild", "buffers", "gradients"]
Buckets = tuple[tuple[int, ...], ...]
_INT: Final = 4


@dataclass(frozen=True)
class Item:
    """One collective of the sequence. `nbytes` is its buffer's size, None if only its content will tell."""

    op: Op
    kind: Kind
    nbytes: int | None
    dtype: str
    step: int
    group: Group
    index: int
    """In its group."""
    phase: int = -1
    """2 k before the k-th reduction, 2 k + 1 in it: a rank has all of a phase before it begins the next one."""
    bucket: int | None = None
    tensors: tuple[str, ...] = ()

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return ITEM_BYTES[self.dtype]


class CollectiveSequence:
    """Where in the sequence a training is. `accept` goes on; `candidates` says what may come next."""

    def __init__(self, job: JobDescription, known: Buckets | None = None) -> None:
        self._job = job
        self._known = known
        self._parameters = len(job.trainable)
        self._start = self._start_items()
        self.buffers = self._buffer_items() if job.ddp.forward_buffers else []
        """Of a broadcast of buffers, with the sizes that matter."""
        self._rebuild_after = (2 if job.ddp.static_graph else 1) if rebuilds(job.ddp) else None
        self.buckets: Buckets = initial_buckets(job)
        self._order: list[int] | None = None
        self._sizes: list[int] | None = None
        self._announced: int | None = None
        self.reduction = 0
        """Reductions that are complete."""
        self._rebuilt = False
        self._assumed = False
        self._buffers_first = False
        """Whether the buffers that open this step have come."""
        self._buffers_ready = not self.buffers
        """Whether those of this reduction's own forward have, or there are none."""
        self._open: list[Item] = list(self._start)
        self._at = 0

    # -- what comes ------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The step that is open, or comes next."""
        return self.reduction // self._job.reductions_per_step

    @property
    def has_known(self) -> bool:
        """Whether the buckets of an earlier life can stand for rebuilt ones that were not seen."""
        return self._known is not None or self._rebuild_after is None

    @property
    def started(self) -> bool:
        """Whether the first synchronisation is complete."""
        return not (self._open and self._open[0].group == "start")

    @property
    def inside(self) -> Group | None:
        """The group of which some collectives have come, and others have not."""
        return self._open[0].group if self._open and self._at else None

    def candidates(self) -> list[Item]:
        """What may come next; the first one comes in a training without any extra forward.

        None at all: that depends on content that is not there yet.
        """
        if self._open and (self._at or self._open[0].group == "start"):
            return [self._open[self._at]]
        buffers = self._group_of_buffers()[:1]
        if self._rebuild_due():
            return [self._rebuild_items()[0], *buffers]
        if not self._buffers_ready:
            return buffers
        return [self._gradient_items()[0], *buffers] if self.buckets_known else []

    def candidates_at_start(self) -> list[Item]:
        """The collectives of the first synchronisation."""
        return self._start

    def accept(self, item: Item) -> None:
        """One of the candidates came."""
        if not (self._open and self._at) and item.group != "start":
            makers = {
                "rebuild": self._rebuild_items,
                "buffers": self._group_of_buffers,
                "gradients": self._gradient_items,
            }
            self._open, self._at = makers[item.group](), 0
        self._at += 1
        if self._at == len(self._open):
            self._close(item.group)

    def assume(self, buckets: Buckets) -> int:
        """Go on in the steady state, of which nothing was seen: a step begins, and gradients come in these buckets.

        Returns its number: the first that it can be, since how many there were before is not known.
        """
        self.buckets, self.reduction = buckets, max(1, self._rebuild_after or 1)
        self._rebuilt = self._assumed = True
        self._open, self._at = [], 0
        self._buffers_ready, self._buffers_first = not self.buffers, False
        return self.step

    def give_up(self) -> list[Item]:
        """The open group did not go on: its collectives were strangers. They are returned; the group may come again."""
        found, self._at = self._open[: self._at], 0
        if found and found[0].group == "rebuild":
            self._order = self._sizes = self._announced = None
        if found and found[0].group != "start":
            self._open = []
        return found

    def _close(self, group: Group) -> None:
        self._open, self._at = [], 0
        if group == "rebuild":
            self._rebuilt = True
            if self._known is not None and not self.buckets_known:
                self.buckets, self._assumed = self._known, True
            self._buffers_ready = not self.buffers
        elif group == "buffers":
            self._buffers_ready = self._buffers_first = True
        elif group == "gradients":
            self.reduction += 1
            self._buffers_ready = not self.buffers
            self._buffers_first = self.reduction % self._job.reductions_per_step != 0

    def _rebuild_due(self) -> bool:
        return self._rebuild_after is not None and not self._rebuilt and self.reduction >= self._rebuild_after

    # -- content ---------------------------------------------------------------------------------------------------

    def bucket_order(self, data: bytes) -> str | None:
        """The order of parameters in rebuilt buckets came. Says what is wrong with it, if anything is."""
        values = np.frombuffer(data, "<i4").tolist()
        order, count = values[:-1], values[-1]
        if sorted(order) != list(range(self._parameters)) or not 1 <= count <= self._parameters:
            return f"the rebuilt buckets' order is none of {self._parameters} parameters"
        self._order, self._announced = order, count
        return self._rebuild()

    def bucket_sizes(self, data: bytes) -> str | None:
        """How many parameters each rebuilt bucket has came. Says what is wrong with it, if anything is."""
        self._sizes = np.frombuffer(data, "<i4").tolist()
        if min(self._sizes) < 1 or sum(self._sizes) != self._parameters:
            return f"the rebuilt buckets hold {sum(self._sizes)} parameters, and {self._parameters} are trainable"
        return self._rebuild()

    def _rebuild(self) -> str | None:
        if self._order is None or self._sizes is None:
            return None
        if self._announced != len(self._sizes):
            return f"{self._announced} rebuilt buckets are announced, and sizes of {len(self._sizes)} came"
        ends = np.cumsum(self._sizes).tolist()
        found = tuple(tuple(self._order[end - size : end]) for size, end in zip(self._sizes, ends, strict=True))
        if self._assumed and found != self.buckets:
            return "the rebuilt buckets are not those of the life before"
        self.buckets = found
        return None

    @property
    def sizes_bytes(self) -> int | None:
        """Bytes of the rebuilt buckets' sizes, once their number was announced."""
        return None if self._announced is None else _INT * self._announced

    @property
    def buckets_known(self) -> bool:
        """Whether `buckets` are those of the next gradients."""
        return not self._rebuilt or self._assumed or (self._order is not None and self._sizes is not None)

    # -- groups ----------------------------------------------------------------------------------------------------

    def _start_items(self) -> list[Item]:
        job = self._job
        if not job.ddp.init_sync:
            return []
        found: list[tuple[Op, Kind, int | None, str, tuple[str, ...]]] = [
            ("allgather", "count", 8 * job.ranks, "int64", ()),
            ("broadcast", "sizes", None, "int64", ()),
        ]
        tensors = [*job.parameters, *(job.buffers if job.ddp.init_buffers else ())]
        for group in coalesced(tensors, job.ddp.broadcast_cap):
            names = tuple(one.name for one in group)
            found.append(("broadcast", "parameters", sum(one.nbytes for one in group), group[0].dtype, names))
        return [
            Item(op, kind, nbytes, dtype, -1, "start", index, tensors=names)
            for index, (op, kind, nbytes, dtype, names) in enumerate(found)
        ]

    def _buffer_items(self) -> list[Item]:
        groups = coalesced(self._job.buffers, self._job.ddp.broadcast_cap)
        return [
            Item(
                "broadcast",
                "buffers",
                sum(one.nbytes for one in group),
                group[0].dtype,
                0,
                "buffers",
                index,
                tensors=tuple(one.name for one in group),
            )
            for index, group in enumerate(groups)
        ]

    def _group_of_buffers(self) -> list[Item]:
        kind: Kind = "other" if self._buffers_first else "buffers"
        return [replace(one, step=self.step, kind=kind, phase=2 * self.reduction) for one in self.buffers]

    @property
    def buffers_repeated(self) -> bool:
        """Whether a group of buffers that would open the step was there already."""
        return self._buffers_first and self.reduction % self._job.reductions_per_step == 0

    def _rebuild_items(self) -> list[Item]:
        count = _INT * self._announced if self._announced is not None else None
        size = _INT * (self._parameters + 1)
        order = Item("broadcast", "bucket-order", size, "int32", self.step, "rebuild", 0, 2 * self.reduction)
        return [order, replace(order, kind="bucket-sizes", nbytes=count, index=1)]

    def _gradient_items(self) -> list[Item]:
        job = self._job
        last = self.reduction % job.reductions_per_step == job.reductions_per_step - 1
        kind: Kind = "gradient" if last else "other"
        items = [
            Item(
                "allreduce",
                kind,
                bucket_bytes(job, bucket),
                job.wire_dtype(job.trainable[bucket[0]]),
                self.step,
                "gradients",
                0,
                bucket=number,
            )
            for number, bucket in enumerate(self.buckets)
        ]
        used = Item(
            "allreduce", "used" if last else "other", _INT * self._parameters, "int32", self.step, "gradients", 0
        )
        if job.ddp.static_graph and self.reduction == 0:
            items.insert(0, used)
        elif job.ddp.find_unused_parameters and not job.ddp.static_graph:
            items.append(used)
        phase = 2 * self.reduction + 1
        return [replace(one, index=index, phase=phase) for index, one in enumerate(items)]

    def cycle(self) -> list[Item]:
        """The collectives of one reduction from here on."""
        return [*self._group_of_buffers(), *self._gradient_items()]

    def cycle_is_unique(self) -> bool:
        """Whether a whole cycle can be told from all that begin elsewhere in it, by operations and sizes."""
        signs = [(one.op, one.nbytes) for one in self.cycle()]
        return all(signs[turn:] + signs[:turn] != signs for turn in range(1, len(signs)))

    def skip(self, count: int) -> bool:
        """`count` collectives of the regular sequence have passed unseen. False if that cannot be followed."""
        while count:
            steady = not self._rebuild_due() and (self._rebuilt or self._rebuild_after is None)
            if steady and not self.inside and not (self.buffers and self._buffers_ready) and self.buckets_known:
                cycle = len(self.cycle())
                self.reduction += count // cycle
                self._buffers_first = self.reduction % self._job.reductions_per_step != 0
                count %= cycle
                if not count:
                    break
            found = self.candidates()
            if not found:
                return False
            self.accept(found[0])
            count -= 1
        return True


def shapes_difference(job: JobDescription, data: bytes) -> str | None:
    """What of the sizes and strides that rank 0 broadcast is not as described, by the parameter's name."""
    seen = np.frombuffer(data, "<i8").tolist()
    wanted = sum(2 * len(job.parameters[index].shape) for index in job.trainable)
    at = 0
    for index in job.trainable:
        one = job.parameters[index]
        count = len(one.shape)
        shape, stride = tuple(seen[at : at + count]), tuple(seen[at + count : at + 2 * count])
        at += 2 * count
        if shape != one.shape or (stride != one.stride and prod(shape) > 1):
            return (
                f"parameter {one.name} has shape {shape} and strides {stride} in the training, and {one.shape} and "
                f"{one.stride} in the job description"
            )
    if len(seen) != wanted:
        return f"the parameters' sizes and strides are {len(seen)} numbers, and {wanted} in the job description"
    return None


def known_buckets(job: JobDescription, buckets: Sequence[Sequence[int]]) -> Buckets:
    """Check buckets of an earlier life. Raises ValueError if they do not hold each trainable parameter once."""
    found = tuple(tuple(bucket) for bucket in buckets)
    if sorted(one for bucket in found for one in bucket) != list(range(len(job.trainable))) or not all(found):
        raise ValueError("buckets hold each trainable parameter once")
    return found
