"""The columns of a figure's tidy CSV. docs/figures.md explains each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, dataclass, fields
from typing import Any

from pydantic import BaseModel

__all__ = ["LATER_COLUMNS", "OF_PAIRS", "TIDY_COLUMNS", "TidyRow", "same_named"]


@dataclass(frozen=True)
class TidyRow:
    """One run; the fields are the columns of the tidy CSV, in their order. None is an empty field."""

    figure: str
    panel: str
    machine: str
    scale: str
    workload: str
    system: str
    interval_steps: int
    repetition: int
    cell: str
    iterations_per_s: float
    durable_iterations_per_s: float
    none_iterations_per_s: float | None
    ratio_to_none: float | None
    bound_iterations_per_s: float | None
    bound_binds: str | None
    ratio_to_bound: float | None
    stall_save_s: float
    stall_update_s: float
    persist_p50_s: float | None
    persist_p99_s: float | None
    drain_s: float
    restore_s: float | None
    state_bytes: int
    checkpoints_started: int
    checkpoints_durable: int
    checkpoints_superseded: int
    checkpoints_failed: int
    checkpoints_skipped: int
    enough_checkpoints: bool | None
    proof_equal: bool | None
    peak_rss_bytes: int
    peak_device_bytes: int
    cpu_s: float
    bytes_written: int
    warmup_steps: int
    measured_steps: int
    threads: int
    device: str
    seed: int
    method: int
    system_options: str
    workload_options: str
    data_name: str
    parameters: int
    iteration_s: float | None
    hide_s: float | None
    copy_ceiling_bytes_per_s: float | None
    persist_ceiling_bytes_per_s: float
    ceilings_measured_at: str
    cpu: str
    cores: int
    memory_bytes: int
    gpu: str | None
    kernel: str
    scratch_filesystem: str
    scratch_device: str
    storage: str
    git_revision: str | None
    git_dirty: bool | None
    started_at: str
    record: str
    runs_expected: int
    runs_missing: str
    notes: str
    axis: str
    axis_value: int | float | None
    slowdown: float | None
    slowdown_bound: float | None
    persist_min_s: float | None
    persist_max_s: float | None
    persist_bound_s: float | None
    max_in_flight: int | None
    writer_threads: int | None
    pool_bytes: int | None
    drain_each: bool
    paper_slowdown: float | None
    paper_source: str | None
    # Columns that came later have what a file without them means.
    ranks: int = 1
    nodes: int = 1
    parallel: str = "none"
    link_bits_per_s: int | None = None
    stored_bytes: int | None = None
    shadows: int = 0
    shadow_cpu_s: float | None = None
    shadow_received_bytes: int | None = None
    shadow_optimizer_s: float | None = None
    shadow_peak_rss_bytes: int | None = None
    kills: int = 0
    lost_steps: str | None = None
    lives_unlike: int = 0
    losses_compared: int | None = None
    paper_ranges: str | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    rounds: int | None = None
    rounds_disturbed: int | None = None
    rounds_ended_by: str | None = None
    above_bound: str | None = None


TIDY_COLUMNS = tuple(field.name for field in fields(TidyRow))
LATER_COLUMNS = {field.name: field.default for field in fields(TidyRow) if field.default is not MISSING}
"""Columns that older files lack, and their values there."""
OF_PAIRS = TIDY_COLUMNS[TIDY_COLUMNS.index("ratio_low") :]
"""Columns that only a file with runs in pairs of blocks has."""


def same_named(source: BaseModel, columns: Collection[str]) -> dict[str, Any]:
    """The fields of `source` that are named as one of `columns`."""
    return {name: getattr(source, name) for name in type(source).model_fields if name in columns}
