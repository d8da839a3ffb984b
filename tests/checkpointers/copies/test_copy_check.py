"""Writes that torch does not count, under a copy: no mixture of two states may be durable."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from lastgood.checkpointers.copies import copy_check
from lastgood.checkpointers.copies import host as snapshot
from lastgood.checkpointers.copies.copy_check import CopyCheck, Sample
from lastgood.checkpointers.copies.host import HostSnapshot
from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.pccheck.flight import Flight
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import NoCheckpoint, StateError, WaitTimeout
from lastgood.state import flatten
from tests.checkpointers.support.peer_processes import peers_end_with_the_test
from tests.suggestions.following import advice, follows, hear

SYSTEMS = ["pccheck", "checkfreq", "gemini"]


def copy_into_data(parameters):
    for parameter in parameters:
        parameter.data.copy_(torch.full_like(parameter, 2.0))


def clamp_data(parameters):
    for parameter in parameters:
        parameter.data.clamp_(max=0.5)


def foreach_on_data(parameters):
    torch._foreach_mul_([parameter.data for parameter in parameters], 3.0)


def through_numpy(parameters):
    for parameter in parameters:
        parameter.detach().numpy()[...] = 4.0


WRITES = [copy_into_data, clamp_data, foreach_on_data, through_numpy]


def make_state():
    model = torch.nn.Sequential(*(torch.nn.Linear(150, 150) for _ in range(4)))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def set_uncounted(state, value):
    for parameter in state["model"].parameters():
        parameter.data.fill_(value)


def set_all(state, value):
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.fill_(value)


@pytest.fixture(params=SYSTEMS)
def started(request, tmp_path):
    state = make_state()
    set_all(state, 1.0)
    with peers_end_with_the_test(tmp_path):
        checkpointer = checkpointer_class(request.param)(tmp_path / "job")
        checkpointer.start(state)
        yield state, checkpointer
        checkpointer.close()


@pytest.fixture
def before_the_copy(monkeypatch):
    """Takes a function that is called once, before the first copy that is made beside the training."""

    def call_first(change):
        left = [change]

        def changed(copy):
            def copy_then(*args):
                if left and threading.current_thread() is not threading.main_thread():
                    left.pop()()
                return copy(*args)

            return copy_then

        monkeypatch.setattr(snapshot, "copy_bytes", changed(snapshot.copy_bytes))
        monkeypatch.setattr(Flight, "_copy_host", changed(Flight._copy_host))

    return call_first


@follows("call before_update() of the checkpointer before such a change")
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_write_that_torch_does_not_count_fails_the_checkpoint(started, write, before_the_copy):
    state, checkpointer = started
    versions = [parameter._version for parameter in state["model"].parameters()]
    before_the_copy(lambda: write(list(state["model"].parameters())[-3:]))
    checkpointer.save(1)
    checkpointer.drain()
    assert versions == [parameter._version for parameter in state["model"].parameters()], "nothing to show"
    (event,) = checkpointer.events
    assert event.outcome is Outcome.FAILED
    assert "state.model.2.bias was changed while it was being copied" in event.error
    with pytest.raises(NoCheckpoint):
        type(checkpointer)(checkpointer.directory).restore(make_state())
    set_all(state, 5.0)
    checkpointer.save(2)
    checkpointer.drain()
    fresh = make_state()
    assert type(checkpointer)(checkpointer.directory).restore(fresh) == 2
    assert all(parameter.eq(5).all() for parameter in fresh["model"].parameters())
    checkpointer.save(3)
    exec(f"checkpointer.{advice(hear(event.error), r'call (before_update[(][)]) of the checkpointer')}")
    write(list(state["model"].parameters())[-3:])
    checkpointer.drain()
    fresh = make_state()
    assert type(checkpointer)(checkpointer.directory).restore(fresh) == 3
    assert all(parameter.eq(5).all() for parameter in fresh["model"].parameters())


def test_weights_that_are_swapped_and_swapped_back_under_the_copy_are_seen(started, before_the_copy, monkeypatch):
    state, checkpointer = started
    look, looked = CopyCheck.look, []
    monkeypatch.setattr(copy_check, "_GROUP_BYTES", 4096)

    def swap_back_and_look(check, group, streams=None, copies=None):
        # PCcheck, which holds no copy to look at, sees what is taken back after the look at one group.
        if (group == 0 and copies is not None) or group == 4:
            set_uncounted(state, 1.0)
        looked.append(group)
        look(check, group, streams, copies)

    monkeypatch.setattr(CopyCheck, "look", swap_back_and_look)
    before_the_copy(lambda: set_uncounted(state, 2.0))
    checkpointer.save(1)
    checkpointer.drain()
    assert looked == list(range(5))
    assert all(parameter.eq(1).all() for parameter in state["model"].parameters())
    assert checkpointer.events[-1].outcome is Outcome.FAILED


def test_a_block_of_up_to_64_kib_is_compared_whole():
    block = torch.zeros(64 << 10, dtype=torch.uint8)
    sample = Sample([torch.zeros(10, dtype=torch.uint8), block], 64 << 10, random.Random(1))
    device = block.device
    for place in (0, 12345, (64 << 10) - 1):
        before = sample.take(device)
        assert sample.find(device, before, sample.take(device)) is None
        block[place] ^= 1
        assert sample.find(device, before, sample.take(device)) == 1


def test_a_sample_is_bounded_and_lies_inside_its_block():
    memory = torch.arange(1 << 20, dtype=torch.int32).view(torch.uint8)
    for seed in range(20):
        drawn = random.Random(seed)
        blocks = [memory[64 : 64 + size] for size in (300, 4096, 4097, 5000, 70_001, (4 << 20) - 128)]
        sample = Sample(blocks, 256, drawn)
        taken = sample.take(memory.device)
        assert sum(part.numel() for part in taken) == len(blocks) * 256
        assert taken[0].shape == (4 * len(blocks), 64)


def test_a_change_of_an_eighth_of_a_large_block_is_seen_wherever_it_is():
    block = torch.zeros(8 << 20, dtype=torch.uint8)
    part = block.numel() // 8
    for seed in range(8):
        sample = Sample([block], 64 << 10, random.Random(seed))
        before = sample.take(block.device)
        for at in (0, 3 * part + 17, block.numel() - part):
            block[at : at + part] ^= 255
            found = sample.find(block.device, before, sample.take(block.device))
            block[at : at + part] ^= 255
            assert found == 0 or at + part == block.numel() or at == 0
        block[::50] ^= 1
        assert sample.find(block.device, before, sample.take(block.device)) == 0
        block[::50] ^= 1


def test_the_change_is_named_among_small_and_large_blocks():
    state = {
        "small": torch.nn.Linear(3, 1, bias=False),
        "large": torch.nn.Linear(300, 300),
        "last": torch.nn.Linear(2, 2),
    }
    parameters = [parameter for part in state.values() for parameter in part.parameters()]
    state["optimizer"] = torch.optim.SGD(parameters, lr=0.1)
    for name, parameter in [("large.weight", state["large"].weight), ("last.bias", state["last"].bias)]:
        flat = flatten(state)
        check = CopyCheck(flat, range(flat.layout.deferred_blocks))
        for group in range(len(check.groups)):
            check.look(group)
        check.settle()
        parameter.data.add_(1)
        for group in range(len(check.groups)):
            check.look(group)
        with pytest.raises(StateError, match=f"state.{name} was changed"):
            check.settle()


def test_drawing_places_does_not_touch_the_trainings_generator():
    random.seed(5)
    expected = random.random()
    random.seed(5)
    flat = flatten({"model": (model := torch.nn.Linear(300, 300)), "o": torch.optim.SGD(model.parameters(), lr=0.1)})
    CopyCheck(flat, range(flat.layout.deferred_blocks))
    assert random.random() == expected


def test_an_update_does_not_begin_while_another_thread_looks_at_versions():
    flat = flatten({"model": (model := torch.nn.Linear(3, 3)), "o": torch.optim.SGD(model.parameters(), lr=0.1)})
    check = CopyCheck(flat, range(flat.layout.deferred_blocks))
    threads = []

    class Looked:
        def check_versions(self, number):
            if not threads:
                threads.append(threading.Thread(target=check.look_at_versions))
                threads[0].start()
                threads[0].join(0.5)
                assert threads[0].is_alive(), "an update would have begun"

    check._flat = Looked()
    check.look_at_versions()
    threads[0].join(60)
    assert not threads[0].is_alive()


@pytest.mark.parametrize("system", ["checkfreq", "gemini"])
def test_ctrl_c_while_a_snapshot_begins_leaves_no_thread_that_nobody_waits_for(system, tmp_path, monkeypatch):
    state, release = make_state(), threading.Event()
    set_all(state, 1.0)
    with peers_end_with_the_test(tmp_path):
        checkpointer = checkpointer_class(system)(tmp_path / "job")
        checkpointer.start(state)
        start, copy = threading.Thread.start, HostSnapshot.copy

        def interrupted(thread):
            start(thread)
            if thread.name.startswith(system):
                raise KeyboardInterrupt

        def held_copy(snapshot):
            assert release.wait(60)
            copy(snapshot)

        with monkeypatch.context() as patch:
            patch.setattr(HostSnapshot, "copy", held_copy)
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save(1)
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(WaitTimeout):
                checkpointer.drain(0.0)
            release.set()
            checkpointer.drain()
        assert checkpointer.events[0].outcome is Outcome.DURABLE
        checkpointer.close()


@pytest.mark.parametrize("system", ["checkfreq", "gemini", "dcp"])
def test_a_signal_handler_that_drains_inside_a_drain_leaves_it_in_order(system, tmp_path):
    with peers_end_with_the_test(tmp_path):
        checkpointer = checkpointer_class(system)(tmp_path / "job")
        checkpointer.start(make_state())
        checkpointer.save(1)
        worker = checkpointer._flight if system == "dcp" else checkpointer._worker
        join = worker.join

        def join_and_be_interrupted(*args):
            join(*args)
            worker.join = join
            checkpointer.drain()

        worker.join = join_and_be_interrupted
        checkpointer.drain()
        assert checkpointer.events[0].outcome is Outcome.DURABLE
        checkpointer.close()
