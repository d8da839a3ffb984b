"""Which point of (batch, compression) to probe next, and the surface of the loss's lag that probes draw.

A Gaussian process (Matern 2.5, with noise) over the logarithms of batch size and of what is sent is fitted to the lags
so far. The next point is the one whose price, by the controller's own objective over the links that the profile is for,
is expected to improve most on the best so far; every third one is where the surface is least known, so that it is
right everywhere. What comes next follows from the profile alone, also after a kill.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lastgood.errors import ConfigError
from lastgood.sparse.control.objective import Problem, Worker, fit_times
from lastgood.sparse.control.profile import Baseline, Probe, Profile, Surface, Wanted

__all__ = ["LagModel", "expected_improvement", "next_point", "profile_on", "surface_of"]

_GRID = 25
"""Points on each axis among which the next one is looked for."""
_SHOWN = 9
"""Points on each axis of the surface."""
_EXPLORES_EVERY = 3
_VALUE_BYTES = 4.4
Floats = npt.NDArray[np.float64]
Trial = Callable[[int, float], tuple[Sequence[float], int, float]]
"""From batch size and compression to the losses, the steps, and the seconds of a step."""


class LagModel:
    """The lag at any point, and how sure that is. Raises ConfigError without probes."""

    def __init__(self, probes: Sequence[Probe]) -> None:
        if not probes:
            raise ConfigError("a surface of the loss's lag needs probes, and there is none")
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

        kernel = ConstantKernel(1.0, (1e-3, 1e3)) * Matern([1.0, 1.0], (0.1, 30.0), nu=2.5)
        kernel += WhiteKernel(1e-2, (1e-6, 1.0))
        self._process: Any = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=2, random_state=0)
        places = np.array([_place(one.samples, one.compression) for one in probes])
        lags = np.array([one.lag for one in probes])
        if len(probes) > 1 and np.ptp(lags) > 0:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a bound of the kernel that is reached is said each time
                self._process.fit(places, lags)
            self._constant: float | None = None
        else:
            self._constant = float(lags[0])

    def predict(self, points: Sequence[tuple[float, float]]) -> tuple[Floats, Floats]:
        """Means and standard deviations of the lag itself (the noise of a probe is not in them)."""
        if self._constant is not None:
            return np.full(len(points), self._constant), np.zeros(len(points))
        means, deviations = self._process.predict(np.array([_place(*one) for one in points]), return_std=True)
        noise = float(self._process.kernel_.k2.noise_level) * float(self._process._y_train_std) ** 2
        return np.asarray(means, np.float64), np.sqrt(np.maximum(np.asarray(deviations, np.float64) ** 2 - noise, 0.0))


def _place(samples: float, compression: float) -> tuple[float, float]:
    """In octaves of the batch, and in decades of what is sent."""
    return math.log2(samples), -math.log10(1 - compression)


def expected_improvement(means: Floats, deviations: Floats, best: float) -> Floats:
    """By how much each is expected to be lower than `best`, if it is normal with this mean and deviation."""
    gains = best - means
    safe = np.where(deviations > 0, deviations, 1.0)
    marks = gains / safe
    density = np.exp(-0.5 * marks**2) / math.sqrt(2 * math.pi)
    share = np.array([0.5 * (1 + math.erf(mark / math.sqrt(2))) for mark in marks])
    return np.where(deviations > 0, gains * share + deviations * density, np.maximum(gains, 0.0))


def next_point(profile: Profile) -> tuple[int, float]:
    """Batch size and compression to be probed next: the corners and the middle first."""
    wanted, done = profile.wanted, {(one.samples, round(one.compression, 6)) for one in profile.probes}
    for point in _first_points(wanted):
        if (point[0], round(point[1], 6)) not in done:
            return point
    model = LagModel(profile.probes)
    points = [
        (samples, compression)
        for samples in dict.fromkeys(round(one) for one in _sizes(wanted, _GRID))
        for compression in _compressions(wanted, _GRID)
        if (samples, round(compression, 6)) not in done
    ]
    if not points:
        raise ConfigError(f"all points between the limits of this profile are probed: {len(done)}")
    means, deviations = model.predict(points)
    if len(done) % _EXPLORES_EVERY == 0:
        return points[int(np.argmax(deviations))]
    prices, spreads = _prices(profile, points, means, deviations)
    known = [(one.samples, one.compression) for one in profile.probes]
    best = float(_prices(profile, known, *model.predict(known))[0].min())
    return points[int(np.argmax(expected_improvement(prices, spreads, best)))]


def _prices(
    profile: Profile, points: Sequence[tuple[int, float]], means: Floats, deviations: Floats
) -> tuple[Floats, Floats]:
    """Of each point, by the controller's objective: seconds for a sample, and for those that make up for the lag."""
    wanted = profile.wanted
    alpha_s, beta_s = fit_times((one.samples, one.step_s) for one in profile.probes)
    workers = (Worker(alpha_s, beta_s, 0, wanted.most_samples, wanted.mbit_per_s * 1e6),) * wanted.nodes
    problem = Problem(
        workers,
        wanted.parameters,
        1,
        wanted.most_samples,
        value_bytes=_VALUE_BYTES,
        overlap=1.0 if wanted.staleness else 0.5,
    )
    seconds = np.array(
        [
            problem.iteration_s([samples / wanted.nodes] * wanted.nodes, compression) / samples
            for samples, compression in points
        ]
    )
    weight = wanted.lambda_ * wanted.g_scale
    return seconds * (1 + weight * np.maximum(means, 0.0)), seconds * weight * deviations


def surface_of(profile: Profile) -> Surface | None:
    """What the probes so far say; None before the first ones are done."""
    wanted = profile.wanted
    if len(profile.probes) < len(_first_points(wanted)):
        return None
    samples, compressions = _sizes(wanted, _SHOWN), _compressions(wanted, _SHOWN)
    means, deviations = LagModel(profile.probes).predict([(one, other) for one in samples for other in compressions])

    def rows(values: Floats) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(round(float(one), 9) for one in row) for row in values.reshape(_SHOWN, _SHOWN))

    return Surface(
        samples=tuple(samples), compressions=tuple(compressions), lags=rows(means), uncertainties=rows(deviations)
    )


def profile_on(
    profile: Profile,
    probes: int,
    baseline: Callable[[], Sequence[float]],
    trial: Trial,
    keep: Callable[[Profile], None],
) -> Profile:
    """Probe until there are so many; `keep` is called after each one. Goes on from what `profile` holds."""
    if profile.baseline is None:
        profile = profile.model_copy(update={"baseline": Baseline(losses=tuple(baseline()))})
        keep(profile)
    assert profile.baseline is not None
    while len(profile.probes) < probes:
        samples, compression = next_point(profile)
        losses, steps, step_s = trial(samples, compression)
        lags = [one - other for one, other in zip(losses, profile.baseline.losses, strict=True)]
        probe = Probe(
            samples=samples,
            compression=compression,
            losses=tuple(losses),
            lag=sum(lags) / len(lags),
            steps=steps,
            step_s=step_s,
        )
        profile = profile.model_copy(update={"probes": (*profile.probes, probe)})
        profile = profile.model_copy(update={"surface": surface_of(profile)})
        keep(profile)
    return profile


def _first_points(wanted: Wanted) -> list[tuple[int, float]]:
    sizes, compressions = _sizes(wanted, 3), _compressions(wanted, 3)
    places = [(0, 0), (2, 2), (0, 2), (2, 0), (1, 1)]
    return list(dict.fromkeys((round(sizes[one]), compressions[other]) for one, other in places))


def _sizes(wanted: Wanted, count: int) -> list[float]:
    ratio = wanted.most_samples / wanted.least_samples
    return [wanted.least_samples * ratio ** (number / (count - 1)) for number in range(count)]


def _compressions(wanted: Wanted, count: int) -> list[float]:
    first, last = 1 - wanted.least_compression, 1 - wanted.most_compression
    found = [1 - first * (last / first) ** (number / (count - 1)) for number in range(count)]
    return [wanted.least_compression, *(round(one, 9) for one in found[1:-1]), wanted.most_compression]
