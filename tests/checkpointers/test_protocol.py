"""What every checkpointing system promises: the conformance suite for each of ours, and what it cannot ask others."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from lastgood.checkpointers import base
from lastgood.checkpointers.copies.host import CopyFence
from lastgood.checkpointers.events import CheckpointEvent, Outcome
from lastgood.checkpointers.options import BaseOptions
from lastgood.checkpointers.registry import checkpointer_class, checkpointer_names
from lastgood.checkpointers.traits import Traits
from lastgood.conformance.fixtures import answer_s, declared_limit, device, file_size_limit, opened, outcomes
from lastgood.conformance.promises import (
    TestBoundedWaits,
    TestDamage,
    TestDurable,
    TestExactness,
    TestFullDisk,
    TestKills,
    TestPaths,
    TestTwoWriters,
)
from lastgood.errors import ConfigError, NoCheckpoint
from lastgood.storage import SlotWrite
from tests.checkpointers.support.peer_processes import peers_end_with_the_test
from tests.checkpointers.support.small_training import SmallTraining
from tests.support.warm import WarmProcess

__all__ = [
    "TestBoundedWaits",
    "TestDamage",
    "TestDurable",
    "TestExactness",
    "TestFullDisk",
    "TestKills",
    "TestPaths",
    "TestTwoWriters",
    "answer_s",
    "declared_limit",
    "device",
    "file_size_limit",
    "opened",
]

SYSTEMS = ["sync", "checkfreq", "gpm", "gemini", "pccheck", "dcp", "torchsnapshot", "nvrx"]
"""The last two are tested where they are installed: pip install 'lastgood[third-party]'. Checkmate needs shadows:
checkmate/test_one_rank.py and checkmate/test_ranks.py ask the same of it."""
IN_MEMORY = {"gemini", "checkmate"}
"""These keep nothing on a disk; tests of their own damage and break what they keep."""


@pytest.fixture(params=SYSTEMS)
def system(request):
    kind = checkpointer_class(request.param)
    reason = kind.unavailable()
    if reason is not None:
        pytest.skip(reason)
    return kind


KILLS = {"pccheck": 10, "gemini": 3}
"""Every day; of others 4."""


@pytest.fixture(params=["few", pytest.param("many", marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def kills(request, system):
    if request.param == "few":
        return KILLS.get(system.name, 4)
    return 100 if system.name == "pccheck" else 30


@pytest.fixture
def run_program():
    def run(words, timeout_s):
        process = WarmProcess(words)
        told, _ = process.communicate(max(800, timeout_s))
        return process.returncode, told

    return run


@pytest.fixture
def on_disk(system):
    if system.name in IN_MEMORY:
        pytest.skip(f"{system.name} writes no files; test_{system.name}.py does this to its peers")


@pytest.fixture(autouse=True)
def peers_end(request, tmp_path):
    """Peers outlive the process that started them, but not the test."""
    if "gemini" not in request.node.name:
        yield
        return
    with peers_end_with_the_test(tmp_path):
        yield


def test_a_pool_far_smaller_than_the_state(opened, tmp_path, device):
    training = SmallTraining(width=900, device=device)
    kind = checkpointer_class("pccheck")
    checkpointer = opened(kind, tmp_path, training.state, chunk_bytes=64 * 1024, pool_bytes=256 * 1024)
    for _ in range(3):
        training.step()
        digest = training.digest()
        checkpointer.save(training.step_number)
    training.step()
    checkpointer.drain()
    fresh = SmallTraining(width=900, seed=1, device=device)
    assert kind(tmp_path).restore(fresh.state) == 3
    assert fresh.digest() == digest


def test_pressure_skip_never_waits_and_counts(opened, tmp_path, monkeypatch):
    go, commit = threading.Event(), SlotWrite.commit
    # The first one is under way until all have been asked for, however long that takes here.
    monkeypatch.setattr(SlotWrite, "commit", lambda *how, **more: go.wait(250) and commit(*how, **more))
    training = SmallTraining(width=900)
    kind = checkpointer_class("pccheck")
    checkpointer = opened(kind, tmp_path, training.state, max_in_flight=1, keep=1, pressure="skip")
    training.step()
    waits = []
    with monkeypatch.context() as patch:
        patch.setattr(checkpointer._flights._landed, "wait", waits.append)
        for _ in range(12):
            checkpointer.save(training.step_number)
    go.set()
    checkpointer.drain()
    assert outcomes(checkpointer) == [Outcome.DURABLE] + [Outcome.SKIPPED] * 11
    assert waits == []


def test_a_failed_save_is_counted_told_and_loses_nothing(system, on_disk, opened, tmp_path, file_size_limit, caplog):
    training = SmallTraining()
    checkpointer = opened(system, tmp_path, training.state)
    training.step()
    digest = training.digest()
    checkpointer.save(1)
    checkpointer.drain()
    file_size_limit(4096)
    if system.name == "gpm":
        # Stores into an area that is there are no writes that could be refused; one that is gone must be made anew.
        (tmp_path / "slot-0001.lgs").unlink()
    for _ in range(2):
        training.step()
        checkpointer.save(training.step_number)
        checkpointer.drain()
    file_size_limit(None)
    assert outcomes(checkpointer) == [Outcome.DURABLE, Outcome.FAILED, Outcome.FAILED]
    assert str(tmp_path) in (checkpointer.events[1].error or "")
    assert caplog.text.count("older ones stay") == 2, "the first and the second are told, then the fourth"
    fresh = SmallTraining(seed=1)
    assert system(tmp_path).restore(fresh.state) == 1
    assert fresh.digest() == digest
    training.step()
    digest = training.digest()
    checkpointer.save(training.step_number)
    checkpointer.drain()
    assert outcomes(checkpointer)[-1] is Outcome.DURABLE
    assert system(tmp_path).restore(fresh.state) == 4
    assert fresh.digest() == digest


def test_the_optimizer_waits_for_the_copy_by_itself(system, opened, tmp_path):
    training = SmallTraining()
    checkpointer = opened(system, tmp_path, training.state)
    calls = []
    original = checkpointer.before_update
    checkpointer.before_update = lambda: (calls.append(time.perf_counter()), original())
    training.step()
    training.step()
    assert len(calls) == 2
    assert checkpointer.update_stall_s > 0


class Watched(CheckpointEvent):
    """Whoever sees in another thread that a checkpoint has ended may ask at once when, and why it failed."""

    def __setattr__(self, name, value):
        if name == "outcome" and value is not Outcome.PENDING:
            assert self.finished_s is not None
            assert self.error or value is not Outcome.FAILED
        super().__setattr__(name, value)


def test_an_outcome_is_the_last_that_is_known_of_a_checkpoint(system, opened, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "CheckpointEvent", Watched)
    training = SmallTraining()
    checkpointer = opened(system, tmp_path, training.state)
    training.step()
    checkpointer.save(1)
    checkpointer.drain()
    training.state["odd"] = lambda: None
    checkpointer.save(2)
    checkpointer.drain()
    del training.state["odd"]
    assert outcomes(checkpointer) == [Outcome.DURABLE, Outcome.FAILED], checkpointer.events


def test_an_outcome_prints_as_documents_name_it():
    assert [f"{one}" for one in Outcome] == [str(one) for one in Outcome] == [one.value for one in Outcome]


def test_none_saves_nothing(tmp_path):
    training = SmallTraining()
    checkpointer = checkpointer_class("none")(tmp_path / "job")
    checkpointer.start(training.state)
    training.step()
    checkpointer.save(1)
    checkpointer.drain()
    assert checkpointer.latest() is None
    assert not (tmp_path / "job").exists()
    with pytest.raises(NoCheckpoint, match="none"):
        checkpointer.restore(training.state)
    checkpointer.close()


def test_a_system_that_keeps_every_step_says_so_in_its_traits_alone(tmp_path):
    sync = checkpointer_class("sync")

    class Each(sync):
        name = "each"
        traits = Traits(only_interval=1)

    for interval in (0, 2):
        with pytest.raises(ConfigError, match=f"each: interval_steps={interval} is of no use"):
            Each(tmp_path, interval_steps=interval)
    for given in ({}, {"interval_steps": 1}):
        training = SmallTraining()
        checkpointer = Each(tmp_path / str(len(given)), **given)
        began = checkpointer.attach(model=training.model, optimizer=training.optimizer)
        assert [checkpointer.step() for _ in range(3)] == [began + 1, began + 2, began + 3]
        assert [event.step for event in checkpointer.events] == [1, 2, 3]
        checkpointer.close()


def test_registry_names_what_is_known():
    assert checkpointer_names()[: 2 + len(SYSTEMS)] == ["none", *SYSTEMS, "checkmate"]
    with pytest.raises(ConfigError, match=r"'pcheck'.*pccheck"):
        checkpointer_class("pcheck")


@pytest.mark.parametrize("name", ["none", *SYSTEMS, "checkmate"])
def test_options_are_strict_and_state_their_cost(name):
    kind = checkpointer_class(name)
    options = kind.Options()
    assert isinstance(options, BaseOptions)
    assert options.disk_bytes(100) >= (0 if name == "none" or name in IN_MEMORY else 200)
    assert options.host_bytes(100) >= 0
    with pytest.raises(ValueError, match="no_such_knob"):
        kind.Options(no_such_knob=1)


@pytest.mark.parametrize("name", ["checkfreq", "pccheck", "gemini"])
def test_a_change_under_the_copy_that_is_no_update_fails_the_checkpoint(name, opened, tmp_path, monkeypatch):
    training = SmallTraining()
    checkpointer = opened(checkpointer_class(name), tmp_path, training.state)
    training.step()
    original = CopyFence.settle

    def change_and_settle(fence):
        with torch.no_grad():
            training.model[0].weight.mul_(2)
        original(fence)

    monkeypatch.setattr(CopyFence, "settle", change_and_settle)
    checkpointer.save(1)
    checkpointer.drain()
    monkeypatch.undo()
    assert outcomes(checkpointer) == [Outcome.FAILED]
    assert "before_update()" in checkpointer.events[0].error
    assert checkpointer.latest() is None
    training.step()
    checkpointer.save(2)
    training.step()
    checkpointer.drain()
    assert outcomes(checkpointer)[-1] is Outcome.DURABLE


def test_a_thread_that_cannot_start_fails_that_checkpoint_only(opened, tmp_path, monkeypatch):
    for name in ("checkfreq", "pccheck", "dcp"):
        training = SmallTraining()
        checkpointer = opened(checkpointer_class(name), tmp_path / name, training.state)
        training.step()

        def refuse(thread):
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr("threading.Thread.start", refuse)
            checkpointer.save(1)
        assert outcomes(checkpointer) == [Outcome.FAILED]
        training.step()
        checkpointer.save(2)
        checkpointer.drain()
        assert outcomes(checkpointer)[-1] is Outcome.DURABLE


@pytest.mark.gpu
def test_a_state_spread_over_two_devices(system, opened, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    first, second = SmallTraining(width=900, device="cuda:0"), SmallTraining(width=900, seed=1, device="cuda:1")

    def both(*trainings):
        return {f"{key}{number}": part for number, t in enumerate(trainings) for key, part in t.state.items()}

    checkpointer = opened(system, tmp_path, both(first, second))
    digests = {}
    for step in (1, 2, 3):
        first.step()
        second.step()
        digests[step] = (first.digest(), second.digest())
        checkpointer.save(step)
    first.step()
    second.step()
    checkpointer.drain()
    fresh = SmallTraining(width=900, seed=2, device="cuda:0"), SmallTraining(width=900, seed=3, device="cuda:1")
    assert system(tmp_path).restore(both(*fresh)) == 3
    # Both hold the one state of the process's generators, so these agree as well.
    assert (fresh[0].digest(), fresh[1].digest()) == digests[3]
