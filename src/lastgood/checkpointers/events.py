"""What became of the checkpoints that a training asked for."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

__all__ = ["CheckpointEvent", "Outcome"]


class Outcome(str, enum.Enum):
    """What became of a checkpoint that was asked for."""

    PENDING = "pending"
    DURABLE = "durable"
    SUPERSEDED = "superseded"
    """Written in full, but a newer one was durable first."""
    FAILED = "failed"
    SKIPPED = "skipped"
    """Not started: the pressure rule said to skip."""

    def __str__(self) -> str:
        # Python 3.10 and 3.11 would print it differently, and neither as documents name it.
        return self.value


@dataclass
class CheckpointEvent:
    """The life of one checkpoint; times are `time.perf_counter()` seconds of the training process."""

    step: int
    requested_s: float
    copied_s: float | None = None
    """When the last byte of it had left the live tensors."""
    finished_s: float | None = None
    """When it was as safe as the system makes it (or had failed)."""
    outcome: Outcome = Outcome.PENDING
    bytes_written: int = 0
    error: str | None = None
    why: str = ""
    """What asked for it, if that was not the training's interval or its own call: the name of a signal."""
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    """What the system knows of its parts: name, begin and end, on the same clock. Those of one checkpoint follow each
    other: ``wait`` (for checkpoints before it), then what storage does (``write``, ``flush``, ``commit``)."""
