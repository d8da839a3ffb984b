"""The promises, collected for the traces that `--trace-file` names."""

from __future__ import annotations

from lastgood.conformance.trace_promises import TestTrace, trace

__all__ = ["TestTrace", "trace"]
