"""Variants: a model and a system with every option resolved, as each figure asks for them. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lastgood.checkpointers.options import BaseOptions
from lastgood.checkpointers.registry import why_unavailable
from lastgood.experiments.config.schema import Config
from lastgood.experiments.config.sections import NodesSection
from lastgood.experiments.config.values import BASELINE
from lastgood.experiments.systems.over_ranks import why_no_deepspeed
from lastgood.experiments.systems.papers import PCCHECK
from lastgood.workloads.base import WorkloadOptions
from lastgood.workloads.options import BlobOptions

__all__ = [
    "BLOB",
    "Variant",
    "all_variants",
    "available",
    "checkmate_variants",
    "concurrency_variants",
    "goodput_variants",
    "memory_variants",
    "nodes_variants",
    "persist_variants",
    "pool_bytes",
    "threads_variants",
    "throughput_variants",
    "variant",
]

BLOB = "blob"
"""The workload of figure 11."""


@dataclass(frozen=True)
class Variant:
    """What is measured, at one interval or several."""

    key: tuple[str, ...]
    """The configuration's key to change if this machine cannot run it."""
    model: str
    workload: WorkloadOptions
    system: str
    options: BaseOptions


def variant(config: Config, model: str, system: str) -> Variant:
    """`model` under `system`, both as configured."""
    options = config.system_options(system)
    return Variant(("workloads", model), model, config.workload_options(model), system, options)


def throughput_variants(config: Config, model: str) -> list[Variant]:
    """One panel of figure 8: every system as configured, but for those that this machine lacks."""
    return [variant(config, model, system) for system in available(config.systems)]


def available(systems: Sequence[str]) -> list[str]:
    """Those of `systems` that can be used here; `plan.left_out` says why the others cannot."""
    lacking = why_unavailable(systems)
    return [system for system in systems if system not in lacking]


def goodput_variants(config: Config, model: str) -> list[Variant]:
    """One panel of figure 9: those of figure 8, and what is measured under failures beside them."""
    systems = dict.fromkeys([*config.systems, *(config.fig9.systems or [])])
    return [variant(config, model, system) for system in systems]


def persist_variants(config: Config) -> list[Variant]:
    """Figure 11: every system at every size. Options of the configuration's `workloads.blob` play no part."""
    section = config.fig11
    systems = available(section.systems or [system for system in config.systems if system != BASELINE])
    found = []
    for megabytes in section.sizes_mb:
        for system in systems:
            changes = {"writer_threads": section.writer_threads} if system == PCCHECK else {}
            options = _with(config.system_options(system), changes)
            found.append(Variant(("fig11", "sizes_mb"), BLOB, BlobOptions(megabytes=megabytes), system, options))
    return found


def concurrency_variants(config: Config) -> list[Variant]:
    """Figure 12: PCcheck with 1, 2, ... checkpoints in flight."""
    section = config.fig12
    changes = [{"max_in_flight": count, "writer_threads": section.writer_threads} for count in section.in_flight]
    return _swept(config, section.model, ("fig12", "in_flight"), changes)


def threads_variants(config: Config) -> list[Variant]:
    """Figure 13: PCcheck with 1, 2, ... writer threads for each checkpoint."""
    section = config.fig13
    changes = [{"writer_threads": count} for count in section.writer_threads]
    return _swept(config, section.model, ("fig13", "writer_threads"), changes)


def memory_variants(config: Config) -> list[Variant]:
    """Figure 14: PCcheck with more or less host memory for copies."""
    section = config.fig14
    changes = [{"pool_bytes": pool_bytes(config, share)} for share in section.pool_shares]
    return _swept(config, section.model, ("fig14", "pool_shares"), changes)


def nodes_variants(config: Config, section: NodesSection, figure: str) -> list[Variant]:
    """Figures 8e and 8f: every system, on the model with the section's own options.

    What ranks hold alike PCcheck writes once if all of them can read it back. None if DeepSpeed is needed and
    missing: `plan.left_out` has them.
    """
    if why_no_deepspeed(section.parallel):
        return []
    declared = {"ddp": "ddp", "fsdp2": "placements"}.get(section.parallel)
    once = {"replicated": declared} if section.shared_scratch and declared else {}
    return _on_ranks(config, (figure, "options"), section.model, section.options, section.systems, once)


def checkmate_variants(config: Config, model: str) -> list[Variant]:
    """One panel of Checkmate's figure: every system, as in figure 8e."""
    section = config.checkmate
    once = {"replicated": "ddp"} if section.shared_scratch else {}
    key = ("checkmate", "options", model)
    return _on_ranks(config, key, model, section.options.get(model, {}), section.systems, once)


def _on_ranks(
    config: Config,
    key: tuple[str, ...],
    model: str,
    changes: dict[str, Any],
    systems: Sequence[str],
    swept: dict[str, Any],
) -> list[Variant]:
    """`systems` on `model` with changed options; `swept` are changes of systems that have such options."""
    workload = config.workload_options(model)
    options = type(workload).model_validate({**workload.model_dump(), **changes})
    return [
        Variant(key, model, options, system, _with_known(config.system_options(system), swept))
        for system in available(systems)
    ]


def pool_bytes(config: Config, share: float) -> int | None:
    """The pool of figure 14 for a share of the state; at 1 the default pool, so that its runs are figure 8's."""
    return None if share == 1 else int(share * config.workload_options(config.fig14.model).state_bytes())


def all_variants(config: Config) -> Iterator[Variant]:
    """Whatever the figures and the smoke test measure."""
    for model in config.models:
        yield from goodput_variants(config, model)
    yield variant(config, config.simple.model, config.simple.system)
    yield from persist_variants(config)
    yield from concurrency_variants(config)
    yield from threads_variants(config)
    yield from memory_variants(config)


def _swept(config: Config, model: str, key: tuple[str, ...], changes: list[dict[str, Any]]) -> list[Variant]:
    workload, options = config.workload_options(model), config.system_options(PCCHECK)
    return [Variant(key, model, workload, PCCHECK, _with(options, one)) for one in changes]


def _with_known(options: BaseOptions, changes: dict[str, Any]) -> BaseOptions:
    known = type(options).model_fields
    return _with(options, {name: value for name, value in changes.items() if name in known})


def _with(options: BaseOptions, changes: dict[str, Any]) -> BaseOptions:
    return type(options).model_validate({**options.model_dump(), **changes})
