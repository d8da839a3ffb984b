"""What rank 0 of a watched training wrote about its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Life", "Step", "read_steps"]


@dataclass(frozen=True)
class Step:
    """One that was done."""

    number: int
    seconds: float
    loss: str
    """Hexadecimal, so that two are equal only to the bit."""
    ended: float
    """On the machine's monotonic clock."""


@dataclass(frozen=True)
class Life:
    """From a start to an end, by kill or not."""

    ready: float | None
    """When all ranks were there; None: they were not yet."""
    restored: float | None
    restored_step: int
    steps: Sequence[Step]


def read_steps(path: Path) -> Life:
    """Read the file; a line that a kill cut off is none."""
    ready = restored = None
    restored_step = 0
    steps: list[Step] = []
    text = path.read_text() if path.exists() else ""
    for line in text[: text.rfind("\n") + 1].splitlines():
        words = line.split()
        if words[0] == "ready":
            ready = float(words[1])
        elif words[0] == "restored":
            restored_step, restored = int(words[1]), float(words[2])
        else:
            steps.append(Step(int(words[0]), float(words[1]), words[2], float(words[3])))
    return Life(ready, restored, restored_step, steps)
