"""Measures how long a mirror node works on each step of a training, by its own clocks, beside the step itself.

Trainers are nodes of a testbed of the measurement's own, one rank on each, and one more node watches. Needs root.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lastgood.cluster.testbed.testbed import why_no_testbed
from lastgood.errors import ConfigError, LaunchError
from lastgood.experiments.flowcheck.steps import read_steps
from lastgood.experiments.flowcheck.training import trainers_bed
from lastgood.experiments.machine.lock import machine_turn
from lastgood.experiments.records.flowcheck import (
    WATCHED,
    NodeLook,
    StageBlock,
    StagesResult,
    StagesSettings,
    TrainingSettings,
)
from lastgood.mirror.node.status import NodeStatus

__all__ = ["look_at", "measure_stages"]

Report = Callable[[str], None]
_LOOK_S: Final = 0.3
_PATIENCE_S: Final = 300.0
_BEFORE: Final = NodeLook(steps=0, updates=0, stage_s={"parse": 0.0, "extract": 0.0, "take over": 0.0, "update": 0.0})
"""Before a node has seen anything."""


def measure_stages(settings: StagesSettings, _seed: int, scratch: Path, logs: Path, report: Report) -> StagesResult:
    """A watched training of each width, from its start. Raises ConfigError where none can be."""
    reason = why_no_testbed()
    if reason is not None:
        raise ConfigError(f"trainers are nodes of a testbed: {reason}")
    blocks = []
    folder = scratch.absolute() / f"flowcheck-{os.getpid()}"
    with machine_turn(report):
        for round_number in range(settings.training.rounds):
            for width in settings.widths:
                block = _block(settings.at_width(width), round_number, folder, logs, report)
                told = ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in block.step_s.items())
                report(f"width {width}: {1000 * block.gap_s:.0f} ms from step to step; {told}")
                blocks.append(block)
    return StagesResult(blocks=blocks)


def _block(training: TrainingSettings, round_number: int, folder: Path, logs: Path, report: Report) -> StageBlock:
    steps = training.warmup + training.steps
    with trainers_bed(training, folder, logs, report) as trainers, trainers.way(WATCHED) as way:
        node = way.node
        assert node is not None  # it is what makes this way of training
        order = way.order(steps)
        first = _BEFORE
        with trainers.started(order, way.name) as ranks:
            end = time.monotonic() + _PATIENCE_S
            while ranks.check():
                if first is _BEFORE:
                    first = _warm(look_at(node.status()), training)
                if time.monotonic() > end:
                    raise LaunchError(f"the training did not end within {_PATIENCE_S:g} s; its logs: {logs}")
                time.sleep(_LOOK_S)
        held = node.wait_held(steps)
        last = look_at(node.status())
        seconds = [step.seconds for step in read_steps(Path(order.steps_file)).steps]
        parameters = node.parameters
    if last.steps <= first.steps or last.updates <= first.updates:
        first = _BEFORE
    if last.steps == 0 or last.updates == 0:
        raise LaunchError(f"the mirror node followed no step of the training; its log is in {logs}")
    return StageBlock(
        width=training.shape.width,
        parameters=parameters,
        round=round_number,
        iteration_s=seconds[training.warmup :],
        first=first,
        last=last,
        held_step=held,
    )


def _warm(look: NodeLook, training: TrainingSettings) -> NodeLook:
    """A look after the warm-up and before the second half of what is timed; else that before all."""
    return look if training.warmup <= look.steps <= training.warmup + training.steps // 2 else _BEFORE


def look_at(status: NodeStatus) -> NodeLook:
    """What the clocks in a node's status show."""
    counters = status.counters
    update = counters["update"]
    return NodeLook(
        steps=status.iteration,
        updates=int(update["steps"]),
        stage_s={
            "parse": counters["parse"]["seconds"],
            "extract": counters["extract"]["seconds"],
            # What it waits for the optimizer is no work.
            "take over": max(0.0, counters["node"]["seconds"] - update["waited"]),
            "update": update["seconds"],
        },
    )
