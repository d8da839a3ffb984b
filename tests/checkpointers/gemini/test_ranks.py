"""Two ranks that train together, each with its checkpoints in the memory of the other one's peer."""

from __future__ import annotations

import json
import queue
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from lastgood.checkpointers.gemini.address_file import Address
from lastgood.checkpointers.gemini.system import Gemini
from lastgood.errors import NoCheckpoint
from lastgood.ports import free_ports
from tests.checkpointers.support.peer_processes import kill_peer, peers_below, peers_end_with_the_test
from tests.checkpointers.support.small_training import SmallTraining
from tests.support.warm import WarmProcess

WIDTH = 256


@pytest.fixture(autouse=True)
def peers_end(tmp_path):
    with peers_end_with_the_test(tmp_path):
        yield


class Rank:
    """A rank's process, and what it said."""

    def __init__(self, rank, port, directory, steps, device):
        script = Path(__file__).parents[1] / "support" / "gemini_rank.py"
        words = [script, rank, 2, port, directory, steps, device]
        self.errors = directory.parent / f"rank-{rank}.err"
        with self.errors.open("wb") as errors:
            self.process = WarmProcess(words, stderr=errors)
        self.lines = queue.SimpleQueue()
        self.digests = {}
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            words = line.split()
            if words[0] == "saved":
                self.digests[int(words[1])] = words[2]
            self.lines.put(line)
        self.lines.put("")

    def wait_for(self, start, seconds=250):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                line = self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            assert line, f"it ended before it said {start!r}: {self.errors.read_text()[-2000:]}"
            assert not line.startswith("failed"), line
            if line.startswith(start):
                return line
        raise AssertionError(f"waited {seconds} s for {start!r}")

    def end(self):
        self.process.kill()
        self.process.wait(60)
        self.reader.join(60)
        self.process.stdout.close()


@pytest.fixture
def ranks(tmp_path):
    made = []

    def start(steps=0, device="cpu"):
        (port,) = free_ports()
        (tmp_path / "job").mkdir()
        for rank in range(2):
            made.append(Rank(rank, port, tmp_path / "job", steps, device))
        return made

    yield start
    for rank in made:
        rank.end()


def restored(directory, rank, device="cpu"):
    fresh = SmallTraining(WIDTH, seed=9, device=device)
    fresh.plain["of rank"] = None
    step = Gemini(directory, machines=2, machine=rank).restore(fresh.state)
    return step, fresh.plain["of rank"], fresh.digest()


def killed_rank_comes_back(tmp_path, ranks, device):
    directory = tmp_path / "job"
    first, second = ranks(device=device)
    for _ in range(3):
        durable = int(first.wait_for("durable").split()[1])
    # The machine of rank 0 is gone: its training, and the memory that its peer had.
    first.process.send_signal(signal.SIGKILL)
    (address,) = directory.glob("peer-0-*.json")
    own_peer = Address.read(address).pid
    assert own_peer in peers_below(directory)
    kill_peer(own_peer)
    first.end()
    step, rank, digest = restored(directory, 0, device)
    assert step >= durable
    assert (rank, digest) == (0, first.digests[step])
    second.end()
    # What rank 1 had sent lay in the memory that is gone.
    with pytest.raises(NoCheckpoint, match="cannot be reached"):
        restored(directory, 1, device)


def test_a_killed_rank_comes_back_from_the_other_s_memory(tmp_path, ranks):
    killed_rank_comes_back(tmp_path, ranks, "cpu")


@pytest.mark.gpu
def test_a_killed_rank_comes_back_on_cuda(tmp_path, ranks):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    killed_rank_comes_back(tmp_path, ranks, "cuda")


def check_facts(both, least_gaps):
    for rank in both:
        facts = json.loads(rank.wait_for("facts").removeprefix("facts "))
        assert facts["placement"] == [[0, 1], [1, 0]]
        assert list(facts["peers"]) == [str(1 - both.index(rank))]
        assert len(facts["profiled_gaps_s"]) >= least_gaps, facts["profiled_gaps_s"]
        assert facts["communication_s"]["without_checkpoint_traffic"] > 0, "DDP's own communication must be marked"
        assert facts["bytes_per_idle_gap"]["gaps"] > 0
        assert rank.process.wait(60) == 0


@pytest.mark.slow
def test_ddp_marks_its_own_traffic(ranks):
    check_facts(ranks(steps=32), 2)


@pytest.mark.gpu
def test_nccl_marks_its_own_traffic(ranks):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    # Buckets overlap on a fast link, and are then one communication.
    check_facts(ranks(steps=32, device="cuda"), 1)


@pytest.mark.gpu
def test_a_single_device_s_marks_end(tmp_path):
    """The hook's end on CUDA without NCCL: an event behind work of the device."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    training = SmallTraining(WIDTH, device="cuda")
    gemini = Gemini(tmp_path)
    gemini.start(training.state)
    gemini.traffic.begin()
    torch.cuda._sleep(100_000_000)
    event = torch.cuda.Event(blocking=True)
    event.record()
    gemini.traffic.end_after(event)
    assert gemini.traffic.is_busy
    training.step()
    digest = training.digest()
    gemini.save(1)
    gemini.drain()
    assert not gemini.traffic.is_busy
    gemini.close()
    fresh = SmallTraining(WIDTH, seed=1, device="cuda")
    assert Gemini(tmp_path).restore(fresh.state) == 1
    assert fresh.digest() == digest
