"""What a rank of a run is told to do, when it is killed, and the files by which it answers. Needs no torch."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Final, Literal

from lastgood.experiments.records.spec import RunSpec
from lastgood.models import FrozenModel

__all__ = ["RankOrder", "kill_moments", "killed_path", "result_path"]

_LEAST_STEPS: Final = 4
"""Before a kill: an incarnation that was just restored is not yet as it will be."""


def kill_moments(spec: RunSpec) -> list[float]:
    """For each kill, the iterations after an incarnation's begin at which it falls, fractions included.

    They lie anywhere in a span of whole intervals, all moments alike, so that on average half an interval lies after
    the last checkpoint's save. One seed gives the same moments for every system.
    """
    interval = max(1, spec.interval_steps)
    span = interval * math.ceil(_LEAST_STEPS / interval)
    found = random.Random(f"{spec.seed}/{spec.workload}/{interval}")
    return [span + span * found.random() for _ in range(spec.kills)]


class RankOrder(FrozenModel):
    """What a rank is told. It stands on a command line, which every user of its host can read."""

    spec: RunSpec
    phase: Literal["measure", "live", "restore"]
    incarnation: int = 0
    """The number of kills before it."""
    kill_after_steps: float | None = None
    """When all ranks are killed, in iterations after their results; None: they come to their end."""
    step_s: float = 0.0
    """Of an iteration, as measured; a rank that measures knows its own."""
    folder: str
    """The run's scratch folder, of this name on every host."""
    data_dir: str
    token: str
    """Goes into the result, so that it is known for this launch's."""
    boot_id: str
    """Of the machine that holds the turn to measure: ranks on other machines take their own's."""
    parent: int | None = None
    """Process to end with, if no launcher sees to that."""

    @property
    def name(self) -> str:
        """Tells the launches of one run apart."""
        return f"{self.phase}-{self.incarnation}" if self.incarnation else self.phase


def result_path(folder: Path, launch: str, rank: int) -> Path:
    """Where a rank leaves its result of the launch of that name, on its own host."""
    return folder / "results" / f"{launch}-{rank:05d}.json"


def killed_path(folder: Path, token: str, rank: int) -> Path:
    """What is there, on a rank's own host, once it was killed as its order says."""
    return folder / "results" / f"killed-{token}-{rank:05d}"
