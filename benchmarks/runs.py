"""One timed run of a training under one checkpointing system, and what it says about where the time went."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from plain_loop import PlainLoop, PlainLoopOptions

from lastgood.checkpointers.base import Checkpointer
from lastgood.checkpointers.events import CheckpointEvent, Outcome
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import CheckpointError, LastgoodError
from lastgood.experiments.config.schema import Config
from lastgood.experiments.plan.load import parse_config
from lastgood.state import flatten
from lastgood.training.loop import TrainingLoop, configure_compute
from lastgood.workloads.base import Batch, BatchStream, Workload
from lastgood.workloads.data.prepare import prepare_dataset
from lastgood.workloads.registry import build_workload, workload_data_kind

SYSTEMS = ("none", "pccheck", "plain_loop")
_BATCHES = 8
_WARMUP_STEPS = 12
"""cuDNN tries its kernels in the first steps, and clocks come up to speed."""


class FixedBatches(BatchStream):
    """A few batches, made once and kept on the device, over and over: neither data nor copies of it are measured."""

    def __init__(self, stream: BatchStream, device: str) -> None:
        super().__init__()
        self._batches = [{name: part.to(device) for name, part in next(stream).items()} for _ in range(_BATCHES)]

    def batch(self, index: int) -> Batch:
        """Batch number `index`, already on the device."""
        return self._batches[index % len(self._batches)]

    def prefetch(self, pinned: bool) -> None:
        """They are there."""


@dataclass(frozen=True)
class Run:
    """What one run gave. Times are seconds; a value per save is None where there was no save."""

    system: str
    interval: int
    round: int
    steps: int
    elapsed_s: float
    drain_s: float
    hide_s: float
    stall_save_s: float
    stall_update_s: float
    cpu_s: float
    """CPU time of the whole process while it trained."""
    saves: int
    durable: int
    superseded: int
    skipped: int
    persist_s: list[float] = field(default_factory=list)
    """From each save to its durability."""
    copy_s: list[float] = field(default_factory=list)
    """From each save to its last byte's leaving the live tensors."""
    losses: tuple[float, float] = (0.0, 0.0)
    """The first and the last: all systems train the same model on."""

    @property
    def iterations_per_s(self) -> float:
        """Of training alone, without the drain after it."""
        return self.steps / self.elapsed_s

    @property
    def durable_iterations_per_s(self) -> float:
        """With the drain counted as time in which nothing was trained."""
        return self.steps / (self.elapsed_s + self.drain_s)

    def as_json(self) -> dict[str, Any]:
        """All fields and both throughputs."""
        return {
            **dataclasses.asdict(self),
            "iterations_per_s": self.iterations_per_s,
            "durable_iterations_per_s": self.durable_iterations_per_s,
        }


class Trainer:
    """A workload at its configured size, warmed up, that all systems train in turn."""

    def __init__(
        self,
        name: str,
        *,
        config: Path,
        device: str,
        threads: int,
        data_dir: Path,
        folder: Path,
        knobs: dict[str, Any],
        seed: int,
    ) -> None:
        settings = parse_config(config)[0]
        configure_compute(threads, deterministic=False)
        self.name = name
        self.device = device
        self.sizes: dict[str, Any] = settings.workload_options(name).model_dump(mode="json")
        self.knobs = {**settings.options.get("pccheck", {}), **knobs}
        self._folder = folder
        self.workload = build(name, settings, data_dir, device, seed)
        self.workload.data = FixedBatches(self.workload.data, device)
        warm = TrainingLoop(self.workload, self._make("none"), 0, device)
        warm.start()
        warm.train(_WARMUP_STEPS)
        warm.checkpointer.close()
        self.state_bytes = flatten(warm.state).layout.payload_bytes

    def run(self, system: str, interval: int, steps: int, number: int) -> Run:
        """Train `steps` steps under `system`, saving every `interval` steps; 0 never saves.

        Before the clock starts the run gets into its stride: one checkpoint is written untimed, then training goes on
        with saves for an interval and a half. So what is in progress at the end was so at the start, and neither is a
        debt of this run's; and the clock never stops right after a save. `steps` is a multiple of the interval.
        """
        gc.collect()
        checkpointer = self._make(system)
        loop = TrainingLoop(self.workload, checkpointer, 0, self.device)
        loop.start()
        try:
            loop.train(1)
            if interval:
                loop.save()
                checkpointer.drain()
                loop.first_step = loop.progress.step
                loop.interval_steps = interval
                loop.save()
            loop.train(max(3, interval + interval // 2))
            before = len(checkpointer.events)
            cpu_before, stall_before = _cpu_s(), checkpointer.update_stall_s
            segment = loop.train(steps)
            stall_update_s = checkpointer.update_stall_s - stall_before
            cpu_s = _cpu_s() - cpu_before
            begin = time.perf_counter()
            checkpointer.drain()
            drain_s = time.perf_counter() - begin
            events = checkpointer.events[before:]
            _refuse_failures(checkpointer)
            _refuse_divergence(segment.losses)
        finally:
            checkpointer.close()

        def count(outcome: Outcome) -> int:
            return sum(event.outcome is outcome for event in events)

        return Run(
            system=system,
            interval=interval,
            round=number,
            steps=steps,
            elapsed_s=segment.clock.elapsed_s,
            drain_s=drain_s if interval else 0.0,
            hide_s=segment.clock.hide_s(),
            stall_save_s=segment.stall_save_s,
            stall_update_s=stall_update_s,
            cpu_s=cpu_s,
            saves=len(events),
            durable=count(Outcome.DURABLE),
            superseded=count(Outcome.SUPERSEDED),
            skipped=count(Outcome.SKIPPED),
            persist_s=_spans(events, lambda event: event.finished_s),
            copy_s=_spans(events, lambda event: event.copied_s),
            losses=(segment.losses[0], segment.losses[-1]),
        )

    def _make(self, system: str) -> Checkpointer:
        # Slots and files stay from run to run, so that only the first pays for making them.
        folder = self._folder / self.name / system
        if system == "plain_loop":
            keys = {key: self.knobs[key] for key in ("writer_threads", "chunk_bytes") if key in self.knobs}
            return PlainLoop(folder, PlainLoopOptions.model_validate(keys))
        kind = checkpointer_class(system)
        checkpointer = kind(folder, kind.Options.model_validate(self.knobs if system == "pccheck" else {}))
        checkpointer.events_kept = None
        return checkpointer


def build(name: str, config: Config, data_dir: Path, device: str, seed: int) -> Workload:
    """A workload of a configuration, on data that is made if it is missing."""
    prepare_dataset(workload_data_kind(name), data_dir)
    options = config.workload_options(name)
    return build_workload(name, options, data_dir=data_dir, data_path=None, seed=seed, device=device)


def _spans(events: list[CheckpointEvent], end: Callable[[CheckpointEvent], float | None]) -> list[float]:
    found = []
    for event in events:
        moment = end(event)
        if moment is not None and event.outcome is not Outcome.SKIPPED:
            found.append(moment - event.requested_s)
    return found


def _cpu_s() -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)


def _refuse_failures(checkpointer: Checkpointer) -> None:
    for event in checkpointer.events:
        if event.outcome in (Outcome.FAILED, Outcome.PENDING):
            raise CheckpointError(
                f"{checkpointer.name}: the checkpoint of step {event.step} is {event.outcome.value} after the drain "
                f"({event.error}), so this run measures nothing"
            )


def _refuse_divergence(losses: list[float]) -> None:
    for number, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise LastgoodError(f"the loss of measured step {number} is {loss}: such arithmetic has other speeds")
