"""Tuning PCcheck to a disk and a training: how many checkpoints at once, threads, chunk size, interval.

The write curve (write_curve.py) says how long the slowest of N checkpoints at once takes. The rule of the paper
(`tuned.shortest_interval`) turns each of its points into an interval. If a training is given, the choice is then
tried on it, since the rule knows nothing of what copies and checksums cost the training itself.

Nothing here takes the machine's turn to measure, which stands one floor higher: `lastgood tune` does. Callers of the
library see to it that nothing else works on the machine meanwhile.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from lastgood._lazy import torch
from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.pccheck.system import PCcheck, PCcheckOptions
from lastgood.checkpointers.pccheck.tuning_file import SlowdownCheck, Tuning, choose, shortest_interval
from lastgood.errors import CheckpointError, ConfigError
from lastgood.files import local_path
from lastgood.mounts import lies_in_memory
from lastgood.state import flatten
from lastgood.storage.format import stream_layout
from lastgood.training.write_curve import WriteCurve, grid, most_that_fit, probe_folder
from lastgood.units import format_bytes, format_seconds

__all__ = ["Limits", "tune", "tune_training"]

Report = Callable[[str], None]

_WARM_UP_STEPS = 3
_MOST_STEPS = 50
_CHECKS = 6
_CHECK_S = 1.0


@dataclass(frozen=True)
class Limits:
    """What tuning may use. None stands for what the machine shows this process."""

    seconds: float = 60.0
    """For all measurements together. What is begun is ended, so a slow disk or a long iteration may take longer."""
    cores: int | None = None
    """The most writer threads tried."""
    disk_bytes: int | None = None
    """Free space for the job's slots, beside those that it has already."""
    memory_bytes: int | None = None
    """Host memory beside the training's own; half of it at most becomes the pool."""


def tune(
    directory: Path | str,
    *,
    iteration_s: float,
    state_bytes: int,
    slowdown: float = 1.05,
    keep: int = 2,
    limits: Limits | None = None,
    machine: str | None = None,
    report: Report = lambda _: None,
) -> Tuning:
    """Measure the write curve of the file system of `directory`, and choose N, p, b and the shortest interval.

    Args:
        directory: the job's checkpoint folder, made if it is not there. No training may have it open.
        iteration_s: t, seconds of one iteration without checkpoints.
        state_bytes: S, bytes of one checkpoint.
        slowdown: q, the slowdown allowed, above 1; 1.05 allows 5 %.
        keep: K, complete checkpoints that the job keeps; the disk must hold N + K.
        limits: time, cores, disk and memory to keep to.
        machine: a name of this machine for the file.
        report: told each stage.

    Raises:
        ConfigError: numbers that cannot be.
        LockHeld: a training, or another tuning, uses the folder.
        StorageError: the disk is too small, in bytes, or refused a write.
    """
    limits = limits or Limits()
    _refuse_nonsense(iteration_s, state_bytes, slowdown, keep, limits)
    with probe_folder(local_path(directory)) as folder:
        return _tune(folder, iteration_s, state_bytes, slowdown, keep, limits, limits.seconds, machine, report)


def tune_training(
    directory: Path | str,
    step: Callable[[], object],
    state: Mapping[str, Any],
    *,
    slowdown: float = 1.05,
    keep: int = 2,
    limits: Limits | None = None,
    machine: str | None = None,
    report: Report = lambda _: None,
) -> Tuning:
    """As `tune`, with iteration time and state size of a real training, on which the choice is tried as well.

    `step` takes one step of it, the optimizer's included; `state` is what a checkpointer would be started with. The
    steps that this takes are real: tune with a training that may be thrown away, or go on from where it is.

    PCcheck runs at the chosen interval; if the measured slowdown is over the allowed one, the interval is raised and
    tried again. `Tuning.kept` says how that ended: None means that it could not be tried, and a warning says why.

    Raises what `tune` raises, StateError for a state that cannot be stored, CheckpointError if a checkpoint failed.
    """
    limits = limits or Limits()
    _refuse_nonsense(1.0, 1, slowdown, keep, limits)
    deadline = time.monotonic() + limits.seconds
    with probe_folder(local_path(directory)) as folder:
        report("iteration time")
        training = _Training(step, state)
        training.take(_WARM_UP_STEPS)
        iteration_s = training.median_s(limits.seconds / 10)
        state_bytes = training.state_bytes()
        report(f"{format_seconds(iteration_s)} for one iteration, {format_bytes(state_bytes)} of state")
        seconds = max(0.0, deadline - time.monotonic()) / 2
        found = _tune(folder, iteration_s, state_bytes, slowdown, keep, limits, seconds, machine, report)
        return _try_out(folder / "training", training, found, deadline, report)


def _tune(
    folder: Path,
    iteration_s: float,
    state_bytes: int,
    slowdown: float,
    keep: int,
    limits: Limits,
    seconds: float,
    machine: str | None,
    report: Report,
) -> Tuning:
    warnings = []
    if lies_in_memory(folder):
        warnings.append(f"{folder.parent} lies in memory: checkpoints there survive no power cut, and this is no disk")
    most_in_flight = most_that_fit(folder.parent, state_bytes, keep, limits.disk_bytes)
    cores = limits.cores or len(os.sched_getaffinity(0))
    memory = limits.memory_bytes or psutil.virtual_memory().available
    keys = grid(state_bytes, most_in_flight, cores)
    fitting = [key for key in keys if (key[1] + 1) * key[2] <= memory // 4]
    if not fitting:
        raise ConfigError(
            f"{memory} bytes of memory ({format_bytes(memory)}) are too few for any pool: at least "
            f"{4 * min((p + 1) * b for _, p, b in keys)} are needed"
        )
    pool_bytes = None if state_bytes <= memory // 2 else memory // 2
    curve = WriteCurve(folder / "curve", state_bytes, pool_bytes, memory, fitting, seconds, report)
    curve.measure_all()
    points = curve.points()
    best = choose(points, slowdown, iteration_s)
    while curve.confirm(best):
        points = curve.points()
        best = choose(points, slowdown, iteration_s)
    shutil.rmtree(curve.folder)
    if best.stream_bytes < state_bytes:
        warnings.append(
            f"the chosen point was measured with {best.stream_bytes} bytes ({format_bytes(best.stream_bytes)}) and "
            f"scaled to {state_bytes} ({format_bytes(state_bytes)}); a longer budget, or more free disk, writes more"
        )
    if pool_bytes is not None:
        pool_bytes = max(pool_bytes // best.chunk_bytes, best.writer_threads + 1) * best.chunk_bytes
        warnings.append(f"the pool is {format_bytes(pool_bytes)}, less than one state: copies will wait for writes")
    tried = {(p.max_in_flight, p.writer_threads, p.chunk_bytes) for p in points}
    return Tuning(
        interval_steps=best.interval_steps(slowdown, iteration_s),
        options=PCcheckOptions(
            max_in_flight=best.max_in_flight,
            writer_threads=best.writer_threads,
            chunk_bytes=best.chunk_bytes,
            pool_bytes=pool_bytes,
            keep=keep,
        ),
        slowdown=slowdown,
        iteration_s=iteration_s,
        state_bytes=state_bytes,
        curve=points,
        not_tried=[key for key in keys if key not in tried],
        warnings=warnings,
        machine=machine or f"{platform.machine()}, {cores} cores",
        measured_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        direct_io=curve.direct_io,
    )


def _refuse_nonsense(iteration_s: float, state_bytes: int, slowdown: float, keep: int, limits: Limits) -> None:
    shortest_interval(1e-9, 1, slowdown, iteration_s)
    if state_bytes < 1:
        raise ConfigError(f"state_bytes must be at least 1, not {state_bytes}")
    if not 1 <= keep <= 64:
        raise ConfigError(f"keep must be from 1 to 64, not {keep}")
    if not (math.isfinite(limits.seconds) and limits.seconds > 0):
        raise ConfigError(f"the time budget must be above 0 seconds, not {limits.seconds}")
    for name, value in (("cores", limits.cores), ("memory_bytes", limits.memory_bytes)):
        if value is not None and value < 1:
            raise ConfigError(f"limits: {name} must be at least 1, not {value}")


# -- the training --------------------------------------------------------------------------------------------------


class _Training:
    """The user's training, and a stopwatch that stands at a whole number of steps, with the devices idle."""

    def __init__(self, step: Callable[[], object], state: Mapping[str, Any]) -> None:
        self.state = state
        self._step = step
        self._on_device = any(block.is_cuda for block in flatten(state).blocks)

    def take(self, steps: int, after: Callable[[int], None] = lambda _: None) -> float:
        """Take `steps` steps, call `after` with each one's number from 1, and return the seconds of it all."""
        self._synchronize()
        began = time.perf_counter()
        for number in range(1, steps + 1):
            self._step()
            after(number)
        self._synchronize()
        return time.perf_counter() - began

    def median_s(self, seconds: float) -> float:
        """The median of steps timed one by one, for about `seconds`, but at least three of them."""
        deadline = time.monotonic() + seconds
        found: list[float] = []
        while len(found) < 3 or (len(found) < _MOST_STEPS and time.monotonic() < deadline):
            found.append(self.take(1))
        return statistics.median(found)

    def state_bytes(self) -> int:
        """Size of a checkpoint as PCcheck writes it; after the first step, which makes an optimizer's tensors."""
        layout = flatten(self.state).layout
        return layout.stream_bytes + len(layout.to_json())

    def _synchronize(self) -> None:
        if self._on_device:
            for device in range(torch.cuda.device_count()):
                torch.cuda.synchronize(device)


def _try_out(folder: Path, training: _Training, found: Tuning, deadline: float, report: Report) -> Tuning:
    """Run PCcheck as it was chosen, and raise the interval until the measured slowdown is within the allowed one."""
    options = found.options
    needed = options.slots * stream_layout(found.state_bytes, options.chunk_bytes)[2]
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        why = f"it needs {needed} bytes of disk ({format_bytes(needed)}) beside the job's own slots; {free} are free"
        return _not_tried_out(found, why)
    checks: list[SlowdownCheck] = []
    interval = found.interval_steps
    checkpointer = PCcheck(folder, options)
    checkpointer.events_kept = None
    try:
        while len(checks) < _CHECKS:
            saves = _saves_in_time(found, interval, deadline - time.monotonic())
            if saves is None:
                break
            if not checks:
                checkpointer.start(training.state)
                checkpointer.save(0)  # untimed: slots and pool are used for the first time
                checkpointer.drain()
            report(f"training with a checkpoint every {interval} steps")
            check = _check(training, checkpointer, found, interval, saves)
            checks.append(check)
            report(f"slowdown {check.measured:.3f}, allowed {found.slowdown:g}")
            if check.measured <= found.slowdown:
                break
            interval = _next_interval(check, found.slowdown)
    finally:
        checkpointer.close()
    if not checks:
        wanted = _check_seconds(found, interval, options.max_in_flight + 1)
        return _not_tried_out(found, f"it takes about {format_seconds(wanted)}; give a longer budget")
    tuned = found.model_copy(update={"checks": checks, "interval_steps": checks[-1].interval_steps})
    if not tuned.kept:
        why = (
            f"no interval up to {checks[-1].interval_steps} steps kept the slowdown under {found.slowdown:g}; "
            f"measured {checks[-1].measured:.3f}. Allow more, give a longer budget, or measure on a quieter machine"
        )
        tuned = tuned.model_copy(update={"warnings": [*tuned.warnings, why]})
    return tuned


def _not_tried_out(found: Tuning, why: str) -> Tuning:
    text = f"the slowdown was not measured, and the interval rests on the write curve alone: {why}"
    return found.model_copy(update={"warnings": [*found.warnings, text]})


def _check_seconds(found: Tuning, interval: int, saves: int) -> float:
    """About how long a check takes: N intervals to fill the pipeline, `saves` measured, as many steps without."""
    intervals = found.options.max_in_flight + 2 * saves
    return intervals * interval * found.iteration_s


def _saves_in_time(found: Tuning, interval: int, seconds: float) -> int | None:
    """Checkpoints to measure: more than are in flight, and enough for a second; None if the time is too short."""
    least = found.options.max_in_flight + 1
    if _check_seconds(found, interval, least) > seconds:
        return None
    wanted = max(least, math.ceil(_CHECK_S / (interval * found.iteration_s)))
    while wanted > least and _check_seconds(found, interval, wanted) > seconds / 3:
        wanted = max(least, wanted // 2)
    return wanted


def _check(training: _Training, checkpointer: PCcheck, found: Tuning, interval: int, saves: int) -> SlowdownCheck:
    """Steps without checkpoints, steps with them, steps without: so a drift of the machine touches both alike."""
    before = len(checkpointer.events)

    def save(number: int) -> None:
        if number % interval == 0:
            checkpointer.save(number)

    half = -(-saves * interval // 2)
    plain_s = training.take(half)
    training.take(found.options.max_in_flight * interval, save)  # from here on as in the long run
    with_s = training.take(saves * interval, save)
    checkpointer.drain()
    plain_s += training.take(half)
    failed = [event for event in checkpointer.events[before:] if event.outcome is Outcome.FAILED]
    if failed:
        raise CheckpointError(
            f"{checkpointer.directory}: {len(failed)} checkpoints failed, so nothing was measured; the first: "
            f"{failed[0].error}"
        )
    pace_s = found.options.max_in_flight * interval * found.iteration_s
    return SlowdownCheck(
        interval_steps=interval,
        checkpoints=saves,
        plain_iteration_s=plain_s / (2 * half),
        iteration_s=with_s / (saves * interval),
        predicted=max(1.0, found.chosen.worst_write_s / pace_s),
    )


def _next_interval(check: SlowdownCheck, slowdown: float) -> int:
    """Where a cost per checkpoint that stays as it was would just be allowed; at most four times as long."""
    wanted = math.ceil(check.interval_steps * (check.measured - 1) / (slowdown - 1))
    return max(check.interval_steps + 1, min(wanted, 4 * check.interval_steps))
