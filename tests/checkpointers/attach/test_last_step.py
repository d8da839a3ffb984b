"""SIGTERM in the middle of a training: its step is finished and saved if that fits, and else it ends as ever."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from lastgood.checkpointers.attach import last_step, process_end
from lastgood.checkpointers.registry import checkpointer_class
from tests.checkpointers.support.sigterm import wait_for_nobody_to_have_sigterm


@pytest.fixture
def begun(tmp_path):
    """Makes a training that has made five steps, of which the second and the fourth are durable."""
    wait_for_nobody_to_have_sigterm()
    made = []

    def make(system: str = "pccheck", **options):
        checkpointer = checkpointer_class(system)(tmp_path, **{"interval_steps": 2, **options})
        made.append(checkpointer)
        checkpointer.attach(model=torch.nn.Linear(2, 2))
        for _ in range(5):
            time.sleep(0.01)
            checkpointer.step()
            checkpointer.drain()
        return checkpointer

    yield make
    for checkpointer in made:
        checkpointer.close()
    assert not process_end._awaited


@pytest.mark.parametrize("system", ["sync", "checkfreq", "gpm", "pccheck"])
def test_the_step_is_finished_and_saved(system, begun):
    checkpointer = begun(system)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        checkpointer.step()
    assert (checkpointer.latest(), checkpointer.events[-1].step) == (6, 6)
    # Whoever catches it goes on, and may be asked again.
    assert checkpointer.step() == 7
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        checkpointer.step()
    assert checkpointer.latest() == 8
    assert [event.why for event in checkpointer.events if event.step in (4, 7)] == [""]


def test_the_event_says_why(begun):
    checkpointer = begun(interval_steps=3)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        checkpointer.step()  # step 6 is due in any case
    assert checkpointer.events[-1].why == ""
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        checkpointer.step()
    assert (checkpointer.events[-1].step, checkpointer.events[-1].why) == (7, "SIGTERM")


@pytest.mark.parametrize("kind", ["no time", "no step", "by hand", "nothing durable"])
def test_it_ends_at_once_if_that_does_not_fit(kind, begun, monkeypatch):
    options = {
        "no time": {"exit_drain_s": 0.2},
        "by hand": {"interval_steps": 0},
        "nothing durable": {"interval_steps": 100},
    }
    begun(**options.get(kind, {}))
    if kind == "no step":  # as in an evaluation
        monkeypatch.setattr(last_step, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 100.0))
    with pytest.raises(SystemExit, match="143"):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(100):
            pass


def test_a_step_that_does_not_end_is_waited_for_until_the_write_would_not_fit(begun):
    checkpointer = begun(exit_drain_s=1.5)
    begin = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        time.sleep(60)  # the step
    assert time.monotonic() - begin < 5
    assert checkpointer.latest() == 4
    assert checkpointer._granted_s() < 1.5
