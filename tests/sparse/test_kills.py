"""Ranks that are killed, and go on to the bit."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from lastgood.ports import free_ports
from lastgood.sparse.engine import Engine
from tests.checkpointers.support.peer_processes import peers_end_with_the_test
from tests.sparse.support.thread_ranks import together
from tests.sparse.support.workers import loss_of, make
from tests.support.warm import WarmProcess

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "support" / "train_rank.py"
RANKS, STEPS, INTERVAL = 2, 40, 3
LIMIT_S = 120


@pytest.fixture(scope="module")
def expected():
    """The losses of trainings that nothing ends, by staleness and rank."""

    def work(place, staleness):
        model, optimizer = make()
        engine = Engine(model, optimizer, 0.9, "v16", staleness, ranks=place)
        losses = []
        for iteration in range(STEPS):
            loss = loss_of(model, place.rank, iteration)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()).hex())
        engine.close()
        return losses

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the ranks' processes: sums of two threads are rounded in another order
    try:
        return [together(RANKS, functools.partial(work, staleness=staleness)) for staleness in (0, 1)]
    finally:
        torch.set_num_threads(threads)


def begin(directory, system, staleness):
    port = free_ports()[0]
    ranks = []
    for rank in range(RANKS):
        env = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": "1",
            "PYTHONPATH": str(ROOT),
            "LASTGOOD_JOB_TOKEN": "a token of a test, long enough",
        }
        words = [SCRIPT, system, directory, staleness, INTERVAL, STEPS]
        ranks.append(WarmProcess(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env))
    return ranks


def run(ranks, kill_at=None, victims=range(RANKS)):
    """For each rank where it began, and its losses by step; with `kill_at` victims are killed once rank 0 is there.

    Those that are not killed then end by themselves, and say which rank was lost.
    """
    found = [{} for _ in ranks]
    late = threading.Timer(LIMIT_S, lambda: [rank.kill() for rank in ranks])
    late.start()
    killed = False
    errors = []
    reading = [threading.Thread(target=lambda rank=rank: errors.append(rank.stderr.read())) for rank in ranks]
    for thread in reading:
        thread.start()
    try:
        for line in ranks[0].stdout:
            note(found[0], line)
            if kill_at is not None and not killed and found[0].keys() >= {kill_at}:
                killed = True
                for rank in random.Random(kill_at).sample(list(victims), len(victims)):
                    ranks[rank].send_signal(signal.SIGKILL)
        for rank, kept in zip(ranks[1:], found[1:], strict=True):
            for line in rank.stdout:
                note(kept, line)
        codes = [rank.wait() for rank in ranks]
        assert late.is_alive(), f"not finished in {LIMIT_S} s: {found} {errors}"
    finally:
        late.cancel()
        for rank in ranks:
            rank.kill()
        for thread in reading:
            thread.join(10)
        for rank in ranks:
            rank.stdout.close()
            rank.stderr.close()
    if not killed:
        assert codes == [0] * len(ranks), "\n".join(errors)
    elif len(victims) < len(ranks):
        (victim,) = victims
        assert codes[1 - victim] == 1
        assert any(f"rank {victim} on " in text for text in errors), "\n".join(errors)
    return found


def note(kept, line):
    first, second = line.split()
    if first == "began":
        kept["began"] = int(second)
    else:
        kept[int(first)] = second


def assert_goes_on(directory, system, staleness, kill_at, victims, expected):
    before = run(begin(directory, system, staleness), kill_at, victims)
    after = run(begin(directory, system, staleness))
    began = {kept.pop("began") for kept in after}
    assert len(began) == 1
    (step,) = began
    assert 0 < step <= kill_at + 1 and step % INTERVAL == 0
    for rank in range(RANKS):
        assert before[rank].pop("began") == 0
        assert list(after[rank]) == list(range(step + 1, STEPS + 1))
        for kept in (before[rank], after[rank]):
            assert {number: expected[staleness][rank][number - 1] for number in kept} == kept


@pytest.mark.parametrize(
    ("system", "staleness", "kill_at", "victims"),
    [("pccheck", 1, 17, range(RANKS)), pytest.param("sync", 0, 11, [1], marks=pytest.mark.slow)],
)
def test_ranks_that_are_killed_go_on_to_the_bit(tmp_path, system, staleness, kill_at, victims, expected):
    """Processes are begun twice, with all that they import: some 5 s on an idle machine."""
    assert_goes_on(tmp_path, system, staleness, kill_at, victims, expected)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_ranks_go_on_from_each_others_memory(tmp_path, staleness, expected):
    with peers_end_with_the_test(tmp_path):
        assert_goes_on(tmp_path, "gemini", staleness, 17, [0, 1], expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_seeded_kills(tmp_path, seed, expected):
    drawn = random.Random(seed)
    system, staleness = drawn.choice(["pccheck", "sync"]), drawn.choice([0, 1])
    victims = drawn.choice([[0], [1], [0, 1]])
    kill_at = drawn.randrange(2 * INTERVAL + 1, STEPS - 2)
    assert_goes_on(tmp_path, system, staleness, kill_at, victims, expected)
