"""What a DDP training puts on the wire, from the table of what was seen: written apart from the conversation.

A life is a list of collectives in the order of their tags; each carries a label, which says what its bytes are.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field
from typing import Literal

from lastgood.mirror.job.description import JobDescription

Label = tuple[str, int, int | None]
"""What (as in Expect.kind), step, bucket."""
SIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4}


@dataclass
class Collective:
    """One tag."""

    op: Literal["allgather", "broadcast", "allreduce", "barrier"]
    nbytes: int
    item: int
    label: Label | None
    """None: a stranger."""
    content: bytes = b""
    alone: bool = True
    """Whether nothing else runs beside it."""
    root: int = 0
    phase: int = 0
    """What is in one phase may run at once; a rank ends one before it begins the next."""


@dataclass
class Life:
    """A training of some steps, and what is strange in it."""

    job: JobDescription
    steps: int = 4
    seed: int = 0
    strangers: float = 0.0
    """Chance of a stranger at each place."""
    stranger_sizes: tuple[int, ...] = (4, 8)
    joins: bool = False
    evaluates: bool = False
    rebuilt: tuple[tuple[int, ...], ...] = ()
    """The rebuilt buckets; any, if none are given."""
    collectives: list[Collective] = field(default_factory=list)
    buckets: list[list[int]] = field(default_factory=list)
    """The rebuilt ones."""
    odd_steps: set[int] = field(default_factory=set)
    """Steps in whose midst a stranger came that fits one of their buckets."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._phase = 0
        self._start()
        if self.strangers:
            self._add("allreduce", 4, 4, None)
        first = self._first_buckets()
        self.buckets = [list(one) for one in self.rebuilt] or self._shuffled_buckets()
        rebuilt_at = None
        if not (self.job.ddp.find_unused_parameters and not self.job.ddp.static_graph):
            rebuilt_at = 2 if self.job.ddp.static_graph else 1
        turn = 0
        for step in range(self.steps):
            for reduction in range(self.job.reductions_per_step):
                if rebuilt_at is not None and turn == rebuilt_at:
                    self._rebuild(step)
                last = reduction == self.job.reductions_per_step - 1
                buckets = self.buckets if rebuilt_at is not None and turn >= rebuilt_at else first
                if self.evaluates and turn and self._random.random() < 0.3:
                    self._buffers(step, reduction == 0)
                    self._buffers(step, False)
                else:
                    self._buffers(step, reduction == 0)
                self._gradients(step, buckets, last, turn)
                turn += 1
        self._buffers(self.steps, True)
        self._stranger()

    # -- pieces of the table ---------------------------------------------------------------------------------------

    def _add(self, op: str, nbytes: int, item: int, label: Label | None, **more: object) -> None:
        one = Collective(op, nbytes, item, label, **more)  # type: ignore[arg-type]
        self._phase += one.alone
        one.phase = self._phase
        self.collectives.append(one)
        self._phase += one.alone

    def _start(self) -> None:
        job = self.job
        named = [one for one in job.parameters if one.trainable]
        for _ in range(self._random.randrange(3) if self.strangers else 0):
            self._add("barrier", 0, 1, None)
        self._add("allgather", 8 * job.ranks, 8, ("count", -1, None), content=struct.pack("<q", len(named)) * job.ranks)
        shapes = [number for one in named for number in (*one.shape, *one.stride)]
        self._add(
            "broadcast", 8 * len(shapes), 8, ("sizes", -1, None), content=struct.pack(f"<{len(shapes)}q", *shapes)
        )
        sizes: dict[str, int] = {}
        for one in (*job.parameters, *(job.buffers if job.ddp.init_buffers else ())):
            sizes[one.dtype] = sizes.get(one.dtype, 0) + one.nbytes
        for number, (dtype, nbytes) in enumerate(sizes.items()):
            self._add("broadcast", nbytes, SIZE[dtype], ("parameters", -1, number))

    def _buffers(self, step: int, first: bool) -> None:
        if not self.job.ddp.forward_buffers or not self.job.buffers:
            return
        if self.joins:
            self._add("allreduce", 4, 4, None)
            self._add("allreduce", 8, 8, None)
        self._stranger()
        sizes: dict[str, int] = {}
        for one in self.job.buffers:
            sizes[one.dtype] = sizes.get(one.dtype, 0) + one.nbytes
        root = self.job.ranks - 1 if self.joins else 0
        for number, (dtype, nbytes) in enumerate(sizes.items()):
            label: Label | None = ("buffers", step, number) if first else None
            self._add("broadcast", nbytes, SIZE[dtype], label, root=root)

    def _rebuild(self, step: int) -> None:
        order = [index for bucket in self.buckets for index in bucket]
        numbers = [*order, len(self.buckets)]
        content = struct.pack(f"<{len(numbers)}i", *numbers)
        self._add("broadcast", len(content), 4, ("bucket-order", step, None), content=content)
        content = struct.pack(f"<{len(self.buckets)}i", *map(len, self.buckets))
        self._add("broadcast", len(content), 4, ("bucket-sizes", step, None), content=content)

    def _gradients(self, step: int, buckets: list[list[int]], last: bool, turn: int) -> None:
        job = self.job
        self._phase += 1
        trainable = [one for one in job.parameters if one.trainable]
        used: Label | None = ("used", step, None) if last else None
        if job.ddp.static_graph and turn == 0:
            self._add("allreduce", 4 * len(trainable), 4, used)
        sizes = []
        for number, bucket in enumerate(buckets):
            dtype = {"none": trainable[bucket[0]].dtype, "fp16": "float16", "bf16": "bfloat16"}[job.ddp.hook]
            nbytes = sum(trainable[index].elements for index in bucket) * SIZE[dtype]
            label: Label | None = ("gradient", step, number) if last else None
            self._stranger(alone=False)
            self._add("allreduce", nbytes, SIZE[dtype], label, alone=False)
            sizes.append(nbytes)
        if job.ddp.find_unused_parameters and not job.ddp.static_graph:
            self._add("allreduce", 4 * len(trainable), 4, used, alone=False)
        self._phase += 1

    def _stranger(self, *, alone: bool = True) -> None:
        if self._random.random() < self.strangers:
            op = self._random.choice(["allreduce", "broadcast", "barrier", "allreduce"])
            nbytes = 0 if op == "barrier" else self._random.choice(self.stranger_sizes)
            self._add(op, nbytes, 4, None, alone=alone)

    def _first_buckets(self) -> list[list[int]]:
        trainable = [one for one in self.job.parameters if one.trainable]
        if not self.job.ddp.find_unused_parameters or self.job.ddp.static_graph:
            return [list(range(len(trainable)))]
        found: list[list[int]] = [[]]
        caps = [self.job.ddp.first_cap, self.job.ddp.cap]
        filled = 0
        for index, one in enumerate(trainable):
            found[-1].append(index)
            filled += one.nbytes
            if filled >= caps[min(len(found) - 1, 1)]:
                found.append([])
                filled = 0
        return [bucket for bucket in reversed(found) if bucket]

    def _shuffled_buckets(self) -> list[list[int]]:
        order = list(range(sum(one.trainable for one in self.job.parameters)))
        self._random.shuffle(order)
        count = self._random.randint(1, min(3, len(order)))
        ends = sorted(self._random.sample(range(1, len(order)), count - 1))
        return [order[begin:end] for begin, end in zip([0, *ends], [*ends, len(order)], strict=True)]
