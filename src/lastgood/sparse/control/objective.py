"""What a setting of batch sizes and compression is worth, and the best one (StellaTrain, sections 4.2 and 4.3).

Worker i needs ``alpha_i * b_i + beta_i`` seconds to compute a batch of b_i samples, and (1 - r) of the gradient goes
over the slowest link. r is the least compression whose exchange takes no longer than the computing (bisection), so
that the batch sizes are all there is to choose. Their cost is ::

    (seconds of an iteration / samples of it) * (1 + lambda * scale * g(samples, r))

g is how much the loss lags behind after a part of an epoch, as the profiler measures it: the second factor is how many
more samples a training needs for what it loses by compression and large batches. It is minimised by Nelder-Mead from
several starts. Plain arithmetic on floats, without clocks; the same seed gives the same answer.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lastgood.errors import ConfigError

__all__ = [
    "MOST_COMPRESSION",
    "Choice",
    "GridSurface",
    "LossSurface",
    "NoSurface",
    "Problem",
    "Weighing",
    "Worker",
    "apportion",
    "batch_weights",
    "best_choice",
    "fit_times",
    "level",
    "price",
]

MOST_COMPRESSION = 0.999
_BISECTIONS = 40
_LEVELS = 80
_ROUNDS = 120
"""Of one descent."""
_TIE = 1e-3
"""A relative gain that is not worth another split of the batch than the level one."""


@dataclass(frozen=True)
class Worker:
    """One worker: what its computing takes, how many samples it may get, and its link in bits per second."""

    alpha_s: float
    """Seconds for each sample."""
    beta_s: float
    """Seconds for each iteration."""
    least_samples: int
    most_samples: int
    link_bits_per_s: float

    def compute_s(self, samples: float) -> float:
        """Seconds to compute a batch."""
        return self.alpha_s * samples + self.beta_s


class LossSurface(Protocol):
    """g: how far the loss lags behind that of a training without compression and staleness."""

    def lag(self, samples: float, compression: float) -> float:
        """Of a batch of `samples` of all workers; 0 is no lag."""


class NoSurface:
    """g if nothing was measured: batch sizes and compression cost nothing but time."""

    def lag(self, samples: float, compression: float) -> float:
        """Always 0."""
        del samples, compression
        return 0.0


@dataclass(frozen=True)
class GridSurface:
    """g between measured points: linear in log(samples) and log(1 - compression), and at the edges what is there."""

    samples: tuple[float, ...]
    """Ascending."""
    compressions: tuple[float, ...]
    """Ascending."""
    lags: tuple[tuple[float, ...], ...]
    """A row for each of `samples`."""

    def __post_init__(self) -> None:
        for name, axis in (("samples", self.samples), ("compressions", self.compressions)):
            if not axis or any(first >= second for first, second in itertools.pairwise(axis)):
                raise ConfigError(f"a loss surface: {name} are not ascending: {list(axis)[:8]}")
        if self.samples[0] <= 0 or not 0 <= self.compressions[0] <= self.compressions[-1] < 1:
            raise ConfigError("a loss surface: samples are above 0, compressions at least 0 and below 1")
        if len(self.lags) != len(self.samples) or any(len(row) != len(self.compressions) for row in self.lags):
            raise ConfigError(f"a loss surface has {len(self.samples)} rows of {len(self.compressions)} lags")
        if not all(math.isfinite(lag) for row in self.lags for lag in row):
            raise ConfigError("a loss surface: a lag is no finite number")

    def lag(self, samples: float, compression: float) -> float:
        """Interpolated; a training that is better than the uncompressed one (noise) lags by 0."""
        row, across = _place(samples, self.samples, math.log)
        column, along = _place(compression, self.compressions, lambda r: -math.log1p(-r))
        below = min(row + 1, len(self.samples) - 1)
        right = min(column + 1, len(self.compressions) - 1)
        near = self.lags[row][column] * (1 - along) + self.lags[row][right] * along
        far = self.lags[below][column] * (1 - along) + self.lags[below][right] * along
        return max(0.0, near * (1 - across) + far * across)


def _place(value: float, axis: Sequence[float], scale: Callable[[float], float]) -> tuple[int, float]:
    """The number of the mark at or before `value`, and how far it is from there to the next one, 0 to 1."""
    if value <= axis[0]:
        return 0, 0.0
    if value >= axis[-1]:
        return len(axis) - 1, 0.0
    number = max(index for index, mark in enumerate(axis) if mark <= value)
    begin, end = scale(axis[number]), scale(axis[number + 1])
    return number, (scale(value) - begin) / (end - begin)


@dataclass(frozen=True)
class Weighing:
    """How loss is weighed against time.

    `lambda_` 5 is the paper's. `g_scale` brings g to its units: with 1, a lag of 0.01 costs 5 % more samples.
    """

    lambda_: float = 5.0
    g_scale: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.lambda_ < 1e6 and 0 <= self.g_scale < 1e6):
            raise ConfigError(f"lambda {self.lambda_} and scale {self.g_scale} of g are at least 0 and below 1e6")


_PAPERS = Weighing()
_NONE = NoSurface()


@dataclass(frozen=True)
class Problem:
    """What there is to choose from."""

    workers: tuple[Worker, ...]
    elements: int
    """Of the gradient."""
    least_total: int
    most_total: int
    """Samples of all workers together; alike if the batch is not to be chosen."""
    value_bytes: float = 4.4
    """Sent for each chosen element, indices and checksums included."""
    overlap: float = 1.0
    """The part of the computing behind which an exchange is hidden: 1 with staleness 1."""
    least_compression: float = 0.0
    most_compression: float = MOST_COMPRESSION
    weighing: Weighing = _PAPERS
    surface: LossSurface = _NONE

    def __post_init__(self) -> None:
        if not self.workers or self.elements < 1 or not 0 <= self.overlap <= 1 or self.value_bytes <= 0:
            raise ConfigError("a setting is for at least one worker and one element, and an overlap of 0 to 1")
        if not 0 <= self.least_compression <= self.most_compression < 1:
            raise ConfigError(f"compression from {self.least_compression} to {self.most_compression}: 0 to below 1")
        if any(not 0 <= one.least_samples <= one.most_samples or one.link_bits_per_s <= 0 for one in self.workers):
            raise ConfigError("a worker takes at least 0 samples, no fewer than its least, over a link above 0 bits/s")
        least, most = sum(one.least_samples for one in self.workers), sum(one.most_samples for one in self.workers)
        if not max(1, least) <= self.least_total <= self.most_total <= most:
            raise ConfigError(
                f"a batch of {self.least_total} to {self.most_total} samples: these workers together take "
                f"{least} to {most}"
            )

    def exchange_s(self, compression: float) -> float:
        """Seconds of a ring all-gather of what is not left out: each link carries all ranks' parts but one."""
        nodes = len(self.workers)
        if nodes == 1:
            return 0.0
        sent_bytes = (1 - compression) * self.elements * self.value_bytes * (nodes - 1) / nodes
        return sent_bytes * 8 / min(one.link_bits_per_s for one in self.workers)

    def compute_s(self, samples: Sequence[float]) -> float:
        """Seconds of the slowest worker."""
        return max(worker.compute_s(own) for worker, own in zip(self.workers, samples, strict=True))

    def iteration_s(self, samples: Sequence[float], compression: float) -> float:
        """Seconds of an iteration: computing, and what of the exchange is not hidden behind it."""
        computing = self.compute_s(samples)
        return max(computing, computing * (1 - self.overlap) + self.exchange_s(compression))

    def compression_for(self, samples: Sequence[float]) -> float:
        """The least compression whose exchange is hidden, by bisection; the most if none is."""
        room = self.overlap * self.compute_s(samples)
        low, high = self.least_compression, self.most_compression
        if self.exchange_s(low) <= room:
            return low
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.exchange_s(middle) <= room else (middle, high)
        return high


@dataclass(frozen=True)
class Choice:
    """A setting, and what it is expected to cost."""

    samples: tuple[int, ...]
    """Of each worker's batch."""
    compression: float
    iteration_s: float
    cost: float
    """Seconds for each sample, as `price` has it."""


def price(problem: Problem, samples: Sequence[float], compression: float) -> float:
    """Seconds for each sample, and for those that make up for the loss's lag."""
    total = sum(samples)
    lag = problem.surface.lag(total, compression)
    weight = 1 + problem.weighing.lambda_ * problem.weighing.g_scale * lag
    return problem.iteration_s(samples, compression) / total * weight


# -- fitting -----------------------------------------------------------------------------------------------------------


def fit_times(points: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """Alpha and beta, in seconds, of pairs (samples, seconds): least squares of the medians of each batch size.

    Neither is below 0. With one batch size beta cannot be told, and is taken as 0. Raises ConfigError without a pair.
    """
    groups: dict[int, list[float]] = defaultdict(list)
    for samples, seconds in points:
        if samples > 0 and math.isfinite(seconds) and seconds > 0:
            groups[samples].append(seconds)
    if not groups:
        raise ConfigError("no iteration time was measured, so a worker's speed is unknown")
    marks = [(float(samples), _median(found), float(len(found))) for samples, found in sorted(groups.items())]
    weight = sum(count for _, _, count in marks)
    mean_x = sum(x * count for x, _, count in marks) / weight
    mean_y = sum(y * count for _, y, count in marks) / weight
    spread = sum((x - mean_x) ** 2 * count for x, _, count in marks)
    if not spread:
        return mean_y / mean_x, 0.0
    alpha = sum((x - mean_x) * (y - mean_y) * count for x, y, count in marks) / spread
    if alpha <= 0:
        return 0.0, mean_y
    beta = mean_y - alpha * mean_x
    if beta < 0:
        return sum(x * y * count for x, y, count in marks) / sum(x * x * count for x, _, count in marks), 0.0
    return alpha, beta


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


# -- parts of a batch --------------------------------------------------------------------------------------------------


def batch_weights(samples: Sequence[int]) -> list[float]:
    """By what each worker multiplies its mean loss, where gradients are averaged over workers, to have that of samples.

    They sum to the number of workers; a worker without samples has 0.
    """
    total = sum(samples)
    if total < 1:
        raise ConfigError("a batch without samples has no weights")
    return [own * len(samples) / total for own in samples]


def apportion(parts: Sequence[float], total: int, workers: Sequence[Worker]) -> tuple[int, ...]:
    """Whole numbers near `parts`, within each worker's limits, that sum to `total`.

    What is left over goes to those that lost most by rounding, the first ones of equals first.
    """
    chosen = [
        min(max(math.floor(part), one.least_samples), one.most_samples)
        for part, one in zip(parts, workers, strict=True)
    ]
    left = total - sum(chosen)
    while left:
        step = 1 if left > 0 else -1
        free = [
            index
            for index, one in enumerate(workers)
            if (chosen[index] < one.most_samples if left > 0 else chosen[index] > one.least_samples)
        ]
        if not free:
            raise ConfigError(f"{total} samples do not fit into the workers' limits")
        free.sort(key=lambda index: step * (chosen[index] - parts[index]))
        for index in free[: abs(left)]:
            chosen[index] += step
        left = total - sum(chosen)
    return tuple(chosen)


def level(problem: Problem, total: int) -> list[float]:
    """The split of `total` samples with which all workers compute equally long, as far as limits let them.

    No other split of it has a shorter iteration.
    """
    low, high = 0.0, max(one.compute_s(one.most_samples) for one in problem.workers)
    for _ in range(_LEVELS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(_within(problem.workers, middle)) >= total else (middle, high)
    found = _within(problem.workers, high)
    surplus = sum(found) - total
    for index, one in enumerate(problem.workers):  # a worker whose time does not depend on its samples gives first
        if surplus > 0 and one.alpha_s == 0:
            given = min(surplus, found[index] - one.least_samples)
            found[index] -= given
            surplus -= given
    return found


def _within(workers: Sequence[Worker], seconds: float) -> list[float]:
    """The samples that each worker can compute in this time, within its limits."""
    able = []
    for one in workers:
        room = seconds - one.beta_s
        samples = room / one.alpha_s if one.alpha_s > 0 else (math.inf if room >= 0 else 0.0)
        able.append(min(max(samples, float(one.least_samples)), float(one.most_samples)))
    return able


# -- the best ----------------------------------------------------------------------------------------------------------


def best_choice(problem: Problem, *, starts: int = 32, seed: int = 0, before: Sequence[int] | None = None) -> Choice:
    """The cheapest setting that Nelder-Mead finds from `starts` random starts, the level split, and `before`.

    Another split than the level one of that many samples is taken only if it is clearly cheaper.
    """
    candidates = [_exact(problem, level(problem, total), total) for total in _totals(problem)]
    if before is not None and _allowed(problem, before):
        candidates.append(_exact(problem, before, sum(before)))
    # The level split of a given total is the fastest, and without a surface nothing else counts.
    searched = len(problem.workers) > 1 and not isinstance(problem.surface, NoSurface)
    if searched or problem.least_total < problem.most_total:
        candidates += [_descend(problem, start) for start in _starts(problem, starts, seed)]
        totals = sorted({sum(one.samples) for one in candidates})
        candidates += [_exact(problem, level(problem, total), total) for total in totals]
    best = _nearby(problem, min(candidates, key=lambda one: one.cost))
    flat = _exact(problem, level(problem, sum(best.samples)), sum(best.samples))
    return flat if flat.cost <= best.cost * (1 + _TIE) else best


def _nearby(problem: Problem, choice: Choice) -> Choice:
    """Whole numbers are not where the descent was: go on to a neighbour as long as one is cheaper."""
    workers = range(len(problem.workers))
    for _ in range(_ROUNDS):
        neighbours = []
        for gives, takes in itertools.permutations([None, *workers], 2):
            samples = list(choice.samples)
            for one, change in ((gives, -1), (takes, 1)):
                if one is not None:
                    samples[one] += change
            if _allowed(problem, samples):
                neighbours.append(_exact(problem, samples, sum(samples)))
        best = min(neighbours, key=lambda one: one.cost, default=choice)
        if best.cost >= choice.cost:
            break
        choice = best
    return choice


def _totals(problem: Problem) -> list[int]:
    return sorted({problem.least_total, (problem.least_total + problem.most_total) // 2, problem.most_total})


def _allowed(problem: Problem, samples: Sequence[int]) -> bool:
    return (
        len(samples) == len(problem.workers)
        and problem.least_total <= sum(samples) <= problem.most_total
        and all(w.least_samples <= own <= w.most_samples for w, own in zip(problem.workers, samples, strict=True))
    )


def _exact(problem: Problem, parts: Sequence[float], total: int) -> Choice:
    samples = apportion(parts, total, problem.workers)
    compression = problem.compression_for(samples)
    return Choice(samples, compression, problem.iteration_s(samples, compression), price(problem, samples, compression))


def _starts(problem: Problem, starts: int, seed: int) -> list[list[float]]:
    chance = random.Random(seed)
    axes = len(problem.workers)  # logarithms of shares, less one, and where the total lies between its limits
    return [[chance.uniform(-1, 1) for _ in range(axes)] for _ in range(starts)]


def _descend(problem: Problem, start: list[float]) -> Choice:
    from scipy.optimize import minimize

    others = len(problem.workers) - 1
    free = problem.most_total > problem.least_total

    def parts(point: Sequence[float]) -> tuple[list[float], int]:
        place = (math.tanh(point[others]) + 1) / 2 if free else 0.0
        total = problem.least_total + place * (problem.most_total - problem.least_total)
        shares = [math.exp(min(max(value, -20.0), 20.0)) for value in [*point[:others], 0.0]]
        return _scaled(problem.workers, shares, total), round(total)

    def cost(point: Sequence[float]) -> float:
        samples, _ = parts(point)
        return price(problem, samples, problem.compression_for(samples))

    begin = start if free else start[:others]
    ends = {"maxiter": _ROUNDS, "xatol": 1e-3, "fatol": cost(begin) * 1e-5}
    found = minimize(cost, begin, method="Nelder-Mead", options=ends)
    samples, total = parts([float(value) for value in found.x])
    return _exact(problem, samples, total)


def _scaled(workers: Sequence[Worker], shares: Sequence[float], total: float) -> list[float]:
    """Samples in proportion to `shares` that sum to `total`, within the workers' limits."""
    low, high = 0.0, max(one.most_samples / share for one, share in zip(workers, shares, strict=True))

    def at(scale: float) -> list[float]:
        return [
            min(max(scale * share, float(one.least_samples)), float(one.most_samples))
            for one, share in zip(workers, shares, strict=True)
        ]

    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(at(middle)) >= total else (middle, high)
    return at(high)
