"""Copies off a CUDA device: what is seen under them, and what is no change; an end out of a collective of NCCL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from lastgood.checkpointers.copies.copy_check import CopyCheck
from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import NoCheckpoint
from lastgood.ports import free_ports
from lastgood.state import state_digest
from lastgood.storage import SlotStore
from tests.checkpointers.support.peer_processes import peers_end_with_the_test

pytestmark = pytest.mark.gpu
WIDTH = 1200


class Training:
    """A frozen base, a trained head with momentum, both large enough for samples and groups."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.base = torch.nn.Linear(WIDTH, WIDTH).cuda().requires_grad_(False)
        self.head = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH)).cuda()
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=1e-3)
        self.state = {"base": self.base, "head": self.head, "optimizer": self.optimizer}

    def step(self):
        self.head(self.base(torch.ones(8, WIDTH, device="cuda"))).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture(params=["pccheck", "checkfreq", "gemini"])
def started(request, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    training = Training()
    training.step()
    with peers_end_with_the_test(tmp_path):
        checkpointer = checkpointer_class(request.param)(tmp_path / "job")
        checkpointer.start(training.state)
        yield training, checkpointer
        checkpointer.close()


def test_a_write_that_torch_does_not_count_fails_the_checkpoint(started, monkeypatch):
    training, checkpointer = started
    look = CopyCheck.look

    def write_and_look(check, *arguments):
        for parameter in training.head.parameters():
            parameter.data.copy_(torch.full_like(parameter, 2.0))
        torch.cuda.synchronize()
        look(check, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(CopyCheck, "look", write_and_look)
        checkpointer.save(1)
        checkpointer.drain()
    (event,) = checkpointer.events
    assert event.outcome is Outcome.FAILED and "was changed while it was being copied" in event.error
    with pytest.raises(NoCheckpoint):
        type(checkpointer)(checkpointer.directory).restore(Training(1).state)


def test_training_on_at_once_is_no_change(started):
    training, checkpointer = started
    for step in range(1, 31):
        training.step()
        expected = state_digest(training.state)
        checkpointer.save(step)
    training.step()
    checkpointer.drain()
    assert not [event.error for event in checkpointer.events if event.outcome is Outcome.FAILED]
    fresh = Training(1)
    fresh.step()
    assert type(checkpointer)(checkpointer.directory).restore(fresh.state) == 30
    assert state_digest(fresh.state) == expected


@pytest.mark.parametrize("saves_before", [0, 3])
def test_a_save_becomes_durable_beside_a_kernel_that_does_not_end(started, saves_before):
    training, checkpointer = started
    for step in range(1, saves_before + 1):
        training.step()
        checkpointer.save(step)
        checkpointer.drain()
    training.step()
    expected = state_digest(training.state)
    checkpointer.save(saves_before + 1)
    # As one of a collective whose other ranks are gone.
    torch.cuda._sleep(40_000_000_000)
    end = torch.cuda.Event()
    end.record()
    checkpointer.drain(15)
    assert not end.query(), "the kernel ended first: this shows nothing"
    torch.cuda.synchronize()
    assert not [event.error for event in checkpointer.events if event.outcome is Outcome.FAILED]
    fresh = Training(1)
    fresh.step()
    assert type(checkpointer)(checkpointer.directory).restore(fresh.state) == saves_before + 1
    assert state_digest(fresh.state) == expected


_RANK = """
import os, signal, sys, torch, torch.distributed as dist
from lastgood import PCcheck
from lastgood.processes import keep_stdout
keep_stdout()  # NCCL_DEBUG writes there
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
model = torch.nn.Linear(4096, 4096).cuda()
ckpt = PCcheck(sys.argv[1] + f"/{rank}", interval_steps=1, rank=0, world_size=1, control="off")
ckpt.attach(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
tensor = torch.ones(1 << 20, device="cuda")
dist.all_reduce(tensor)
if sys.argv[2] == "loaded":
    tensor.sum().item()
torch.cuda.synchronize()
ckpt.step()
ckpt.drain()
print("trained", flush=True)
if rank == 1:
    signal.pause()
sys.stdin.readline()
ckpt.step()
dist.all_reduce(tensor)
print("waits", flush=True)
tensor.sum().item()
print("never", flush=True)
"""


@pytest.mark.parametrize("kernels", ["loaded", "loaded at the first call"])
def test_a_rank_that_sits_in_a_collective_of_nccl_ends_at_sigterm(tmp_path, kernels):
    # A kernel that is called for the first time is loaded by the driver, which waits for the collective with its lock
    # held: then no copy leaves the device, and only what was durable stays.
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    (port,) = free_ports(1)
    ranks = []
    try:
        for rank in range(2):
            env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
            env |= {"MASTER_PORT": str(port), "TORCH_NCCL_ENABLE_MONITORING": "0", "CUDA_MODULE_LOADING": "LAZY"}
            argv = [sys.executable, "-c", _RANK, str(tmp_path), kernels]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            ranks.append(subprocess.Popen(argv, env=env, text=True, **pipes))
        zero, one = ranks
        assert zero.stdout.readline() == "trained\n" and one.stdout.readline() == "trained\n"
        one.kill()
        one.wait()
        zero.stdin.write("go on\n")
        zero.stdin.flush()
        assert zero.stdout.readline() == "waits\n"
        # Into the wait for the device. A rank that is late ends by Python's own handler, which is right as well.
        time.sleep(1)
        began_s = time.monotonic()
        zero.send_signal(signal.SIGTERM)
        assert zero.wait(60) in (-signal.SIGTERM, 128 + signal.SIGTERM)
        print(f"ended after {time.monotonic() - began_s:.1f} s with {zero.returncode}")
        assert "never" not in zero.stdout.read()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    steps = [info.step for info in SlotStore.peek(tmp_path / "0").committed()]
    assert 1 in steps
    if kernels == "loaded":
        assert 2 in steps
