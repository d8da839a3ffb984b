"""A telemetry server's numbers for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lastgood.sparse.control.telemetry_server import TelemetryServer

__all__ = ["TelemetryNumbers"]

PREFIX = "lastgood_sparse_"
_OF_RANKS = (
    ("connected", "connected", "1 if the rank is connected."),
    ("told_iterations_total", "told_iterations", "Iterations that the rank told of."),
    ("forgotten_iterations_total", "forgotten_iterations", "Iterations that it could not tell of."),
    ("samples_total", "samples", "Samples of these iterations."),
    ("sent_bytes_total", "sent_bytes", "Bytes sent to the next rank in them."),
    ("compute_seconds_total", "compute_s", "Time in them that was no waiting."),
    ("waited_seconds_total", "waited_s", "Time in them in which the rank waited for the exchange."),
    ("silent_seconds", "silent_s", "Since the rank told anything."),
    ("link_bits_per_second", "link_bits_per_s", "The controller's estimate of its link."),
    ("most_batch_samples", "most_samples", "Largest batch that its memory takes, as far as it was measured."),
)
_OF_ITERATIONS = (
    ("iteration", "iteration", "The newest iteration told."),
    ("setting", "setting_number", "Number of the controller's setting that held in it; 0: none."),
    ("batch_samples", "samples", "Samples of this rank's batch in it."),
    ("compression_ratio", "compression", "Share of elements that was not sent."),
    ("iteration_compute_seconds", "compute_s", "Time that was no waiting."),
    ("iteration_apply_seconds", "apply_s", "Of that, time for updating the weights."),
    ("iteration_waited_seconds", "waited_s", "Time in which the rank waited for the exchange."),
    ("iteration_sending_seconds", "sending_s", "Time in which something was on its way."),
    ("iteration_sent_bytes", "sent_bytes", "Bytes sent to the next rank."),
    ("energy_kept_ratio", "energy_kept", "Share of the squares of gradient and residual that was sent."),
    ("residual_age_iterations", "residual_age_iterations", "How long what is not sent waits in the mean."),
    ("not_finite_total", "not_finite", "Layers and iterations skipped since a gradient was not finite."),
    ("memory_bytes", "memory_bytes", "Most memory so far, if this was the largest batch so far; else 0."),
    ("memory_room_bytes", "memory_room_bytes", "Memory that the process could have."),
)


@dataclass
class TelemetryNumbers(Collector):
    """What a server tells at the moment of asking."""

    server: TelemetryServer

    def collect(self) -> Iterator[Metric]:
        """All families; a value that was not measured has no line."""
        view = self.server.view()
        ranks = view["ranks"]
        for name, key, text in _OF_RANKS:
            yield _family(name, text, [(one["rank"], one[key]) for one in ranks])
        for name, key, text in _OF_ITERATIONS:
            yield _family(name, text, [(one["rank"], one["last"][key]) for one in ranks if one["last"] is not None])
        controller = view["controller"]
        if controller is not None:
            for name, key, text in (
                ("controller_decisions_total", "decisions", "Decisions, those that changed nothing too."),
                ("controller_cpu_seconds_total", "cpu_s", "Processor time of these."),
            ):
                metric = CounterMetricFamily(PREFIX + name, text)
                metric.add_metric([], controller[key])
                yield metric


def _family(name: str, text: str, values: list[tuple[int, float | None]]) -> Metric:
    family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    metric = family(PREFIX + name, text, labels=["rank"])
    for rank, value in values:
        if value is not None:
            metric.add_metric([str(rank)], float(value))
    return metric
