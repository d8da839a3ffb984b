"""Frozen weights are not copied inside save(), and still come back right whatever is done to them."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch

from lastgood.checkpointers.copies import host as snapshot
from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.pccheck import flight as pccheck_flight
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.state import state_digest
from tests.checkpointers.support.peer_processes import peers_end_with_the_test

WIDTH = 600
FROZEN_BYTES = 4 * WIDTH * WIDTH


class Adapted:
    """A frozen base with a small head, as LoRA trains it."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.base = torch.nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.head = torch.nn.Linear(WIDTH, 2)
        self.optimizer = torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)
        self.state = {"base": self.base, "head": self.head, "optimizer": self.optimizer}

    def step(self):
        self.head(self.base(torch.ones(WIDTH))).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture(params=["pccheck", "checkfreq", "gemini"])
def started(request, tmp_path):
    training = Adapted()
    with peers_end_with_the_test(tmp_path):
        checkpointer = checkpointer_class(request.param)(tmp_path / "job")
        checkpointer.start(training.state)
        yield training, checkpointer
        checkpointer.close()


@pytest.fixture
def copied_at_once(monkeypatch):
    """The bytes of large blocks that were copied in this thread."""
    counts = [0]
    freeze, copy_bytes = snapshot.freeze, snapshot.copy_bytes

    def counted_freeze(flat, still):
        blocks = freeze(flat, still)
        pairs = zip(blocks, flat.blocks, strict=True)
        counts[0] += sum(block.numel() for block, live in pairs if block is not live and block.numel() >= FROZEN_BYTES)
        return blocks

    def counted_copy(target, source):
        if threading.current_thread() is threading.main_thread() and source.numel() >= FROZEN_BYTES:
            counts[0] += source.numel()
        copy_bytes(target, source)

    monkeypatch.setattr(pccheck_flight, "freeze", counted_freeze)
    monkeypatch.setattr(snapshot, "copy_bytes", counted_copy)

    def since_last():
        count, counts[0] = counts[0], 0
        return count

    return since_last


def resident_bytes(key):
    """A line of /proc/self/status: VmRSS is what is resident now, VmHWM the most since the peak was reset."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{key}:\s+(\d+) kB$", status, re.MULTILINE)[1]) << 10


def save(checkpointer, step):
    checkpointer.save(step)
    checkpointer.drain()
    return checkpointer.events[-1]


def restored(checkpointer):
    fresh = Adapted(seed=1)
    type(checkpointer)(checkpointer.directory).restore(fresh.state)
    return state_digest(fresh.state)


def test_frozen_weights_are_not_copied_inside_save(started, copied_at_once):
    training, checkpointer = started
    for step in (1, 2, 3):
        training.step()
        assert save(checkpointer, step).outcome is Outcome.DURABLE
        assert copied_at_once() == 0
        assert restored(checkpointer) == state_digest(training.state)


def test_frozen_weights_take_no_memory_in_save(tmp_path):
    """By what the process holds, with a staging pool that is much smaller than the weights."""
    frozen = torch.nn.Linear(4096, 4096, bias=False).requires_grad_(False)  # 64 MiB
    head = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    checkpointer = checkpointer_class("pccheck")(tmp_path, pool_bytes=4 << 20, chunk_bytes=1 << 20)
    checkpointer.start({"frozen": frozen, "head": head, "optimizer": optimizer})
    assert save(checkpointer, 1).outcome is Outcome.DURABLE  # what is made once is there now
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident_bytes("VmRSS")
    assert save(checkpointer, 2).outcome is Outcome.DURABLE
    assert resident_bytes("VmHWM") - before < 32 << 20
    checkpointer.close()


@pytest.mark.parametrize("counted", [True, False])
def test_weights_that_other_code_changes_in_every_step_are_copied_at_once(started, copied_at_once, counted):
    training, checkpointer = started
    for step in (1, 2, 3):
        training.step()
        weight = training.base.weight if counted else training.base.weight.data
        with torch.no_grad():
            weight.mul_(0.5)
        digest = state_digest(training.state)
        checkpointer.save(step)
        with torch.no_grad():
            weight.mul_(2)  # what save() has copied may change at once
            weight.mul_(0.5)
        checkpointer.drain()
        assert checkpointer.events[-1].outcome is Outcome.DURABLE
        assert copied_at_once() == FROZEN_BYTES
        assert restored(checkpointer) == digest


@pytest.mark.parametrize("counted", [True, False])
def test_one_that_changes_under_its_copy_fails_that_checkpoint_and_is_copied_at_once_then(
    started, copied_at_once, counted, monkeypatch
):
    training, checkpointer = started
    training.step()
    assert save(checkpointer, 1).outcome is Outcome.DURABLE
    digest = state_digest(training.state)
    copy_bytes, copy_host = snapshot.copy_bytes, pccheck_flight.Flight._copy_host

    def changed(copy):
        def change_and_copy(*args):
            if threading.current_thread() is not threading.main_thread():
                with torch.no_grad():
                    (training.base.weight if counted else training.base.weight.data).add_(1)
            copy(*args)

        return change_and_copy

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "copy_bytes", changed(copy_bytes))
        patch.setattr(pccheck_flight.Flight, "_copy_host", changed(copy_host))
        event = save(checkpointer, 2)
    assert event.outcome is Outcome.FAILED
    assert "state.base.weight was changed while it was being copied" in event.error
    assert restored(checkpointer) == digest
    for step in (3, 4):
        copied_at_once()
        training.step()
        assert save(checkpointer, step).outcome is Outcome.DURABLE
        assert copied_at_once() == FROZEN_BYTES
        assert restored(checkpointer) == state_digest(training.state)


def test_before_update_waits_for_them_too(started):
    training, checkpointer = started
    training.step()
    assert save(checkpointer, 1).outcome is Outcome.DURABLE
    digest = state_digest(training.state)
    checkpointer.save(2)
    checkpointer.before_update()
    with torch.no_grad():
        training.base.weight.zero_()
    checkpointer.drain()
    assert checkpointer.events[-1].outcome is Outcome.DURABLE
    assert restored(checkpointer) == digest


def test_once_one_was_changed_under_its_copy_none_of_that_save_is_trusted(tmp_path, copied_at_once, monkeypatch):
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False) for _ in range(3)]
    checkpointer = checkpointer_class("pccheck")(tmp_path / "job")
    checkpointer.start({"base": torch.nn.Sequential(*layers)})
    assert save(checkpointer, 1).outcome is Outcome.DURABLE
    copy_host = pccheck_flight.Flight._copy_host

    def merge_and_copy(flight, first, last):
        layers[1].weight.data.add_(1)  # as LoRA is merged for an evaluation, one after the other
        copy_host(flight, first, last)

    with monkeypatch.context() as patch:
        patch.setattr(pccheck_flight.Flight, "_copy_host", merge_and_copy)
        assert save(checkpointer, 2).outcome is Outcome.FAILED
    copied_at_once()
    assert save(checkpointer, 3).outcome is Outcome.DURABLE
    assert copied_at_once() == 3 * FROZEN_BYTES
    checkpointer.close()
