"""An incarnation of a goodput run: build, restore, train with checkpoints, and write its progress to the board."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lastgood.checkpointers.events import CheckpointEvent, Outcome
from lastgood.errors import LastgoodError, NoCheckpoint
from lastgood.experiments.machine.page_cache import forget_cached_pages
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.runs.measure import build_planned, drain_checked, scramble
from lastgood.experiments.runs.part import make_checkpointer
from lastgood.experiments.runs.progress import MAX_STEPS, Board, losses_equal
from lastgood.state import flatten
from lastgood.training.loop import TrainingLoop, configure_compute

__all__ = ["first_incarnation", "last_look", "later_incarnation"]

Report = Callable[[str], None]


def first_incarnation(spec: RunSpec, checkpoints: Path, data_dir: Path, board: Board, report: Report) -> None:
    """Warm up, take one checkpoint, and train on until killed."""
    configure_compute(spec.threads, deterministic=spec.device == "cpu")
    report("building the workload")
    workload = build_planned(spec, data_dir)
    loop = TrainingLoop(workload, make_checkpointer(spec, checkpoints), 0, spec.device)
    loop.start()
    report(f"warming up, {spec.warmup_steps} steps")
    loop.train(spec.warmup_steps)
    if spec.interval_steps:
        loop.save()
        drain_checked(loop.checkpointer)
    board.put(
        state_bytes=flatten(loop.state).layout.payload_bytes,
        parameters=sum(parameter.numel() for parameter in workload.model.parameters()),
        restored_step=loop.progress.step,
        step=loop.progress.step,
    )
    _train(spec, loop, loop.progress.step, board, report, MAX_STEPS)


def later_incarnation(
    spec: RunSpec, checkpoints: Path, data_dir: Path, base: int, board: Board, report: Report
) -> None:
    """Restore and train on until killed. Saves fall on the steps that they fell on before: counted from `base`."""
    loop = _restored(spec, checkpoints, data_dir, board, report)
    loop.start()
    _train(spec, loop, base, board, report, MAX_STEPS)


def last_look(spec: RunSpec, checkpoints: Path, data_dir: Path, base: int, board: Board, report: Report) -> None:
    """Restore, and train one step for its loss. What this finds is what was durable."""
    loop = _restored(spec, checkpoints, data_dir, board, report)
    loop.workload.model.train()
    _train(spec, loop, base, board, report, 1)


def _restored(spec: RunSpec, checkpoints: Path, data_dir: Path, board: Board, report: Report) -> TrainingLoop:
    configure_compute(spec.threads, deterministic=spec.device == "cpu")
    report("building the workload")
    loop = _loop(spec, checkpoints, data_dir)
    # What a restore leaves out must show; and a machine that took the place of a lost one has cached nothing.
    scramble(loop.workload)
    forget_cached_pages(checkpoints)
    board.stamp("restoring_s")
    report("restoring")
    try:
        named = loop.restore()
    except NoCheckpoint:
        named = 0
    if spec.device == "cuda":
        torch.cuda.synchronize()
    board.stamp("restored_s")
    if named == 0:
        loop = _loop(spec, checkpoints, data_dir)
    board.put(named_step=named, restored_step=loop.progress.step)
    report("starting the system")
    return loop


def _loop(spec: RunSpec, checkpoints: Path, data_dir: Path) -> TrainingLoop:
    return TrainingLoop(build_planned(spec, data_dir), make_checkpointer(spec, checkpoints), 0, spec.device)


def _train(spec: RunSpec, loop: TrainingLoop, base: int, board: Board, report: Report, steps: int) -> None:
    watcher = _Watcher(spec, loop, base, board)
    loop.interval_steps = spec.interval_steps if steps > 1 else 0
    loop.first_step = base
    loop.on_step = watcher.finished
    board.stamp("training_s")
    report("training")
    loop.train(steps)
    if steps > 1:
        raise LastgoodError(f"{spec.title()}: {steps} steps were done before the window was over; make it shorter")


class _Watcher:
    """Notes on the board, step by step, what is finished, durable and failed, and the losses after checkpoints."""

    def __init__(self, spec: RunSpec, loop: TrainingLoop, base: int, board: Board) -> None:
        self._title = spec.title()
        self._device = spec.device
        self._interval = spec.interval_steps
        self._board = board
        self._events = loop.checkpointer.events
        self._first = loop.progress.step + 1
        self._base = base
        self._issued: deque[tuple[int, Any]] = deque()
        self._seen = 0
        self._open: list[CheckpointEvent] = []
        self._durable_step = -1
        self._failed = 0

    def finished(self, step: int, loss: torch.Tensor) -> None:
        """A step was issued; on the CPU it is finished."""
        if step >= MAX_STEPS:
            raise LastgoodError(f"{self._title}: more than {MAX_STEPS} steps; make the window shorter")
        self._board.put(issued_step=step)
        if self._device == "cuda":
            self._note_device(step)
        else:
            self._board.put(step=step)
        # A restore begins at a checkpoint, so only the losses after checkpoints are ever compared. Reading a loss
        # waits for the device; at every step that would hold up the training.
        if step == self._first or (self._interval and (step - 1 - self._base) % self._interval == 0):
            self._check(step, float(loss))
        self._note_checkpoints()

    def _note_device(self, step: int) -> None:
        event = torch.cuda.Event()
        event.record()
        self._issued.append((step, event))
        while self._issued and self._issued[0][1].query():
            self._board.put(step=self._issued.popleft()[0])

    def _check(self, step: int, loss: float) -> None:
        if not math.isfinite(loss):
            raise LastgoodError(f"{self._title}: the loss of step {step} is {loss}; the workload's options diverge")
        known = self._board.loss_of(step)
        if step == self._first and known is not None:
            self._board.put(first_loss_equal=int(losses_equal(loss, known, self._device)))
        # The first incarnation that came here knows best; on CUDA the one whose checkpoint is restored next.
        if known is None or self._device == "cuda":
            self._board.put_loss(step, loss)

    def _note_checkpoints(self) -> None:
        self._open += self._events[self._seen :]
        self._seen = len(self._events)
        pending = []
        for event in self._open:
            if event.outcome is Outcome.PENDING:
                pending.append(event)
            elif event.outcome is Outcome.DURABLE:
                self._durable_step = max(self._durable_step, event.step)
            elif event.outcome is Outcome.FAILED:
                self._failed += 1
        self._open = pending
        self._board.put(failed_saves=self._failed)
        if self._durable_step >= 0:
            self._board.put(durable_step=self._durable_step)
