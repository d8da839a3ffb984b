"""The training loop: one workload, one checkpointer, and clocks around both."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lastgood._lazy import torch
from lastgood.checkpointers.attach.attachment import Progress
from lastgood.checkpointers.base import Checkpointer
from lastgood.state import RngState, state_digest
from lastgood.training.clock import StepClock
from lastgood.workloads.base import Batch, Workload

__all__ = ["HEARTBEAT_S", "Segment", "TrainingLoop", "configure_compute"]


def configure_compute(threads: int, deterministic: bool, later: bool = False) -> None:
    """Set CPU threads and, for proofs, deterministic kernels; TF32 as the papers' set-ups use it.

    Deterministic kernels cost speed on CUDA and nothing on the CPU; a measurement runs without, a proof with them.
    cuBLAS reads its workspace setting once, when it starts, and is slower with the deterministic one (OPT-1.3B on an
    H200: 142 ms for a step, 88 without). So it is set only in a process that proves, or that will do so `later`.
    Fused attention adds in an order that differs from run to run: a proof takes torch's plain one in its place.
    """
    if deterministic or later:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    for allow in (
        torch.backends.cuda.enable_flash_sdp,
        torch.backends.cuda.enable_mem_efficient_sdp,
        torch.backends.cuda.enable_cudnn_sdp,
    ):
        allow(not deterministic)
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True


HEARTBEAT_S = 30.0


@dataclass
class Segment:
    """What a number of steps gave."""

    clock: StepClock
    losses: list[float] = field(default_factory=list)
    saves: list[tuple[int, float, float]] = field(default_factory=list)
    """Step, begin and end of each call of save(), in `time.perf_counter()` seconds."""

    @property
    def stall_save_s(self) -> float:
        """Total time in save()."""
        return sum(end - begin for _, begin, end in self.saves)


class TrainingLoop:
    """Trains `workload` and offers its state to `checkpointer` every `interval_steps` steps (0: never).

    The interval counts from `first_step`, so that a warm-up of any length does not shift the saves of a measurement.
    """

    def __init__(self, workload: Workload, checkpointer: Checkpointer, interval_steps: int, device: str) -> None:
        self.workload = workload
        self.checkpointer = checkpointer
        self.interval_steps = interval_steps
        self.device = device
        self.progress = Progress()
        self.first_step = 0
        self.saves_first = False
        """Save before the first step of each interval, instead of after its last: a stretch of whole intervals then
        begins with a save, and each checkpoint has an interval of steps to become durable in."""
        self.drain_each = False
        """Wait after every save until it is durable, outside the save's own stall: no two are in progress."""
        self.heartbeat: Callable[[str], None] | None = None
        """Told how far a long `train` is, about once in `HEARTBEAT_S`."""
        self.on_step: Callable[[int, torch.Tensor], None] | None = None
        """Told the number and the loss (on the device) of each step, after its save."""
        self.state: dict[str, Any] = {**workload.state(), "rng": RngState(), "progress": self.progress}

    def restore(self, step: int | None = None) -> int:
        """Load the newest complete checkpoint (or that of `step`) and return its step."""
        found = self.checkpointer.restore(self.state, step)
        self.first_step = self.progress.step
        return found

    def start(self) -> None:
        """Hand the state to the checkpointer; before the first step, after any restore, and after all forks."""
        self.workload.model.train()
        if self.device != "cpu":  # there the cores are idle while the device works
            self.workload.data.prefetch(pinned=torch.device(self.device).type == "cuda")
        self.checkpointer.start(self.state)

    def train(self, steps: int) -> Segment:
        """Take `steps` steps, with saves when the interval asks for them."""
        segment = Segment(StepClock(self.device))
        losses = []
        segment.clock.begin()
        told = time.monotonic()
        for number in range(1, steps + 1):
            losses.append(self._step(segment))
            if self.on_step is not None:
                self.on_step(self.progress.step, losses[-1])
            if self.heartbeat is not None and time.monotonic() - told > HEARTBEAT_S:
                told = time.monotonic()
                self.heartbeat(f"step {number} of {steps}")
        segment.clock.end()
        segment.losses = [float(loss) for loss in losses]
        return segment

    def save(self) -> None:
        """Save now, whatever the interval says."""
        self.checkpointer.save(self.progress.step)

    def digest(self) -> str:
        """Of the live state, and of what the workload makes from it."""
        derived = self.workload.derived
        return state_digest(self.state if derived is None else {**self.state, "derived": derived()})

    def _step(self, segment: Segment) -> torch.Tensor:
        clock = segment.clock
        clock.step_started()
        if self.saves_first:
            self._save_if_due(segment)
        loss = (self.workload.step or self._plain_step)(self._next_batch, clock.update_reached)
        self.progress.step += 1
        if not self.saves_first:
            self._save_if_due(segment)
        clock.step_ended()
        return loss

    def _save_if_due(self, segment: Segment) -> None:
        if self.interval_steps and (self.progress.step - self.first_step) % self.interval_steps == 0:
            before = time.perf_counter()
            self.save()
            segment.saves.append((self.progress.step, before, time.perf_counter()))
            if self.drain_each:
                self.checkpointer.drain()

    def _plain_step(self, next_batch: Callable[[], Batch], update_reached: Callable[[], None]) -> torch.Tensor:
        """The step of a workload that brings none of its own; see `Stepper`."""
        workload = self.workload
        loss = workload.loss(next_batch())
        loss.backward()
        update_reached()
        workload.optimizer.step()
        if workload.scheduler is not None:
            workload.scheduler.step()
        workload.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _next_batch(self) -> Batch:
        batch = next(self.workload.data)
        if self.device == "cpu":
            return batch
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
