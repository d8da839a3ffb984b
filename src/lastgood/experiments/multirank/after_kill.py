"""A rank that is killed while it trains, and the incarnation after that: what a failure takes back, measured.

The kill is SIGKILL from another process, at its moment whatever the rank is in the middle of. How far the rank was, and
with which losses, stands in a file that it maps (`Board`): the kernel keeps that.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

import torch

from lastgood.errors import LastgoodError
from lastgood.experiments.multirank.results import Resumed
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.runs.measure import restore_scrambled
from lastgood.experiments.runs.part import Part
from lastgood.experiments.runs.progress import MAX_STEPS, Board, losses_equal
from lastgood.training.loop import TrainingLoop, configure_compute

__all__ = ["resume_after_kill", "train_until_killed"]

_CHECKED_STEPS: Final = 2
_END_S: Final = 60.0
# Ends with its rank: then its input ends, and `read` returns with another status than that of its timeout.
_KILLER: Final = 'read -r -t "$1" _; [ $? -gt 128 ] || exit 0; : > "$2"; kill -KILL "$3"'

Report = Callable[[str], None]


def train_until_killed(
    spec: RunSpec, loop: TrainingLoop, board: Board, after_steps: float, step_s: float, marker: Path, part: Part
) -> NoReturn:
    """Train on, with checkpoints, until a process that is started here kills this one; it makes `marker` just before.

    All ranks do this together; `after_steps` iterations of `step_s` seconds are the moment.
    """
    configure_compute(spec.threads, deterministic=spec.device == "cpu")

    def note(step: int, loss: torch.Tensor) -> None:
        # On CUDA this waits for the step, so that it is known to be finished.
        board.put_loss(step, float(loss))
        board.put(step=step)

    loop.on_step = note
    loop.interval_steps = spec.interval_steps
    board.put(step=loop.progress.step)
    part.barrier()
    command = ["bash", "-c", _KILLER, "bash", f"{after_steps * step_s:.6f}", str(marker), str(os.getpid())]
    killer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        loop.train(MAX_STEPS - 1 - loop.progress.step)
    finally:
        killer.kill()
        killer.wait(_END_S)
    raise LastgoodError(f"{spec.title()}: {MAX_STEPS} steps were done before the rank was killed")


def resume_after_kill(
    spec: RunSpec, checkpoints: Path, data_dir: Path, report: Report, part: Part, board: Board
) -> tuple[Resumed, TrainingLoop]:
    """Restore in this fresh process what a kill has left, start the system, and compare the next losses.

    The loop has trained on for the steps whose losses were compared.
    """
    configure_compute(spec.threads, deterministic=spec.device == "cpu")
    found = restore_scrambled(spec, checkpoints, data_dir, report, part)
    loop, restored = found.loop, found.step
    if loop.progress.step != restored:
        raise LastgoodError(
            f"{spec.title()}: restore() named step {restored}, and the state in it is of step {loop.progress.step}"
        )
    reached = board.get("step")
    if reached is None:
        raise LastgoodError(f"{spec.title()}: nothing is known of the incarnation before; its board is empty")
    known = [board.loss_of(restored + number) for number in range(1, _CHECKED_STEPS + 1)]
    report("training on from the restored state")
    loop.checkpointer = part.writer(loop.checkpointer, checkpoints)
    loop.start()
    loop.interval_steps = spec.interval_steps
    losses = loop.train(_CHECKED_STEPS).losses
    equal = [
        losses_equal(loss, other, spec.device) for loss, other in zip(losses, known, strict=True) if other is not None
    ]
    resumed = Resumed(
        reached_step=reached,
        restored_step=restored,
        restore_s=found.restore_s,
        losses_checked=len(equal),
        losses_equal=all(equal),
    )
    return resumed, loop
