"""A restored training goes on exactly as the one that was never stopped: losses, state, every workload."""

from __future__ import annotations

import itertools
import threading
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from lastgood.checkpointers.baselines.none import NoCheckpointing
from lastgood.checkpointers.pccheck.system import PCcheck
from lastgood.state import seed_everything, state_digest
from lastgood.storage import SlotStore, SlotWrite
from lastgood.training import clock as clock_module
from lastgood.training.loop import TrainingLoop, configure_compute
from lastgood.workloads.data.prepare import prepare_dataset
from lastgood.workloads.registry import build_workload, workload_names, workload_options_class
from tests.workloads.tiny_options import TINY


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for kind in ("images", "squad", "wikitext"):
        prepare_dataset(kind, folder)
    return folder


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return request.param


def build(name, data_dir, seed, device="cpu"):
    seed_everything(seed)
    options = workload_options_class(name).model_validate(TINY[name][0])
    return build_workload(name, options, data_dir=data_dir, data_path=None, seed=0, device=device)


EVERYDAY = ("vgg16", "opt")
"""Of the others test_workloads restores one in the middle of a training every day."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.slow) for name in workload_names()]
)
def test_resume_is_exact(name, data_dir, tmp_path, device):
    configure_compute(torch.get_num_threads(), deterministic=True)
    unbroken = TrainingLoop(build(name, data_dir, 0, device), PCcheck(tmp_path), 3, device)
    unbroken.start()
    losses = unbroken.train(7).losses
    unbroken.checkpointer.close()
    assert len(set(losses)) > 3, "a loss that does not move proves nothing"

    resumed = TrainingLoop(build(name, data_dir, 1, device), PCcheck(tmp_path), 3, device)
    with torch.no_grad():
        for parameter in resumed.workload.model.parameters():
            parameter.add_(1)
    assert resumed.restore() == 6
    assert resumed.progress.step == 6
    assert resumed.workload.data.consumed == 6
    resumed.start()
    assert resumed.train(1).losses == losses[6:]
    assert state_digest(resumed.state) == state_digest(unbroken.state)
    resumed.checkpointer.close()


def test_interval_counts_from_the_first_measured_step(data_dir, tmp_path):
    loop = TrainingLoop(build("vgg16", data_dir, 0), PCcheck(tmp_path), 0, "cpu")
    loop.start()
    loop.train(2)
    loop.first_step = loop.progress.step
    loop.interval_steps = 2
    segment = loop.train(5)
    loop.checkpointer.close()
    assert [event.step for event in loop.checkpointer.events] == [4, 6]
    assert segment.stall_save_s > 0
    assert len(segment.clock.step_s()) == len(segment.losses) == 5


def test_the_clock_adds_up(data_dir, tmp_path, monkeypatch):
    loop = TrainingLoop(build("vgg16", data_dir, 0), NoCheckpointing(tmp_path), 0, "cpu")
    loop.start()
    clock = loop.train(4).clock
    assert sum(clock.step_s()) <= clock.elapsed_s
    assert 0 < clock.hide_s() <= max(clock.step_s())
    # A second passes whenever somebody looks at the clock: twice at the begin, three times in each step, at the end.
    ticks = itertools.count()
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    clock = loop.train(4).clock
    assert (clock.step_s(), clock.hide_s(), clock.elapsed_s) == ([2.0] * 4, 1.0, 14.0)


def test_a_long_training_says_how_far_it_is(data_dir, tmp_path, monkeypatch):
    loop = TrainingLoop(build("vgg16", data_dir, 0), NoCheckpointing(tmp_path), 0, "cpu")
    loop.start()
    told = []
    loop.heartbeat = told.append
    loop.train(2)
    assert told == []
    monkeypatch.setattr("lastgood.training.loop.HEARTBEAT_S", 0)
    loop.train(2)
    assert told == ["step 1 of 2", "step 2 of 2"]


def test_with_drain_each_no_two_checkpoints_are_under_way(data_dir, tmp_path, monkeypatch):
    def overlaps(drain_each, folder):
        loop = TrainingLoop(build("blob", data_dir, 0), PCcheck(folder, max_in_flight=4), 1, "cpu")
        loop.drain_each = drain_each
        loop.start()
        segment = loop.train(6)
        loop.checkpointer.drain()
        loop.checkpointer.close()
        events = loop.checkpointer.events
        assert len(events) == 6
        assert segment.stall_save_s < segment.clock.elapsed_s
        return sum(second.requested_s < first.finished_s for first, second in pairwise(events))

    assert overlaps(True, tmp_path / "one") == 0
    # Without draining they do overlap, if a checkpoint takes longer than a step: the first one until the second begins.
    begin, commit, second = SlotStore.begin, SlotWrite.commit, threading.Event()

    def begun(store, step, *how, **more):
        if step == 2:
            second.set()
        return begin(store, step, *how, **more)

    def committed(write, *how, **more):
        assert second.wait(60), "waited 60 s for the second checkpoint"
        return commit(write, *how, **more)

    monkeypatch.setattr(SlotStore, "begin", begun)
    monkeypatch.setattr(SlotWrite, "commit", committed)
    assert overlaps(False, tmp_path / "many") > 0
