"""Switch mode as a training has it: real ranks, a real switch process, real shadows; ranks that are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from lastgood.checkpointers.checkmate import Checkmate, CheckmateOptions
from lastgood.checkpointers.checkmate_ring import check_ring
from lastgood.errors import ConfigError
from lastgood.gradients.ring_tap import RingTap
from lastgood.gradients.tracked import Tracked
from lastgood.processes import die_with_parent
from tests.checkpointers.checkmate_shadows import Shadows
from tests.checkpointers.rank_pool import RankPool

STEPS = 30
FAULTS = ("corrupt=0.03,seed=4", "truncate=0.03,seed=5", "duplicate=0.2,reorder=0.2,delay=0.02,delay_s=0.05,seed=6")
COMMAND = [sys.executable, "-c", "from lastgood.cli import main; main()", "switch"]


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class SwitchProcess:
    """`lastgood switch` between `ranks` ranks of this machine."""

    def __init__(self, shadows, ranks, folder, faults=None):
        ports = free_ports(2 * ranks)
        self.listen = [f"127.0.0.1:{port}" for port in ports[:ranks]]
        self.next = [f"127.0.0.1:{port}" for port in ports[ranks:]]
        words = [*COMMAND, "--token-file", shadows.knobs["token_file"], "--timeout", "10"]
        for rank in range(ranks):
            words += ["--link", f"{self.next[rank]}={self.listen[(rank + 1) % ranks]}"]
        for address in shadows.addresses:
            words += ["--shadow", address]
        if faults is not None:
            words += ["--faults", faults]
        own = os.getpid()
        self.log = folder / "switch.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=log, text=True, preexec_fn=lambda: die_with_parent(own)
            )
        deadline = time.monotonic() + 60
        while self.log.read_text().count("goes to") < ranks:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def end(self):
        """Its counters."""
        self.process.send_signal(signal.SIGTERM)
        try:
            out, _ = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
            self.process.wait(30)
        return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def shadows(tmp_path_factory):
    made = Shadows(tmp_path_factory.mktemp("shadows"), 2)
    yield made
    made.end()


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    made = RankPool(2, tmp_path_factory.mktemp("pool"), "checkmate_rank.py")
    yield made
    made.end()


@pytest.fixture
def victims(tmp_path):
    """Ranks that a test kills."""
    made = RankPool(2, tmp_path, "checkmate_rank.py")
    yield made
    made.end()


@pytest.fixture
def switch(shadows, tmp_path):
    """Makes a switch of two ranks; it has ended with the test."""
    made = []

    def make(ranks=2, faults=None):
        made.append(SwitchProcess(shadows, ranks, tmp_path, faults))
        return made[-1]

    yield make
    for one in made:
        one.process.kill()
        one.process.communicate()


def knobs_of(shadows, switch, **more):
    ring = {"tap": "ring", "ring_listen": switch.listen, "ring_next": switch.next, "ring_timeout_s": 60}
    return {**shadows.knobs, "bucket_bytes": 4096, "verify_every": 3, **ring, **more}


def killed_and_restored(seed, pool, victims, shadows, switch, directory, **made):
    job, knobs = str(directory / "job"), knobs_of(shadows, switch)
    chance = random.Random(seed)
    plain = pool.run(2, "train", steps=STEPS, **made)
    for rank in range(2):
        asked = {"work": "train_until_killed", "rank": rank, "world": 2, "meeting": str(directory / "meeting")}
        victims.send(rank, asked | {"knobs": knobs, "directory": job, **made})
    asker = Checkmate(job, **knobs)
    reached, deadline = 0, time.monotonic() + 120
    while reached < 4:
        assert time.monotonic() < deadline, victims.errors[0].read_text()[-2000:]
        time.sleep(0.02)
        # What an older test has kept is not this one's: its first fence ends that.
        reached = (asker.latest() or 0) if (directory / "job" / "checkmate.json").exists() else 0
    time.sleep(chance.uniform(0, 0.1))
    for rank in chance.sample(range(2), 2):
        victims.processes[rank].kill()
        time.sleep(chance.uniform(0, 0.02))
    rest = pool.run(2, "train", steps=STEPS, knobs=knobs, directory=job, restore=True, **made)
    for rank in range(2):
        assert 4 <= rest[rank]["restored"] < STEPS
        expected = {step: loss for step, loss in plain[rank]["losses"].items() if step in rest[rank]["losses"]}
        assert rest[rank]["losses"] == expected
        assert rest[rank]["digest"] == plain[rank]["digest"]
        assert rest[rank]["outcomes"] == ["durable"] * (STEPS - rest[rank]["restored"]), rest[rank]["errors"]
        assert rest[rank]["facts"]["diverged"] == rest[rank]["facts"]["torn"] == 0
    return rest


def test_killed_ranks_go_on_from_what_the_switch_has_copied(pool, victims, shadows, switch, tmp_path):
    made = switch()
    rest = killed_and_restored(1, pool, victims, shadows, made, tmp_path)
    counters = made.end()
    gradients = 4 * sum(one.numel() for one in torch.nn.Sequential(torch.nn.Linear(37, 53)).parameters())
    assert counters["copies"]["sent_bytes"] > STEPS * gradients
    assert "blind_links" not in counters["relay"]
    # Ranks themselves have sent side records, and rank 0 seeds if any; no gradients.
    assert rest[1]["facts"]["sent_bytes"] == sum(rest[1]["bytes"])


@pytest.mark.parametrize(
    ("faults", "steps"),
    [("loss=0.04,seed=3", 40), *(pytest.param(one, 80, marks=pytest.mark.slow) for one in FAULTS)],
)
def test_what_is_lost_behind_the_switch_fails_that_step_and_is_healed(faults, steps, pool, shadows, switch, tmp_path):
    made = switch(faults=faults)
    job, knobs = str(tmp_path / "job"), knobs_of(shadows, made)
    answers = pool.run(2, "train", steps=steps, knobs=knobs, directory=job)
    assert made.end()["copies"]["faults"] > 0
    plain = pool.run(2, "train", steps=steps + 5)
    for rank in range(2):
        assert answers[rank]["losses"] | {} == {step: plain[rank]["losses"][step] for step in answers[rank]["losses"]}
        assert {"durable"} <= set(answers[rank]["outcomes"]) <= {"durable", "failed"}
        assert answers[rank]["facts"]["diverged"] == 0
    # Without faults on the way, the same shadows go on from what they have; never from something else.
    rest = pool.run(2, "train", steps=steps + 5, knobs=knobs_of(shadows, switch()), directory=job, restore=True)
    held = rest[0]["restored"]
    assert answers[0]["outcomes"][held - 1] == "durable"
    assert "durable" not in answers[0]["outcomes"][held:]
    for rank in range(2):
        assert rest[rank]["digest"] == plain[rank]["digest"]
        assert rest[rank]["outcomes"] == ["durable"] * (steps + 5 - held), rest[rank]["errors"]
