"""What attach says when it begins or resumes, and what a checkpointer that was dropped leaves behind."""

from __future__ import annotations

import gc
import logging
import re
import subprocess
import sys
import threading

import pytest
import torch

from lastgood import PCcheck, notices
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import LockHeld
from lastgood.storage import SlotStore
from lastgood.storage.areas import AreaStore

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
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(setup=setup), str(directory)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return ended.stderr


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


def test_an_optimizer_keeps_no_checkpointer_alive(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        checkpointer = PCcheck(tmp_path, interval_steps=1)
        checkpointer.attach(model=model, optimizer=optimizer)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        del checkpointer


def test_a_lock_that_this_very_process_holds_is_told_so(tmp_path):
    first = one_step(tmp_path)
    with pytest.raises(LockHeld, match=r"held by this very process \(\d+\).*not closed.*call its close\(\)"):
        one_step(tmp_path)
    first.close()
    one_step(tmp_path).close()
