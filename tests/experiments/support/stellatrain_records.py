"""Records of StellaTrain's figure, without a run."""

from __future__ import annotations

from typing import Any

from lastgood.experiments.records.stellatrain import (
    ALONE,
    KERNELS,
    WAYS,
    KernelsSettings,
    KernelTimes,
    LinkBlock,
    LinksSettings,
    StellatrainPart,
    StellatrainRecord,
    StellatrainSpec,
)
from tests.experiments.support.records import make_record

GRADIENT = 45_000_000
LINKS: dict[str, Any] = {
    "model": "resnet18",
    "classes": 10,
    "size_px": 32,
    "batch": 8,
    "threads": 1,
    "rates_bits_per_s": (100_000_000, 1_000_000_000),
    "ways": WAYS[1:],
    "compression": 0.99,
    "average_every": 4,
    "warmup": 4,
    "block_s": 3.0,
    "most_steps": 200,
    "rounds": 2,
}
KERNEL: dict[str, Any] = {"elements": 25_000_000, "compression": 0.99, "threads": 2, "rounds": 3}


def spec_of(part: StellatrainPart = "links", repetition: int = 0, **changes: Any) -> StellatrainSpec:
    settings: Any = (
        LinksSettings(**{**LINKS, **changes}) if part == "links" else KernelsSettings(**{**KERNEL, **changes})
    )
    given = {part: settings}
    return StellatrainSpec(machine="testbox", scale="laptop", repetition=repetition, seed=repetition, **given)


def record_of(
    part: StellatrainPart = "links", repetition: int = 0, *, alone: float = 5.0, **changes: Any
) -> StellatrainRecord:
    """Iterations take 0.2 s alone (`alone` of them in a second), and else as long as their bytes as well."""
    spec = spec_of(part, repetition, **changes)
    own: dict[str, Any] = {}
    if spec.links is not None:
        own["parameters"] = 11_181_642
        own["blocks"] = [
            _block(rate, way, number, alone) for number in (0, 1) for rate in LINKS["rates_bits_per_s"] for way in WAYS
        ]
    else:
        units = [30.0 if kernel == "torch-topk" else place + 1.0 for place, kernel in enumerate(KERNELS)]
        own["times"] = [
            KernelTimes(
                kernel=kernel,
                seconds=[0.1 * units[place], 0.11 * units[place], 0.3 * units[place]],
                energy_kept=0.36 if place > 6 else None,
                elements_kept=250_000 if place > 6 else None,
            )
            for place, kernel in enumerate(KERNELS)
        ]
    like = make_record()
    return StellatrainRecord(spec=spec, started_at=like.started_at, wall_s=60.0, where=like.where, **own)


def _block(rate: int, way: Any, number: int, alone: float) -> LinkBlock:
    sent = 0 if way == ALONE else GRADIENT // (WAYS.index(way) ** 2)
    step_s = 1 / alone if way == ALONE else 0.2 + 8 * sent / rate + 0.01 * number
    return LinkBlock(rate_bits_per_s=rate, way=way, round=number, steps=10, seconds=10 * step_s, sent_bytes=10 * sent)
