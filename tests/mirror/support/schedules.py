"""Seeded schedules for a mirror node: a training's traffic over Gloo or RoCEv2, a mirror with faults, kills, restarts.

The training is made here, with torch's own optimizer; its frames come from `lastgood.mirror.generate` (RoCEv2) or from
the tables of what Gloo sends (`ddp_life`, `gloo_sends`), and pass the generator's faulty mirror.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lastgood.checkpointers.flowcheck.system import FlowCheck
from lastgood.errors import NoCheckpoint
from lastgood.mirror.extract.extractor import Extractor
from lastgood.mirror.extract.slots import GradientSlots
from lastgood.mirror.generate.faults import FaultyMirror, MirrorFaults
from lastgood.mirror.generate.life import DdpLife
from lastgood.mirror.generate.output import batches
from lastgood.mirror.generate.traffic import Frame, RingTraffic, Wire, reduced
from lastgood.mirror.job.describe import describe
from lastgood.mirror.job.description import Backend, DdpSettings, JobDescription
from lastgood.mirror.job.factory import Training
from lastgood.mirror.node.stages import conversation_for, parser_for
from tests.mirror.support.ddp_life import Life
from tests.mirror.support.frames import ACK, SYN, tcp_frame
from tests.mirror.support.gloo_sends import DATA, heads
from tests.mirror.support.gloo_wire import header
from tests.mirror.support.node_thread import node_thread
from tests.mirror.support.simulated_life import bytes_of, same_state

__all__ = ["Outcome", "Schedule", "run_schedule", "schedule_of"]

ELEMENTS = (70, 300, 50, 400)
CAPS = {"first_cap": 1024, "cap": 1500}
STEPS = 6


class Vectors(torch.nn.Module):
    """Parameters of these sizes; with `buffers`, two that change in each forward."""

    def __init__(self, seed: int, buffers: bool) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(seed)
        for number, count in enumerate(ELEMENTS):
            self.register_parameter(f"p{number}", torch.nn.Parameter(torch.randn(count, generator=chance)))
        if buffers:
            self.register_buffer("mean", torch.randn(16, generator=chance))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))


@dataclass(frozen=True)
class Schedule:
    """One training and what happens to its frames."""

    seed: int
    wire: Wire | None
    """None: Gloo."""
    ranks: int
    watched: tuple[int, ...]
    faults: MirrorFaults
    limit: int
    """Frames that are read at once."""
    kills: tuple[float, ...]
    """The share of each life's frames that comes before it is killed; 1: it ends."""
    nak_every: int = 0

    @property
    def faultless(self) -> bool:
        """Whether the mirror copies everything, once and in order."""
        return self.faults == MirrorFaults()


@dataclass
class Outcome:
    """What the node said and gave back at the end of each life."""

    wrong: list[str] = field(default_factory=list)
    """Where a state that was given back differs from the trainer's."""
    restored: list[int] = field(default_factory=list)
    """Steps that were given back, 0 for none."""
    made: list[int] = field(default_factory=list)
    """Updates that the trainer had made at most."""
    blind: list[str] = field(default_factory=list)
    healed: float = 0
    """Bytes that came another way."""


def schedule_of(seed: int) -> Schedule:
    """Each seed is another one, and always the same."""
    chance = random.Random(seed)
    wire = None
    if seed % 2:
        protocol = chance.choice(("ll", "simple"))
        wire = Wire(protocol, chance.choice(("2.19", "2.28", "2.30")), chance.choice((1, 1, 2)), mtu=256)
    ranks = chance.choice((2, 3))
    watched = (0,) if ranks == 2 else chance.choice(((0,), (0, 1), (0, 2)))
    loss = 0.0 if chance.random() < 0.15 else 10 ** chance.uniform(-4, -1)
    faults = MirrorFaults(
        loss=loss,
        burst=chance.choice((1, 1, 3, 8)),
        duplication=chance.choice((0.0, 0.02)),
        reordering=chance.choice((0.0, 0.02)),
        reach=chance.choice((2, 8)),
        corruption=chance.choice((0.0, 0.005)),
        truncation=chance.choice((0.0, 0.0, 0.002)),
    )
    if seed % 10 < 2:
        faults = MirrorFaults()
    kills = tuple(1.0 if chance.random() < 0.3 else chance.uniform(0.2, 1.0) for _ in range(2))
    return Schedule(seed, wire, ranks, watched, faults, chance.choice((1, 7, 64, 500)), kills, chance.choice((0, 15)))


@functools.cache
def job_of(wire: Wire | None, ranks: int) -> JobDescription:
    model = Vectors(0, buffers=wire is None)
    job = describe(Training(model, _optimizer(model)), ranks=ranks)
    backend = Backend()
    if wire is not None:
        backend = Backend(
            kind="nccl", network="roce", version=wire.version, protocol=wire.protocol, channels=wire.channels
        )
    return job.model_copy(update={"backend": backend, "ddp": DdpSettings(**CAPS)})


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


class Trainer:
    """The truth: one life of the training. `states[i]` is the state after i updates of the job."""

    def __init__(self, schedule: Schedule, number: int) -> None:
        self.schedule, self.number = schedule, number
        self.model = Vectors(schedule.seed, buffers=schedule.wire is None)
        self.optimizer = _optimizer(self.model)
        self.done = 0

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def copied(self) -> dict[str, Any]:
        import copy

        return copy.deepcopy({name: one.state_dict() for name, one in self.state.items()})

    def train(self) -> tuple[list[Frame], dict[int, dict[str, Any]]]:
        """All frames at the watched ports, and the states on the way."""
        # A step that is made again after a restore has the gradients of before.
        chances = [np.random.default_rng((self.schedule.seed, self.done + step)) for step in range(STEPS)]
        gradients = tuple(
            tuple(
                tuple((chance.standard_normal(count) * 0.1).astype(np.float32) for count in ELEMENTS)
                for _ in range(self.schedule.ranks)
            )
            for chance in chances
        )
        weights = tuple(one.detach().numpy().copy() for one in self.model.parameters())
        names = tuple(name for name, _ in self.model.named_parameters())
        life = DdpLife(names, weights, gradients, first_cap_bytes=CAPS["first_cap"], cap_bytes=CAPS["cap"])
        buffers = [self._buffers()]
        states: dict[int, dict[str, Any]] = {}
        sums = []
        for step in range(STEPS):
            found = self._reduced(life, step)
            sums.append(found)
            for parameter, gradient in zip(self.model.parameters(), found, strict=True):
                parameter.grad = torch.from_numpy(gradient.copy())
            self.optimizer.step()
            self._forward(chances[step])
            self.done += 1
            states[self.done] = self.copied()
            buffers.append(self._buffers())
        wire = self.schedule.wire
        if wire is None:
            return list(GlooWire(self.schedule, self.number).frames(weights, sums, buffers)), states
        traffic = RingTraffic(
            self.schedule.ranks,
            wire,
            self.schedule.watched,
            self.schedule.seed,
            nak_every=self.schedule.nak_every,
            first_queue=0x100 + 0x1000 * self.number,
        )
        return list(traffic.frames(life.collectives())), states

    def _reduced(self, life: DdpLife, step: int) -> list[np.ndarray]:
        """By parameter, as the ring's additions make it (Gloo's: in the order of ranks)."""
        wire = self.schedule.wire
        gradients = life.gradients[step]
        found: list[Any] = [None] * len(ELEMENTS)
        for bucket in life.step_buckets(step):
            parts = [np.concatenate([rank[one] for one in bucket]) for rank in gradients]
            whole = functools.reduce(np.add, parts) if wire is None else reduced(parts, wire)
            at = 0
            for one in bucket:
                found[one] = whole[at : at + ELEMENTS[one]]
                at += ELEMENTS[one]
        return found

    def _buffers(self) -> list[bytes]:
        """By dtype."""
        return [bytes_of([one]).tobytes() for one in self.model.buffers()]

    def _forward(self, chance: np.random.Generator) -> None:
        for one in self.model.buffers():
            change = torch.from_numpy(chance.integers(0, 5, one.numel()).astype(np.float32)).view(one.shape)
            one.add_(change.to(one.dtype))


class GlooWire:
    """Gloo's messages as TCP segments at the watched ports: each with its acknowledgement."""

    def __init__(self, schedule: Schedule, number: int) -> None:
        self._schedule = schedule
        self._chance = random.Random(f"{schedule.seed} {number}")
        self._port = 41000 + 100 * number
        self._next: dict[tuple[int, int], int] = {}
        """By sender and receiver: the next sequence number."""

    def frames(
        self, weights: tuple[np.ndarray, ...], sums: list[list[np.ndarray]], buffers: list[list[bytes]]
    ) -> Iterator[Frame]:
        schedule = self._schedule
        life = Life(job_of(None, schedule.ranks), steps=STEPS, seed=self._chance.randrange(1 << 30))
        contents = []
        for one in life.collectives:
            content = one.content
            if one.label is None:
                content = self._chance.randbytes(one.nbytes)
            elif one.label[0] == "parameters":
                first = b"".join(weight.tobytes() for weight in weights) + buffers[0][0]
                content = first if one.label[2] == 0 else buffers[0][1]
            elif one.label[0] == "buffers":
                content = buffers[one.label[1]][one.label[2] or 0]
            elif one.label[0] == "gradient":
                step, bucket = one.label[1], one.label[2] or 0
                indices = life.buckets[bucket] if step else range(len(ELEMENTS))
                content = b"".join(sums[step][index].tobytes() for index in indices)
            assert len(content) == one.nbytes, one
            contents.append(content)
        for pair in [(a, b) for a in range(schedule.ranks) for b in range(a)]:
            yield from self._open(*pair)
        for sent in heads(life, schedule.seed):
            payload = b""
            if sent.opcode == DATA:
                payload = contents[sent.tag][sent.begin : sent.end]
                if not sent.final:
                    payload = self._chance.randbytes(len(payload))  # partial sums
            yield from self._write(sent.source, sent.destination, header(sent.opcode, sent.slot, sent.nbytes) + payload)

    def _open(self, source: int, destination: int) -> Iterator[Frame]:
        for pair in ((source, destination), (destination, source)):
            self._next[pair] = self._chance.randrange(1 << 32)
        yield from self._segment(source, destination, flags=SYN)
        self._next[source, destination] += 1
        yield from self._segment(destination, source, flags=SYN | ACK)
        self._next[destination, source] += 1
        yield from self._segment(source, destination, flags=ACK)
        yield from self._write(source, destination, self._chance.randbytes(8))

    def _write(self, source: int, destination: int, content: bytes) -> Iterator[Frame]:
        at = 0
        while at < len(content):
            part = content[at : at + self._chance.choice((100, 536, 1448))]
            yield from self._segment(source, destination, part, flags=ACK)
            self._next[source, destination] += len(part)
            at += len(part)
        if self._chance.random() < 0.5:
            yield from self._segment(destination, source, flags=ACK)

    def _segment(self, source: int, destination: int, content: bytes = b"", flags: int = 0) -> Iterator[Frame]:
        low, high = sorted((source, destination))
        ends = {low: ("10.0.0." + str(low + 1), 29000), high: ("10.0.0." + str(high + 1), self._port + low)}
        data = tcp_frame(
            ends[source],
            ends[destination],
            self._next[source, destination],
            content,
            acknowledgement=self._next[destination, source] if flags & ACK else None,
            flags=flags,
        )
        for rank in self._schedule.watched:
            if rank in (source, destination):
                yield Frame(rank, data)


def run_schedule(schedule: Schedule, folder: Path) -> Outcome:
    """Two lives: each is killed, and the next goes on from what the node gives back, whether it is blind or not."""
    outcome = Outcome()
    job = job_of(schedule.wire, schedule.ranks)
    if schedule.wire is None:
        addresses = [f"10.0.0.{rank + 1}" for rank in schedule.watched]
    else:
        traffic = RingTraffic(schedule.ranks, schedule.wire, schedule.watched)
        addresses = [traffic.address(rank) for rank in schedule.watched]
    parser = parser_for(job)
    extractor = Extractor(conversation_for(job, addresses), GradientSlots(1 << 24), 1 << 20)
    mirror = FaultyMirror(schedule.faults, schedule.seed)
    trainer = Trainer(schedule, 0)
    truth: dict[int, dict[str, Any]] = {}
    with node_thread(job, folder) as node:
        for number, share in enumerate(schedule.kills):
            trainer.number = number
            frames, states = trainer.train()
            truth.update(states)
            seen = islice(frames, round(share * len(frames)))
            for batch in batches(mirror.frames(seen), limit=schedule.limit):
                for memory in node.follower.hear(extractor.feed(parser.feed(batch))):
                    extractor.slots.free(memory)
            node.settle()
            outcome.blind.append(str(node.follower.blind or ""))
            outcome.made.append(trainer.done)
            trainer = Trainer(schedule, number + 1)
            outcome.restored.append(_restore(trainer, node.options, folder, truth, outcome))
    outcome.healed = extractor.slots.counters["healed"]
    return outcome


def _restore(trainer: Trainer, options: Any, folder: Path, truth: Any, outcome: Outcome) -> int:
    try:
        step = FlowCheck(folder / "job", **options).restore(trainer.state)
    except NoCheckpoint:
        return 0
    trainer.done = step
    if step not in truth:
        outcome.wrong.append(f"step {step} was never made")
    else:
        outcome.wrong += [f"step {step}: {place}" for place in same_state(trainer.copied(), truth[step])]
    return step
