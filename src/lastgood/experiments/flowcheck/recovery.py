"""How many iterations survive a lossy mirror: simulated, and measured by the mirror node's own code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lastgood.experiments.flowcheck.lossy_ring import Iteration, LossyMirror, ring_iterations
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
        if settings.simulated:
            points += [_simulated(settings, watched, loss_rate, seed) for loss_rate in settings.loss_rates]
        if settings.measured:
            points += _measured(settings, watched, seed)
    return RecoveryResult(points=points)


def _measured(settings: RecoverySettings, watched: tuple[int, ...], seed: int) -> list[RecoveryPoint]:
    """The same generated iterations at every loss rate."""
    rates = [_Rate(settings, loss_rate, seed + number) for number, loss_rate in enumerate(settings.loss_rates)]
    iterations = ring_iterations(
        settings.ranks, watched, settings.gradient_bytes, settings.payload_bytes, settings.measured + 1, seed
    )
    for iteration in iterations:
        for rate in rates:
            rate.feed(iteration)
    return [point for rate in rates if (point := rate.point(watched)) is not None]


class _Rate:
    """One loss rate. A mirror begins with an iteration without loss, which does not count.

    Once its parser has lost count of a flow's messages, what follows would be lost for that alone: another one begins.
    """

    def __init__(self, settings: RecoverySettings, loss_rate: float, seed: int) -> None:
        self._settings, self._loss_rate, self._seed = settings, loss_rate, seed
        self._mirror: LossyMirror | None = None
        self._recovered: list[bool] = []
        self._differing = 0

    def feed(self, iteration: Iteration) -> None:
        first = self._mirror is None
        if self._mirror is None:
            self._seed += 1000
            settings = self._settings
            self._mirror = LossyMirror(
                settings.ranks, settings.gradient_bytes, settings.payload_bytes, self._loss_rate, self._seed
            )
        self._mirror.feed(iteration, lossless=first)
        if self._mirror.broken_flows:
            self._end()

    def _end(self) -> None:
        if self._mirror is not None:
            self._mirror.finish()
            self._recovered += self._mirror.recovered[1:]
            self._differing += self._mirror.differing
            self._mirror = None

    def point(self, watched: tuple[int, ...]) -> RecoveryPoint | None:
        """Of all that was fed; None if nothing of it counts."""
        self._end()
        if not self._recovered:
            return None
        return RecoveryPoint(
            source="measurement",
            watched=watched,
            loss_rate=self._loss_rate,
            iterations=len(self._recovered),
            recovered=sum(self._recovered),
            differing=self._differing,
        )


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
