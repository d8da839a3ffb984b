"""A shadow's numbers as Prometheus reads them, over HTTP on a port of their own."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from lastgood.errors import HostError
from lastgood.gradients.shadow_core import ShadowCore

__all__ = ["MetricsServer", "metrics_text"]

_PREFIX = "lastgood_shadow_"
_REQUEST_S = 5.0


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
    """Answers GET /metrics in threads of its own. Raises HostError where the port cannot be had."""

    def __init__(self, core: ShadowCore, host: str, port: int) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = _REQUEST_S

            def do_GET(self) -> None:
                known = self.path.split("?")[0] in ("/", "/metrics")
                content = metrics_text(core).encode() if known else b"there is /metrics only\n"
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_request(self, *arguments: object) -> None:
                """Say nothing: a scrape every few seconds is no news."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise HostError(f"metrics cannot be served at {host}:{port}: {error}; name another port") from error
        self._server.daemon_threads = True
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
