"""How many iterations survive a lossy mirror: simulated, and measured by the mirror node's own code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lastgood.experiments.records.flowcheck import RecoveryPoint, RecoveryResult, RecoverySettings
from lastgood.mirror.odds import Loss, RingJob, simulate

__all__ = ["measure_recovery"]

Report = Callable[[str], None]


def measure_recovery(
    settings: RecoverySettings, seed: int, _scratch: Path, _logs: Path, report: Report
) -> RecoveryResult:
    """All points. Nothing is timed, so it needs no turn of the machine. Seeded: the same again for the same spec."""
    points = []
    for watched in settings.watched:
        report(f"watched {', '.join(map(str, watched))} of {settings.ranks} ranks")
        for loss_rate in settings.loss_rates:
            if settings.simulated:
                points.append(_simulated(settings, watched, loss_rate, seed))
    return RecoveryResult(points=points, left_out=["measured: no extractor is here"] if settings.measured else [])


def _simulated(settings: RecoverySettings, watched: tuple[int, ...], loss_rate: float, seed: int) -> RecoveryPoint:
    job = RingJob(settings.ranks, settings.gradient_bytes, settings.payload_bytes)
    lost = simulate(job, watched, Loss(loss_rate), settings.simulated, seed)
    return RecoveryPoint(
        source="simulation",
        watched=watched,
        loss_rate=loss_rate,
        iterations=settings.simulated,
        recovered=settings.simulated - round(lost * settings.simulated),
    )
