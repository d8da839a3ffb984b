"""A save asked for while an optimizer's step runs: no system may keep a state that training never has."""

from __future__ import annotations

import os
import signal
import sys
import threading
import weakref

import pytest
import torch

from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.checkpointers.steps.update_steps import UpdateSteps
from lastgood.errors import CheckpointError, WaitTimeout
from tests.checkpointers.support.peer_processes import peers_end_with_the_test

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


class Application:
    """A user's own object that keeps model and optimizer, as torch's recipes for distributed checkpoints have it."""

    def __init__(self, **parts):
        self.parts = parts

    def state_dict(self):
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state):
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


@pytest.mark.parametrize("hold", [lambda one: [one], lambda one: {"a": {"b": one}}, lambda one: Application(o=one)])
@pytest.mark.parametrize("system", ["sync", "pccheck"])
def test_steps_of_optimizers_in_containers_and_objects_are_seen(system, hold, tmp_path):
    parts = make_state()
    optimizer = parts["optimizer"]
    checkpointer = checkpointer_class(system)(tmp_path)
    checkpointer.start({"model": parts["model"], "held": hold(optimizer)})
    optimizer.between = lambda: checkpointer.save(1)
    optimizer.step()
    del optimizer.between
    checkpointer.save(2)
    checkpointer.drain()
    outcomes = [event.outcome for event in checkpointer.events]
    assert outcomes == [Outcome.FAILED, Outcome.DURABLE] and "InParts.step()" in checkpointer.events[0].error
    checkpointer.close()


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


class Trainer:
    """A user's own object that keeps what it trains."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.gone = model, optimizer, weakref.proxy(set())  # a reference to nothing

    def state_dict(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, saved):
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])


class Extended(InParts):
    """Calls the step that it extends, and goes on."""

    then = staticmethod(lambda: None)

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"][:2]:
            parameter.data.add_(1)
        self.then()


HELD = {
    "in a list": lambda model, optimizer: {"model": model, "optimizers": [optimizer]},
    "in a mapping": lambda model, optimizer: {"model": model, "optimizers": {"first": (optimizer,)}},
    "in an object": lambda model, optimizer: {"trainer": Trainer(model, optimizer)},
}


@pytest.mark.parametrize("system", ["pccheck", "sync"])
@pytest.mark.parametrize("held", HELD.values(), ids=HELD.keys())
def test_steps_of_an_optimizer_are_seen_wherever_the_state_holds_it(held, system, tmp_path):
    model = make_state()["model"]
    optimizer = InParts(model.parameters(), 0.1)
    checkpointer = checkpointer_class(system)(tmp_path / "job")
    checkpointer.start(held(model, optimizer))
    optimizer.between = lambda: checkpointer.save(1)
    optimizer.step()
    assert "inside InParts.step()" in checkpointer.events[-1].error
    checkpointer.save(1)
    checkpointer.drain()
    assert checkpointer.events[-1].outcome is Outcome.DURABLE
    checkpointer.close()


@pytest.mark.parametrize("system", ["pccheck", "sync"])
def test_a_step_inside_a_step_of_the_same_optimizer_does_not_end_it(system, tmp_path):
    model = make_state()["model"]
    InParts(model.parameters(), 0.1)  # torch gives the step of each class that is made hooks of its own
    optimizer = Extended(model.parameters(), 0.1)
    checkpointer = checkpointer_class(system)(tmp_path / "job")
    checkpointer.start({"model": model, "optimizer": optimizer})
    optimizer.then = lambda: checkpointer.save(1)
    optimizer.step()
    assert "inside Extended.step()" in checkpointer.events[-1].error
    optimizer.then = lambda: None

    def fail():
        raise RuntimeError("of the inner step alone")

    optimizer.between = fail
    with pytest.raises(RuntimeError):
        optimizer.step()
    checkpointer.save(2)
    assert "was ended by an exception" in checkpointer.events[-1].error
    optimizer.between = lambda: None
    optimizer.step()
    checkpointer.save(3)
    checkpointer.drain()
    assert checkpointer.events[-1].outcome is Outcome.DURABLE
    checkpointer.close()


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
