"""A training that is asked to end: its step is finished and saved if that fits, and else it ends as ever."""

from __future__ import annotations

import faulthandler
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

    make.made = made
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
        monkeypatch.setattr(
            last_step,
            "time",
            SimpleNamespace(monotonic=lambda: time.monotonic() + 100.0, perf_counter=time.perf_counter),
        )
    with pytest.raises(SystemExit, match="143"):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(100):
            pass


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"exit_drain_s": 0.2}, "do not fit into 0.2 s (exit_drain_s)"),
        ({"interval_steps": 100}, "how long steps and writes take is not known"),
        ({"interval_steps": 0}, None),  # whoever saves by hand was not promised this checkpoint
    ],
)
def test_the_event_says_that_the_present_step_is_not_saved(options, why, begun):
    checkpointer = begun(**options)
    before = list(checkpointer.events)
    with pytest.raises(SystemExit, match="143"):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(100):
            pass
    added = checkpointer.events[len(before) :]
    assert [(event.step, event.outcome.value, event.why) for event in added] == [(5, "skipped", "SIGTERM")] * bool(why)
    for event in added:
        assert event.error.startswith("no checkpoint of this step: ") and why in event.error


def test_a_checkpoint_of_the_present_step_that_is_in_progress_is_what_was_asked_for(begun):
    checkpointer = begun(exit_drain_s=0.2)
    assert checkpointer.step() == 6
    with pytest.raises(SystemExit, match="143"):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(100):
            pass
    assert [event.step for event in checkpointer.events] == [2, 4, 6]


def test_sigusr1_does_as_sigterm(begun):
    checkpointer = begun(interval_steps=4)
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(SystemExit, match=str(128 + signal.SIGUSR1)):
        checkpointer.step()
    assert (checkpointer.latest(), checkpointer.events[-1].why) == (6, "SIGUSR1")
    checkpointer.close()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_sigusr1_of_others_is_left_to_them(begun, tmp_path):
    """Python knows no handler of faulthandler's: it stands in the kernel's list alone."""
    with (tmp_path / "stacks").open("w+") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        try:
            checkpointer = begun()
            os.kill(os.getpid(), signal.SIGUSR1)
            checkpointer.step()
            checkpointer.drain()
        finally:
            faulthandler.unregister(signal.SIGUSR1)
        stacks.seek(0)
        assert "test_sigusr1_of_others_is_left_to_them" in stacks.read()
    assert checkpointer.latest() == 6
    assert [event.why for event in checkpointer.events] == ["", "", ""]


@pytest.mark.parametrize("measured", [True, False])
def test_before_a_deadline_the_present_step_is_saved(measured, begun, monkeypatch):
    """Without a measured write, `exit_drain_s` is what is left for it."""
    monkeypatch.setattr(last_step, "_SPARE_S", 2.0)  # a busy machine keeps that
    checkpointer = begun(
        deadline=time.time() + 3.0, exit_drain_s=2.0, **({} if measured else {"interval_steps": 100_000})
    )
    with pytest.raises(SystemExit, match="143"):
        for _ in range(2000):
            time.sleep(0.005)
            checkpointer.step()
    last = checkpointer.events[-1]
    assert last.finished_s - time.perf_counter() + time.time() < checkpointer.deadline
    assert last.outcome.value == "durable"
    assert last.why == "deadline" or (measured and last.step % 2 == 0), "it may be due in any case"
    assert last.step == checkpointer.latest() == checkpointer._attachment.progress.step
    assert checkpointer.step() == last.step + 1, "whoever catches it goes on, and is not asked again"


def test_the_end_of_a_slurm_job_is_a_deadline(begun, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 3))
    with pytest.raises(SystemExit, match="143"):
        checkpointer = begun(exit_drain_s=2.0, interval_steps=100_000)
        for _ in range(2000):
            time.sleep(0.005)
            checkpointer.step()
    assert begun.made[0].events[-1].why == "deadline"


def test_a_step_that_does_not_end_is_waited_for_until_the_write_would_not_fit(begun):
    checkpointer = begun(exit_drain_s=1.5)
    begin = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        time.sleep(60)  # the step
    assert time.monotonic() - begin < 5
    assert checkpointer.latest() == 4
    assert checkpointer._granted_s() < 1.5
    assert "the step did not end in time" in checkpointer.events[-1].error
