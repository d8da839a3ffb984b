"""A run whose saves fail says so again and again, and can be told to end."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time

import pytest
import torch

from lastgood.checkpointers import save_health
from lastgood.checkpointers.events import CheckpointEvent, Outcome
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.checkpointers.save_health import SaveHealth
from lastgood.errors import CheckpointError, ConfigError, StorageError


class Clock:
    def __init__(self, monkeypatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(save_health.time, "perf_counter", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def event(step, at_s, outcome=Outcome.FAILED, error="StorageError: no room"):
    return CheckpointEvent(step, at_s, finished_s=at_s, outcome=outcome, error=error)


def test_failures_are_told_at_growing_distances_with_count_and_age(clock, caplog):
    health, events = SaveHealth("pccheck", None), [event(5, 1010.0, Outcome.DURABLE)]
    for number in range(1, 41):
        clock.now_s = 1010.0 + 60 * number
        events.append(event(5 + number, clock.now_s))
        health.failed(events[-1], "StorageError 28", events)
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    told = [record.message for record in caplog.records]
    assert [message.split(" failed")[0][-2:].strip() for message in told] == ["6", "7", "9", "13", "21", "37"]
    assert "32 saves in a row have failed; the newest durable one is that of step 5, 32 min 0 s old" in told[-1]
    assert "in a row" not in told[0] and "StorageError: no room" in told[0]
    health.failed(event(46, clock.now_s), "RuntimeError None", events)
    assert len(caplog.records) == 7, "a new kind is told at once"
    events.append(event(47, clock.now_s + 1, Outcome.DURABLE))
    assert health.status(events).failed_in_row == 0
    health.failed(event(48, clock.now_s + 2), "StorageError 28", events)
    assert "step 48 failed" in caplog.records[-1].message and "step 47" in caplog.records[-1].message


def test_a_life_without_any_is_told_as_one(clock, caplog):
    health = SaveHealth("sync", None)
    health.begin()
    clock.now_s += 7300
    health.failed(event(1, clock.now_s), "StorageError 28", [])
    assert "none is durable since this incarnation began, 2 h 1 min ago" in caplog.text


def test_a_training_whose_every_save_fails_says_so_again_and_again(tmp_path, caplog):
    """One line at the first failure is forgotten by the time that somebody looks."""
    checkpointer, best = checkpointer_class("sync")(tmp_path, interval_steps=1), {"loss": 1.0}
    checkpointer.attach(model=torch.nn.Linear(3, 3), best=best)
    best["loss"] = object()  # which no format of ours can hold
    for _ in range(20):
        checkpointer.step()
    checkpointer.close()
    told = [record for record in caplog.records if record.levelno == logging.WARNING and "failed" in record.message]
    assert 4 <= len(told) <= 6, "after 1, 2, 4, 8 and 16 of them"
    assert "16 saves in a row have failed" in told[-1].message


@pytest.mark.parametrize("system", ["sync", "checkfreq", "gpm", "pccheck", "dcp"])
def test_a_training_whose_saves_fail_can_be_told_to_end(system, tmp_path, monkeypatch, caplog):
    model = torch.nn.Linear(3, 3)
    checkpointer = checkpointer_class(system)(tmp_path, interval_steps=1, max_unsaved_s=3600.0)
    checkpointer.attach(model=model)
    checkpointer.step()
    checkpointer.drain()
    assert checkpointer.status().newest_step == 1 and checkpointer.status().failed_in_row == 0

    def refuse(*_):
        raise StorageError(f"the disk is full: {os.strerror(errno.ENOSPC)}")

    monkeypatch.setattr(checkpointer, "_save", refuse)
    for _ in range(3):
        checkpointer.step()
    status = checkpointer.status()
    assert (status.newest_step, status.failed_in_row) == (1, 3) and "the disk is full" in status.last_error
    assert caplog.text.count("the newest durable one is that of step 1") == 2
    began_s = time.perf_counter()
    monkeypatch.setattr(save_health.time, "perf_counter", lambda: began_s + 4000.0)
    with pytest.raises(
        CheckpointError, match=r"ends at step 5: .*step 1, 66 min .*max_unsaved_s.*3600 s.*disk is full"
    ):
        checkpointer.step()
    monkeypatch.undo()
    checkpointer.close()
    with pytest.raises(ConfigError, match="max_unsaved_s"):
        checkpointer_class(system)(tmp_path, max_unsaved_s=0)


def test_a_save_that_fails_in_a_signal_handler_while_health_is_looked_at_does_not_wait_for_itself():
    health = SaveHealth("test", None)
    failed = event(1, 0.0)

    class Events(list):
        def __reversed__(self):
            if not handled:
                handled.append(1)
                health.failed(failed, "StateError", self)  # as a handler does that runs here
            return super().__reversed__()

    handled = []
    thread = threading.Thread(target=health.status, args=(Events(),), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert handled
