"""A shadow's numbers as Prometheus reads them, over HTTP on a port of their own."""

from __future__ import annotations

import logging
import threading

from lastgood.errors import CorruptCheckpoint, HostError
from lastgood.gradients.shadow_core import ShadowCore
from lastgood.wire.gate import Gate, Handshake, Line, open_listener

__all__ = ["MetricsServer", "metrics_text"]

_log = logging.getLogger("lastgood.shadow")
_PREFIX = "lastgood_shadow_"
_TICK_S = 0.2
_MAX_LINE_BYTES = 4096
_MAX_FIELDS = 100


def metrics_text(core: ShadowCore) -> str:
    """All numbers in Prometheus' text format, version 0.0.4."""
    status, counters, received = core.status(), core.counters, core.receiver_counters()
    cpu_s, peak_bytes = core.process_usage()
    shadow = f'{{shadow="{status.shadow}"}}'
    rows: list[tuple[str, str, str, float]] = [
        ("cpu_seconds_total", "counter", "Processor time, user and system.", cpu_s),
        ("peak_rss_bytes", "gauge", "Most resident memory so far.", peak_bytes),
        ("declared_memory_bytes", "gauge", "Memory for the declared layout.", core.memory_bytes()),
        ("received_bytes_total", "counter", "Bytes of gradients held, since this layout.", received.get("bytes", 0)),
        ("received_records_total", "counter", "Gradient records held.", received.get("records", 0)),
        ("checksum_seconds_total", "counter", "Time for checksums of records.", received.get("checksum_s", 0.0)),
        ("connections", "gauge", "Data connections that are open.", received.get("connections", 0)),
        ("parked_connections", "gauge", "Of these, not read: a window is full.", received.get("parked", 0)),
        ("applied_iterations_total", "counter", "Iterations applied to all buckets.", counters.applied_iterations),
        ("applied_buckets_total", "counter", "Updates of single buckets.", counters.applied_buckets),
        ("optimizer_seconds_total", "counter", "Time in the optimizer.", counters.optimizer_s),
        ("epoch", "gauge", "The epoch that trainers must have.", status.epoch),
        ("applied_iteration", "gauge", "All buckets are behind this iteration.", status.applied),
        ("have_iteration", "gauge", "The newest iteration that it can be brought to.", status.have),
        (
            "newest_saved_step",
            "gauge",
            "The training's step of the newest iteration in memory.",
            _newest(status.memory),
        ),
        ("durable_step", "gauge", "The same of the newest spill.", _newest(status.durable)),
        ("whole", "gauge", "1 if no bucket waits for a seed.", int(status.whole)),
        ("seeds_total", "counter", "Buckets that were seeded.", counters.seeds),
        ("seed_bytes_total", "counter", "Bytes of these seeds.", counters.seed_bytes),
        ("side_bytes_total", "counter", "Bytes of side records kept.", counters.side_bytes),
        ("checks_total", "counter", "Buckets compared with the trainers'.", counters.checks),
        ("diverged_total", "counter", "Of these, found to differ.", counters.diverged),
        ("spills_total", "counter", "Iterations made durable.", counters.spills),
        ("spill_errors_total", "counter", "Iterations that could not be made durable.", counters.spill_errors),
        ("fences_total", "counter", "Epochs begun.", counters.fences),
    ]
    lines = []
    for name, kind, text, value in rows:
        lines += [f"# HELP {_PREFIX}{name} {text}", f"# TYPE {_PREFIX}{name} {kind}"]
        lines.append(f"{_PREFIX}{name}{shadow} {value}")
    lines += [
        f"# HELP {_PREFIX}refused_total Records, messages and connections refused.",
        f"# TYPE {_PREFIX}refused_total counter",
    ]
    for cause, count in sorted(status.refused.items()):
        lines.append(f'{_PREFIX}refused_total{{shadow="{status.shadow}",cause="{cause}"}} {count}')
    return "\n".join(lines) + "\n"


def _newest(held: tuple[object, ...]) -> float:
    steps = [getattr(saved, "step", 0) for saved in held]
    return float(max(steps, default=-1))


class MetricsServer:
    """Answers GET /metrics, all requests in one thread. Raises HostError where the port cannot be had."""

    def __init__(self, core: ShadowCore, host: str, port: int) -> None:
        self._core = core
        self._ending = threading.Event()
        try:
            listener = open_listener(host, port)
        except OSError as error:
            raise HostError(f"metrics cannot be served at {host}:{port}: {error}; name another port") from error
        self.address = f"{host}:{listener.getsockname()[1]}"
        self._gate: Gate[None] = Gate(listener, self._answer, "the metrics' port", _log.warning)
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._ending.set()
        self._thread.join()

    def _serve(self) -> None:
        with self._gate as gate:
            while not self._ending.is_set():
                gate.step(_TICK_S)

    def _answer(self, other: str) -> Handshake[None]:
        """A request and its answer: here nobody has anything to prove, and nobody stays."""
        words = (yield Line(b"\n", _MAX_LINE_BYTES)).decode("ascii").split()
        if len(words) < 2:
            raise CorruptCheckpoint(f"{other} sent no request")
        for _ in range(_MAX_FIELDS):
            if not (yield Line(b"\n", _MAX_LINE_BYTES)).strip():
                break
        else:
            raise CorruptCheckpoint(f"{other} sent more than {_MAX_FIELDS} fields of a request")
        known = words[1].split("?")[0] in ("/", "/metrics")
        if words[0] != "GET":
            status, text = "405 Method Not Allowed", "there is GET only\n"
        elif known:
            status, text = "200 OK", metrics_text(self._core)
        else:
            status, text = "404 Not Found", "there is /metrics only\n"
        content = text.encode()
        head = (
            f"HTTP/1.0 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        yield head.encode() + content
