"""Which interval keeps the overhead of checkpoints under a budget: CheckFreq's policy (Mohan et al., FAST'21).

Section 4.3 of the paper, "Checkpointing policy". A profile of the first iterations gives the interval (Algorithm 1):
long enough that a checkpoint is durable before the next one begins, and that what it costs training, spread over the
iterations of an interval, stays under the budget. Then the costs that were really seen, interference included, make it
longer or shorter ("adaptive rate tuning").

Nothing here measures: everything is computed from durations that a caller gives. All times are seconds.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from lastgood.errors import ConfigError

__all__ = ["DEFAULT_BUDGET", "PROFILE_WINDOWS", "Change", "IntervalTuner", "Profile", "Window", "choose_interval"]

DEFAULT_BUDGET = 0.035
"""The paper's overhead: 3.5 % of the time that training takes without checkpoints."""
PROFILE_WINDOWS = 3
"""Checkpoints that a profile is made of; one more before them is not counted, for it makes buffers and files."""
_LONGEST = 1_000_000
"""Iterations; no measurement leads to more."""

_PLAIN_KEPT = 64
_WINDOWS_KEPT = 16
_QUICK_WINDOWS = 3
_QUICK_EXCESS = 1.25
"""A budget exceeded so far, as the median of the last three windows, is acted on at once; less, as the mean of 16."""
_STEP = 1.05
"""Longer is longer by so much at least: if noise exceeds the budget, few changes find an interval that keeps it."""
_GROWTH = 4
"""No single change makes an interval longer than so many times: three windows can all be bad ones."""
_WORTH = 0.8
"""A shorter interval must be at most so much of the one there is."""
_PATIENCE = 3
_PATIENCE_MOST = 256
_CHANGES_KEPT = 100


@dataclass(frozen=True)
class Profile:
    """What a training and its checkpoints take."""

    iteration_s: float
    """One iteration without a checkpoint in progress."""
    room_s: float
    """Of it, the time in which weights stay unchanged: what a snapshot can hide behind."""
    snapshot_s: float
    """From a save to the moment when the last byte has left the live tensors."""
    persist_s: float
    """From there to durability."""
    cost_s: float | None = None
    """What one checkpoint was seen to cost training, stalls and interference; None: `stall_s`, the paper's estimate."""

    @property
    def stall_s(self) -> float:
        """The part of a snapshot that does not fit into its room, for which the update waits."""
        return max(0.0, self.snapshot_s - self.room_s)

    def overhead(self, interval: int) -> float:
        """The expected slowdown with a checkpoint every `interval` iterations; 0.035 for 3.5 %."""
        seen = self.stall_s if self.cost_s is None else max(0.0, self.cost_s)
        waits = max(0.0, self.snapshot_s + self.persist_s - interval * self.iteration_s)
        return (seen + waits) / (interval * self.iteration_s)


def choose_interval(profile: Profile, budget: float) -> int:
    """The shortest interval, in iterations, of which checkpoints do not overlap and cost at most `budget`.

    FAST'21, Algorithm 1, for a snapshot in host memory. Raises ConfigError for a budget that is not above 0, and for
    an iteration that takes no time.
    """
    if not budget > 0:
        raise ConfigError(f"checkfreq: overhead_budget must be above 0, not {budget}")
    if not profile.iteration_s > 0:
        raise ConfigError(f"checkfreq: an iteration of {profile.iteration_s} s cannot be; time at least one iteration")
    cost_s = profile.stall_s if profile.cost_s is None else profile.cost_s
    apart = (profile.snapshot_s + profile.persist_s) / profile.iteration_s
    spread = cost_s / (budget * profile.iteration_s)
    longer = max(1.0, apart, spread)
    # The quotients are rounded up, but not for a rounding error of the division.
    return min(_LONGEST, math.ceil(longer * (1 - 1e-12)))


@dataclass(frozen=True)
class Window:
    """One checkpoint, and the iterations from its save to the next one."""

    step: int
    """Of the checkpoint."""
    affected_s: tuple[float, ...]
    """Durations of the iterations in which it was in progress; the first one holds its save."""
    plain_s: tuple[float, ...]
    """Durations of the others."""
    snapshot_s: float
    persist_s: float
    waited_s: float = 0.0
    """Time in its save() for the checkpoint before it to end; part of the first of `affected_s`."""

    @property
    def iterations(self) -> int:
        """How many iterations lie in it."""
        return len(self.affected_s) + len(self.plain_s)

    def cost_s(self, iteration_s: float) -> float:
        """What the checkpoint cost beyond iterations of `iteration_s`, without the wait for the one before it."""
        return sum(self.affected_s) - len(self.affected_s) * iteration_s - self.waited_s

    def overhead(self, iteration_s: float) -> float:
        """The slowdown that it was, that wait included."""
        return (self.cost_s(iteration_s) + self.waited_s) / (self.iterations * iteration_s)


@dataclass(frozen=True)
class Change:
    """One decision."""

    step: int
    """Of the checkpoint that led to it."""
    interval: int
    why: str
    profile: Profile
    """What it was computed from."""


@dataclass
class IntervalTuner:
    """Chooses an interval from the first windows, and changes it by what later ones cost.

    Longer, when the overhead seen exceeds the budget: at once if it is 1.25 times as much, after 16 windows if it
    is less. Shorter, when the windows since the last change need an interval of at most 0.8 times the present one, so
    many times in a row as its patience. When a shorter interval exceeds the budget it is taken back, and the patience
    doubles: under noise the changes become rarer and rarer, up to a cap, so that a disk that recovers is found out.
    """

    budget: float = DEFAULT_BUDGET
    interval: int | None = None
    """Iterations between checkpoints; None until the profile is complete."""
    changes: list[Change] = field(default_factory=list)
    """The newest hundred; the first one is the profile's choice."""
    room_s: float = 0.0
    """Kept up to date by the caller; see `Profile`."""

    def __post_init__(self) -> None:
        if not self.budget > 0:
            raise ConfigError(f"checkfreq: overhead_budget must be above 0, not {self.budget}")
        self._plain: deque[float] = deque(maxlen=_PLAIN_KEPT)
        self._windows: deque[Window] = deque(maxlen=_WINDOWS_KEPT)
        self._patience = _PATIENCE
        self._lower_in_a_row = 0
        self._taken_from: int | None = None
        """The interval before, if the last change was to a shorter one."""
        self._warm = False

    def plain_iterations(self, durations_s: tuple[float, ...]) -> None:
        """Iterations without any checkpoint in progress, before the first one."""
        self._plain.extend(durations_s)

    @property
    def iteration_s(self) -> float | None:
        """Median of the newest plain iterations; None before the first."""
        return statistics.median(self._plain) if self._plain else None

    @property
    def profile(self) -> Profile | None:
        """Medians over the windows since the last change; None before the first one."""
        iteration_s = self.iteration_s
        if not self._windows or iteration_s is None:
            return None
        return Profile(
            iteration_s,
            # Both are medians, of other iterations: on a fast device the part has come out longer than the whole.
            min(self.room_s, iteration_s),
            statistics.median(window.snapshot_s for window in self._windows),
            statistics.median(window.persist_s for window in self._windows),
            max(0.0, statistics.median(window.cost_s(iteration_s) for window in self._windows)),
        )

    @property
    def seen_overhead(self) -> float | None:
        """The slowdown over the windows since the last change, waits included; None before the first one."""
        return self._seen(len(self._windows))

    def observe(self, window: Window) -> None:
        """Take in a whole window, in their order; `interval` may be another one afterwards."""
        self._plain.extend(window.plain_s)
        if not self._warm:
            self._warm = True
            return
        self._windows.append(window)
        profile = self.profile
        if profile is None or not profile.iteration_s > 0:
            return
        if self.interval is None:
            if len(self._windows) >= PROFILE_WINDOWS:
                self._change(window, profile, choose_interval(profile, self.budget), "profiled")
            return
        needed = choose_interval(profile, self.budget)
        if self._exceeded():
            self._lower_in_a_row = 0
            longer = max(math.ceil(_STEP * self.interval), min(needed, _GROWTH * self.interval))
            if self._taken_from is not None:
                self._patience = min(_PATIENCE_MOST, 2 * self._patience)
                longer = max(longer, self._taken_from)
                self._taken_from = None
            why = f"overhead of {self.seen_overhead:.3g} seen, above the budget of {self.budget:g}"
            self._change(window, profile, min(_LONGEST, longer), why)
        elif needed <= _WORTH * self.interval:
            self._lower_in_a_row += 1
            if self._lower_in_a_row >= self._patience:
                self._lower_in_a_row = 0
                self._taken_from = self.interval
                why = f"overhead of {self.seen_overhead:.3g} seen, a shorter interval keeps the budget"
                self._change(window, profile, needed, why)
        else:
            self._lower_in_a_row = 0

    def _exceeded(self) -> bool:
        iteration_s = self.iteration_s
        if iteration_s is None or len(self._windows) < _QUICK_WINDOWS:
            return False
        newest = list(self._windows)[-_QUICK_WINDOWS:]
        if statistics.median(window.overhead(iteration_s) for window in newest) > _QUICK_EXCESS * self.budget:
            return True
        seen = self._seen(_WINDOWS_KEPT)
        return len(self._windows) == _WINDOWS_KEPT and seen is not None and seen > self.budget * (1 + 1e-6)

    def _seen(self, newest: int) -> float | None:
        iteration_s = self.iteration_s
        windows = list(self._windows)[-newest:] if newest else []
        if iteration_s is None or not iteration_s > 0 or not windows:
            return None
        costs = sum(window.cost_s(iteration_s) + window.waited_s for window in windows)
        return costs / (iteration_s * sum(window.iterations for window in windows))

    def _change(self, window: Window, profile: Profile, interval: int, why: str) -> None:
        """From here on only windows of the new interval count: what they cost depends on it."""
        if interval != self.interval:
            self.changes.append(Change(window.step, interval, why, profile))
            del self.changes[:-_CHANGES_KEPT]
        self.interval = interval
        self._windows.clear()
