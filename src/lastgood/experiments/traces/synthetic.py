"""Traces by the rules of chance: failures one by one (Poisson), ageing (Weibull), or in bursts. Needs no torch.

Every trace is a function of its arguments and its seed alone, on any machine: random numbers come from Python's
Mersenne twister, whose uniform stream is fixed, and times from it by inversion.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from lastgood.errors import ConfigError
from lastgood.experiments.traces.trace import GPUS_PER_MACHINE, MAX_GPUS, MAX_SAMPLES, SpotTrace

__all__ = ["bursts_trace", "poisson_trace", "weibull_trace"]

_HOUR_S = 3600.0


def poisson_trace(*, mtbf_h: float, hours: float, period_s: float, gpus: int, seed: int) -> SpotTrace:
    """Failures of the cluster with independent, exponential gaps of `mtbf_h` hours in the mean.

    The trace has `hours` of samples `period_s` apart, of a cluster with up to `gpus` GPUs. Raises ConfigError.
    """
    _check("mtbf_h", mtbf_h)
    rng = random.Random(seed)
    said = f"poisson, mtbf_h {mtbf_h}, seed {seed}"
    return _trace(lambda: mtbf_h * _HOUR_S * _exponential(rng), lambda: 1, hours, period_s, gpus, said)


def weibull_trace(*, shape: float, scale_h: float, hours: float, period_s: float, gpus: int, seed: int) -> SpotTrace:
    """Failures with independent Weibull gaps: below a `shape` of 1 they come in clusters, above it evenly.

    Their mean is `scale_h` * gamma(1 + 1/shape) hours; the rest as in `poisson_trace`. Raises ConfigError.
    """
    _check("shape", shape, least=0.1, most=20.0)
    _check("scale_h", scale_h)
    rng = random.Random(seed)
    said = f"weibull, shape {shape}, scale_h {scale_h}, seed {seed}"
    return _trace(lambda: scale_h * _HOUR_S * _exponential(rng) ** (1 / shape), lambda: 1, hours, period_s, gpus, said)


def bursts_trace(*, mtbf_h: float, burst: float, hours: float, period_s: float, gpus: int, seed: int) -> SpotTrace:
    """Bursts with exponential gaps of `mtbf_h` hours in the mean, each of `burst` failures at once in the mean.

    Sizes are geometric, at least 1 and at most half of the machines; the rest as in `poisson_trace`. Raises
    ConfigError.
    """
    _check("mtbf_h", mtbf_h)
    _check("burst", burst, least=1.0, most=float(MAX_GPUS))
    rng = random.Random(seed)
    most = max(1, gpus // GPUS_PER_MACHINE // 2)

    def size() -> int:
        if burst == 1.0:
            return 1
        return min(most, 1 + int(_exponential(rng) / -math.log1p(-1 / burst)))

    said = f"bursts, mtbf_h {mtbf_h}, burst {burst}, seed {seed}"
    return _trace(lambda: mtbf_h * _HOUR_S * _exponential(rng), size, hours, period_s, gpus, said)


def _exponential(rng: random.Random) -> float:
    """Exponential with mean 1."""
    return -math.log1p(-rng.random())


def _trace(
    gap_s: Callable[[], float], size: Callable[[], int], hours: float, period_s: float, gpus: int, said: str
) -> SpotTrace:
    _check("hours", hours)
    _check("period_s", period_s)
    if not 2 * GPUS_PER_MACHINE <= gpus <= MAX_GPUS or gpus % GPUS_PER_MACHINE:
        raise ConfigError(
            f"gpus {gpus}; allowed: multiples of {GPUS_PER_MACHINE} from {2 * GPUS_PER_MACHINE} to {MAX_GPUS}"
        )
    samples = int(hours * _HOUR_S / period_s) + 1
    if not 2 <= samples <= MAX_SAMPLES:
        raise ConfigError(f"{hours} hours with period_s {period_s} are {samples} samples; allowed: 2 to {MAX_SAMPLES}")
    machines = [0] * samples
    for time_s in _times(gap_s, (samples - 1) * period_s):
        machines[math.ceil(time_s / period_s)] += size()
    return SpotTrace(period_s, tuple(_counts(machines, gpus)), (f"made by `lastgood trace make`: {said}",))


def _times(gap_s: Callable[[], float], end_s: float) -> Iterator[float]:
    now_s, failures = gap_s(), 0
    while now_s <= end_s:
        failures += 1
        if failures > MAX_SAMPLES:
            raise ConfigError(f"more than {MAX_SAMPLES} failures in {end_s:.0f} s; take fewer hours or longer gaps")
        yield now_s
        now_s += gap_s()


def _counts(machines: list[int], gpus: int) -> Iterator[int]:
    """GPUs at each sample: machines leave a full cluster and come back to one that is not; either is an event."""
    now = gpus
    for number, moved in enumerate(machines):
        change = moved * GPUS_PER_MACHINE
        if change and now < gpus and now + change <= gpus:
            now += change
        elif change <= now:
            now -= change
        else:
            raise ConfigError(
                f"{moved} failures at once in sample {number} of a cluster of {gpus} GPUs; "
                "take a shorter period_s, more gpus or fewer failures"
            )
        yield now


def _check(name: str, value: float, *, least: float = 0.0, most: float = 1e6) -> None:
    if not (math.isfinite(value) and least <= value <= most and value > 0):
        raise ConfigError(f"{name} {value!r}; allowed: {f'from {least}' if least else 'above 0'}, at most {most:g}")
