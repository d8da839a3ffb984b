"""Names of a shadow's metrics that others read: here once, for the shadow that writes them and for its readers."""

from __future__ import annotations

from typing import Final

__all__ = ["CPU_S", "OPTIMIZER_S", "PEAK_RSS_BYTES", "PREFIX", "RECEIVED_BYTES"]

PREFIX: Final = "lastgood_shadow_"
"""Before each name."""
CPU_S: Final = "cpu_seconds_total"
PEAK_RSS_BYTES: Final = "peak_rss_bytes"
RECEIVED_BYTES: Final = "received_bytes_total"
OPTIMIZER_S: Final = "optimizer_seconds_total"
