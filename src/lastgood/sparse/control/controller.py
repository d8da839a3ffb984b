"""Chooses batch sizes and compression while a training runs, from what its workers report (StellaTrain, section 4).

Pure: no clock, no thread, no connection. `Controller.observe` takes a worker's reports in any order, `decide` says
whether another setting is worth taking. `InForce` is each rank's side: a setting holds from one iteration on for all
ranks or for none, though some never heard of it.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import Field, model_validator

from lastgood.errors import ConfigError
from lastgood.models import FrozenModel
from lastgood.sparse.control.objective import (
    MOST_COMPRESSION,
    Choice,
    LossSurface,
    NoSurface,
    Problem,
    Weighing,
    Worker,
    best_choice,
    fit_times,
    price,
)

__all__ = ["MAX_WORKERS", "Controller", "ControllerSettings", "InForce", "Report", "Setting"]

MAX_WORKERS = 64
_MOST_SAMPLES = 1 << 24
_MOST_S = 86_400.0
_MOST_BYTES = 1 << 50
_NO_WAITING, _MUCH_WAITING = 0.05, 0.25
"""Shares of an iteration."""
_HELD = 64
"""Settings that a rank remembers, and reports of one worker that are fitted."""


class Report(FrozenModel):
    """What one worker tells of one iteration."""

    worker: int = Field(ge=0, lt=MAX_WORKERS)
    iteration: int = Field(ge=0, lt=1 << 48)
    samples: int = Field(ge=1, le=_MOST_SAMPLES)
    compute_s: float = Field(gt=0, le=_MOST_S)
    """Forward and backward pass, and all else that is no waiting."""
    waited_s: float = Field(ge=0, le=_MOST_S)
    """For the exchange, while nothing was computed."""
    sent_bytes: int = Field(ge=0, le=_MOST_BYTES)
    sending_s: float = Field(ge=0, le=_MOST_S)
    """During which there was something to send."""
    setting_number: int = Field(default=0, ge=0, lt=1 << 47)
    """Of the setting that holds; 0 before the first."""
    loss: float | None = None
    memory_bytes: int = Field(default=0, ge=0, le=_MOST_BYTES)
    """Most that this batch took, of the device if there is one; 0 if it was not measured."""
    memory_room_bytes: int = Field(default=0, ge=0, le=_MOST_BYTES)
    """Most that there is; 0 if it is not known."""


class Setting(FrozenModel):
    """Batch sizes and compression, and the first iteration that they hold for."""

    number: int = Field(ge=1, lt=1 << 48)
    from_iteration: int = Field(ge=0, lt=1 << 48)
    samples: tuple[int, ...] = Field(min_length=1, max_length=MAX_WORKERS)
    compression: float = Field(ge=0, lt=1)

    @model_validator(mode="after")
    def _sizes(self) -> Setting:
        if any(not 0 <= own <= _MOST_SAMPLES for own in self.samples) or not sum(self.samples):
            raise ValueError(f"batch sizes {self.samples[:8]}")
        return self


class ControllerSettings(FrozenModel):
    """What a user may set of a controller."""

    elements: int = Field(ge=1, le=1 << 40)
    """Of the gradient."""
    samples: int = Field(ge=1, le=_MOST_SAMPLES)
    """Of all workers' batches together."""
    most_samples: int | None = Field(default=None, ge=1, le=_MOST_SAMPLES)
    """With it the batch may grow up to that from `samples`; without, it keeps its size."""
    least_worker_samples: int = Field(default=1, ge=0, le=_MOST_SAMPLES)
    value_bytes: float = Field(default=4.4, gt=0, le=64)
    overlap: float = Field(default=1.0, ge=0, le=1)
    least_compression: float = Field(default=0.0, ge=0, le=MOST_COMPRESSION)
    most_compression: float = Field(default=MOST_COMPRESSION, ge=0, lt=1)
    lambda_: float = Field(default=5.0, ge=0, lt=1e6)
    g_scale: float = Field(default=1.0, ge=0, lt=1e6)
    ahead_iterations: int = Field(default=1, ge=1, le=1000)
    """A new setting holds from so many iterations after the newest one reported; what has not reached all ranks by
    then holds later, for all of them."""
    least_gain: float = Field(default=0.02, ge=0, le=1)
    """Of the cost, below which the present setting stays."""
    memory_share: float = Field(default=0.9, gt=0, le=1)
    """Of a worker's memory that a batch may be expected to take."""
    growth: float = Field(default=1.25, gt=1, le=4)
    """A worker's batch may grow by so much beyond the largest that it has computed, until memory is fitted."""
    first_bits_per_s: float = Field(default=100e6, gt=0, le=1e13)
    """A link's rate until it is measured."""
    most_bits_per_s: float = Field(default=1e11, gt=0, le=1e13)
    starts: int = Field(default=32, ge=1, le=1000)
    """Of Nelder-Mead, for the first setting."""
    later_starts: int = Field(default=2, ge=1, le=1000)
    seed: int = Field(default=0, ge=0)


class _Known:
    """What is known of one worker."""

    def __init__(self, settings: ControllerSettings) -> None:
        self.times: deque[tuple[int, float]] = deque(maxlen=_HELD)
        self.memory: OrderedDict[int, int] = OrderedDict()
        self.room_bytes = 0
        self.largest = 0
        self.refused: int | None = None
        """The smallest batch that did not fit into memory."""
        self.newest = -1
        self.setting_number = 0
        self.bits_per_s = settings.first_bits_per_s
        self.rates: deque[float] = deque(maxlen=8)
        """Measured lately."""
        self.waiting = 0.0
        """The share of the last iteration."""


class Controller:
    """The setting of a training of `workers` workers. Raises ConfigError for settings that no worker can keep."""

    def __init__(self, settings: ControllerSettings, workers: int, surface: LossSurface | None = None) -> None:
        if not 1 <= workers <= MAX_WORKERS:
            raise ConfigError(f"{workers} workers; a controller is for 1 to {MAX_WORKERS}")
        if settings.most_samples is not None and settings.most_samples < settings.samples:
            raise ConfigError(f"at most {settings.most_samples} samples, and {settings.samples} to begin with")
        if settings.samples < workers * settings.least_worker_samples:
            raise ConfigError(
                f"{settings.samples} samples for {workers} workers of at least {settings.least_worker_samples}"
            )
        if settings.least_compression > settings.most_compression:
            raise ConfigError(
                f"compression from {settings.least_compression} to {settings.most_compression}: nothing lies between"
            )
        self.settings = settings
        self.workers = workers
        self.surface: LossSurface = NoSurface() if surface is None else surface
        self.current: Setting | None = None
        self._known = [_Known(settings) for _ in range(workers)]

    # -- what comes in -------------------------------------------------------------------------------------------------

    def observe(self, report: Report) -> bool:
        """Take a report. False for one that was there already, is older than the last, or of nobody known."""
        if report.worker >= self.workers:
            return False
        known = self._known[report.worker]
        if report.iteration <= known.newest:
            return False
        known.newest = report.iteration
        known.setting_number = report.setting_number
        known.times.append((report.samples, report.compute_s))
        known.largest = max(known.largest, report.samples)
        if known.refused is not None and report.samples >= known.refused:
            known.refused = None  # it fits now
        if report.memory_bytes:
            known.memory[report.samples] = report.memory_bytes
            known.memory.move_to_end(report.samples)
            while len(known.memory) > _HELD:
                known.memory.popitem(last=False)
        if report.memory_room_bytes:
            known.room_bytes = report.memory_room_bytes
        self._learn_rate(known, report)
        return True

    def refuse(self, worker: int, samples: int) -> None:
        """A batch of so many samples did not fit into a worker's memory."""
        if 0 <= worker < self.workers and samples >= 1:
            known = self._known[worker]
            known.refused = samples if known.refused is None else min(samples, known.refused)

    def _learn_rate(self, known: _Known, report: Report) -> None:
        """Nine parts the old estimate, one the measured rate, then a tenth more, while nobody waits for the link.

        So the estimate rises until the link is full, as a little that is sent says nothing of what could be; but never
        by more than a quarter above what was measured lately. Once somebody waits the measured rate is the link's,
        and half of the new estimate: a link that has become slower costs with each iteration.
        """
        known.waiting = report.waited_s / (report.waited_s + report.compute_s)
        if not report.sent_bytes or not report.sending_s:
            return
        measured = report.sent_bytes * 8 / report.sending_s
        known.rates.append(measured)
        if known.waiting < _NO_WAITING:
            risen = (0.9 * known.bits_per_s + 0.1 * measured) * 1.1
            known.bits_per_s = min(risen, 1.25 * max(known.rates))
        else:
            known.bits_per_s = 0.5 * min(known.bits_per_s, 2 * measured) + 0.5 * measured
            known.rates.clear()
        known.bits_per_s = min(max(known.bits_per_s, 1e3), self.settings.most_bits_per_s)

    # -- what is known -------------------------------------------------------------------------------------------------

    @property
    def newest_iteration(self) -> int:
        """That any worker reported; -1 before."""
        return max(known.newest for known in self._known)

    @property
    def urgent(self) -> bool:
        """Whether the last iterations waited so long for a link that a decision should not wait."""
        return any(known.waiting > _MUCH_WAITING for known in self._known)

    def silent(self) -> list[int]:
        """Workers that have reported nothing yet."""
        return [number for number, known in enumerate(self._known) if known.newest < 0]

    def bits_per_s(self, worker: int) -> float:
        """The estimate of a worker's link."""
        return self._known[worker].bits_per_s

    def most_samples(self, worker: int) -> int:
        """That a worker's memory takes, as far as it is measured: never a table of devices."""
        known, settings = self._known[worker], self.settings
        begun = max(known.largest, self._equal()[worker])
        most = max(begun + 1, math.floor(begun * settings.growth))
        if len(known.memory) > 1 and known.room_bytes:
            alpha, beta = fit_times((samples, float(used)) for samples, used in known.memory.items())
            room = known.room_bytes * settings.memory_share - beta
            fitted = _MOST_SAMPLES if alpha <= 0 else math.floor(max(0.0, room) / alpha)
            # What has fitted, fits; beyond twice that a fit of small batches says too little.
            most = max(known.largest, min(fitted, 2 * begun))
        if known.refused is not None:
            most = min(most, known.refused - 1)
        return max(settings.least_worker_samples, min(most, _MOST_SAMPLES))

    def _equal(self) -> list[int]:
        whole, rest = divmod(self.settings.samples, self.workers)
        return [whole + (number < rest) for number in range(self.workers)]

    def problem(self) -> Problem:
        """What there is to choose now. Raises ConfigError if the batch fits into the workers' memory no more."""
        settings = self.settings
        workers = []
        for number, known in enumerate(self._known):
            alpha, beta = fit_times(known.times)
            most = self.most_samples(number)
            least = min(settings.least_worker_samples, most)
            workers.append(Worker(alpha, beta, least, most, known.bits_per_s))
        room = sum(one.most_samples for one in workers)
        if room < settings.samples:
            raise ConfigError(
                f"a batch of {settings.samples} samples does not fit: the workers' memory takes {room} together "
                f"({', '.join(str(one.most_samples) for one in workers)})"
            )
        return Problem(
            tuple(workers),
            settings.elements,
            settings.samples,
            min(room, settings.most_samples or settings.samples),
            value_bytes=settings.value_bytes,
            overlap=settings.overlap,
            least_compression=settings.least_compression,
            most_compression=settings.most_compression,
            weighing=Weighing(settings.lambda_, settings.g_scale),
            surface=self.surface,
        )

    # -- what goes out -------------------------------------------------------------------------------------------------

    def decide(self) -> Setting | None:
        """A new setting, if every worker has reported and it is clearly better than the present one; else None.

        It holds from `ahead_iterations` after the newest iteration reported.
        """
        if self.silent():
            return None
        problem = self.problem()
        present = self.current
        starts = self.settings.starts if present is None else self.settings.later_starts
        before = None if present is None else present.samples
        seed = self.settings.seed + (0 if present is None else present.number)
        best = best_choice(problem, starts=starts, seed=seed, before=before)
        if present is not None and not self._is_worth(problem, present, best):
            return None
        # Above those of a controller before this one, whose settings the ranks still have.
        numbers = [known.setting_number for known in self._known]
        self.current = Setting(
            number=1 + max(numbers if present is None else [present.number, *numbers]),
            from_iteration=self.newest_iteration + self.settings.ahead_iterations,
            samples=best.samples,
            compression=min(max(round(best.compression, 6), 0.0), MOST_COMPRESSION),
        )
        return self.current

    def _is_worth(self, problem: Problem, present: Setting, best: Choice) -> bool:
        limits = zip(problem.workers, present.samples, strict=True)
        if not all(one.least_samples <= own <= one.most_samples for one, own in limits):
            return True
        return best.cost < price(problem, present.samples, present.compression) * (1 - self.settings.least_gain)

    # -- the state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a restart."""
        return {
            "current": None if self.current is None else self.current.model_dump(),
            "workers": [
                {
                    "times": [[samples, seconds] for samples, seconds in known.times],
                    "memory": [[samples, used] for samples, used in known.memory.items()],
                    "room_bytes": known.room_bytes,
                    "largest": known.largest,
                    "refused": known.refused,
                    "newest": known.newest,
                    "bits_per_s": known.bits_per_s,
                    "rates": list(known.rates),
                }
                for known in self._known
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. Raises ConfigError for a state of another number of workers."""
        if len(state["workers"]) != self.workers:
            raise ConfigError(f"a controller's state of {len(state['workers'])} workers, and these are {self.workers}")
        self.current = None if state["current"] is None else Setting.model_validate(state["current"])
        for known, held in zip(self._known, state["workers"], strict=True):
            known.times = deque(((int(s), float(t)) for s, t in held["times"]), maxlen=_HELD)
            known.memory = OrderedDict((int(s), int(used)) for s, used in held["memory"])
            known.room_bytes, known.largest = int(held["room_bytes"]), int(held["largest"])
            known.refused = None if held["refused"] is None else int(held["refused"])
            known.rates = deque((float(rate) for rate in held["rates"]), maxlen=8)
            known.newest, known.bits_per_s = int(held["newest"]), float(held["bits_per_s"])


class InForce:
    """One rank's side: which setting holds. All ranks that see the same `agree` calls have the same one.

    Each rank `offer`s itself what it hears, which may be late, or never come. In an iteration that all ranks know as
    one of agreement, each shows the numbers that it holds (`shown`), all see what all showed, and `agree` takes the
    newest that every rank holds, from that iteration on.
    """

    def __init__(self, workers: int, first: Setting | None = None) -> None:
        self.workers = workers
        self.current = first
        """None: as the training was begun."""
        self._offered: OrderedDict[int, Setting] = OrderedDict()

    def offer(self, setting: Setting) -> bool:
        """Take a setting that was heard of. False for one that is no newer than what holds, or of other workers."""
        held = 0 if self.current is None else self.current.number
        if len(setting.samples) != self.workers or setting.number <= held:
            return False
        self._offered.setdefault(setting.number, setting)
        while len(self._offered) > _HELD:
            del self._offered[min(self._offered)]
        return True

    def shown(self, iteration: int) -> list[str]:
        """Marks of the settings that this rank could take in this iteration: number and content."""
        ready = (one for _, one in sorted(self._offered.items()) if one.from_iteration <= iteration)
        return [_mark(one) for one in ready]

    def agree(self, iteration: int, shown: Iterable[Sequence[str]]) -> Setting | None:
        """What holds from this iteration on; `shown` is what every rank showed for it, this one included."""
        common = set.intersection(*(set(one) for one in shown))
        taken = [one for one in self._offered.values() if one.from_iteration <= iteration and _mark(one) in common]
        if len(taken) != len(common):
            raise ConfigError(f"settings {sorted(common)} are said to be this rank's too, and are not")
        if taken:
            self.current = max(taken, key=lambda one: one.number)
            for number in [one for one in self._offered if one <= self.current.number]:
                del self._offered[number]
        return self.current


def _mark(setting: Setting) -> str:
    """A controller that was started again may give a number twice: then no rank takes one for the other."""
    return f"{setting.number}.{hashlib.sha256(setting.model_dump_json().encode()).hexdigest()[:16]}"
