"""The training of the conformance suite."""

from __future__ import annotations

from lastgood.conformance.training import SmallTraining

__all__ = ["SmallTraining"]
