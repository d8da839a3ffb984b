"""The controller and a model of the engine, driven by a bandwidth trace: no network, no clock, the same for one seed.

The model is the one that the controller assumes, `Problem.iteration_s`, with three differences: links change as the
trace says, also within an exchange; computing times vary by chance; and the controller sees reports only.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field

from lastgood.errors import ConfigError
from lastgood.models import FrozenModel
from lastgood.sparse.control.controller import MAX_WORKERS, Controller, ControllerSettings, InForce, Report, Setting
from lastgood.sparse.control.objective import GridSurface, LossSurface, Problem, Worker, apportion, level
from lastgood.sparse.control.profile import read_profile
from lastgood.text import parse_csv, parse_json, parse_model, parse_number, read_bytes

__all__ = ["ASSUMED_SURFACE", "FIXED_COMPRESSIONS", "Outcome", "Plant", "Trace", "read_surface", "read_trace", "replay"]

FIXED_COMPRESSIONS = (0.0, 0.5, 0.9, 0.95, 0.99, 0.995, 0.999)
ASSUMED_SURFACE = GridSurface(
    (16.0, 64.0, 256.0, 1024.0),
    (0.0, 0.9, 0.99, 0.999),
    ((0.0, 0.004, 0.02, 0.08), (0.0, 0.005, 0.024, 0.09), (0.01, 0.016, 0.04, 0.11), (0.03, 0.04, 0.07, 0.16)),
)
"""g for a simulation, with the shape that is usual; not measured."""
_MOST_ROWS = 100_000
_MOST_BYTES = 16 << 20
_MOST_ITERATIONS = 200_000
_LAST_S = 60.0


@dataclass(frozen=True)
class Trace:
    """The rate of each node's link, constant between the given seconds; `length_s` is its end."""

    seconds: tuple[tuple[float, ...], ...]
    """Of each node, ascending, the first one 0."""
    bits_per_s: tuple[tuple[float, ...], ...]
    length_s: float

    def slowest(self, second: float) -> tuple[float, float]:
        """The rate of the slowest link at a time, and until when no link changes."""
        rate, until = math.inf, math.inf
        for seconds, rates in zip(self.seconds, self.bits_per_s, strict=True):
            place = bisect.bisect_right(seconds, second)
            rate = min(rate, rates[place - 1])
            if place < len(seconds):
                until = min(until, seconds[place])
        return rate, until

    def sent_at(self, begin_s: float, bits: float) -> float:
        """When an exchange is done that begins at `begin_s` and brings so many bits over each link."""
        now = begin_s
        while bits > 0:
            rate, until = self.slowest(now)
            if bits <= (until - now) * rate:
                return now + bits / rate
            bits -= (until - now) * rate
            now = until
        return now


def read_trace(path: Path, nodes: int) -> Trace:
    """A CSV of columns `second` and `mbit_per_s`, and `node` (0 to nodes - 1; empty: all of them), if links differ.

    Raises ConfigError, naming file and line.
    """
    if not 1 <= nodes <= MAX_WORKERS:
        raise ConfigError(f"{nodes} nodes: a replay is of 1 to {MAX_WORKERS}")
    content = read_bytes(path, _MOST_BYTES)
    rows = parse_csv(
        content, str(path), ("second", "mbit_per_s"), most_bytes=_MOST_BYTES, most_rows=_MOST_ROWS, error=ConfigError
    )
    links: list[list[tuple[float, float]]] = [[] for _ in range(nodes)]
    for line, row in rows:
        where = f"{path}: line {line}"
        try:
            second = parse_number(row["second"], least=0, most=1e7)
            rate = parse_number(row["mbit_per_s"], least=1e-3, most=1e7)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
        node = row.get("node", "")
        if node and not (node.isdigit() and len(node) < 4 and int(node) < nodes):
            raise ConfigError(f"{where}: node {node[:20]!r} is none of 0 to {nodes - 1}")
        for number in [int(node)] if node else range(nodes):
            if links[number] and links[number][-1][0] >= second:
                raise ConfigError(f"{where}: {second:g} s does not come after {links[number][-1][0]:g} s")
            links[number].append((second, rate * 1e6))
    for number, link in enumerate(links):
        if not link or link[0][0] != 0:
            raise ConfigError(f"{path}: the link of node {number} has no rate at second 0")
    marks = sorted({second for link in links for second, _ in link})
    last_s = marks[-1] - marks[-2] if len(marks) > 1 else _LAST_S
    seconds = tuple(tuple(second for second, _ in link) for link in links)
    return Trace(seconds, tuple(tuple(rate for _, rate in link) for link in links), marks[-1] + last_s)


class _Surface(FrozenModel):
    samples: tuple[float, ...] = Field(min_length=1, max_length=1000)
    compressions: tuple[float, ...] = Field(min_length=1, max_length=1000)
    lags: tuple[tuple[float, ...], ...] = Field(min_length=1, max_length=1000)


def read_surface(path: Path) -> GridSurface:
    """A JSON file of `samples`, `compressions` and `lags` (a row for each of `samples`), or a profile.

    Raises ConfigError.
    """
    content = read_bytes(path, _MOST_BYTES)
    held = parse_json(content, str(path), most_bytes=_MOST_BYTES, error=ConfigError)
    try:
        if isinstance(held, dict) and "profile_version" in held:
            surface = read_profile(path).surface
            if surface is None:
                raise ConfigError("the profile has too few probes for a surface so far")
            return surface.grid()
        found = parse_model(_Surface, content, "no surface", most_bytes=_MOST_BYTES)
        return GridSurface(found.samples, found.compressions, found.lags)
    except ConfigError as error:
        raise ConfigError(str(error) if str(path) in str(error) else f"{path}: {error}") from error


@dataclass(frozen=True)
class Plant:
    """What the workers really are, which the controller must find out."""

    alpha_s: tuple[float, ...]
    beta_s: tuple[float, ...]
    noise: float = 0.05
    """Relative spread of computing times."""


@dataclass
class Outcome:
    """One run through the trace. `useful_samples` counts what they are worth, by the loss's lag."""

    name: str
    iterations: int = 0
    seconds: float = 0.0
    samples: int = 0
    useful_samples: float = 0.0
    waited_s: float = 0.0
    settings: list[Setting] = field(default_factory=list)

    @property
    def useful_per_s(self) -> float:
        """Samples per second, each at its worth."""
        return self.useful_samples / self.seconds if self.seconds else 0.0


def replay(
    trace: Trace, plant: Plant, settings: ControllerSettings, surface: LossSurface, *, every: int = 10, seed: int = 0
) -> tuple[Outcome, list[Outcome]]:
    """The controller's run, and those of the fixed settings, best first.

    `every`: iterations between two decisions, unless one is urgent. Fixed settings are those of
    `FIXED_COMPRESSIONS`, each with equal batches and with batches that the workers compute equally long.
    """
    if every < 1:
        raise ConfigError(f"a decision every {every} iterations: at least 1")
    workers = len(plant.alpha_s)
    equal = [settings.samples // workers + (number < settings.samples % workers) for number in range(workers)]
    able = tuple(
        Worker(alpha, beta, 0, settings.samples, 1.0) for alpha, beta in zip(plant.alpha_s, plant.beta_s, strict=True)
    )
    flat = Problem(able, settings.elements, settings.samples, settings.samples)
    fastest = apportion(level(flat, settings.samples), settings.samples, able)
    splits = {"equal": tuple(equal), "level": fastest}
    if splits["equal"] == splits["level"]:
        del splits["level"]
    fixed = []
    for (name, split), compression in itertools.product(splits.items(), FIXED_COMPRESSIONS):
        if settings.least_compression <= compression <= settings.most_compression:
            run = _Run(f"{compression:g}, {name} batches", trace, plant, settings, surface, seed)
            setting = Setting(number=1, from_iteration=0, samples=split, compression=compression)
            fixed.append(run.go(functools.partial(_always, setting)))
    fixed.sort(key=lambda one: -one.useful_per_s)
    begin = Setting(number=1, from_iteration=0, samples=tuple(equal), compression=settings.most_compression)
    return _controlled(begin, trace, plant, settings, surface, every, seed), fixed


def _always(setting: Setting, iteration: int) -> Setting:
    del iteration
    return setting


def _controlled(
    begin: Setting,
    trace: Trace,
    plant: Plant,
    settings: ControllerSettings,
    surface: LossSurface,
    every: int,
    seed: int,
) -> Outcome:
    controller = Controller(settings, len(plant.alpha_s), surface)
    # It begins with the most compression, as nothing is known of the links; the controller's first number is above it.
    side = InForce(len(plant.alpha_s), begin)
    run = _Run("controller", trace, plant, settings, surface, seed)
    run.outcome.settings.append(begin)

    def choose(iteration: int) -> Setting:
        for report in run.reports:
            controller.observe(report)
        if iteration and (iteration % every == 0 or controller.urgent) and (found := controller.decide()) is not None:
            side.offer(found)
        side.agree(iteration, [side.shown(iteration)])
        assert side.current is not None
        if side.current.number != run.outcome.settings[-1].number:
            run.outcome.settings.append(side.current)
        return side.current

    return run.go(choose)


class _Run:
    def __init__(
        self,
        name: str,
        trace: Trace,
        plant: Plant,
        settings: ControllerSettings,
        surface: LossSurface,
        seed: int,
    ) -> None:
        self.outcome = Outcome(name)
        self.reports: list[Report] = []
        self._trace, self._plant, self._settings, self._surface = trace, plant, settings, surface
        self._chance = random.Random(seed)

    def go(self, choose: Callable[[int], Setting]) -> Outcome:
        now, outcome = 0.0, self.outcome
        while now < self._trace.length_s:
            if outcome.iterations == _MOST_ITERATIONS:
                raise ConfigError(f"the trace is longer than {_MOST_ITERATIONS} iterations of these workers")
            setting = choose(outcome.iterations)
            self.reports.clear()
            now = self._iterate(now, setting)
        outcome.seconds = now
        return outcome

    def _iterate(self, now: float, setting: Setting) -> float:
        settings, outcome, nodes = self._settings, self.outcome, len(self._plant.alpha_s)
        computing = [
            max(1e-6, (alpha * own + beta) * (1 + self._chance.gauss(0, self._plant.noise)))
            for alpha, beta, own in zip(self._plant.alpha_s, self._plant.beta_s, setting.samples, strict=True)
        ]
        slowest = max(computing)
        begin = now + slowest * (1 - settings.overlap)
        sent_bytes = (1 - setting.compression) * settings.elements * settings.value_bytes * (nodes - 1) / nodes
        sent = self._trace.sent_at(begin, sent_bytes * 8)
        waited_s = max(0.0, sent - now - slowest)
        end = now + slowest + waited_s
        total = sum(setting.samples)
        lag = self._surface.lag(total, setting.compression)
        outcome.samples += total
        outcome.useful_samples += total / (1 + settings.lambda_ * settings.g_scale * lag)
        outcome.waited_s += waited_s
        self._tell(setting, computing, waited_s, round(sent_bytes), max(0.0, sent - begin))
        outcome.iterations += 1
        return end

    def _tell(
        self, setting: Setting, computing: Sequence[float], waited_s: float, sent_bytes: int, sending_s: float
    ) -> None:
        for worker, (own, seconds) in enumerate(zip(setting.samples, computing, strict=True)):
            if own:
                self.reports.append(
                    Report(
                        worker=worker,
                        iteration=self.outcome.iterations,
                        samples=own,
                        compute_s=seconds,
                        waited_s=waited_s,
                        sent_bytes=sent_bytes,
                        sending_s=sending_s,
                        setting_number=setting.number,
                    )
                )
