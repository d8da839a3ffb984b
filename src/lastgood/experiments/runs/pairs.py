"""Measures a training in pairs of blocks, with checkpoints and without, until their ratio is known well enough."""

from __future__ import annotations

import contextlib
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lastgood.experiments.ceilings.disk import disk_bursts
from lastgood.experiments.formulas.pairs import estimate_pairs
from lastgood.experiments.machine.disturbance import Look, disturbance_between, disturbed_by, look
from lastgood.experiments.records.blocks import Block, BlockKind, PairPlan, Pairs
from lastgood.experiments.records.spec import RunSpec
from lastgood.training.loop import Segment, TrainingLoop

__all__ = ["PairedSegments", "block_orders", "measure_pairs", "rounds_are_enough"]

_WITHOUT_S = 0.8
"""A block without checkpoints has no more steps than one with, and takes about this long."""
_LEAST_STEPS = 5
_CALM_S = 0.1
"""For so long others must have had at most a tenth of a core for a machine to be calm again after a disturbance."""
_CALM_SHARE = 0.1
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
    spec: RunSpec, plan: PairPlan, loop: TrainingLoop, scratch: Path, report: Callable[[str], None]
) -> PairedSegments:
    """Measure rounds of blocks until `plan` is content. Nothing may be in progress when it is called.

    `scratch` is a folder on the disk that checkpoints go to. A disturbed block stays in the record, and is measured
    again once others have paused, while the budget lasts. A system that takes no checkpoints has blocks of one kind.
    """
    run = os.getppid()  # the parent of trainer, restorer and services
    kinds: tuple[BlockKind, ...] = ("with", "without") if spec.interval_steps else ("without",)
    without_steps = _steps_without(spec, loop)
    blocks: list[Block] = []
    segments: list[Segment] = []
    drains: list[tuple[float, float]] = []
    bursts: list[float] = []
    began_s = time.perf_counter()
    with disk_bursts(scratch) if spec.interval_steps else contextlib.nullcontext() as burst:
        for number, order in enumerate(block_orders(spec.seed)):
            if burst is not None:
                bursts.append(burst())
            for kind in order:
                if kind not in kinds:
                    continue
                while True:
                    before = look(run, scratch, device=spec.device == "cuda")
                    segment, drain = _block(spec, loop, kind, spec.measured_steps if kind == "with" else without_steps)
                    after = look(run, scratch, device=spec.device == "cuda")
                    segments.append(segment)
                    drains += [drain] if drain else []
                    drain_s = drain[1] - drain[0] if drain else 0.0
                    blocks.append(_described(number, kind, before, after, segment, drain_s, began_s, bursts))
                    again_s = began_s + _FOR_DISTURBED * plan.budget_s - (after.at_s - before.at_s)
                    if not blocks[-1].disturbed or not _wait_until_calm(run, scratch, again_s):
                        break
            spent_s = time.perf_counter() - began_s
            ended_by = rounds_are_enough(plan, blocks, spent_s)
            report(f"measuring pairs: {number + 1} rounds in {spent_s:.0f} s")
            if ended_by is not None:
                pairs = Pairs(blocks=blocks, ended_by=ended_by, write_bursts_bytes_per_s=bursts)
                return PairedSegments(pairs, segments, drains)
    raise AssertionError("rounds have no end")


def _wait_until_calm(run: int, scratch: Path, until_s: float) -> bool:
    """Sleep until others have paused, since a block that begins in a pause is likely to end in it.

    False if it is later than `until_s` by then.
    """
    before = look(run, scratch)
    while before.at_s < until_s:
        time.sleep(_CALM_S)
        after = look(run, scratch)
        if disturbance_between(before, after).others_cpu_s <= _CALM_SHARE * (after.at_s - before.at_s):
            return after.at_s < until_s
        before = after
    return False


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
    before: Look,
    after: Look,
    segment: Segment,
    drain_s: float,
    began_s: float,
    bursts: list[float],
) -> Block:
    disturbance = disturbance_between(before, after)
    elapsed_s = after.at_s - before.at_s
    return Block(
        round=number,
        kind=kind,
        began_s=before.at_s - began_s,
        steps=len(segment.losses),
        elapsed_s=segment.clock.elapsed_s,
        drain_s=drain_s,
        disturbance=disturbance,
        disturbed=disturbed_by(disturbance, elapsed_s, max(bursts, default=None)),
    )


def rounds_are_enough(plan: PairPlan, blocks: Sequence[Block], spent_s: float) -> Literal["interval", "budget"] | None:
    """Why no further round is needed after `spent_s` seconds of rounds; None if one is."""
    rounds = blocks[-1].round + 1
    estimate = estimate_pairs(blocks)
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
