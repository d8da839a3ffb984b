"""A rank is killed in the middle of a training, and all go on: every loss of every rank is the one without a kill."""

from __future__ import annotations

import importlib.util
import signal
import time

import pytest
import torch

from lastgood.checkpointers.ranks.directories import whole_checkpoints
from tests.checkpointers.support.rank_pool import RankPool
from tests.support.patience import wait_until

STEPS, KILLED_AT = 60, 33
NO_DEEPSPEED = importlib.util.find_spec("deepspeed") is None
KINDS = ("ddp", "fsdp2", "sharded-optimizer", "zero1", "zero3")
"""DistributedDataParallel, torch's shards, torch's ZeroRedundancyOptimizer, DeepSpeed's ZeRO."""


def case(kind, device):
    marks = [pytest.mark.gpu if device == "cuda" else pytest.mark.slow]
    if kind.startswith("zero"):
        marks.append(pytest.mark.skipif(NO_DEEPSPEED, reason="lastgood[deepspeed] is not installed"))
    return pytest.param(kind, device, id=f"{kind}-{device}", marks=marks)


pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def pool(tmp_path):
    """Makes pairs of ranks, that end with the test."""
    made = []

    def make(name):
        folder = tmp_path / name
        folder.mkdir()
        made.append(RankPool(2, folder, "spread_rank.py"))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.mark.parametrize(("kind", "device"), [case(kind, device) for device in ("cpu", "cuda") for kind in KINDS])
def test_a_killed_job_goes_on_to_the_bit(kind, device, pool, tmp_path):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    plain, victims, heirs = pool("plain"), pool("victims"), pool("heirs")
    common = {"kind": kind, "device": device}
    job = str(tmp_path / "job")

    undisturbed = plain.run(2, "train", steps=STEPS, losses=str(plain.folder), **common)
    expected = [losses_of(plain, rank) for rank in range(2)]
    assert [list(one) for one in expected] == [list(range(1, STEPS + 1))] * 2
    assert all(len(set(one.values())) > STEPS // 2 for one in expected), "losses that do not move prove nothing"
    assert expected[0] != expected[1], "ranks on the same data prove nothing"

    for rank in range(2):
        asked = {"work": "train", "rank": rank, "world": 2, "meeting": str(tmp_path / "meeting"), "job": job}
        asked |= {"steps": STEPS, "losses": str(victims.folder), "drained": 20, "dying": [1, KILLED_AT]}
        victims.send(rank, asked | common)
    wait_for_the_kill(victims)
    time.sleep(0.2)  # rank 0 comes to its next exchange of gradients, and hangs there
    victims.processes[0].kill()
    victims.processes[0].wait(60)
    for rank in range(2):
        seen = losses_of(victims, rank)
        assert seen == {step: expected[rank][step] for step in seen}
    assert max(losses_of(victims, 1)) == KILLED_AT

    (newest, *_) = whole_checkpoints(job)
    assert newest.step in (20, 30)
    movable = kind in ("ddp", "fsdp2")  # the others keep each rank's part, for as many ranks
    after = heirs.run(2, "train", steps=STEPS, job=job, losses=str(heirs.folder), seed=9, sums=movable, **common)
    assert [one["began"] for one in after] == [newest.step] * 2
    for rank in range(2):
        rest = losses_of(heirs, rank)
        assert rest == {step: expected[rank][step] for step in range(newest.step + 1, STEPS + 1)}
        assert after[rank]["digest"] == undisturbed[rank]["digest"]
        assert {outcome for _, outcome, _ in after[rank]["outcomes"]} <= {"durable", "superseded"}
    if movable:
        to_one_rank_and_back(plain, common, job, after[0]["sums"], tmp_path)


def to_one_rank_and_back(pool, common, job, sums, tmp_path):
    """One rank goes on from what two have saved, and two from that."""
    more = {"losses": str(tmp_path), "interval": 1, "seed": 9, "sums": True, "buffers": "rank0", **common}
    one, back = str(tmp_path / "one"), str(tmp_path / "back")
    (alone,) = pool.run(1, "train", steps=STEPS + 3, job=one, resume_from=job, **more)
    assert (alone["began"], alone["restored"]) == (STEPS, sums)
    assert alone["sums"] != sums
    again = pool.run(2, "train", steps=STEPS + 5, job=back, resume_from=one, **more)
    assert [answer["began"] for answer in again] == [STEPS + 3] * 2
    assert [answer["restored"] for answer in again] == [alone["sums"]] * 2
    assert again[0]["sums"] == again[1]["sums"] != alone["sums"]


def losses_of(pool, rank):
    """By step, to the bit."""
    lines = (pool.folder / f"rank-{rank}.txt").read_text().splitlines()
    return {int(step): loss for step, loss in (line.split() for line in lines)}


def wait_for_the_kill(victims):
    """Until rank 1 is gone, by its own hand and in no other way."""
    process, answers = victims.processes[1], victims.answers[1]
    wait_until(
        lambda: process.poll() is not None or not answers.empty(),
        lambda: f"rank 1 to die: {victims.errors[1].read_text()[-3000:]}",
        120,
    )
    said = "" if answers.empty() else answers.get()
    assert said == "", f"{said} {victims.errors[1].read_text()[-3000:]}"
    assert process.wait(60) == -signal.SIGKILL
