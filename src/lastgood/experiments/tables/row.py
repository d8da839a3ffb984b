"""One run's row of a tidy CSV, by what provides its columns: spec, clocks, baseline and bound, shadows, failures, ...

docs/figures.md explains each column; tables/columns.py has their order.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lastgood.checkpointers.registry import system_traits
from lastgood.experiments.ceilings.record import CeilingsRecord
from lastgood.experiments.figures.axes import FigureAxes
from lastgood.experiments.formulas.bound import throughput_bound, why_above
from lastgood.experiments.formulas.pairs import estimate_pairs
from lastgood.experiments.records.blocks import Pairs
from lastgood.experiments.records.run import Counts, RunRecord, ShadowFacts
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.tables.columns import TIDY_COLUMNS, TidyRow, same_named
from lastgood.experiments.tables.published import Published
from lastgood.sinks import Sink

__all__ = ["Baseline", "Panel", "compact_json", "tidy_row"]


@dataclass(frozen=True)
class Baseline:
    """What trainings of a workload without checkpoints say: `none` runs, or blocks without checkpoints of all runs."""

    iterations_per_s: dict[int, float]
    """By repetition."""
    disk_bytes_per_s: float = field(default=0.0, kw_only=True)
    """The fastest that the disk was seen in pairs of blocks, by probes or by a system."""
    iteration_s: float
    hide_s: float


@dataclass(frozen=True)
class Panel:
    """What all rows of a panel share."""

    figure: str
    panel: str
    axes: FigureAxes
    ceilings: CeilingsRecord
    runs_expected: int
    runs_missing: str


def tidy_row(
    panel: Panel,
    record: RunRecord,
    baseline: Baseline | None,
    *,
    proof_equal: bool | None,
    notes: str,
    published: Published | None,
) -> TidyRow:
    """The row of `record`. Pure.

    `baseline` are the `none` runs to compare it with, `proof_equal` is what the proofs of its cell say, if it has none
    of its own.
    """
    spec = record.spec
    parts = (spec, record.workload, record.resources, record.clocks, record.where)
    values: dict[str, Any] = {name: value for part in parts for name, value in same_named(part, TIDY_COLUMNS).items()}
    values |= {
        "figure": panel.figure,
        "panel": panel.panel,
        "cell": spec.variant,
        "record": str(spec.record_path()),
        "system_options": compact_json(spec.system_options),
        "workload_options": compact_json(spec.workload_options),
        "storage": compact_json(record.storage),
        "runs_expected": panel.runs_expected,
        "runs_missing": panel.runs_missing,
        "axis": panel.axes.axis,
        "axis_value": panel.axes.value_of(spec),
        "ceilings_measured_at": panel.ceilings.measured_at,
        "started_at": record.started_at,
        "notes": notes,
        "restore_s": record.proof.restore_s if record.proof else None,
        "proof_equal": record.proof.equal if record.proof else proof_equal,
        "paper_slowdown": published.slowdown if published else None,
        "paper_source": published.source if published else None,
        "link_bits_per_s": record.ranks.link_bits_per_s if record.ranks else None,
    }
    values |= _of_options(spec, record.workload.state_bytes) | _of_persists(record.clocks.persist_s)
    values |= _of_counts(record.counts, spec.interval_steps) | _of_baseline(record, baseline)
    values |= _of_bound(record, panel.ceilings, baseline) | _of_shadows(record.shadows) | _of_failures(record)
    if record.pairs is not None and baseline is not None:
        values |= _of_pairs(record, record.pairs, baseline, panel.ceilings)
    return TidyRow(**values)


def _of_options(spec: RunSpec, state_bytes: int) -> dict[str, Any]:
    """The system's options that a figure sweeps."""
    return {
        "max_in_flight": _integer(spec, "max_in_flight"),
        "writer_threads": _integer(spec, "writer_threads"),
        "pool_bytes": _integer(spec, "pool_bytes", default=state_bytes),
    }


def _integer(spec: RunSpec, name: str, default: int | None = None) -> int | None:
    """An option of the system, `default` if it has it and it is null; None if it has no such option."""
    value = spec.system_options.get(name)
    if value is None and name in spec.system_options:
        return default
    return value if isinstance(value, int) else None


def _of_persists(persist_s: Sequence[float]) -> dict[str, Any]:
    return {
        "persist_p50_s": statistics.median(persist_s) if persist_s else None,
        "persist_p99_s": _nearest_rank(persist_s, 0.99) if persist_s else None,
        "persist_min_s": min(persist_s, default=None),
        "persist_max_s": max(persist_s, default=None),
    }


def _nearest_rank(values: Sequence[float], share: float) -> float:
    """The smallest measured value that at least `share` of all values do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def _of_counts(counts: Counts, interval_steps: int) -> dict[str, Any]:
    return {
        **{f"checkpoints_{name}": count for name, count in counts},
        # A superseded checkpoint was written in full, so it cost what a durable one costs.
        "enough_checkpoints": counts.durable + counts.superseded >= 2 if interval_steps else None,
    }


def _of_baseline(record: RunRecord, baseline: Baseline | None) -> dict[str, Any]:
    """Ratios to training without checkpoints. A slowdown is in time, and takes the median of repetitions if it must."""
    own = baseline.iterations_per_s.get(record.spec.repetition) if baseline else None
    rate = own or (1 / baseline.iteration_s if baseline else None)
    return {
        "none_iterations_per_s": own,
        "ratio_to_none": record.clocks.iterations_per_s / own if own else None,
        "slowdown": rate / record.clocks.durable_iterations_per_s if rate else None,
        "iteration_s": baseline.iteration_s if baseline else None,
        "hide_s": baseline.hide_s if baseline else None,
    }


def _of_bound(record: RunRecord, ceilings: CeilingsRecord, baseline: Baseline | None) -> dict[str, Any]:
    """What the ceilings allow at best."""
    disk = max(ceilings.persist_bytes_per_s, baseline.disk_bytes_per_s if baseline else 0.0)
    spec, stored = record.spec, _stored(record, disk)
    copy_ceiling = ceilings.copy_bytes_per_s(spec.device) if baseline else None
    found: dict[str, Any] = {
        "copy_ceiling_bytes_per_s": copy_ceiling,
        "persist_ceiling_bytes_per_s": disk,
        "persist_bound_s": stored.nbytes / stored.bytes_per_s if stored and spec.interval_steps else None,
        "stored_bytes": stored.nbytes if stored and spec.interval_steps else None,
        "bound_iterations_per_s": None,
        "bound_binds": None,
        "ratio_to_bound": None,
        "slowdown_bound": None,
    }
    if baseline is None or copy_ceiling is None or stored is None:
        return found
    bound = throughput_bound(
        iteration_s=baseline.iteration_s,
        interval_steps=spec.interval_steps,
        state_bytes=0 if system_traits(spec.system).takes_gradients else record.workload.state_bytes,
        copy_bytes_per_s=copy_ceiling,
        persist_bytes_per_s=stored.bytes_per_s,
        hide_s=baseline.hide_s,
        stored_bytes=stored.nbytes,
        sink=stored.sink,
    )
    return found | {
        "bound_iterations_per_s": bound.iterations_per_s,
        "bound_binds": str(bound.binds),
        "ratio_to_bound": record.clocks.durable_iterations_per_s / bound.iterations_per_s,
        "slowdown_bound": 1 / baseline.iteration_s / bound.iterations_per_s,
    }


@dataclass(frozen=True)
class _Stored:
    """What one checkpoint puts on the sink that has most to do with it, and how fast that is at best."""

    nbytes: int
    bytes_per_s: float
    sink: Sink


def _stored(record: RunRecord, disk_bytes_per_s: float) -> _Stored | None:
    """None if a checkpoint goes over a link whose rate nobody knows.

    Hosts are taken to have disks like the one that was measured, and share it if they share a kernel.
    """
    ranks = record.ranks
    sink, nbytes = (Sink.DISK, record.workload.state_bytes) if ranks is None else ranks.most_on
    if sink is Sink.DISK:
        written = 0 if system_traits(record.spec.system).takes_gradients else nbytes
        return _Stored(written, disk_bytes_per_s, sink)
    if ranks is None or ranks.link_bits_per_s is None:
        return None
    return _Stored(nbytes, ranks.link_bits_per_s / 8, sink)


def _of_pairs(record: RunRecord, pairs: Pairs, panel: Baseline, ceilings: CeilingsRecord) -> dict[str, Any]:
    """Columns of a run in pairs: a ratio within the run is primary, and rates are it times that of the panel's `none`.

    The drain is part of every block, so nothing is lost to it.
    """
    # A system that takes gradients has no blocks without checkpoints: it is compared with those of the panel.
    estimate = estimate_pairs(record.blocks, none_step_s=panel.iteration_s)
    if estimate is None:  # a run without checkpoints: all blocks of the panel are its repetitions, and it is its bound
        rate = 1 / panel.iteration_s
        bound = _of_bound(record, ceilings, panel)["bound_iterations_per_s"]
        return {
            "iterations_per_s": rate,
            "durable_iterations_per_s": rate,
            "ratio_to_none": 1.0,
            "slowdown": 1.0,
            "ratio_to_bound": None if bound is None else rate / bound,
        }
    own_s = 1 / estimate.none_iterations_per_s
    own = replace(panel, iteration_s=own_s, hide_s=record.clocks.hide_s)
    scale = own_s / panel.iteration_s
    bound = _of_bound(record, ceilings, own)
    allowed = bound["bound_iterations_per_s"]
    rate = estimate.ratio / panel.iteration_s
    found = {
        "iterations_per_s": rate,
        "durable_iterations_per_s": rate,
        "none_iterations_per_s": 1 / panel.iteration_s,
        "ratio_to_none": estimate.ratio,
        "ratio_low": estimate.low,
        "ratio_high": estimate.high,
        "rounds": estimate.rounds,
        "rounds_disturbed": estimate.disturbed_rounds,
        "rounds_ended_by": pairs.ended_by,
        "slowdown": 1 / estimate.ratio,
        **bound,
    }
    if allowed is not None:
        found |= {
            "bound_iterations_per_s": allowed * scale,
            "ratio_to_bound": estimate.ratio / (allowed * own_s),
            "above_bound": why_above(estimate.ratio, estimate.low, allowed * own_s, record.counts.skipped),
        }
    return found


def _of_shadows(shadows: Sequence[ShadowFacts]) -> dict[str, Any]:
    """Columns of a run under Checkmate: sums over its shadows."""
    if not shadows:
        return {}
    names = ("cpu_s", "received_bytes", "optimizer_s", "peak_rss_bytes")
    return {f"shadow_{name}": sum(getattr(one, name) for one in shadows) for name in names}


def _of_failures(record: RunRecord) -> dict[str, Any]:
    """Columns of a run whose ranks were killed."""
    failures = record.failures
    return {
        "lost_steps": ";".join(str(failure.lost_steps) for failure in failures) or None,
        "lives_unlike": sum(not failure.losses_equal for failure in failures),
        "losses_compared": sum(failure.losses_checked for failure in failures) if failures else None,
    }


def compact_json(value: object) -> str:
    """`value` in one field of a CSV, the same text for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
