"""Threads that run the earliest task first, and waits that end."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import Future

import pytest

from lastgood.errors import CheckpointError, WaitTimeout
from lastgood.sparse.schedule import Task
from lastgood.sparse.tasks import Tasks, results


@pytest.fixture
def pool():
    tasks = Tasks(1)
    yield tasks
    tasks.close()


def test_the_earliest_iteration_and_layer_goes_first(pool):
    begun, go, order = threading.Event(), threading.Event(), []

    def first():
        begun.set()
        assert go.wait(10)

    futures = [pool.submit(Task(0, 9), first)]
    assert begun.wait(10)
    for task in (Task(2, 0), Task(1, 5), Task(1, 1), Task(1, 3)):
        futures.append(pool.submit(task, lambda task=task: order.append(task)))
    go.set()
    results(futures, 10, "tasks")
    assert order == [Task(1, 1), Task(1, 3), Task(1, 5), Task(2, 0)]


def test_an_error_is_heard_of_at_once_and_the_thread_goes_on(pool):
    never = Future()
    failing = pool.submit(Task(0, 0), lambda: 1 // 0)
    before = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        results([never, failing], 10, "a task")
    assert time.monotonic() - before < 5
    assert results([pool.submit(Task(0, 1), lambda: 7)], 10, "a task") == [7]


def test_what_has_not_arrived_keeps_no_thread_from_what_has(pool):
    arrived, order = threading.Event(), []
    late = pool.submit(Task(0, 0), lambda: order.append("late"), lambda: arrived.wait(10))
    # As a backward pass on a device, whose earliest layers come last.
    results([pool.submit(Task(0, 5), lambda: order.append("here"))], 5, "what is here")
    assert order == ["here"] and not late.done()
    arrived.set()
    results([late], 10, "what is late")
    assert order == ["here", "late"]


def test_what_does_not_arrive_is_heard_of_and_what_arrives_after_the_end_is_cancelled():
    tasks, arrived, ran = Tasks(1), threading.Event(), []
    failed = tasks.submit(Task(0, 1), lambda: ran.append(1), lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        results([failed], 10, "a copy")
    late = tasks.submit(Task(0, 0), lambda: ran.append(0), lambda: arrived.wait(10))
    tasks.close(timeout_s=0.1)
    arrived.set()
    with pytest.raises(CheckpointError, match="the engine was closed"):
        results([late], 10, "a copy")
    assert not ran


def test_a_wait_names_what_it_waited_for():
    with pytest.raises(WaitTimeout, match=r"waited 0.05 s for layer 3 of iteration 7: 1 of 2 are not finished"):
        done = Future()
        done.set_result(None)
        results([done, Future()], 0.05, "layer 3 of iteration 7")


def test_what_has_not_begun_is_cancelled_by_the_end():
    tasks, begun, go = Tasks(1), threading.Event(), threading.Event()
    first = tasks.submit(Task(0, 0), lambda: (begun.set(), go.wait(10)))
    assert begun.wait(10)
    second = tasks.submit(Task(0, 1), lambda: 1)
    threading.Timer(0.1, go.set).start()
    tasks.close()
    tasks.close()
    assert first.done()
    with pytest.raises(CheckpointError, match="closed"):
        results([second], 1, "a task")
    with pytest.raises(CheckpointError, match="closed"):
        tasks.submit(Task(0, 2), lambda: 1)


def test_an_idle_thread_holds_nothing_of_what_it_did(pool):
    class Gradient:
        pass

    gradient = Gradient()
    seen = weakref.ref(gradient)
    results([pool.submit(Task(0, 0), lambda gradient=gradient: None)], 10, "a task")
    del gradient
    deadline = time.monotonic() + 5
    while seen() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert seen() is None
