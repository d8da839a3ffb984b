"""What attach says when it begins or resumes, and what a checkpointer that was dropped leaves behind."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import threading
import time

import pytest
import torch

from lastgood import PCcheck, locks, notices
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import LockHeld
from lastgood.storage import SlotStore
from lastgood.storage.mapped_areas import AreaStore
from tests.support.warm import WarmProcess

SYSTEMS = ["sync", "checkfreq", "gpm", "pccheck", "dcp"]


def one_step(directory, system="pccheck", **more):
    model = torch.nn.Linear(2, 2)
    checkpointer = checkpointer_class(system)(directory, interval_steps=1, **more)
    checkpointer.attach(model=model)
    checkpointer.step()
    checkpointer.drain()
    return checkpointer


@pytest.mark.parametrize("system", SYSTEMS)
def test_one_line_says_where_a_training_begins(system, tmp_path, caplog):
    caplog.set_level(logging.INFO, "lastgood")
    one_step(tmp_path, system).close()
    assert f"{system}: begins at step 0, there is no checkpoint in {tmp_path}" in caplog.messages
    caplog.clear()
    one_step(tmp_path, system).close()
    (line,) = [one for one in caplog.messages if "resumed" in one]
    assert re.fullmatch(rf"{system}: resumed at step 1, saved \S+ \S+ ago, from {re.escape(str(tmp_path))}\S*", line)


SCRIPT = """
import sys, torch
{setup}
from lastgood import PCcheck
checkpointer = PCcheck(sys.argv[1], interval_steps=1)
checkpointer.attach(model=torch.nn.Linear(2, 2))
checkpointer.step()
checkpointer.close()
"""


def said(directory, setup: str = "") -> str:
    ended = WarmProcess(["-c", SCRIPT.format(setup=setup), directory])
    text, _ = ended.communicate()
    assert ended.returncode == 0, text
    return text


def test_the_line_is_seen_where_nobody_set_up_logging_and_follows_those_who_did(tmp_path):
    assert "lastgood: pccheck: begins at step 0" in said(tmp_path)
    assert "lastgood: pccheck: resumed at step 1, saved" in said(tmp_path)
    quiet = "import logging; logging.getLogger('lastgood').setLevel('WARNING')"
    assert "step" not in said(tmp_path, quiet)


@pytest.mark.parametrize(("system", "store"), [("pccheck", SlotStore), ("gpm", AreaStore)])
def test_making_room_that_takes_long_is_told(system, store, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "lastgood")
    told = threading.Event()
    tell, reserve = notices.tell, store.reserve

    def heard(message):
        tell(message)
        if "making room" in message:
            told.set()

    def slow(self, capacity_bytes):
        reserve(self, capacity_bytes)
        assert told.wait(60), "nothing was told"

    monkeypatch.setattr(notices, "SLOW_S", 0.01)
    monkeypatch.setattr(notices, "tell", heard)
    monkeypatch.setattr(store, "reserve", slow)
    one_step(tmp_path, system).close()
    (line, *_) = [one for one in caplog.messages if "making room" in one]
    assert str(tmp_path) in line
    assert re.search(r": making room for checkpoints, once: .* on the disk, \d+ s so far", line)


def test_room_that_is_made_at_once_is_not_told(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lastgood")
    with notices.told_if_slow("it", lambda: "half"):
        pass
    assert not caplog.messages


# -- dropped -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_dropped_checkpointer_gives_its_directory_back(system, tmp_path):
    def cell():
        # As a notebook's cell that is run again: nothing is closed, and all refer to each other.
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        checkpointer = checkpointer_class(system)(tmp_path, interval_steps=1)
        model.kept = [checkpointer]
        began = checkpointer.attach(model=model, optimizer=optimizer)
        optimizer.step()
        checkpointer.step()
        checkpointer.drain()
        return began

    gc.disable()  # what is dropped is collected when somebody asks for the lock
    try:
        assert [cell() for _ in range(3)] == [0, 1, 2]
    finally:
        gc.enable()


@pytest.mark.parametrize(("system", "last"), [("pccheck", "_fly"), ("checkfreq", "_persist")])
def test_what_a_dropped_one_has_under_way_is_waited_for(system, last, tmp_path, monkeypatch):
    kind, asked = checkpointer_class(system), threading.Event()
    work, ends = getattr(kind, last), locks._let_dropped_end

    def held_back(self, *args):
        assert asked.wait(60)
        work(self, *args)

    def let_end():
        asked.set()
        ends()

    monkeypatch.setattr(kind, last, held_back)
    monkeypatch.setattr(locks, "_let_dropped_end", let_end)

    def cell():
        model = torch.nn.Linear(2, 2)
        checkpointer = kind(tmp_path, interval_steps=1)
        began = checkpointer.attach(model=model)
        checkpointer.step()
        return began

    assert [cell(), cell()] == [0, 1]


def test_an_optimizer_keeps_no_checkpointer_alive(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        checkpointer = PCcheck(tmp_path, interval_steps=1)
        checkpointer.attach(model=model, optimizer=optimizer)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        del checkpointer
    gc.collect()
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_a_lock_that_this_very_process_holds_is_told_so(tmp_path):
    first = one_step(tmp_path)
    with pytest.raises(LockHeld, match=r"held by this very process \(\d+\).*not closed.*call its close\(\)"):
        one_step(tmp_path)
    first.close()
    one_step(tmp_path).close()


@pytest.mark.parametrize("system", ["pccheck", "checkfreq"])
def test_a_forked_child_that_trains_waits_for_nothing_and_saves_nothing(system, tmp_path, monkeypatch):
    kind, go = checkpointer_class(system), threading.Event()
    last = {"pccheck": "_fly", "checkfreq": "_persist"}[system]
    work = getattr(kind, last)
    monkeypatch.setattr(kind, last, lambda *args: (go.wait(60), work(*args)))
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    checkpointer = kind(tmp_path, interval_steps=1)
    checkpointer.attach(weight=weight, optimizer=optimizer)
    weight.grad = torch.ones(2)
    optimizer.step()
    checkpointer.step()  # under way until `go`
    child = os.fork()
    if child == 0:
        optimizer.step()
        checkpointer.step()
        os._exit(0 if "forked child" in (checkpointer.events[-1].error or "") else 1)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    go.set()
    checkpointer.close()
    assert ended == (child, 0), "the child waited for threads that it does not have, or saved"
