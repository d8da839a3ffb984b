"""The runs of FlowCheck's figure: one for each part and repetition. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lastgood.cluster.testbed.state import parse_rate
from lastgood.experiments.config.schema import Config
from lastgood.experiments.machine.facts import machine_label
from lastgood.experiments.plan.cells import PUBLIC_TRACE
from lastgood.experiments.plan.grid import find_root
from lastgood.experiments.records.flowcheck import (
    FLOWCHECK_PARTS,
    CaptureSettings,
    FlowcheckSpec,
    LivesSettings,
    RecoverySettings,
    SizingSettings,
    StagesSettings,
    TrainingSettings,
)
from lastgood.experiments.records.mirror_node import LARGE_MODELS, MirrorNode
from lastgood.experiments.traces.trace import load_trace

if TYPE_CHECKING:
    from lastgood.experiments.plan.grid import Prediction

__all__ = ["flowcheck_modelled_s", "plan_flowcheck"]


def plan_flowcheck(config: Config) -> list[FlowcheckSpec]:
    """One run a part; repetitions are the outer loop. Raises ValueError for watched ranks that a ring does not have."""
    return [
        FlowcheckSpec(
            machine=config.machine or machine_label(),
            scale=config.scale,
            settings=_SETTINGS[part](config),
            seed=config.seed + repetition,
            repetition=repetition,
        )
        for repetition in range(config.flowcheck.repetitions)
        for part in FLOWCHECK_PARTS
        if part in config.flowcheck.parts
    ]


def _training(config: Config) -> TrainingSettings:
    bench = config.flowcheck.training
    same = bench.model_dump(exclude={"systems", "threads"})
    threads = bench.threads or max(1, config.thread_count // bench.ranks)
    return TrainingSettings(**same, systems=tuple(bench.systems), threads=threads)


def _lives(config: Config) -> LivesSettings:
    bench = config.flowcheck.lives
    path = Path(config.fig9.trace) if config.fig9.trace else find_root() / PUBLIC_TRACE
    trace = load_trace(path)
    stretch = trace.stretch(bench.window_s, bench.failures)
    training = _training(config).model_copy(update={"systems": tuple(bench.systems)})
    return LivesSettings(
        training=training,
        window_s=bench.window_s,
        failures_s=tuple(stretch.failures_s),
        trace_name=path.stem,
        trace_sha256=trace.digest,
        trace_s=trace.duration_s,
        trace_failures=trace.failures,
    )


def _capture(config: Config) -> CaptureSettings:
    bench = config.flowcheck.capture
    return CaptureSettings(
        frame_bytes=tuple(bench.frame_bytes),
        offered_bits_per_s=tuple(float(parse_rate(rate)) for rate in bench.offered),
        seconds=bench.seconds,
        ring_bytes=bench.ring_bytes,
    )


def _recovery(config: Config) -> RecoverySettings:
    bench = config.flowcheck.recovery
    return RecoverySettings.model_validate(bench.model_dump())


def _stages(config: Config) -> StagesSettings:
    bench = config.flowcheck.stages
    same = {"systems": (), "steps": bench.steps, "rounds": bench.rounds}
    return StagesSettings(training=_training(config).model_copy(update=same), widths=tuple(bench.widths))


def _sizing(config: Config) -> SizingSettings:
    bench = config.flowcheck.sizing
    node = MirrorNode(
        watched=bench.watched,
        gpu_link_bits_per_s=bench.gpu_link_gbit * 1e9,
        gradient_bytes=bench.gradient_bytes,
        header_bytes=bench.header_bytes,
        payload_bytes=bench.payload_bytes,
    )
    same = bench.model_dump(include={"optimizer", "update_shape", "updates", "traffic_bytes", "payload_bytes"})
    return SizingSettings(models=tuple(LARGE_MODELS[name] for name in bench.models), node=node, **same)


_SETTINGS: dict[str, Any] = {
    "training": _training,
    "lives": _lives,
    "capture": _capture,
    "recovery": _recovery,
    "stages": _stages,
    "sizing": _sizing,
}


def flowcheck_modelled_s(spec: FlowcheckSpec, prediction: Prediction) -> float:
    """Start-up, and what a part takes as its settings have it, in units of its step."""
    step_s = prediction.step_s.get(spec.part, prediction.other_step_s)
    settings = spec.settings
    if isinstance(settings, RecoverySettings):
        iterations = settings.measured * len(settings.loss_rates) * sum(map(len, settings.watched))
        return prediction.startup_s + iterations * step_s * settings.gradient_bytes / 1e6
    if isinstance(settings, TrainingSettings):
        blocks = settings.rounds * (3 + len(settings.systems))
        return prediction.proof_s + blocks * (
            2 * prediction.startup_s + (settings.warmup + settings.steps) * step_s * (settings.ranks + 1) / 2
        )
    if isinstance(settings, StagesSettings):
        training = settings.training
        steps = (training.warmup + training.steps) * step_s * sum(settings.widths) / training.shape.width
        starts = 2 * prediction.startup_s * len(settings.widths)
        return prediction.proof_s + training.rounds * (starts + steps * (training.ranks + 1) / 2)
    if isinstance(settings, LivesSettings):
        ways = 1 + len(settings.training.systems)
        starts = 2 + ways * (1 + len(settings.failures_s))
        return prediction.proof_s + 2 * starts * prediction.startup_s + ways * settings.window_s
    if isinstance(settings, CaptureSettings):
        points = len(settings.frame_bytes) * len(settings.offered_bits_per_s)
        return prediction.startup_s + points * (settings.seconds + step_s)
    return prediction.startup_s + settings.updates * step_s + settings.traffic_bytes / 1e6 * 0.02
