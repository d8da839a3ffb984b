"""What a figure of runs varies, and how its wide CSV is laid out. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from lastgood.errors import LastgoodError
from lastgood.experiments.config.values import BASELINE
from lastgood.experiments.records.spec import RunSpec
from lastgood.workloads.registry import workload_options_class

__all__ = ["CONCURRENCY", "MEMORY", "PERSIST", "THREADS", "THROUGHPUT", "FigureAxes", "Side"]

Side = Literal["system", "interval", "axis"]


@dataclass(frozen=True)
class FigureAxes:
    """Which numbers of a run tell it from the other runs of its panel."""

    axis: str
    """The column `axis`: the name of what varies beside the system and the repetition."""
    value_of: Callable[[RunSpec], int | float | None]
    """The column `axis_value`, from a run; None for `none`."""
    rows: Side
    """A row of the wide CSV, and a series of the picture."""
    columns: Side
    """A column of the wide CSV, and a place on the picture's x axis."""
    value: Literal["iterations_per_s", "slowdown", "persist_ms"]
    """The number in the wide CSV, and the picture's y axis."""
    baseline: bool = True
    """Whether it needs runs of `none`."""


def _option(name: str) -> Callable[[RunSpec], int | float | None]:
    def value_of(spec: RunSpec) -> int | float | None:
        if spec.system == BASELINE:
            return None
        value = spec.system_options.get(name)
        if not isinstance(value, int | float):
            raise LastgoodError(f"{spec.record_path()}: a run without {name}, which this figure varies; leave it out")
        return value

    return value_of


def _megabytes(spec: RunSpec) -> int:
    value = spec.workload_options.get("megabytes")
    if not isinstance(value, int) or not spec.drain_each:
        raise LastgoodError(
            f"{spec.record_path()}: not one checkpoint at a time of a blob of a given size; leave it out"
        )
    return value


def _pool_share(spec: RunSpec) -> float | None:
    """The pool in sizes of the state as its formula gives it, from which the plan made the pool."""
    if spec.system == BASELINE:
        return None
    if "pool_bytes" not in spec.system_options:
        raise LastgoodError(f"{spec.record_path()}: a run without pool_bytes, which this figure varies; leave it out")
    pool = spec.system_options["pool_bytes"]
    if not isinstance(pool, int | float):
        return 1.0
    try:
        options = workload_options_class(spec.workload).model_validate(spec.workload_options)
    except ValidationError as error:
        raise LastgoodError(f"{spec.record_path()}: options that {spec.workload} does not take: {error}") from error
    return round(float(pool) / options.state_bytes(), 3)


THROUGHPUT = FigureAxes("interval_steps", lambda spec: spec.interval_steps, "system", "interval", "iterations_per_s")
"""Figure 8."""
PERSIST = FigureAxes("megabytes", _megabytes, "system", "axis", "persist_ms", baseline=False)
"""Figure 11."""
CONCURRENCY = FigureAxes("max_in_flight", _option("max_in_flight"), "axis", "interval", "slowdown")
"""Figure 12."""
THREADS = FigureAxes("writer_threads", _option("writer_threads"), "interval", "axis", "slowdown")
"""Figure 13."""
MEMORY = FigureAxes("pool_share", _pool_share, "interval", "axis", "slowdown")
"""Figure 14."""
