"""What every checkpointing system promises, one test for all of them."""

from __future__ import annotations

import resource
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from lastgood.checkpointers import base
from lastgood.checkpointers.base import Checkpointer
from lastgood.checkpointers.copies.host import CopyFence
from lastgood.checkpointers.events import CheckpointEvent, Outcome
from lastgood.checkpointers.options import BaseOptions
from lastgood.checkpointers.registry import checkpointer_class, checkpointer_names
from lastgood.checkpointers.traits import Traits
from lastgood.errors import CheckpointError, ConfigError, MismatchError, NoCheckpoint, StateError
from lastgood.storage import SlotWrite
from tests.checkpointers.support.peer_processes import peers_end_with_the_test
from tests.checkpointers.support.small_training import SmallTraining
from tests.support.warm import WarmProcess

SYSTEMS = ["sync", "checkfreq", "gpm", "gemini", "pccheck", "dcp", "torchsnapshot", "nvrx"]
"""The last two are tested where they are installed: pip install 'lastgood[third-party]'. Checkmate needs shadows:
checkmate/test_one_rank.py and checkmate/test_ranks.py ask the same of it."""
IN_MEMORY = {"gemini", "checkmate"}
"""These keep nothing on a disk; tests of their own damage and break what they keep."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return request.param


@pytest.fixture(params=SYSTEMS)
def system(request):
    kind = checkpointer_class(request.param)
    reason = kind.unavailable()
    if reason is not None:
        pytest.skip(reason)
    return kind


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


@pytest.fixture
def opened():
    """Makes started checkpointers and closes them at the end of the test."""
    made = []

    def make(kind, directory, state, **options) -> Checkpointer:
        checkpointer = kind(directory, kind.Options(**options))
        checkpointer.start(state)
        made.append(checkpointer)
        return checkpointer

    yield make
    for checkpointer in made:
        checkpointer.close()


def outcomes(checkpointer):
    return [event.outcome for event in checkpointer.events]


@pytest.mark.parametrize("width", [8, 900])
def test_restores_the_state_at_the_save_though_training_went_on(system, opened, tmp_path, device, width):
    training = SmallTraining(width, device=device)
    checkpointer = opened(system, tmp_path, training.state)
    saved = {}
    for _ in range(5):
        training.step()
        saved[training.step_number] = training.digest()
        checkpointer.save(training.step_number)
        # Outside optimizer.step(): these must have been copied when save() returned.
        training.plain["moving"] += 1
        training.model[1].running_mean.add_(1)
        torch.rand(1, device=device)
    training.step()
    checkpointer.drain()
    assert outcomes(checkpointer)[-1] is Outcome.DURABLE
    fresh = SmallTraining(width, seed=1, device=device)
    step = system(tmp_path).restore(fresh.state)
    assert step == 5 == checkpointer.latest() == system(tmp_path).latest()
    assert fresh.digest() == saved[5]


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


def test_losses_after_a_restore_are_those_of_the_unbroken_run(system, opened, tmp_path, device):
    training = SmallTraining(device=device)
    checkpointer = opened(system, tmp_path, training.state)
    for _ in range(3):
        training.step()
    checkpointer.save(3)
    expected = [training.step() for _ in range(4)]
    checkpointer.drain()
    fresh = SmallTraining(seed=1, device=device)
    fresh.step()
    assert system(tmp_path).restore(fresh.state) == 3
    assert [fresh.step() for _ in range(4)] == expected


def test_keeps_the_checkpoint_before_and_restores_it_by_step(system, opened, tmp_path):
    training = SmallTraining()
    checkpointer = opened(system, tmp_path, training.state)
    digests = {}
    for _ in range(4):
        training.step()
        digests[training.step_number] = training.digest()
        checkpointer.save(training.step_number)
        checkpointer.drain()
    fresh = SmallTraining(seed=1)
    assert system(tmp_path).restore(fresh.state, step=3) == 3
    assert fresh.digest() == digests[3]
    with pytest.raises(NoCheckpoint, match=r"step 99.*4"):
        system(tmp_path).restore(fresh.state, step=99)


def test_a_new_life_goes_on_in_the_same_directory(system, opened, tmp_path):
    training = SmallTraining()
    first = opened(system, tmp_path, training.state)
    for _ in range(2):
        training.step()
        first.save(training.step_number)
    first.close()
    fresh = SmallTraining(seed=1)
    second = system(tmp_path)
    assert second.restore(fresh.state) == 2
    second.start(fresh.state)
    fresh.step()
    digest = fresh.digest()
    second.save(3)
    second.close()
    last = SmallTraining(seed=2)
    assert system(tmp_path).restore(last.state) == 3
    assert last.digest() == digest


@pytest.mark.parametrize("place", ["missing", "empty"])
def test_nothing_to_restore_is_said_clearly(system, tmp_path, place):
    directory = tmp_path / "job"
    if place == "empty":
        directory.mkdir()
    checkpointer = system(directory)
    assert checkpointer.latest() is None
    with pytest.raises(NoCheckpoint, match="job"):
        checkpointer.restore(SmallTraining().state)


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(system, on_disk, opened, tmp_path, caplog):
    training = SmallTraining()
    checkpointer = opened(system, tmp_path, training.state)
    digests = {}
    for _ in range(2):
        training.step()
        digests[training.step_number] = training.digest()
        checkpointer.save(training.step_number)
        checkpointer.drain()
    checkpointer.close()
    weights = bytes(training.model[0].weight.detach().numpy().tobytes()[:64])
    newest = max(
        (path for path in tmp_path.rglob("*") if path.is_file() and weights in path.read_bytes()),
        key=lambda path: path.stat().st_mtime_ns,
    )
    damaged = bytearray(newest.read_bytes())
    middle = damaged.find(weights)
    damaged[middle + 5] ^= 0x40
    newest.write_bytes(damaged)
    fresh = SmallTraining(seed=1)
    assert system(tmp_path).restore(fresh.state) == 1
    assert fresh.digest() == digests[1]
    assert "trying the checkpoint before it" in caplog.text


def test_a_state_of_another_shape_is_refused_with_both_sides(system, opened, tmp_path):
    training = SmallTraining(width=8)
    checkpointer = opened(system, tmp_path, training.state)
    training.step()
    checkpointer.save(1)
    checkpointer.close()
    with pytest.raises(MismatchError, match=r"\(8, 8\).*\(16, 16\)"):
        system(tmp_path).restore(SmallTraining(width=16).state)


def test_what_cannot_be_stored_is_refused_at_the_start(system, tmp_path):
    checkpointer = system(tmp_path)
    with pytest.raises(StateError, match=r"state\.bad"):
        checkpointer.start({"bad": lambda: None})
    checkpointer.close()


def test_starting_twice_is_refused(system, opened, tmp_path):
    training = SmallTraining()
    checkpointer = opened(system, tmp_path, training.state)
    with pytest.raises(CheckpointError, match="twice"):
        checkpointer.start(training.state)


def test_close_twice_and_hooks_are_gone(system, opened, tmp_path):
    training = SmallTraining()
    checkpointer = opened(system, tmp_path, training.state)
    training.step()
    checkpointer.save(1)
    checkpointer.close()
    checkpointer.close()
    training.step()
    with pytest.raises(CheckpointError, match="start"):
        _ = checkpointer.state


@pytest.fixture
def file_size_limit():
    """Makes the kernel refuse writes beyond a file size, as a full disk would, and lifts that again."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before if size is None else (size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


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


def test_events_tell_the_life_of_a_checkpoint(system, opened, tmp_path):
    training = SmallTraining()
    checkpointer = opened(system, tmp_path, training.state)
    training.step()
    checkpointer.save(1)
    checkpointer.drain()
    (event,) = checkpointer.events
    assert event.step == 1
    assert event.requested_s <= event.copied_s <= event.finished_s
    assert event.bytes_written >= 64 * 64 * 4 * 3
    assert checkpointer.storage_facts()["durability"]


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


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("sync", 4),
        ("checkfreq", 4),
        ("gpm", 4),
        ("pccheck", 10),
        ("gemini", 3),
        ("dcp", 4),
        *(pytest.param(name, 30, marks=pytest.mark.slow) for name in ("sync", "checkfreq", "gpm", "gemini", "dcp")),
        pytest.param("pccheck", 100, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_kill_and_restore_in_a_fresh_process(name, rounds, tmp_path):
    driver = Path(__file__).parent / "support" / "kill_driver.py"
    process = WarmProcess([driver, name, tmp_path / "job", rounds, 7])
    told, _ = process.communicate(800)
    assert process.returncode == 0, told
    assert told.count("exact") == rounds


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


def test_a_restore_waits_for_what_is_under_way(system, opened, tmp_path):
    training = SmallTraining(width=900)
    checkpointer = opened(system, tmp_path, training.state)
    digests = {}
    for _ in range(2):
        training.step()
        digests[training.step_number] = training.digest()
        checkpointer.save(training.step_number)
    assert checkpointer.restore(training.state) == 2
    assert training.digest() == digests[2]
    fresh = SmallTraining(width=900, seed=1)
    assert system(tmp_path).restore(fresh.state) == 2
    assert fresh.digest() == digests[2]


def test_after_a_return_to_an_earlier_step_the_new_life_is_the_newest(system, opened, tmp_path):
    training = SmallTraining()
    first = opened(system, tmp_path, training.state)
    for _ in range(2):
        for _ in range(5):
            training.step()
        first.save(training.step_number)
        first.drain()
    first.close()
    fresh = SmallTraining(seed=1)
    second = system(tmp_path)
    assert second.restore(fresh.state, step=5) == 5
    second.start(fresh.state)
    fresh.step()
    digest = fresh.digest()
    second.save(6)
    second.close()
    last = SmallTraining(seed=2)
    assert system(tmp_path).restore(last.state) == 6, "step 10 belongs to the life that was given up"
    assert last.digest() == digest


def test_an_optimizer_that_joins_after_the_start_is_waited_for_as_well(system, opened, tmp_path):
    training = SmallTraining()
    checkpointer = opened(system, tmp_path, training.state)
    second = torch.optim.SGD(training.model.parameters(), lr=0.1)
    training.state["optimizer"] = second
    training.step()
    checkpointer.save(1)
    calls = []
    checkpointer.before_update = lambda: calls.append(1)
    second.step()
    assert calls == [1]
    checkpointer.drain()


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
