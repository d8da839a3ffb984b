"""What pairs of blocks say: the ratio of training with checkpoints to training without, and how well it is known.

Each round has one block of either kind, side by side in time, and gives one ratio of rates. The estimate is the median
of the rounds' ratios, which one disturbed round in three does not move; the interval is the percentile bootstrap's
(Efron 1979), with the seed fixed, so that the same blocks always give the same interval. Pure arithmetic.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lastgood.experiments.records.blocks import Block

__all__ = ["Interval", "PairEstimate", "estimate_pairs", "round_ratios"]

_RESAMPLES = 2000
_COVERAGE = 0.95


class Interval(NamedTuple):
    """A number that is known to an interval. All of it is above 0."""

    low: float
    middle: float
    """The estimate."""
    high: float

    def map(self, change: Callable[[float], float]) -> Interval:
        """The same in another unit; `change` rises or falls all the way."""
        return Interval(*sorted(change(value) for value in self))

    def over(self, other: Interval) -> Interval:
        """This number divided by `other`."""
        return Interval(self.low / other.high, self.middle / other.middle, self.high / other.low)

    def overlaps(self, other: Interval) -> bool:
        """Whether nothing says which of the two is the larger one."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class PairEstimate:
    """Rates are iterations per second; ratios are durable throughput with checkpoints over throughput without."""

    ratio: float
    low: float
    high: float
    """Ends of the interval that covers 95 of 100 resamples."""
    none_iterations_per_s: float
    """Median of the blocks without checkpoints."""
    rounds: int
    """Pairs that the estimate is made of."""
    disturbed_rounds: int
    """Pairs that were left out, or, if `all_disturbed`, all of them."""
    all_disturbed: bool
    """Fewer than two pairs were undisturbed, so disturbed ones count as well."""

    @property
    def half_width(self) -> float:
        """Half of the interval, as a share of the ratio."""
        return (self.high - self.low) / 2 / self.ratio


def round_ratios(blocks: Sequence[Block]) -> list[float]:
    """The ratio of each complete round, in order."""
    steps: dict[int, dict[str, float]] = {}
    for block in blocks:
        steps.setdefault(block.round, {})[block.kind] = block.step_s
    return [pair["without"] / pair["with"] for _, pair in sorted(steps.items()) if len(pair) == 2]


def estimate_pairs(blocks: Sequence[Block]) -> PairEstimate | None:
    """The estimate from all complete rounds; None if there is none.

    A round with a disturbed block is left out as long as two others are left.
    """
    disturbed = {block.round for block in blocks if block.disturbed}
    calm = [block for block in blocks if block.round not in disturbed]
    ratios = round_ratios(calm)
    all_disturbed = len(ratios) < 2
    if all_disturbed:
        calm, ratios = list(blocks), round_ratios(blocks)
    if not ratios:
        return None
    low, high = _interval(ratios)
    return PairEstimate(
        ratio=statistics.median(ratios),
        low=low,
        high=high,
        none_iterations_per_s=statistics.median(1 / block.step_s for block in calm if block.kind == "without"),
        rounds=len(ratios),
        disturbed_rounds=len(disturbed),
        all_disturbed=all_disturbed and bool(disturbed),
    )


def _interval(values: Sequence[float]) -> tuple[float, float]:
    drawn = random.Random(20_261_129)
    medians = sorted(statistics.median(drawn.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    tail = round((1 - _COVERAGE) / 2 * _RESAMPLES)
    return medians[tail], medians[-tail - 1]
