"""Which task may run when: every order of events that a training can bring."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.sparse.schedule import Schedule, Task


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 5), st.sampled_from([(0, False), (1, False), (1, True)]), st.integers(1, 7))
def test_every_layer_is_applied_once_in_order_and_in_time(data, layers, kind, iterations):
    staleness, partial = kind
    schedule = Schedule(layers, staleness, partial=partial)
    applied = []
    for iteration in range(iterations):
        assert schedule.iteration == iteration
        assert schedule.idle
        before = set(applied)
        # The forward pass sees all updates but those of the last `staleness` iterations.
        assert {task for i in range(iteration - staleness) for task in tasks(i, layers)} <= before
        for layer in data.draw(st.permutations(range(layers))):
            assert layer in schedule.missing()
            assert schedule.begin(layer) == Task(iteration, layer)
        assert not schedule.missing()
        due = schedule.due()
        assert due == sorted(due)
        for task in due:
            assert task.iteration <= iteration - staleness
            schedule.apply(task)
            applied.append(task)
        arrived = {task for task in tasks(iteration, layers) if data.draw(st.booleans())}
        early = schedule.early(arrived)
        assert early == (sorted(arrived) if partial else [])
        for task in early:
            schedule.apply(task)
            applied.append(task)
        schedule.end()
        flying = schedule.in_flight()
        assert sorted(applied + flying) == [task for i in range(iteration + 1) for task in tasks(i, layers)]
        assert all(task.iteration > iteration - staleness for task in flying)
        if data.draw(st.booleans()):  # a restart
            resumed = Schedule(layers, staleness, partial=partial)
            resumed.restore(schedule.iteration, flying)
            schedule = resumed
        elif data.draw(st.integers(0, 3)) == 0:  # an evaluation
            applied += schedule.flush()
            assert schedule.in_flight() == []
    for layer in range(layers):
        mine = [task.iteration for task in applied if task.layer == layer]
        assert mine == list(range(len(mine)))


def tasks(iteration, layers):
    return [Task(iteration, layer) for layer in range(layers)]


def test_what_may_not_be_is_refused_and_changes_nothing():
    schedule = Schedule(2, 1)
    schedule.begin(0)
    with pytest.raises(ValueError, match="begun before"):
        schedule.begin(0)
    with pytest.raises(ValueError, match="not begun"):
        schedule.end()
    with pytest.raises(ValueError, match="applied in the step of iteration 0"):
        schedule.apply(Task(0, 0))
    with pytest.raises(ValueError, match="not the next of its layer"):
        schedule.apply(Task(0, 1))
    schedule.begin(1)
    schedule.end()
    schedule.begin(0)
    with pytest.raises(ValueError, match="iteration 1 has begun"):
        schedule.flush()
    schedule.begin(1)
    with pytest.raises(ValueError, match="were not applied"):
        schedule.end()
    with pytest.raises(ValueError, match="not the next of its layer"):
        schedule.apply(Task(1, 0))
    assert schedule.due() == [Task(0, 0), Task(0, 1)]
    assert schedule.in_flight() == [Task(0, 0), Task(0, 1), Task(1, 0), Task(1, 1)]


@pytest.mark.parametrize(
    ("iteration", "flying"),
    [
        (3, [Task(1, 0)]),
        (3, [Task(3, 0)]),
        (3, [Task(2, 2)]),
        (3, [Task(2, 0), Task(2, 0)]),
        (-1, []),
        (0, [Task(-1, 0)]),
    ],
)
def test_a_place_that_no_training_has_is_refused(iteration, flying):
    schedule = Schedule(2, 1)
    with pytest.raises(ValueError, match=r"iteration|layers"):
        schedule.restore(iteration, flying)
    assert schedule.iteration == 0


@pytest.mark.parametrize("kind", [(0, 0, False), (1, 2, False), (1, -1, False), (1, 0, True)])
def test_a_schedule_that_cannot_be_is_refused(kind):
    layers, staleness, partial = kind
    with pytest.raises(ValueError, match="staleness"):
        Schedule(layers, staleness, partial=partial)
