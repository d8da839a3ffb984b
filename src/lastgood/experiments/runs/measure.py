"""What the processes of one run do: the trainer measures and takes the live digest, the restorer proves."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch

from lastgood.checkpointers.base import Checkpointer
from lastgood.checkpointers.events import CheckpointEvent, Outcome
from lastgood.errors import CheckpointError, LastgoodError
from lastgood.experiments.machine.page_cache import forget_cached_pages
from lastgood.experiments.records.blocks import Pairs
from lastgood.experiments.records.run import Clocks, Counts, LiveProof, Resources, RestoredProof, WorkloadFacts
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.runs.pairs import measure_pairs
from lastgood.experiments.runs.part import Part
from lastgood.experiments.runs.timeline import Timeline
from lastgood.state import flatten, seed_everything
from lastgood.training.loop import Segment, TrainingLoop, configure_compute
from lastgood.workloads.base import Workload
from lastgood.workloads.registry import build_workload, workload_options_class

__all__ = [
    "AfterMeasurement",
    "Measurement",
    "Restored",
    "build_planned",
    "drain_checked",
    "live_proof",
    "prove_restore",
    "restore_scrambled",
    "scramble",
    "train_and_measure",
    "train_and_prove",
]

_PROOF_STEPS_AFTER = 2
"""Steps trained on after the proved checkpoint, live and restored, whose losses must agree."""

Report = Callable[[str], None]
AfterMeasurement = Callable[[TrainingLoop, "Measurement"], NoReturn]


@dataclass(frozen=True)
class Restored:
    """A training with the state of its newest checkpoint."""

    loop: TrainingLoop
    step: int
    """As restore() named it."""
    restore_s: float


@dataclass(frozen=True)
class Measurement:
    """What the trainer hands back."""

    workload: WorkloadFacts
    clocks: Clocks
    resources: Resources
    counts: Counts
    storage: dict[str, Any]
    proof: LiveProof | None
    service_facts: Mapping[str, Any] = field(default_factory=dict)
    """What services used, as fields of the record."""
    notes: list[str] = field(default_factory=list)
    pairs: Pairs | None = None
    timeline: Timeline | None = None
    """If it was asked for."""

    def facts(self) -> dict[str, Any]:
        """What a record takes over as it is, by the names of its fields."""
        names = ("workload", "clocks", "resources", "counts", "storage", "notes")
        return {**{name: getattr(self, name) for name in names}, **self.service_facts}


@dataclass(frozen=True)
class _Timed:
    """The measured steps."""

    segments: list[Segment]
    """All, in order."""
    counted: list[Segment]
    """Those that the clocks of the record are about."""
    plain: list[Segment]
    """Those that say how long a copy can hide."""
    drains: list[tuple[float, float]]
    """Begin and end of each, in `time.perf_counter()` seconds."""
    pairs: Pairs | None = None


def train_and_measure(
    spec: RunSpec,
    checkpoints: Path,
    data_dir: Path,
    timeline: bool,
    report: Report,
    part: Part | None = None,
    after_measurement: AfterMeasurement | None = None,
) -> Measurement:
    """Warm up, measure, drain and, if the spec asks for it, take the live half of the proof.

    `part` is this process's part in a run over several ranks, each of which calls this. `after_measurement`, if given,
    gets the measurement, goes on with the training and never returns. Raises LastgoodError if a checkpoint failed: such
    a run measures something else.
    """
    # Ranks prove in these processes, and all systems and `none` must be measured alike.
    configure_compute(spec.threads, deterministic=False, later=spec.proof or spec.over_ranks)
    part = part or Part(spec)
    report("building the workload")
    workload = build_planned(spec, data_dir)
    # Before it is spread over ranks: of a shard or a stage a rank has no more than its own.
    parameters = sum(parameter.numel() for parameter in workload.model.parameters())
    part.parallelise(workload)
    checkpointer = part.checkpointer(checkpoints)
    loop = TrainingLoop(workload, checkpointer, 0, spec.device)
    loop.heartbeat = report
    loop.start()
    try:
        report(f"warming up, {spec.warmup_steps} steps")
        loop.train(spec.warmup_steps)
        if spec.interval_steps:
            # Untimed: slots are written for the first time, and buffers touched. One long stretch hides what is left.
            for number in range(part.follow(checkpointer.saves_until_warm) if spec.pairs else 1):
                if number:
                    loop.train(1)
                loop.save()
                drain_checked(checkpointer)
            part.share_buffers()
            part.check(loop.state)
        loop.first_step = loop.progress.step
        loop.interval_steps, loop.drain_each = spec.interval_steps, spec.drain_each
        first_step, before = loop.first_step + 1, len(checkpointer.events)
        if timeline:
            checkpointer.keep_update_waits()
        used = part.begin_meters(checkpoints)
        part.barrier()
        cpu_before, stall_before = _cpu_s(), checkpointer.update_stall_s
        timed = _timed(spec, loop, checkpoints.parent, report, part)
        stall_update_s = checkpointer.update_stall_s - stall_before
        cpu_s = _cpu_s() - cpu_before
        events = checkpointer.events[before:]
        losses = [loss for segment in timed.segments for loss in segment.losses]
        _refuse_failures(events)
        _refuse_unfinished(checkpointer)
        _refuse_divergence(spec, losses)
        flat = flatten(loop.state, spread=True)
        measurement = Measurement(
            workload=WorkloadFacts(
                parameters=parameters,
                state_bytes=flat.layout.payload_bytes,
                state_tensors=flat.layout.tensor_count(),
                data_name=workload.data_facts["name"],
                data_source=workload.data_facts["source"],
                data_sha256=workload.data_facts["sha256"],
                losses=losses,
            ),
            clocks=_clocks(timed, events, stall_update_s),
            resources=Resources(
                peak_rss_bytes=_peak_rss_bytes(),
                peak_device_bytes=torch.cuda.max_memory_allocated() if spec.device == "cuda" else 0,
                cpu_s=cpu_s,
                bytes_written=sum(event.bytes_written for event in events),
            ),
            counts=_counts(events),
            storage=checkpointer.storage_facts(),
            proof=None,
            service_facts=used(),
            pairs=timed.pairs,
            timeline=None
            if not timeline
            else Timeline(
                first_step=first_step,
                steps=[span for segment in timed.segments for span in segment.clock.spans()],
                saves=[save for segment in timed.segments for save in segment.saves],
                update_waits=checkpointer.update_waits[0],
                device_waits=checkpointer.update_waits[1],
                checkpoints=list(events),
                drains=timed.drains,
            ),
        )
        del flat
        if after_measurement is not None:
            after_measurement(loop, measurement)
        if spec.proof:
            report("training on for the restore proof")
            # Not closed: this process is killed next, and what is durable must be so without a tidy end.
            return replace(measurement, proof=live_proof(loop, part))
    except BaseException:
        checkpointer.close()
        raise
    checkpointer.close()
    return measurement


def prove_restore(
    spec: RunSpec, checkpoints: Path, data_dir: Path, report: Report, part: Part | None = None
) -> RestoredProof:
    """Restore the newest checkpoint into a scrambled training and say what came back. Runs in a fresh process."""
    configure_compute(spec.threads, deterministic=True)
    part = part or Part(spec)
    found = restore_scrambled(spec, checkpoints, data_dir, report, part)
    loop = found.loop
    digest = loop.digest()
    report("training on from the restored state")
    loop.workload.model.train()
    losses = loop.train(_PROOF_STEPS_AFTER).losses
    part.barrier()
    loop.checkpointer.close()
    return RestoredProof(step=found.step, digest=digest, next_losses=losses, restore_s=found.restore_s)


def train_and_prove(spec: RunSpec, checkpoints: Path, data_dir: Path, report: Report) -> LiveProof:
    """The live half of the proof in a process of its own: the training goes on from its newest checkpoint.

    On CUDA: what makes cuBLAS deterministic is set when it starts, and would slow down a measurement.
    """
    configure_compute(spec.threads, deterministic=True)
    part = Part(spec)
    loop = restore_scrambled(spec, checkpoints, data_dir, report, part).loop
    loop.checkpointer = part.writer(loop.checkpointer, checkpoints)
    loop.start()
    report("training on for the restore proof")
    return live_proof(loop, part)


def restore_scrambled(spec: RunSpec, checkpoints: Path, data_dir: Path, report: Report, part: Part) -> Restored:
    """Build the training of `spec` again, make all of its state wrong, and restore the newest checkpoint into it.

    All ranks begin to restore together. Files that were read or written before are read from the disk.
    """
    report("building the workload again")
    workload = build_planned(spec, data_dir)
    part.parallelise(workload)
    scramble(workload)
    loop = TrainingLoop(workload, part.checkpointer(checkpoints), 0, spec.device)
    forget_cached_pages(checkpoints)
    part.barrier()
    report("restoring")
    started = time.perf_counter()
    step = loop.restore(part.common_step(loop.checkpointer))
    return Restored(loop, step, time.perf_counter() - started)


def live_proof(loop: TrainingLoop, part: Part) -> LiveProof:
    """Two checkpoints in neighbouring steps, the second of which is proved, and training that overwrites both at once.

    The digest is taken from the live tensors before the save, not between save and update, where it would give a
    careless copy the time to finish.
    """
    configure_compute(torch.get_num_threads(), deterministic=True)
    loop.interval_steps, loop.saves_first = 0, False
    loop.train(1)
    loop.save()
    loop.train(1)
    part.share_buffers()
    digest, step = loop.digest(), loop.progress.step
    loop.save()
    losses = loop.train(_PROOF_STEPS_AFTER).losses
    drain_checked(loop.checkpointer)
    return LiveProof(step=step, digest=digest, next_losses=losses)


def build_planned(spec: RunSpec, data_dir: Path) -> Workload:
    """The workload of `spec`, with every generator seeded."""
    options = workload_options_class(spec.workload).model_validate(spec.workload_options)
    seed_everything(spec.seed)
    data_path = Path(spec.data) if spec.data is not None else None
    return build_workload(
        spec.workload, options, data_dir=data_dir, data_path=data_path, seed=spec.seed, device=spec.device
    )


def scramble(workload: Workload) -> None:
    """Make every parameter and generator wrong, so that what a restore leaves out shows."""
    updated = (parameter for group in workload.optimizer.param_groups for parameter in group["params"])
    wrong = {id(parameter): parameter for parameter in (*workload.model.parameters(), *updated)}
    with torch.no_grad():
        for parameter in wrong.values():
            parameter.add_(1)
    seed_everything(20_000_001)
    for _ in range(3):
        next(workload.data)


def drain_checked(checkpointer: Checkpointer) -> None:
    """Drain, and raise CheckpointError if a checkpoint failed or is pending still."""
    checkpointer.drain()
    _refuse_failures(checkpointer.events)
    _refuse_unfinished(checkpointer)


def _refuse_unfinished(checkpointer: Checkpointer) -> None:
    """After a drain nothing may be pending, and what is newest must be what was last durable."""
    pending = [event.step for event in checkpointer.events if event.outcome is Outcome.PENDING]
    durable = [event.step for event in checkpointer.events if event.outcome is Outcome.DURABLE]
    newest = checkpointer.latest()
    if pending or (durable and newest != durable[-1]):
        raise CheckpointError(
            f"{checkpointer.name}: after drain() steps {pending or 'none'} are pending and latest() is {newest}, "
            f"where step {durable[-1] if durable else 'none'} was the last to be durable"
        )


def _refuse_failures(events: Sequence[CheckpointEvent]) -> None:
    failed = [event for event in events if event.outcome is Outcome.FAILED]
    if failed:
        raise CheckpointError(
            f"{len(failed)} of {len(events)} checkpoints failed, so this run measures nothing; "
            f"the first, of step {failed[0].step}: {failed[0].error}"
        )


def _refuse_divergence(spec: RunSpec, losses: Sequence[float]) -> None:
    """Arithmetic on NaN can be slower or faster, and NaN hides what a restore got wrong."""
    for number, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise LastgoodError(
                f"{spec.title()}: the loss of measured step {number} is {loss}, the one before it "
                f"{losses[number - 1] if number else 'unknown'}; the workload's options diverge"
            )


def _timed(spec: RunSpec, loop: TrainingLoop, scratch: Path, report: Report, part: Part) -> _Timed:
    """Take the measured steps: one stretch with checkpoints and its drain, or pairs of blocks."""
    if spec.pairs is not None:
        found = measure_pairs(spec, spec.pairs, loop, scratch, report, part)
        plain = found.of_kind("without")
        counted = found.of_kind("with") if spec.interval_steps else plain
        return _Timed(found.segments, counted, plain or counted, found.drains, found.pairs)
    report(f"measuring, {spec.measured_steps} steps")
    segment = loop.train(spec.measured_steps)
    started = time.perf_counter()
    loop.checkpointer.drain()
    drains = [(started, time.perf_counter())] if spec.interval_steps else []
    return _Timed([segment], [segment], [segment], drains)


def _clocks(timed: _Timed, events: Sequence[CheckpointEvent], stall_update_s: float) -> Clocks:
    elapsed_s = sum(segment.clock.elapsed_s for segment in timed.counted)
    drain_s = sum(end - begin for begin, end in timed.drains)
    steps = sum(len(segment.losses) for segment in timed.counted)
    finished = [
        event.finished_s - event.requested_s
        for event in events
        if event.finished_s is not None and event.outcome in (Outcome.DURABLE, Outcome.SUPERSEDED)
    ]
    return Clocks(
        measured_steps=steps,
        elapsed_s=elapsed_s,
        iterations_per_s=steps / elapsed_s,
        durable_iterations_per_s=steps / (elapsed_s + drain_s),
        step_s=[duration for segment in timed.counted for duration in segment.clock.step_s()],
        hide_s=statistics.median(segment.clock.hide_s() for segment in timed.plain),
        stall_save_s=sum(segment.stall_save_s for segment in timed.counted),
        stall_update_s=stall_update_s,
        persist_s=finished,
        drain_s=drain_s,
    )


def _counts(events: Sequence[CheckpointEvent]) -> Counts:
    outcomes = Counter(event.outcome for event in events)
    return Counts(
        started=len(events),
        durable=outcomes[Outcome.DURABLE],
        superseded=outcomes[Outcome.SUPERSEDED],
        failed=outcomes[Outcome.FAILED],
        skipped=outcomes[Outcome.SKIPPED],
    )


def _cpu_s() -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)


def _peak_rss_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise LastgoodError("/proc/self/status holds no VmHWM; run records need a Linux kernel with /proc")
