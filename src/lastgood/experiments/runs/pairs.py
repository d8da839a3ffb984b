"""Measures a training in pairs of blocks, with checkpoints and without, until their ratio is known well enough."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lastgood.checkpointers.registry import system_traits
from lastgood.experiments.ceilings.disk import disk_bursts
from lastgood.experiments.formulas.pairs import estimate_pairs
from lastgood.experiments.records.blocks import Block, BlockKind, PairPlan, Pairs
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.runs.part import Part
from lastgood.experiments.runs.watch import Found, Watch, what_disturbed, worst_of
from lastgood.training.loop import Segment, TrainingLoop

__all__ = ["PairedSegments", "block_orders", "measure_pairs", "rounds_are_enough"]

_WITHOUT_S = 0.8
"""A block without checkpoints has no more steps than one with, and takes about this long."""
_LEAST_STEPS = 5
_FOR_DISTURBED = 1.5
"""The budget of a run whose disturbed pairs are measured again, in budgets of one that is calm."""


@dataclass(frozen=True)
class PairedSegments:
    """What the trainer measured."""

    pairs: Pairs
    segments: list[Segment]
    """One for each block, in order."""
    drains: list[tuple[float, float]]
    """Begin and end of each block's drain, in `time.perf_counter()` seconds; none for blocks without checkpoints."""

    def of_kind(self, kind: BlockKind) -> list[Segment]:
        """Segments of the blocks of one kind."""
        return [one for one, block in zip(self.segments, self.pairs.blocks, strict=True) if block.kind == kind]


def block_orders(seed: int) -> Iterator[tuple[BlockKind, BlockKind]]:
    """The order of the two blocks of each round: drawn, and turned round in the next one (ABBA or BAAB).

    So a drift of the machine, over one round or over many, favours neither kind.
    """
    drawn = random.Random(seed)
    while True:
        order: tuple[BlockKind, BlockKind] = ("with", "without") if drawn.random() < 0.5 else ("without", "with")
        yield order
        yield order[1], order[0]


def measure_pairs(
    spec: RunSpec,
    plan: PairPlan,
    loop: TrainingLoop,
    scratch: Path,
    report: Callable[[str], None],
    part: Part,
) -> PairedSegments:
    """Measure rounds of blocks until `plan` is content. Nothing may be in progress when it is called.

    `scratch` is the run's folder, on the disk that checkpoints go to. A disturbed block stays in the record, and is
    measured again once others have paused, while the budget lasts. A system that takes no checkpoints has blocks of one
    kind, and so has one that takes gradients in every step. Of several processes the first one decides what is next,
    and none begins a block before all are through with the last one, its checkpoints included.
    """
    watch = Watch(part, scratch, device=spec.device == "cuda")
    kinds = _kinds(spec)
    without_steps = part.follow(_steps_without(spec, loop))
    blocks: list[Block] = []
    segments: list[Segment] = []
    drains: list[tuple[float, float]] = []
    bursts: list[float] = []
    ended_by: Literal["interval", "budget"] | None = None
    began_s = time.perf_counter()
    bursting = spec.interval_steps > 0 and part.rank == 0
    with disk_bursts(scratch) if bursting else contextlib.nullcontext() as burst:
        for number, order in enumerate(block_orders(spec.seed)):
            if spec.interval_steps:
                bursts.append(part.follow(0.0 if burst is None else burst()))
            for kind in part.follow(order):
                if kind not in kinds:
                    continue
                while True:
                    before = watch.look()
                    part.barrier()
                    at_s = time.perf_counter() - began_s
                    segment, drain = _block(spec, loop, kind, spec.measured_steps if kind == "with" else without_steps)
                    part.barrier()
                    found = watch.between(before, watch.look())
                    times = part.gather((segment.clock.elapsed_s, drain[1] - drain[0] if drain else 0.0))
                    segments.append(segment)
                    drains += [drain] if drain else []
                    blocks.append(_described(number, kind, at_s, len(segment.losses), times, found, bursts))
                    again_s = began_s + _FOR_DISTURBED * plan.budget_s - found[0].elapsed_s
                    if not part.follow(blocks[-1].disturbed) or not watch.wait_until_calm(again_s):
                        break
            spent_s = time.perf_counter() - began_s
            ended_by = part.follow(rounds_are_enough(plan, blocks, spent_s))
            report(f"measuring pairs: {number + 1} rounds in {spent_s:.0f} s")
            if ended_by is not None:
                break
    # As after one stretch: saves come after whole intervals from here.
    loop.first_step, loop.saves_first = loop.progress.step, False
    assert ended_by is not None  # rounds have no other end
    pairs = Pairs(blocks=blocks, ended_by=ended_by, write_bursts_bytes_per_s=bursts)
    return PairedSegments(pairs, segments, drains)


def _kinds(spec: RunSpec) -> tuple[BlockKind, ...]:
    """A system that takes gradients sends them in every step: it has no blocks without."""
    if not spec.interval_steps:
        return ("without",)
    return ("with",) if system_traits(spec.system).takes_gradients else ("with", "without")


def _steps_without(spec: RunSpec, loop: TrainingLoop) -> int:
    """Steps of a block without checkpoints; trains a few to know how long one takes."""
    loop.interval_steps = 0
    segment = loop.train(_LEAST_STEPS)
    step_s = statistics.median(segment.clock.step_s())
    return max(_LEAST_STEPS, min(spec.measured_steps, math.ceil(_WITHOUT_S / step_s)))


def _block(
    spec: RunSpec, loop: TrainingLoop, kind: BlockKind, steps: int
) -> tuple[Segment, tuple[float, float] | None]:
    """Train one block; and when its drain began and ended, if it has one."""
    loop.first_step = loop.progress.step
    loop.saves_first = True
    loop.interval_steps = spec.interval_steps if kind == "with" else 0
    segment = loop.train(steps)
    if kind == "without":
        return segment, None
    started = time.perf_counter()
    loop.checkpointer.drain()
    return segment, (started, time.perf_counter())


def _described(
    number: int,
    kind: BlockKind,
    began_s: float,
    steps: int,
    times: Sequence[tuple[float, float]],
    found: Sequence[Found],
    bursts: Sequence[float],
) -> Block:
    """`times` are each process's seconds to the last step's end, and of its drain: the slowest ones count."""
    elapsed_s = max(elapsed for elapsed, _ in times)
    return Block(
        round=number,
        kind=kind,
        began_s=began_s,
        steps=steps,
        elapsed_s=elapsed_s,
        drain_s=max(elapsed + drain for elapsed, drain in times) - elapsed_s,
        disturbance=worst_of(found),
        disturbed=what_disturbed(found, max(bursts, default=None)),
    )


def rounds_are_enough(plan: PairPlan, blocks: Sequence[Block], spent_s: float) -> Literal["interval", "budget"] | None:
    """Why no further round is needed after `spent_s` seconds of rounds; None if one is."""
    rounds = blocks[-1].round + 1
    # How wide an interval is, as a share, depends on no unit: blocks with checkpoints only are compared with a second.
    estimate = estimate_pairs(blocks, none_step_s=1.0)
    if estimate is None:  # blocks without checkpoints only
        enough = calm = sum(block.disturbed is None for block in blocks) >= plan.rounds
    else:
        calm = not estimate.all_disturbed and estimate.rounds >= plan.rounds
        enough = calm and estimate.half_width <= plan.half_width
    if enough:
        return "interval"
    budget_s = plan.budget_s * (1 if calm else _FOR_DISTURBED)
    # Half of another round may go beyond the budget.
    if rounds >= plan.rounds and spent_s * (1 + 0.5 / rounds) > budget_s:
        return "budget"
    return None
