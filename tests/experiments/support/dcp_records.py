"""Made-up records of DCP saves and loads."""

from __future__ import annotations

from typing import Any

from lastgood.experiments.dcp.storages import storage_named
from lastgood.experiments.records.dcp import DcpIteration, DcpRecord, DcpSpec, RankTimes
from lastgood.units import MIB
from tests.experiments.support.records import make_record


def spec_of(storage: str = "disk", ranks: int = 2, repetition: int = 0, **changes: Any) -> DcpSpec:
    medium = changes.get("medium", "disk")
    values = {
        "machine": "testbox",
        "scale": "laptop",
        "operation": "save-and-load",
        "model": "L7b-64MB",
        "storage": storage,
        "storage_options": storage_named(storage, medium).resolved({}, medium),
        "ranks": ranks,
        "iterations": 3,
        "repetition": repetition,
        **changes,
    }
    return DcpSpec.model_validate(values)


def iteration_of(operation: Any, ranks: int, seconds: float, *, warmup: bool = False, **changes: Any) -> DcpIteration:
    """Rank r has 10 MiB and takes ``seconds + r / 10``, of which a fifth each is plan, gathering and end."""
    times = []
    for rank in range(ranks):
        total = seconds + rank / 10
        steps = {"plan_s": total / 5, "gather_s": total / 5, "transfer_s": 2 * total / 5, "finish_s": total / 5}
        times.append(RankTimes(nbytes=10 * MIB, total_s=total, stall_s=total / 2, **steps))
    return DcpIteration(operation=operation, warmup=warmup, ranks=times, digest="0" * 16, **changes)


def record_of(spec: DcpSpec, seconds: float = 1.0, *, equal: bool = True, **changes: Any) -> DcpRecord:
    """Saves take `seconds` less a rank's tenths, twice and half of it; loads half as long."""
    iterations = []
    for number, factor in enumerate((9.0, 1.0, 2.0, 0.5)):
        warmup = number == 0
        iterations.append(iteration_of("save", spec.ranks, factor * seconds, warmup=warmup))
        iterations.append(iteration_of("load", spec.ranks, factor * seconds / 2, warmup=warmup, equal=equal))
    values = {
        "spec": spec,
        "started_at": "2026-01-01T00:00:00+00:00",
        "wall_s": 30.0,
        "where": make_record().where,
        "place": "/somewhere",
        "suffix": "a",
        "hosts": ["box"] * spec.ranks,
        "state_bytes": 10 * MIB * spec.ranks,
        "setup_s": 5.0,
        "durable": storage_named(spec.storage, spec.medium).durable(spec.storage_options),
        "raw_write_bytes_per_s": [40.0 * MIB, 60.0 * MIB, 50.0 * MIB],
        "iterations": iterations,
        **changes,
    }
    return DcpRecord.model_validate(values)
