"""The promises, collected for the machines that `--machine` names."""

from __future__ import annotations

from lastgood.conformance.machine_promises import TestMachine

__all__ = ["TestMachine"]
