"""CheckFreq with an overhead budget in a real training: what it chose, from what, and when it saved."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from lastgood.checkpointers.checkfreq.policy import DEFAULT_BUDGET, Profile, choose_interval
from lastgood.checkpointers.checkfreq.system import CheckFreq
from lastgood.checkpointers.events import Outcome
from lastgood.errors import ConfigError
from tests.checkpointers.support.small_training import SmallTraining


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return request.param


@pytest.fixture
def attached():
    """Attaches a small training to CheckFreq with a budget, and closes it at the end of the test."""
    made = []

    def attach(directory, device="cpu", budget=DEFAULT_BUDGET, width=64, seed=0):
        training = SmallTraining(width, seed, device)
        checkpointer = CheckFreq(directory, overhead_budget=budget)
        checkpointer.events_kept = None
        made.append(checkpointer)
        parts = {name: part for name, part in training.state.items() if name != "rng"}
        return training, checkpointer, checkpointer.attach(**parts)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield attach
    torch.set_num_threads(threads)
    for checkpointer in made:
        checkpointer.close()


def train(training, checkpointer, until, most=60_000):
    for _ in range(most):
        training.step()
        time.sleep(0.001)  # or a disk that takes seconds makes an interval of very many steps
        checkpointer.step()
        if until():
            return
    raise AssertionError(f"not within {most} steps: {checkpointer.storage_facts()}")


def interval_of(checkpointer):
    return checkpointer.storage_facts()["interval"]


def test_the_budget_is_kept_by_its_own_account_and_saves_come_at_its_interval(attached, tmp_path, device):
    budget = 0.5
    training, checkpointer, step = attached(tmp_path, device, budget)
    assert step == 0 and interval_of(checkpointer)["interval_steps"] is None
    train(training, checkpointer, lambda: interval_of(checkpointer)["interval_steps"] is not None)
    for change in interval_of(checkpointer)["changes"]:
        inputs = {name: value for name, value in change["inputs"].items() if name != "stall_s"}
        assert all(value >= 0 for value in inputs.values())
        assert 0 < inputs["room_s"] <= inputs["iteration_s"]
        assert change["interval_steps"] == choose_interval(Profile(**inputs), budget)
    assert interval_of(checkpointer)["expected_overhead"] <= budget * (1 + 1e-9)
    # Six more saves: as many steps apart as the interval was, which may have changed meanwhile.
    intervals, saves = [], len(checkpointer.events)
    while len(checkpointer.events) < saves + 6:
        chosen = interval_of(checkpointer)["interval_steps"]
        train(training, checkpointer, lambda: True)
        intervals.append(chosen)
        if len(intervals) > 60_000:
            raise AssertionError("no six saves")
    allowed = {*intervals, *(change["interval_steps"] for change in interval_of(checkpointer)["changes"])}
    steps = [event.step for event in checkpointer.events[saves - 1 :]]
    assert {after - before for before, after in itertools.pairwise(steps)} <= allowed
    checkpointer.drain()
    assert {event.outcome for event in checkpointer.events} == {Outcome.DURABLE}


def test_a_resumed_training_goes_on_and_profiles_anew(attached, tmp_path):
    training, checkpointer, _ = attached(tmp_path, budget=0.5)
    train(training, checkpointer, lambda: len(checkpointer.events) == 2)
    checkpointer.drain()
    saved = checkpointer.latest()
    checkpointer.close()
    again, other, step = attached(tmp_path, budget=0.5, seed=1)
    assert step == saved == again.step_number
    train(again, other, lambda: interval_of(other)["interval_steps"] is not None)


def test_saves_by_hand_and_a_loop_without_attach_need_no_budget(tmp_path):
    training = SmallTraining()
    checkpointer = CheckFreq(tmp_path, overhead_budget=DEFAULT_BUDGET)
    checkpointer.start(training.state)
    try:
        for step in range(1, 40):
            training.step()
            if step % 10 == 0:
                checkpointer.save(step)
        checkpointer.drain()
        assert [event.step for event in checkpointer.events] == [10, 20, 30]
        assert "interval" not in checkpointer.storage_facts()
    finally:
        checkpointer.close()


def test_a_budget_beside_an_interval_and_neither_of_them(tmp_path):
    with pytest.raises(ConfigError, match="leave one out"):
        CheckFreq(tmp_path, overhead_budget=DEFAULT_BUDGET, interval_steps=5)
    with pytest.raises(ConfigError, match="overhead_budget"):
        CheckFreq(tmp_path, overhead_budget=0.0)
    with pytest.raises(ConfigError, match="needs interval_steps"):
        CheckFreq(tmp_path).attach(model=torch.nn.Linear(2, 2))


def test_a_save_tells_its_phases_in_order(attached, tmp_path):
    training, checkpointer, _ = attached(tmp_path)
    training.step()
    checkpointer.save(1)
    checkpointer.drain()
    (event,) = checkpointer.events
    assert [name for name, _, _ in event.phases] == ["wait", "write", "flush", "commit"]
    moments = [moment for _, begin, end in event.phases for moment in (begin, end)]
    assert moments == sorted(moments)
    assert event.requested_s <= moments[0] and moments[-1] <= event.finished_s
