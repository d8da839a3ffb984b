"""Who wants to hear what became of checkpoints hears it, beside the training."""

from __future__ import annotations

import json
import logging
import threading
import time

import pytest
import torch

from lastgood import PCcheck
from lastgood.checkpointers import telling
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import StorageError


class Breaks:
    def state_dict(self):
        raise RuntimeError("no state today")

    def load_state_dict(self, state):
        raise AssertionError


def run(checkpointer, steps: int = 3) -> None:
    for _ in range(steps):
        checkpointer.step()
        checkpointer.drain()


@pytest.mark.parametrize("system", ["sync", "checkfreq", "gpm", "pccheck", "dcp"])
def test_each_finished_checkpoint_is_told_once(system, tmp_path):
    checkpointer = checkpointer_class(system)(tmp_path / "ckpt", interval_steps=1)
    heard: list[tuple[int, str, str]] = []
    checkpointer.on_event(lambda one: heard.append((one.step, one.outcome.value, threading.current_thread().name)))
    path = checkpointer.write_events()
    state = {"model": torch.nn.Linear(1, 1)}
    checkpointer.attach(**state)
    run(checkpointer)
    checkpointer.state["model"] = Breaks()  # type: ignore[index]
    checkpointer.save(9)
    checkpointer.close()
    assert heard == [(step, "durable", "lastgood-events") for step in (1, 2, 3)] + [(9, "failed", "lastgood-events")]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert path == tmp_path / "ckpt" / "events.jsonl" and path.stat().st_mode & 0o777 == 0o600
    assert [(line["step"], line["outcome"]) for line in lines] == [one[:2] for one in heard]
    assert "no state today" in lines[-1]["error"] and lines[0]["error"] is None
    assert abs(lines[0]["time"] - time.time()) < 100 and lines[0]["seconds"] >= 0
    # A second life in the same directory goes on in the same file.
    again = checkpointer_class(system)(tmp_path / "ckpt", interval_steps=1)
    again.write_events()
    assert again.attach(model=torch.nn.Linear(1, 1)) == 3
    run(again, 1)
    again.close()
    assert len(path.read_text().splitlines()) == 5


def test_a_callback_that_fails_is_told_once_and_others_hear(tmp_path, caplog):
    checkpointer = PCcheck(tmp_path, interval_steps=1)

    def fails(event) -> None:
        raise ValueError("broken")

    heard = []
    checkpointer.on_event(fails)
    checkpointer.on_event(heard.append)
    checkpointer.attach(model=torch.nn.Linear(1, 1))
    with caplog.at_level(logging.WARNING, "lastgood"):
        run(checkpointer)
        checkpointer.close()
    assert [one.step for one in heard] == [1, 2, 3]
    assert caplog.text.count("ValueError('broken')") == 1


def test_training_waits_for_no_callback(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(telling, "_END_S", 0.2)
    held = threading.Event()
    checkpointer = PCcheck(tmp_path, interval_steps=1)
    checkpointer.on_event(lambda event: held.wait(60))
    checkpointer.attach(model=torch.nn.Linear(1, 1))
    begin = time.monotonic()
    run(checkpointer)
    with caplog.at_level(logging.WARNING, "lastgood"):
        checkpointer.close()
    assert time.monotonic() - begin < 30
    assert "a callback takes longer than 0.2 s" in caplog.text
    held.set()


def test_a_file_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "place").write_text("a file")
    with pytest.raises(StorageError, match="place"):
        PCcheck(tmp_path / "ckpt").write_events(tmp_path / "place" / "events.jsonl")
