"""Switch mode as a training has it: real ranks, a real switch process, real shadows; ranks that are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lastgood.checkpointers.checkmate.ring import check_ring
from lastgood.checkpointers.checkmate.system import Checkmate
from lastgood.errors import ConfigError
from lastgood.ports import free_ports
from lastgood.processes import die_with_parent
from tests.checkpointers.support.checkmate_shadows import Shadows
from tests.checkpointers.support.rank_pool import RankPool
from tests.checkpointers.support.ring_parts import TapOf, ring_options, tracked_of

STEPS = 30
LONG = 2500
"""A training goes on while a shadow is away."""
FAULTS = ("corrupt=0.03,seed=4", "truncate=0.03,seed=5", "duplicate=0.2,reorder=0.2,delay=0.02,delay_s=0.05,seed=6")
COMMAND = [sys.executable, "-c", "from lastgood.cli import main; main()", "shadow", "switch"]


class SwitchProcess:
    """`lastgood shadow switch` between `ranks` ranks of this machine."""

    def __init__(self, shadows, ranks, folder, faults=None):
        ports = free_ports(2 * ranks)
        self.listen = [f"127.0.0.1:{port}" for port in ports[:ranks]]
        self.next = [f"127.0.0.1:{port}" for port in ports[ranks:]]
        words = [*COMMAND, "--token-file", shadows.knobs["token_file"], "--timeout", "60"]
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
        deadline = time.monotonic() + 120
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


def reaches(step, job, knobs, victims):
    """The newest step that shadows hold, once it is this one or a later one."""
    observer = Checkmate(job, **knobs)
    deadline = time.monotonic() + 120
    while True:
        assert time.monotonic() < deadline, victims.errors[0].read_text()[-2000:]
        time.sleep(0.02)
        # What an older test has kept is not this one's: its first fence ends that.
        reached = (observer.latest() or 0) if (Path(job) / "checkmate.json").exists() else 0
        if reached >= step:
            return reached


def killed_and_restored(seed, pool, victims, shadows, switch, directory, meanwhile=None, **made):
    job, knobs = str(directory / "job"), knobs_of(shadows, switch)
    chance = random.Random(seed)
    steps = STEPS if meanwhile is None else LONG
    plain = pool.run(2, "train", steps=steps, **made)
    for rank in range(2):
        asked = {"work": "train_until_killed", "rank": rank, "world": 2, "meeting": str(directory / "meeting")}
        victims.send(rank, asked | {"knobs": knobs, "directory": job, "most": steps - 1, **made})
    reached = reaches(4, job, knobs, victims)
    if meanwhile is not None:
        meanwhile()
        reached = reaches(reached + 1, job, knobs, victims)
    time.sleep(chance.uniform(0, 0.1))
    for rank in chance.sample(range(2), 2):
        victims.processes[rank].kill()
        time.sleep(chance.uniform(0, 0.02))
    rest = pool.run(2, "train", steps=steps, knobs=knobs, directory=job, restore=True, **made)
    for rank in range(2):
        assert reached <= rest[rank]["restored"] < steps
        expected = {step: loss for step, loss in plain[rank]["losses"].items() if step in rest[rank]["losses"]}
        assert rest[rank]["losses"] == expected
        assert rest[rank]["digest"] == plain[rank]["digest"]
        assert rest[rank]["outcomes"] == ["durable"] * (steps - rest[rank]["restored"]), rest[rank]["errors"]
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
        assert answers[rank]["losses"].items() <= plain[rank]["losses"].items()
        assert set(answers[rank]["outcomes"]) <= {"durable", "failed"}
        # A failed step promises nothing, and may be held all the same. Not the last one: `drain` makes it whole.
        assert answers[rank]["outcomes"][-1] == "durable", answers[rank]["errors"]
        assert answers[rank]["facts"]["diverged"] == 0
    assert answers[0]["facts"]["torn"] > 0 or "duplicate" in faults
    # Without faults on the way, the same shadows go on from what they have; never from something else.
    rest = pool.run(2, "train", steps=steps + 5, knobs=knobs_of(shadows, switch()), directory=job, restore=True)
    for rank in range(2):
        assert rest[rank]["restored"] == steps
        assert rest[rank]["digest"] == plain[rank]["digest"]
        assert rest[rank]["outcomes"] == ["durable"] * 5, rest[rank]["errors"]


def test_gradients_that_are_changed_behind_the_ring_fail_that_step_and_are_healed(pool, shadows, switch, tmp_path):
    answers = pool.run(
        2, "train", steps=8, knobs=knobs_of(shadows, switch()), directory=str(tmp_path / "job"), meddle=3
    )
    for answer in answers:
        assert answer["outcomes"][:4] == ["durable"] * 3 + ["failed"]
        assert answer["outcomes"][-1] == "durable"
    assert any("something changed gradients between backward() and step()" in error for error in answers[0]["errors"])


def trained_on(world, pool, shadows, switch, directory, knobs=None, **made):
    """What a training that ends in the middle and goes on makes: its first half, its second, and one without an end."""
    job, knobs = str(directory / "job"), knobs_of(shadows, switch, **(knobs or {}))
    half = pool.run(world, "train", steps=8, knobs=knobs, directory=job, **made)
    rest = pool.run(world, "train", steps=14, knobs=knobs, directory=job, restore=True, **made)
    for rank in range(world):
        assert half[rank]["outcomes"] == ["durable"] * len(half[rank]["outcomes"]), half[rank]["errors"]
        assert rest[rank]["outcomes"] == ["durable"] * len(rest[rank]["outcomes"]), rest[rank]["errors"]
        assert rest[rank]["restored"] == 8
        assert [half[rank]["facts"][what] for what in ("torn", "diverged")] == [0, 0]
        assert [rest[rank]["facts"][what] for what in ("torn", "diverged")] == [0, 0]
    return half, rest


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        {"optimizer": "adamw", "register": "hook", "accumulate": 2, "clip": 0.5, "view": True},
        {"optimizer": "sgd", "scaled": True, "clip": 1.0},
        {"optimizer": "adamw fused", "knobs": {"cover": "artefact", "policy": "drop"}},
        {"optimizer": "adamw", "again": [3, 8]},
    ],
    ids=["accumulate", "scaled", "artefact", "saves without an update"],
)
def test_every_step_is_kept_and_the_training_is_the_one_without(case, pool, shadows, switch, tmp_path):
    made = {key: value for key, value in case.items() if key not in ("register", "knobs", "again")}
    plain = pool.run(2, "train", steps=14, **made)
    half, rest = trained_on(2, pool, shadows, switch(), tmp_path, **case)
    for rank in range(2):
        assert half[rank]["losses"] | rest[rank]["losses"] == plain[rank]["losses"]
        assert rest[rank]["digest"] == plain[rank]["digest"]


@pytest.mark.slow
def test_three_ranks_come_back_as_they_were(shadows, switch, tmp_path):
    """With three ranks the ring adds in another order than DDP, and in another one while DDP's buckets are new."""
    made = switch(3)
    pool = RankPool(3, tmp_path, "checkmate_rank.py")
    try:
        job, knobs = str(tmp_path / "job"), knobs_of(shadows, made)
        trained = pool.run(3, "train", steps=9, knobs=knobs, directory=job, optimizer="sgd")
        back = pool.run(3, "restore_only", knobs=knobs, directory=job, optimizer="sgd")
    finally:
        pool.end()
    for rank in range(3):
        assert trained[rank]["outcomes"] == ["durable"] * 9, trained[rank]["errors"]
        assert trained[rank]["facts"]["diverged"] == 0
        assert back[rank] == {"step": 9, "digest": trained[rank]["digest"]}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_killed_at_many_instants(seed, pool, victims, shadows, switch, tmp_path):
    optimizer = ["sgd", "adamw", "adamw fused"][seed % 3]
    killed_and_restored(seed, pool, victims, shadows, switch(), tmp_path, optimizer=optimizer)


@pytest.mark.slow
def test_a_shadow_that_dies_behind_the_switch_is_replaced_while_training_goes_on(
    pool, victims, shadows, switch, tmp_path
):
    def replace():
        shadows.kill(1)
        shadows.restart(1)

    killed_and_restored(9, pool, victims, shadows, switch(), tmp_path, meanwhile=replace)


# -- refused -----------------------------------------------------------------------------------------------------------


def test_what_goes_together_is_taken():
    check_ring(ring_options(cover="artefact"), tracked_of(dtype=torch.bfloat16), TapOf(2), 2)


@pytest.mark.parametrize(
    ("options", "tracked", "reduced", "ranks", "why"),
    [
        ({}, {}, 1, 1, "needs two ranks"),
        ({}, {}, 3, 3, "ring_listen has 2 addresses, and there are 3 ranks"),
        ({"ring_next": ()}, {}, 2, 2, "ring_next has 0 addresses"),
        ({}, {}, 1, 2, "reduces over 1 ranks, and the ring has 2"),
        ({}, {"device": "meta"}, 2, 2, "float32 on meta; use tap="),
        ({}, {"dtype": torch.complex64}, 2, 2, "complex64 on cpu"),
    ],
)
def test_what_does_not_go_together_is_refused(options, tracked, reduced, ranks, why):
    with pytest.raises(ConfigError, match=why):
        check_ring(ring_options(**options), tracked_of(**tracked), TapOf(reduced), ranks)


def test_the_ring_needs_the_hook(tmp_path):
    model = torch.nn.Linear(3, 2)
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text("a secret of this test")
    knobs = {"shadows": ["127.0.0.1:9"], "token_file": str(tmp_path / "token"), "tap": "ring"}
    checkpointer = Checkmate(tmp_path, **knobs)
    with pytest.raises(ConfigError, match='tap="ring", and no hook is registered'):
        checkpointer.start({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})


@pytest.mark.parametrize(
    ("options", "why"),
    [({"tap": "step"}, "of no use without tap"), ({"ring_next": ("switch", "switch:2")}, "'switch' is no HOST:PORT")],
)
def test_addresses_are_looked_at(options, why):
    with pytest.raises(ConfigError, match=why):
        Checkmate("unused", **ring_options().model_dump() | options)
