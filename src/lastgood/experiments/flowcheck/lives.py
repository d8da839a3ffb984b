"""Measures how much of a window of restoring and training is useful while all trainers are killed now and then."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lastgood.cluster.testbed.testbed import why_no_testbed
from lastgood.errors import ConfigError, LaunchError
from lastgood.experiments.flowcheck.steps import Life, read_steps
from lastgood.experiments.flowcheck.training import Ranks, Trainers, trainers_bed
from lastgood.experiments.machine.lock import machine_turn
from lastgood.experiments.records.flowcheck import (
    ALONE,
    WATCHED,
    LivesResult,
    LivesSettings,
    Variant,
    WatchedLife,
    Window,
)

__all__ = ["measure_lives"]

Report = Callable[[str], None]
_MANY_STEPS: Final = 1_000_000
_START_S: Final = 120.0
_POLL_S: Final = 0.02


def measure_lives(settings: LivesSettings, _seed: int, scratch: Path, logs: Path, report: Report) -> LivesResult:
    """A window of each way. Raises ConfigError if none can be."""
    reason = why_no_testbed()
    if reason is not None:
        raise ConfigError(f"trainers are nodes of a testbed: {reason}")
    ways: list[Variant] = [WATCHED, *settings.training.systems]
    folder = scratch.absolute() / f"flowcheck-{os.getpid()}"
    with machine_turn(report), trainers_bed(settings.training, folder, logs, report) as trainers:
        alone = [trainers.block(ALONE, 0)]
        windows = []
        for variant in ways:
            window = _window(trainers, settings, variant)
            report(f"{variant}: {window.useful_steps} useful steps in {settings.window_s:g} s")
            windows.append(window)
        alone.append(trainers.block(ALONE, 1))
    return LivesResult(alone=alone, windows=windows)


def _window(trainers: Trainers, settings: LivesSettings, variant: Variant) -> Window:
    """Lives one after another, until they have had the window together; what a process needs to start is outside."""
    lives: list[WatchedLife] = []
    known: dict[int, str] = {}
    differing = 0
    with trainers.way(variant) as way:
        had_s = 0.0
        for number, end_s in enumerate([*settings.failures_s, settings.window_s]):
            order = way.order(_MANY_STEPS, restore=number > 0, life=number)
            with trainers.started(order, f"{way.name}-life{number}") as ranks:
                began = _await_ready(ranks, Path(order.steps_file))
                while time.monotonic() < began + end_s - had_s:
                    ranks.check()
                    time.sleep(_POLL_S)
                ranks.kill()
            had_s = end_s
            life = read_steps(Path(order.steps_file))
            differing += _compare(life, known)
            lives.append(_told(life, number, began))
    return Window(variant=variant, lives=lives, differing=differing)


def _await_ready(ranks: Ranks, path: Path) -> float:
    end = time.monotonic() + _START_S
    while (ready := read_steps(path).ready) is None:
        if not ranks.check() or time.monotonic() > end:
            raise LaunchError(f"the trainers were not ready within {_START_S:g} s; their logs: {ranks.logs[0].parent}")
        time.sleep(_POLL_S)
    return ready


def _compare(life: Life, known: dict[int, str]) -> int:
    """How many losses of steps done again are other ones; those that are new are kept."""
    wrong = sum(known.get(step.number, step.loss) != step.loss for step in life.steps)
    known.update({step.number: step.loss for step in life.steps})
    return wrong


def _told(life: Life, number: int, began: float) -> WatchedLife:
    return WatchedLife(
        restored_step=life.restored_step if number else None,
        restore_s=None if life.restored is None else life.restored - began,
        last_step=life.steps[-1].number + 1 if life.steps else life.restored_step,
    )
