"""Made-up records of FlowCheck's figure."""

from __future__ import annotations

from typing import Any

from lastgood.experiments.records.flowcheck import (
    ALONE,
    MIRRORED,
    WATCHED,
    CapturePoint,
    CaptureResult,
    CaptureSettings,
    FlowcheckRecord,
    FlowcheckSpec,
    GptShape,
    LivesResult,
    LivesSettings,
    MeasuredRate,
    NodeLook,
    RecoveryPoint,
    RecoveryResult,
    RecoverySettings,
    SizingResult,
    SizingSettings,
    StageBlock,
    StagesResult,
    StagesSettings,
    TrainingBlock,
    TrainingResult,
    TrainingSettings,
    WatchedLife,
    Window,
)
from lastgood.experiments.records.mirror_node import LARGE_MODELS, MirrorNode
from tests.experiments.support.records import make_record

NODE = MirrorNode(watched=8, gpu_link_bits_per_s=200e9, gradient_bytes=4, header_bytes=58, payload_bytes=4096)
SETTINGS: dict[str, Any] = {
    "training": TrainingSettings(
        shape=GptShape(), ranks=3, rate="1gbit", threads=1, systems=("sync", "checkfreq"), warmup=2, steps=4, rounds=2
    ),
    "capture": CaptureSettings(
        frame_bytes=(1500, 65_535), offered_bits_per_s=(1e9, 8e9), seconds=2.0, ring_bytes=64 << 20
    ),
    "recovery": RecoverySettings(
        ranks=8,
        gradient_bytes=1 << 20,
        payload_bytes=1024,
        watched=((0,), (0, 1), (0, 4)),
        loss_rates=(1e-4, 1e-3, 1e-2),
        simulated=100,
        measured=10,
    ),
    "sizing": SizingSettings(
        models=tuple(LARGE_MODELS.values()),
        node=NODE,
        optimizer="adamw",
        update_shape="resnet50",
        updates=5,
        traffic_bytes=1 << 20,
        payload_bytes=4096,
    ),
}


SETTINGS["lives"] = LivesSettings(
    training=SETTINGS["training"],
    window_s=20.0,
    failures_s=(5.0, 12.0),
    trace_name="a trace",
    trace_sha256="0" * 64,
    trace_s=1e6,
    trace_failures=100,
)


SETTINGS["stages"] = StagesSettings(training=SETTINGS["training"].model_copy(update={"systems": ()}), widths=(128, 512))


def look(steps: int, updates: int, **stage_s: float) -> NodeLook:
    return NodeLook(
        steps=steps, updates=updates, stage_s={name.replace("_", " "): one for name, one in stage_s.items()}
    )


def spec_of(part: str, repetition: int = 0, settings: Any = None, **changes: Any) -> FlowcheckSpec:
    return FlowcheckSpec(
        machine="testbox",
        scale="laptop",
        settings=SETTINGS[part] if settings is None else settings,
        repetition=repetition,
        seed=repetition,
        **changes,
    )


def result_of(part: str, *, differing: int = 0) -> Any:
    """Half of the faster frames are lost; 9 of 10 iterations come through; a core updates 1e8 parameters a second."""
    if part == "lives":
        lives = [
            WatchedLife(last_step=40, restore_s=0.0),
            WatchedLife(restored_step=38, restore_s=1.0, last_step=90),
            WatchedLife(restored_step=90, restore_s=1.0, last_step=150),
        ]
        alone = TrainingBlock(variant=ALONE, round=0, iteration_s=[0.1])
        windows = [Window(variant=name, lives=lives, differing=differing) for name in (WATCHED, "sync")]
        return LivesResult(alone=[alone], windows=windows)
    if part == "training":
        times = {ALONE: 0.1, MIRRORED: 0.101, WATCHED: 0.11, "sync": 0.3, "checkfreq": 0.2}
        blocks = [
            TrainingBlock(
                variant=variant,
                round=number,
                iteration_s=[seconds, seconds * 1.1, seconds, seconds * 0.9],
                held_step=(6 if not differing else 5) if variant == WATCHED else None,
            )
            for number in range(2)
            for variant, seconds in times.items()
        ]
        return TrainingResult(blocks=blocks, left_out=[])
    if part == "stages":
        return StagesResult(
            blocks=[
                StageBlock(
                    width=width,
                    parameters=10_000 * width,
                    round=0,
                    iteration_s=[0.1, 0.2, 0.1],
                    first=look(2, 1, parse=0.5, extract=0.1, take_over=0.1, update=0.1),
                    last=look(6, 6, parse=0.54, extract=0.18, take_over=0.12, update=0.2),
                    held_step=5 if differing else 6,
                )
                for width in SETTINGS["stages"].widths
            ]
        )
    if part == "capture":
        points = [
            CapturePoint(
                device="af_packet",
                frame_bytes=size,
                asked_bits_per_s=rate,
                sent_frames=1000,
                sent_s=1000 * size * 8 / rate,
                captured_frames=1000 if rate < 2e9 else 500,
                kernel_dropped=0 if rate < 2e9 else 400,
                capture_cpu_s=1.0,
            )
            for size in SETTINGS["capture"].frame_bytes
            for rate in SETTINGS["capture"].offered_bits_per_s
        ]
        return CaptureResult(points=points, left_out=["DPDK: not here"])
    if part == "recovery":
        settings = SETTINGS["recovery"]
        recovery = [
            RecoveryPoint(
                source=source,
                watched=watched,
                loss_rate=rate,
                iterations=count,
                recovered=count * 9 // 10,
                differing=differing if source == "measurement" else 0,
            )
            for watched in settings.watched
            for rate in settings.loss_rates
            for source, count in (("simulation", 100), ("measurement", 10))
        ]
        return RecoveryResult(points=recovery)
    rates = [
        MeasuredRate(name="update", per_core_s=1e8, how="adamw on resnet50", seconds=[0.25]),
        MeasuredRate(name="parse", per_core_s=1e9, how="RoCEv2, 4096 B", seconds=[0.5]),
    ]
    return SizingResult(rates=rates)


def record_of(part: str, repetition: int = 0, *, differing: int = 0, settings: Any = None) -> FlowcheckRecord:
    return FlowcheckRecord(
        spec=spec_of(part, repetition, settings),
        started_at="2026-01-01T00:00:00+00:00",
        wall_s=30.0,
        where=make_record().where,
        result=result_of(part, differing=differing),
    )
