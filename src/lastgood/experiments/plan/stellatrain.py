"""The runs of StellaTrain's figure: one for each part and repetition. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lastgood.cluster.testbed.state import parse_rate
from lastgood.experiments.config.schema import Config
from lastgood.experiments.machine.facts import machine_label
from lastgood.experiments.records.stellatrain import (
    KERNELS,
    STELLATRAIN_PARTS,
    KernelsSettings,
    LinksSettings,
    StellatrainSpec,
)

if TYPE_CHECKING:
    from lastgood.experiments.plan.grid import Prediction

__all__ = ["plan_stellatrain", "stellatrain_modelled_s"]

_NODES: Final = 2
_BED_S: Final = 5.0
"""To make a testbed and take it down."""
_GRADIENT_BYTES: Final = 45e6
"""Of ResNet-18, which DDP sends, and each way that compresses sends while it warms up."""


def plan_stellatrain(config: Config) -> list[StellatrainSpec]:
    """One run a part; repetitions are the outer loop."""
    section = config.stellatrain
    settings: dict[str, Any] = {"links": _links(config), "kernels": _kernels(config)}
    return [
        StellatrainSpec(
            machine=config.machine or machine_label(),
            scale=config.scale,
            seed=config.seed + repetition,
            repetition=repetition,
            **{part: settings[part]},
        )
        for repetition in range(section.repetitions)
        for part in STELLATRAIN_PARTS
        if part in section.parts
    ]


def _links(config: Config) -> LinksSettings:
    bench = config.stellatrain.links
    given = bench.model_dump(exclude={"rates", "threads", "ways"})
    return LinksSettings(
        **given,
        threads=bench.threads or max(1, config.thread_count // _NODES),
        rates_bits_per_s=tuple(parse_rate(rate) for rate in bench.rates),
        ways=tuple(bench.ways),
    )


def _kernels(config: Config) -> KernelsSettings:
    bench = config.stellatrain.kernels
    return KernelsSettings(
        elements=bench.elements,
        compression=bench.compression,
        threads=bench.threads or config.thread_count,
        rounds=bench.rounds,
    )


def stellatrain_modelled_s(spec: StellatrainSpec, prediction: Prediction) -> float:
    """Start-up, and what a part takes by its settings, in units of its step."""
    step_s = prediction.step_s.get(spec.part, prediction.other_step_s)
    if spec.kernels is not None:
        kernels = spec.kernels
        return prediction.startup_s + (kernels.rounds + 2) * len(KERNELS) * step_s * kernels.elements / 25e6
    links = spec.links
    assert links is not None
    blocks = links.rounds * (1 + len(links.ways))
    seconds = 0.0
    for rate in links.rates_bits_per_s:
        sent_s = 8 * _GRADIENT_BYTES / rate
        # Four ways send as much as DDP while they warm up, or half of it at each iteration.
        seconds += _BED_S + prediction.startup_s + blocks * (links.block_s + links.warmup * step_s)
        seconds += links.rounds * sent_s * (3 * links.warmup + 4)
    return seconds
