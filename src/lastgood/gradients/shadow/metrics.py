"""A shadow's numbers as Prometheus reads them, over HTTP on a port of their own."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lastgood.gradients.layout.entries import Saved
from lastgood.gradients.shadow.core import ShadowCore
from lastgood.gradients.shadow.metric_names import CPU_S, OPTIMIZER_S, PEAK_RSS_BYTES, PREFIX, RECEIVED_BYTES
from lastgood.wire.scrape import ScrapeServer

__all__ = ["MetricsServer"]

_log = logging.getLogger("lastgood.shadow")


@dataclass
class _Numbers(Collector):
    """What a shadow tells at the moment of asking."""

    core: ShadowCore

    def collect(self) -> Iterator[Metric]:
        body = self.core.body
        with body.change:
            status, counters = self.core.status(), body.counters
            received = body.receiver.counters() if body.receiver else {}
            declared_bytes = body.memory.need.total if body.memory else 0
        used = resource.getrusage(resource.RUSAGE_SELF)
        rows: list[tuple[str, str, float]] = [
            (CPU_S, "Processor time, user and system.", used.ru_utime + used.ru_stime),
            (PEAK_RSS_BYTES, "Most resident memory so far.", used.ru_maxrss * 1024),
            ("declared_memory_bytes", "Memory for the declared layout.", declared_bytes),
            (RECEIVED_BYTES, "Bytes of gradients held, since this layout.", received.get("bytes", 0)),
            ("received_records_total", "Gradient records held.", received.get("records", 0)),
            ("checksum_seconds_total", "Time for checksums of records.", received.get("checksum_s", 0.0)),
            ("connections", "Data connections that are open.", received.get("connections", 0)),
            ("parked_connections", "Of these, not read: a window is full.", received.get("parked", 0)),
            ("applied_iterations_total", "Iterations applied to all buckets.", counters.applied_iterations),
            ("applied_buckets_total", "Updates of single buckets.", counters.applied_buckets),
            (OPTIMIZER_S, "Time in the optimizer.", counters.optimizer_s),
            ("epoch", "The incarnation that trainers must be of.", status.epoch),
            ("applied_iteration", "All buckets have applied this iteration.", status.applied),
            ("have_iteration", "The newest iteration that it can be brought to.", status.have),
            ("newest_saved_step", "The training's step of the newest iteration in memory.", _newest(status.memory)),
            ("durable_step", "The same of the newest spill.", _newest(status.durable)),
            ("whole", "1 if no bucket waits for a seed.", int(status.whole)),
            ("seeds_total", "Buckets that were seeded.", counters.seeds),
            ("seed_bytes_total", "Bytes of these seeds.", counters.seed_bytes),
            ("side_bytes_total", "Bytes of side records kept.", counters.side_bytes),
            ("checks_total", "Buckets compared with the trainers'.", counters.checks),
            ("diverged_total", "Of these, found to differ.", counters.diverged),
            ("spills_total", "Iterations made durable.", counters.spills),
            ("spill_errors_total", "Iterations that could not be made durable.", counters.spill_errors),
            ("fences_total", "Epochs begun.", counters.fences),
        ]
        shadow = str(status.shadow)
        for name, text, value in rows:
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = family(PREFIX + name, text, labels=["shadow"])
            metric.add_metric([shadow], value)
            yield metric
        refused = CounterMetricFamily(
            f"{PREFIX}refused_total", "Records, messages and connections refused.", labels=["shadow", "cause"]
        )
        for cause, count in sorted(status.refused.items()):
            refused.add_metric([shadow, cause], count)
        yield refused


def _newest(held: tuple[Saved, ...]) -> int:
    return max((saved.step for saved in held), default=-1)


class MetricsServer(ScrapeServer):
    """Answers GET /metrics with a shadow's numbers. Raises HostError if the port cannot be had."""

    def __init__(self, core: ShadowCore, host: str, port: int) -> None:
        super().__init__(_Numbers(core), host, port, _log.warning)
