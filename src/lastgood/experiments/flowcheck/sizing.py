"""Measures the rates from which the needs of a mirror node follow: one core's, of this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lastgood.experiments.optbench.bench import BenchOrder, run_bench
from lastgood.experiments.records.flowcheck import MeasuredRate, SizingResult, SizingSettings

__all__ = ["measure_sizing"]

Report = Callable[[str], None]


def measure_sizing(settings: SizingSettings, _seed: int, _scratch: Path, _logs: Path, report: Report) -> SizingResult:
    """Rates of updates and of parsing. Waits for this machine's turn to measure."""
    return SizingResult(rates=[_update_rate(settings, report)])


def _update_rate(settings: SizingSettings, report: Report) -> MeasuredRate:
    report(f"{settings.updates} updates of {settings.update_shape} by {settings.optimizer} on one core")
    order = BenchOrder(model=settings.update_shape, optimizer=settings.optimizer, threads=(1,), steps=settings.updates)
    result = run_bench(order, report)
    assert result is not None  # of the only rank
    (row,) = result.rows
    return MeasuredRate(
        name="update",
        per_core_s=row.parameters_per_s,
        how=f"{settings.optimizer} on {settings.update_shape}",
        seconds=row.update_s,
    )
