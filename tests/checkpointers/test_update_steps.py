"""A save asked for while an optimizer's step runs: no system may keep a state that training never has."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest
import torch

from lastgood.checkpointers.base import Outcome
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.checkpointers.update_steps import UpdateSteps
from lastgood.errors import CheckpointError, WaitTimeout
from tests.checkpointers.peer_processes import peers_end_with_the_test

SYSTEMS = ["sync", "checkfreq", "gpm", "gemini", "pccheck", "dcp"]
WAIT_S = 60.0


class InParts(torch.optim.SGD):
    """Adds one to a parameter after the other, and calls `between` when half of them are done."""

    between = staticmethod(lambda: None)

    @torch.no_grad()
    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        for number, parameter in enumerate(parameters):
            if number == len(parameters) // 2:
                self.between()
            parameter.add_(1)


def make_state():
    parameters = torch.nn.ParameterList(torch.zeros(4) for _ in range(4))
    return {"model": parameters, "optimizer": InParts(parameters.parameters(), 0.1)}


def values(state):
    return [int(parameter[0]) for parameter in state["model"]]


@pytest.fixture(params=SYSTEMS)
def started(request, tmp_path):
    """A state, and a checkpointer that was started on it."""
    state = make_state()
    with peers_end_with_the_test(tmp_path):
        checkpointer = checkpointer_class(request.param)(tmp_path / "job")
        checkpointer.start(state)
        yield state, checkpointer
        checkpointer.close()


def restored(checkpointer):
    fresh = make_state()
    type(checkpointer)(checkpointer.directory).restore(fresh)
    return values(fresh)


def test_a_signal_handler_that_saves_in_the_midst_of_a_step_is_refused(started):
    state, checkpointer = started
    state["optimizer"].step()
    checkpointer.save(1)
    checkpointer.drain()
    handled = []

    def save(*_):
        handled.append(values(state))
        checkpointer.save(1)
        checkpointer.drain()

    before = signal.signal(signal.SIGUSR1, save)
    try:
        state["optimizer"].between = lambda: os.kill(os.getpid(), signal.SIGUSR1)
        state["optimizer"].step()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert handled == [[2, 2, 1, 1]]
    assert [event.outcome for event in checkpointer.events] == [Outcome.DURABLE, Outcome.FAILED]
    assert "inside InParts.step()" in checkpointer.events[-1].error
    assert restored(checkpointer) == [1] * 4
    state["optimizer"].between = lambda: None
    state["optimizer"].step()
    checkpointer.save(3)
    checkpointer.drain()
    assert restored(checkpointer) == [3] * 4


def test_a_save_in_another_thread_waits_for_the_end_of_the_step(started):
    state, checkpointer = started
    waits = threading.Event()
    steps = checkpointer._steps
    look = steps._runs
    steps._runs = lambda *who: look(*who) and (waits.set() or True)
    threads = []

    def between():
        threads.append(threading.Thread(target=checkpointer.save, args=(1,)))
        threads[0].start()
        assert waits.wait(WAIT_S), "it did not wait"

    state["optimizer"].between = between
    state["optimizer"].step()
    threads[0].join(WAIT_S)
    checkpointer.drain()
    assert [event.outcome for event in checkpointer.events] == [Outcome.DURABLE]
    assert restored(checkpointer) == [1] * 4


def test_a_step_that_an_exception_ended_leaves_nothing_to_save(started):
    state, checkpointer = started

    def fail():
        raise RuntimeError("out of memory")

    state["optimizer"].between = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        state["optimizer"].step()
    checkpointer.save(1)
    assert "was ended by an exception" in checkpointer.events[-1].error
    assert checkpointer.latest() is None
    state["optimizer"].between = lambda: None
    state["optimizer"].step()
    checkpointer.save(2)
    checkpointer.drain()
    assert restored(checkpointer) == values(state)
    state["optimizer"].between = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        state["optimizer"].step()
    state["optimizer"] = InParts(state["model"].parameters(), 0.1)  # the training goes on with another one
    checkpointer.save(3)
    checkpointer.drain()
    assert [event.outcome for event in checkpointer.events] == [Outcome.FAILED, Outcome.DURABLE, Outcome.DURABLE]


def test_a_step_waits_for_the_copies_of_a_save_in_another_thread():
    steps, entered, leave, begun = UpdateSteps(), threading.Event(), threading.Event(), threading.Event()

    def save():
        with steps.kept_out(WAIT_S):
            entered.set()
            assert leave.wait(WAIT_S)

    def step():
        steps.begin(steps, sys._getframe(), WAIT_S)
        begun.set()

    threads = [threading.Thread(target=save), threading.Thread(target=step)]
    threads[0].start()
    assert entered.wait(WAIT_S)
    with pytest.raises(WaitTimeout, match="save in another thread"):
        steps.begin(steps, sys._getframe(), 0.01)
    threads[1].start()
    assert not begun.is_set()
    leave.set()
    assert begun.wait(WAIT_S)
    for thread in threads:
        thread.join(WAIT_S)


def test_a_wait_for_a_step_has_an_end():
    steps, inside, leave = UpdateSteps(), threading.Event(), threading.Event()

    def step():
        steps.begin(steps, sys._getframe(), WAIT_S)
        inside.set()
        leave.wait(WAIT_S)
        steps.end(steps)

    thread = threading.Thread(target=step)
    thread.start()
    assert inside.wait(WAIT_S)
    with pytest.raises(WaitTimeout, match=r"optimizer\.step\(\)"), steps.kept_out(0.01):
        pass
    leave.set()
    with steps.kept_out(WAIT_S):
        pass
    thread.join(WAIT_S)


def test_a_save_inside_a_save_of_the_same_thread_is_refused():
    steps = UpdateSteps()
    with steps.kept_out(WAIT_S):
        with pytest.raises(CheckpointError, match="inside another save"), steps.kept_out(WAIT_S):
            pass
        steps.begin(
            steps, sys._getframe(), WAIT_S
        )  # an optimizer stepped in the midst of a save by itself: nobody to wait for
