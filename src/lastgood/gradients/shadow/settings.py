"""How one shadow is to run, and what it has done."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lastgood.errors import ConfigError
from lastgood.units import GIB

__all__ = ["Counters", "ShadowSettings"]


@dataclass(frozen=True)
class ShadowSettings:
    """How one shadow is to run."""

    shadow: int
    shadows: int
    trainers: int | None = None
    """Ranks that may declare; None: whatever they say."""
    slots: int = 4
    """Gradients of how many iterations each bucket can hold."""
    limit_bytes: int = 0
    """Memory for all that a layout needs; 0: what is available when it is declared."""
    side_limit_bytes: int = GIB
    """Memory for all side records."""
    threads: int = 1
    """Of the optimizer."""
    receive_threads: int = 1
    cpus: tuple[int, ...] = ()
    """Where the optimizer stays; none: wherever the kernel likes."""
    receive_cpus: tuple[int, ...] = ()
    spill_directory: Path | None = None
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.shadow < self.shadows:
            raise ConfigError(f"shadow {self.shadow} of {self.shadows}: its number must be below theirs")
        if self.slots < 2:
            raise ConfigError(
                f"{self.slots} gradient slots: at least 2 are needed, so that one fills while one is kept"
            )
        if min(self.threads, self.receive_threads) < 1:
            raise ConfigError("a shadow needs at least one thread for each of its two tasks")


@dataclass
class Counters:
    """What a shadow has done since it began."""

    applied_iterations: int = 0
    applied_buckets: int = 0
    optimizer_s: float = 0.0
    seeds: int = 0
    seed_bytes: int = 0
    spills: int = 0
    spill_errors: int = 0
    diverged: int = 0
    checks: int = 0
    fences: int = 0
    side_bytes: int = 0
