"""What pairs of blocks say: the ratio of training with checkpoints to training without, and how well it is known.

Each round has one block of either kind, side by side in time, and gives one ratio of rates. The estimate is the median
of the rounds' ratios, which one disturbed round in three does not move. The interval is the percentile bootstrap's of
their logarithms (Efron 1979), expanded for few values as Hesterberg proposes (*What Teachers Should Know About the
Bootstrap*, The American Statistician 69, 2015): the bootstrap of three values never leaves their range, which covers
the median three times in four and not 95 times in 100. The seed is fixed, so that the same blocks always give the same
interval. Pure arithmetic.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit

from lastgood.experiments.records.blocks import Block

__all__ = ["Interval", "PairEstimate", "estimate_pairs", "pair_ratios"]

_RESAMPLES = 2000
_COVERAGE = 0.95
_UNKNOWN = 1000.0
"""If nothing is known of the spread, the interval goes from a thousandth to a thousand times."""


class Interval(NamedTuple):
    """A number that is known to an interval. All of it is above 0."""

    low: float
    middle: float
    """The estimate."""
    high: float

    @property
    def says_nothing(self) -> bool:
        """Whether it is that of a cell whose pairs were all disturbed."""
        return self.high > 0.999 * _UNKNOWN * self.middle

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
    """Ends of the interval that covers the true ratio in 95 of 100 runs."""
    none_iterations_per_s: float
    """Median of the blocks without checkpoints."""
    rounds: int
    """Pairs that the estimate is made of."""
    disturbed_rounds: int
    """Blocks with checkpoints that were left out, or, if `all_disturbed`, all of them."""
    all_disturbed: bool
    """Fewer than two were undisturbed, so nothing is known of the ratio."""

    @property
    def half_width(self) -> float:
        """Half of the interval, as a share of the ratio."""
        return (self.high - self.low) / 2 / self.ratio


def pair_ratios(blocks: Sequence[Block]) -> list[float]:
    """The ratio of each block with checkpoints to the nearest one without: that of its own round, if it is there.

    In order. A block whose partner was disturbed, and is not among `blocks`, has the next nearest one.
    """
    without = [block for block in blocks if block.kind == "without"]

    def partner(block: Block) -> Block:
        return min(without, key=lambda other: (other.round != block.round, abs(other.began_s - block.began_s)))

    return [partner(block).step_s / block.step_s for block in blocks if block.kind == "with" and without]


def estimate_pairs(blocks: Sequence[Block], *, none_step_s: float | None = None) -> PairEstimate | None:
    """The estimate from all blocks; None if there is none of a kind.

    Blocks with checkpoints only, of a system that cannot pause, are compared with steps of `none_step_s` seconds, if it
    is given: what other trainings without checkpoints took.

    Disturbed blocks are left out as long as two with checkpoints are left. Otherwise nothing is known: a disturbance
    that fell on blocks of one kind cannot be told apart from what checkpoints cost, so the interval is made very wide.
    """
    calm = [block for block in blocks if not block.disturbed]
    alone_s = none_step_s if all(block.kind == "with" for block in blocks) else None
    ratios = _ratios(calm, alone_s)
    all_disturbed = len(ratios) < 2
    if all_disturbed:
        calm, ratios = list(blocks), _ratios(blocks, alone_s)
    if not ratios:
        return None
    disturbed = len([block for block in blocks if block.kind == "with"]) - (0 if all_disturbed else len(ratios))
    low, high = _unknown(ratios) if all_disturbed else _interval(ratios)
    without_s = alone_s or statistics.median(block.step_s for block in calm if block.kind == "without")
    return PairEstimate(
        ratio=statistics.median(ratios),
        low=low,
        high=high,
        none_iterations_per_s=1 / without_s,
        rounds=len(ratios),
        disturbed_rounds=disturbed,
        all_disturbed=all_disturbed,
    )


def _ratios(blocks: Sequence[Block], alone_s: float | None) -> list[float]:
    return pair_ratios(blocks) if alone_s is None else [alone_s / block.step_s for block in blocks]


def _unknown(ratios: Sequence[float]) -> tuple[float, float]:
    middle = statistics.median(ratios)
    return middle / _UNKNOWN, middle * _UNKNOWN


def _interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Ends of the interval of the median of two ratios or more. Of logarithms, so that it stays above 0."""
    middle = statistics.median(ratios)
    count = len(ratios)
    logs = np.log(ratios)
    drawn = np.random.default_rng(20_261_129).choice(logs, size=(_RESAMPLES, count))
    tail = (1 - _COVERAGE) / 2
    ends = np.quantile(np.median(drawn, axis=1), [tail, 1 - tail]) - np.median(logs)
    # The bootstrap's variance lacks a factor of (count - 1) / count, and its quantiles are a normal distribution's.
    expanded = math.sqrt(count / (count - 1)) * stdtrit(count - 1, tail) / ndtri(tail)
    low, high = np.exp(ends * expanded)
    return middle * float(low), middle * float(high)
