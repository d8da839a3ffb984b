"""What the updates get from the stages before them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lastgood.mirror.extract.extractor import Extracted

__all__ = ["Counters", "Stages", "Turn"]

Counters = Mapping[str, Mapping[str, float]]
"""Of each stage, by name."""


@dataclass(frozen=True)
class Turn:
    """What was extracted at once, in order. `last`: nothing comes after it, and what is open in it is not lost."""

    events: list[Extracted] = field(default_factory=list)
    last: bool = False


class Stages(Protocol):
    """All stages before the updates."""

    def read(self, timeout_s: float) -> Turn:
        """What came; nothing if nothing came in time. Raises CheckpointError as their source."""

    def free(self, memory: npt.NDArray[np.uint8]) -> None:
        """A buffer is read."""

    def counters(self) -> Counters:
        """What each stage counted, and the `seconds` that it worked (`clock.StageClock`)."""

    def close(self) -> None:
        """Give everything back; safe to call twice."""
