"""When the ranks of a run are killed, and what became of it. Pure, and needs no torch."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Final

from lastgood.errors import LastgoodError
from lastgood.experiments.multirank.results import AfterKill
from lastgood.experiments.records.run import Failure
from lastgood.experiments.records.spec import RunSpec

__all__ = ["kill_moments", "merge_kills"]

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


def merge_kills(moments: Sequence[float], incarnations: Sequence[Sequence[AfterKill]]) -> list[Failure]:
    """Each kill, from what every rank of the incarnation after it found.

    Lost is what the rank that had come furthest has to do again. Raises LastgoodError if ranks of one incarnation
    restored different steps: that training is not what it was.
    """
    failures = []
    for moment, ranks in zip(moments, incarnations, strict=True):
        steps = {one.restored_step for one in ranks}
        if len(steps) != 1:
            each = ", ".join(f"rank {one.rank}: {one.restored_step}" for one in ranks)
            raise LastgoodError(f"ranks restored different steps after one kill ({each})")
        reached = max(one.reached_step for one in ranks)
        restored = steps.pop()
        checked = min(one.losses_checked for one in ranks)
        failures.append(
            Failure(
                kill_after_steps=moment,
                reached_step=reached,
                restored_step=restored,
                lost_steps=max(0, reached - restored),
                restore_s=max(one.restore_s for one in ranks),
                losses_checked=checked,
                losses_equal=all(one.losses_equal for one in ranks),
            )
        )
    return failures
