"""A restored training goes on exactly as the one that was never stopped: losses, state, every workload."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from lastgood.checkpointers.none import NoCheckpointing
from lastgood.checkpointers.pccheck import PCcheck
from lastgood.state import seed_everything, state_digest
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


@pytest.mark.parametrize("name", workload_names())
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


def test_the_clock_adds_up(data_dir, tmp_path):
    loop = TrainingLoop(build("vgg16", data_dir, 0), NoCheckpointing(tmp_path), 0, "cpu")
    loop.start()
    segment = loop.train(4)
    clock = segment.clock
    assert sum(clock.step_s()) <= clock.elapsed_s
    assert 0 < clock.hide_s() <= max(clock.step_s())
    assert clock.elapsed_s - sum(clock.step_s()) < 0.1 * clock.elapsed_s + 0.01


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


def test_with_drain_each_no_two_checkpoints_are_under_way(data_dir, tmp_path):
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
    # A step of a blob takes far less time than a checkpoint, so without draining they do overlap.
    assert overlaps(False, tmp_path / "many") > 0
