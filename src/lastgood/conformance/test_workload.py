"""The promises, collected for the workloads that `--workload` names."""

from __future__ import annotations

from lastgood.conformance.workload_promises import TestWorkload

__all__ = ["TestWorkload"]
