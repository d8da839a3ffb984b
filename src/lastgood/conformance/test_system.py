"""The promises, collected for the systems that `--checkpointer` names."""

from __future__ import annotations

from lastgood.conformance.promises import (
    TestBoundedWaits,
    TestDamage,
    TestDurable,
    TestExactness,
    TestFullDisk,
    TestKills,
    TestPaths,
    TestTwoWriters,
)

__all__ = [
    "TestBoundedWaits",
    "TestDamage",
    "TestDurable",
    "TestExactness",
    "TestFullDisk",
    "TestKills",
    "TestPaths",
    "TestTwoWriters",
]
