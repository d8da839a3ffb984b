"""CheckFreq's interval: the pure choice, and its tuning in a simulated training whose costs are known."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lastgood.checkpointers.checkfreq.budget import PLAIN_ITERATIONS, WARM_UP_ITERATIONS, BudgetKeeper
from lastgood.checkpointers.checkfreq.policy import PROFILE_WINDOWS, IntervalTuner, Profile, Window, choose_interval
from lastgood.checkpointers.events import CheckpointEvent, Outcome
from lastgood.errors import ConfigError

BUDGET = 0.035


@dataclass
class Simulation:
    """A training with CheckFreq on a clock of its own: known times, one checkpoint under way at a time."""

    iteration_s: float
    room_s: float
    snapshot_s: float
    persist_s: float
    interference: float = 0.0
    """How much longer an iteration takes while a checkpoint is under way."""
    noise: float = 0.0
    budget: float = BUDGET
    seed: int = 0
    now: float = 0.0
    step: int = 0
    failing: bool = False
    saves: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keeper = BudgetKeeper(self.budget, None, lambda: self.now)
        self.random = random.Random(self.seed)
        self.event: CheckpointEvent | None = None
        self.copied_s = self.finished_s = 0.0

    def run(self, iterations: int) -> float:
        """So many iterations; returns the time they took."""
        began = self.now
        for _ in range(iterations):
            self._iteration()
            self.step += 1
            if self.keeper.step_finished():
                self._save()
        return self.now - began

    def overhead(self, iterations: int) -> float:
        """The slowdown over so many iterations, by the clock alone."""
        return self.run(iterations) / (iterations * self.iteration_s) - 1

    @property
    def interval(self) -> int | None:
        return self.keeper.tuner.interval

    def until_chosen(self) -> int:
        for _ in range(400_000):
            self.run(1)
            if self.interval is not None:
                return self.interval
        raise AssertionError("no interval was chosen")

    def _iteration(self) -> None:
        end = self.now
        slow = 1 + self.interference if end < self.finished_s else 1.0
        length = self.iteration_s * slow * math.exp(self.random.gauss(0, self.noise))
        self.now = end + length * self.room_s / self.iteration_s
        self.keeper.update_reached()
        self.now = max(self.now, self.copied_s)  # the update waits for the snapshot
        self.now += length * (1 - self.room_s / self.iteration_s)
        self._finish()

    def _save(self) -> None:
        self.saves.append(self.step)
        event = CheckpointEvent(self.step, self.now)
        self.keeper.save_begun(event)
        self.now = max(self.now, self.finished_s)
        self._finish()
        event.phases.append(("wait", event.requested_s, self.now))
        if self.failing:
            event.outcome = Outcome.FAILED
            return
        self.copied_s = self.now + self.snapshot_s
        self.finished_s = self.copied_s + self.persist_s * math.exp(self.random.gauss(0, self.noise))
        self.event = event

    def _finish(self) -> None:
        if self.event is not None and self.now >= self.finished_s:
            self.event.copied_s, self.event.finished_s = self.copied_s, self.finished_s
            self.event.outcome = Outcome.DURABLE
            self.event = None


def simulated_overhead(parts: dict[str, float], interval: int) -> float:
    """What a training with a fixed interval costs, simulated: an oracle beside the formula."""
    told = Simulation(**parts)
    told.keeper.step_finished = lambda: told.step % interval == 0  # type: ignore[method-assign]
    told.run(2 * interval)
    return told.overhead(20 * interval)


def apart(saves: list[int]) -> list[int]:
    return [after - before for before, after in itertools.pairwise(saves)]


times = st.fixed_dictionaries(
    {
        "iteration_s": st.floats(0.01, 2),
        "room_s": st.floats(0.0, 1.0),
        "snapshot_s": st.floats(0.001, 3),
        "persist_s": st.floats(0.001, 10),
    }
).map(lambda parts: {**parts, "room_s": parts["room_s"] * parts["iteration_s"]})


@given(times, st.floats(0.005, 0.5))
@example({"iteration_s": 0.1, "room_s": 0.08, "snapshot_s": 0.05, "persist_s": 1.0}, BUDGET)
def test_the_choice_is_the_shortest_interval_that_keeps_the_budget(parts, budget):
    profile = Profile(**parts)
    interval = choose_interval(profile, budget)
    assert profile.overhead(interval) <= budget * (1 + 1e-9)
    assert interval * profile.iteration_s >= (profile.snapshot_s + profile.persist_s) * (1 - 1e-9)
    if interval > 1:
        shorter = interval - 1
        overlap = profile.snapshot_s + profile.persist_s > shorter * profile.iteration_s
        assert overlap or profile.overhead(shorter) > budget


def test_the_choice_by_hand():
    # 1.05 s of checkpoint in iterations of 0.1 s: eleven. The snapshot hides in its room, so nothing else binds.
    assert choose_interval(Profile(0.1, 0.08, 0.05, 1.0), BUDGET) == 11
    # 70 ms of stall may be 3.5 % of the interval: 2 s, twenty iterations.
    assert choose_interval(Profile(0.1, 0.08, 0.15, 1.0), BUDGET) == 20
    # Interference that was seen counts instead of the stall: 140 ms, forty iterations.
    assert choose_interval(Profile(0.1, 0.08, 0.15, 1.0, cost_s=0.14), BUDGET) == 40
    assert choose_interval(Profile(0.1, 0.1, 0.0, 0.0), BUDGET) == 1


@pytest.mark.parametrize("budget", [0.0, -0.1, math.nan])
def test_a_budget_that_is_none_is_refused(budget):
    with pytest.raises(ConfigError, match="overhead_budget"):
        choose_interval(Profile(0.1, 0.1, 0.1, 0.1), budget)
    with pytest.raises(ConfigError, match="overhead_budget"):
        IntervalTuner(budget)


def test_an_iteration_without_time_is_refused():
    with pytest.raises(ConfigError, match=r"iteration of 0\.0 s"):
        choose_interval(Profile(0.0, 0.0, 0.1, 0.1), BUDGET)


@settings(deadline=None, max_examples=15)
@given(times, st.floats(0.0, 0.3))
@example({"iteration_s": 0.1, "room_s": 0.08, "snapshot_s": 0.05, "persist_s": 1.0}, 0.0)
@example({"iteration_s": 0.1, "room_s": 0.05, "snapshot_s": 0.15, "persist_s": 1.0}, 0.2)
def test_a_simulated_training_gets_the_shortest_interval_that_keeps_its_budget(parts, interference):
    parts = {**parts, "interference": interference}
    simulation = Simulation(**parts)
    interval = simulation.until_chosen()
    # Its own clock is the oracle: the slowdown of the iterations that followed, whole intervals of them.
    simulation.run(interval)
    assert simulation.overhead(10 * interval) <= BUDGET * 1.001
    # Shorter by one step of the grid (one iteration, plus one for checkpoints that end within one): too much.
    shorter = interval - 2
    if shorter >= 1:
        checkpoint_s = parts["snapshot_s"] + parts["persist_s"]
        overlap = checkpoint_s > shorter * parts["iteration_s"]
        assert overlap or simulated_overhead(parts, shorter) > BUDGET
    assert len(simulation.keeper.tuner.changes) == 1


def test_saves_come_at_the_chosen_interval_and_not_while_profiling():
    simulation = Simulation(0.1, 0.08, 0.15, 1.0)
    interval = simulation.until_chosen()
    profiled = len(simulation.saves)
    assert simulation.saves[0] == 1 + WARM_UP_ITERATIONS + PLAIN_ITERATIONS
    # The first warms up, three are the profile, and the save behind them ends the last one's window.
    assert profiled == 1 + PROFILE_WINDOWS + 1
    simulation.run(10 * interval)
    assert apart(simulation.saves[profiled - 1 :]) == [interval] * 10


def test_a_disk_three_times_slower_and_its_recovery():
    simulation = Simulation(0.1, 0.08, 0.05, 1.0, interference=0.02)
    first = simulation.until_chosen()
    for _ in range(3):
        simulation.persist_s = 3.0
        simulation.run(60 * first)
        slow = simulation.interval
        assert slow is not None and math.ceil(3.05 / 0.1) <= slow <= 1.25 * math.ceil(3.05 / 0.1) + 1
        assert simulation.overhead(10 * slow) <= BUDGET
        # Saves that had to wait for the one before them cost much, and no longer interval would be needed for that.
        assert max(change.interval for change in simulation.keeper.tuner.changes) <= 1.25 * math.ceil(3.05 / 0.1) + 1
        simulation.persist_s = 1.0
        simulation.run(40 * slow)
        assert simulation.interval is not None and simulation.interval <= 1.25 * first
        assert simulation.overhead(10 * simulation.interval) <= BUDGET
    assert [change.interval > first for change in simulation.keeper.tuner.changes].count(True) >= 3


def test_a_training_that_becomes_slower_by_itself_is_no_overhead():
    simulation = Simulation(0.1, 0.05, 0.15, 0.3)
    first = simulation.until_chosen()
    simulation.iteration_s, simulation.room_s = 0.3, 0.25
    simulation.run(60 * first)
    assert simulation.interval is not None and simulation.interval <= first


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
@pytest.mark.parametrize("noise", [0.05, 0.3])
@pytest.mark.parametrize("persist_s", [0.3, 3.0])
def test_noise_does_not_make_it_oscillate_for_ever(seed, noise, persist_s):
    simulation = Simulation(0.1, 0.05, 0.15, persist_s, interference=0.05, noise=noise, seed=seed)
    simulation.until_chosen()

    def changes_in(saves):
        before, until = len(simulation.keeper.tuner.changes), len(simulation.saves) + saves
        while len(simulation.saves) < until:
            simulation.run(50)
        return len(simulation.keeper.tuner.changes) - before

    early, late = changes_in(500), changes_in(1000)
    assert early <= 40
    assert late <= 12, simulation.keeper.tuner.changes[-late:]


def test_patience_grows_when_a_shorter_interval_had_to_be_taken_back():
    tuner = IntervalTuner(BUDGET)
    tuner.plain_iterations((1.0,) * 20)

    def windows_until_shorter():
        before = tuner.interval
        for number in range(1, 1000):
            feed(tuner, cost_s=0.1)
            if tuner.interval < before:
                return number
        raise AssertionError("never shorter")

    for _ in range(1 + PROFILE_WINDOWS):
        feed(tuner, cost_s=0.1)
    waits = []
    for _ in range(5):
        while tuner.interval < 10:
            feed(tuner, cost_s=1.0)
        waits.append(windows_until_shorter())
    assert waits == sorted(waits) and waits[-1] >= 8 * waits[0]


def feed(tuner, cost_s):
    plain = (1.0,) * max(1, (tuner.interval or 3) - 1)
    tuner.observe(Window(0, (1.0 + cost_s,), plain, snapshot_s=0.5, persist_s=0.5))


def test_the_room_for_a_snapshot_is_never_longer_than_an_iteration():
    tuner = IntervalTuner(BUDGET)
    tuner.plain_iterations((1.0,) * 20)
    tuner.room_s = 1.3  # a median of other iterations than that of all: seen on a GPU
    for _ in range(2):  # the first one warms up
        feed(tuner, cost_s=0.1)
    assert tuner.profile is not None and tuner.profile.room_s == tuner.profile.iteration_s == 1.0


def test_no_single_change_is_longer_than_fourfold():
    tuner = IntervalTuner(BUDGET)
    tuner.plain_iterations((1.0,) * 20)
    for _ in range(1 + PROFILE_WINDOWS):
        feed(tuner, cost_s=0.1)
    before = tuner.interval
    for _ in range(3):
        feed(tuner, cost_s=1e6)
    assert tuner.interval == 4 * before


def test_saves_that_fail_are_no_measurements_and_come_less_and_less_often():
    simulation = Simulation(0.1, 0.08, 0.15, 1.0)
    simulation.failing = True
    simulation.run(5000)
    assert simulation.interval is None
    gaps = apart(simulation.saves)
    assert gaps[0] < 10 and gaps[-1] >= 1000 and gaps == sorted(gaps)
    simulation.failing = False
    assert simulation.until_chosen() == 20
    simulation.failing = True
    simulation.run(200)
    assert simulation.interval == 20
