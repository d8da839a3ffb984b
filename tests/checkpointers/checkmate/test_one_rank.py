"""Checkmate in one process, with real shadows: what it follows, what it refuses, and bad days."""

from __future__ import annotations

import copy
import errno
import json
import threading

import pytest
import torch

from lastgood.checkpointers.checkmate import incarnation
from lastgood.checkpointers.checkmate.system import Checkmate, CheckmateOptions
from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.recovery import checkmate_job
from lastgood.checkpointers.recovery.checkmate_job import JOB_FILE, NotedJob, Promises, note_job, noted_job
from lastgood.errors import CheckpointError, ConfigError, CorruptCheckpoint, MismatchError, NoCheckpoint, WaitTimeout
from lastgood.files import ReadableBy
from lastgood.gradients.tap.device_copy import DeviceMover
from lastgood.state import state_digest
from lastgood.units import KIB
from tests.checkpointers.support.checkmate_shadows import Shadows
from tests.checkpointers.support.small_training import SmallTraining
from tests.support.patience import wait_until

WAIT_S = 60


@pytest.fixture(scope="module")
def shadows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shadows")
    made = Shadows(folder, 2, "--spill-dir", str(folder / "spills-{shadow}"))
    yield made
    made.end()


@pytest.fixture
def make(shadows, tmp_path):
    """Makes checkpointers of one job and closes them at the end of the test."""
    made = []

    def checkpointer(**knobs):
        one = Checkmate(tmp_path / "job", **{**shadows.knobs, "bucket_bytes": 4096, **knobs})
        one.events_kept = None
        made.append(one)
        return one

    yield checkpointer
    for one in made:
        one.close()


def outcomes(checkpointer):
    return [event.outcome for event in checkpointer.events]


def steps(training, checkpointer, count):
    for _ in range(count):
        training.step()
        checkpointer.save(training.step_number)
    checkpointer.drain(WAIT_S)


def until(condition, what):
    wait_until(condition, what, WAIT_S)


def test_where_nothing_is_kept_that_is_said_and_attach_begins_from_nothing(make):
    checkpointer = make()
    assert checkpointer.latest() is None, "this test must be the first of its shadows"
    with pytest.raises(NoCheckpoint, match="job"):
        checkpointer.restore(SmallTraining().state)
    training = SmallTraining()
    parts = {name: part for name, part in training.state.items() if name != "rng"}
    assert checkpointer.attach(**parts) == 0
    for _ in range(3):
        training.step()
        number = checkpointer.step()
    checkpointer.drain(WAIT_S)
    digest = training.digest()
    checkpointer.close()
    fresh = SmallTraining(seed=1)
    again = make()
    assert again.attach(**{name: part for name, part in fresh.state.items() if name != "rng"}) == number == 3
    assert fresh.digest() == digest
    fresh.step()
    again.step()
    again.drain(WAIT_S)
    assert outcomes(again) == [Outcome.DURABLE]


def test_every_step_is_durable_and_comes_back_to_the_bit(make):
    training = SmallTraining()
    checkpointer = make(verify_every=1)
    checkpointer.start(training.state)
    steps(training, checkpointer, 6)
    assert outcomes(checkpointer) == [Outcome.DURABLE] * 6
    gradients = sum(one.nbytes for one in training.model.parameters())
    sides = [event.bytes_written - gradients for event in checkpointer.events]
    assert all(0 < nbytes < 24 * KIB for nbytes in sides), "gradients go once; generators alone are 15 KB beside them"
    digest = training.digest()
    expected = [training.step() for _ in range(4)]
    fresh = SmallTraining(seed=1)
    other = make()
    assert other.restore(fresh.state) == 6 == other.latest()
    assert fresh.digest() == digest
    assert [fresh.step() for _ in range(4)] == expected


def test_steps_without_a_save_and_skipped_ones_are_followed(make):
    training = SmallTraining()
    checkpointer = make(verify_every=1)
    checkpointer.start(training.state)
    training.step()
    training.step()
    steps(training, checkpointer, 2)
    # An update that a training leaves out: no optimizer.step(), and a save all the same.
    training.model(torch.randn(4, 64)).sum().backward()
    training.optimizer.zero_grad()
    training.plain["step"] += 1
    checkpointer.save(training.step_number)
    steps(training, checkpointer, 2)
    assert outcomes(checkpointer) == [Outcome.DURABLE] * 5
    fresh = SmallTraining(seed=1)
    assert make().restore(fresh.state) == training.step_number
    assert fresh.digest() == training.digest()


def test_a_save_without_an_update_keeps_what_else_has_changed(make):
    training = SmallTraining()
    checkpointer = make()
    checkpointer.start(training.state)
    steps(training, checkpointer, 1)
    training.model[1].running_mean.add_(1)
    training.plain["step"] = 7
    checkpointer.save(7)
    checkpointer.drain(WAIT_S)
    assert outcomes(checkpointer) == [Outcome.DURABLE] * 2
    fresh = SmallTraining(seed=1)
    assert make().restore(fresh.state) == 7
    assert fresh.digest() == training.digest()


def test_an_update_that_no_shadow_can_repeat_fails_its_save_and_not_the_training(make):
    training = SmallTraining()
    checkpointer = make(verify_every=1)
    checkpointer.start(training.state)
    steps(training, checkpointer, 2)
    group = training.optimizer.param_groups[0]
    rate, group["lr"] = group["lr"], float("nan")
    kept = [parameter.detach().clone() for parameter in training.model.parameters()]
    training.step()
    group["lr"] = rate
    with torch.no_grad():
        for parameter, old in zip(training.model.parameters(), kept, strict=True):
            parameter.copy_(old)
    checkpointer.save(training.step_number)
    steps(training, checkpointer, 6)
    assert outcomes(checkpointer)[:3] == [Outcome.DURABLE] * 2 + [Outcome.FAILED]
    assert "lr of a parameter group is nan" in checkpointer.events[2].error
    assert outcomes(checkpointer)[-1] is Outcome.DURABLE
    fresh = SmallTraining(seed=1)
    assert make().restore(fresh.state) == training.step_number
    assert fresh.digest() == training.digest()


class TwoBranches(torch.nn.Module):
    """In odd steps one branch gets no gradient; convolutions lie in memory as channels_last."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 5, 3)
        self.norm = torch.nn.BatchNorm2d(5)
        self.left = torch.nn.Conv2d(5, 4, 3)
        self.right = torch.nn.Conv2d(5, 4, 3)
        self.odd = False

    def forward(self, images):
        hidden = self.norm(self.first(images))
        return (self.left if self.odd else self.right)(hidden)


class Images:
    def __init__(self, seed=0, kind=torch.optim.AdamW, **options):
        torch.manual_seed(seed)
        self.model = TwoBranches().to(memory_format=torch.channels_last)
        self.optimizer = kind(self.model.parameters(), lr=1e-2, weight_decay=0.1, **options)
        self.plain = {"step": 0}
        self.state = {"model": self.model, "optimizer": self.optimizer, "plain": self.plain}

    def step(self):
        self.plain["step"] += 1
        self.model.odd = self.plain["step"] % 3 == 1
        data = torch.Generator().manual_seed(self.plain["step"])
        images = torch.randn(2, 3, 8, 8, generator=data).to(memory_format=torch.channels_last)
        self.model(images).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def step_number(self):
        return self.plain["step"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, {"amsgrad": True}), (torch.optim.SGD, {"momentum": 0.9, "nesterov": True})],
)
def test_parameters_without_gradients_and_channels_last(make, kind, options):
    training = Images(kind=kind, **options)
    checkpointer = make(verify_every=1)
    checkpointer.start(training.state)
    steps(training, checkpointer, 5)
    assert outcomes(checkpointer) == [Outcome.DURABLE] * 5
    assert checkpointer.storage_facts()["diverged"] == 0
    fresh = Images(seed=1, kind=kind, **options)
    other = make()
    assert other.restore(fresh.state) == 5
    assert state_digest(fresh.state) == state_digest(training.state)
    assert fresh.model.first.weight.is_contiguous(memory_format=torch.channels_last)
    other.start(fresh.state)
    steps(fresh, other, 2)
    training.step()
    training.step()
    assert state_digest(fresh.state) == state_digest(training.state)
    assert other.storage_facts()["diverged"] == 0, "what shadows kept is what was restored"


class Parts:
    """Steps its optimizer as ZeRO does: one group in it at a time, with gradients for that step only."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 4))
        weights, biases = ([one for one in self.model.parameters() if (one.dim() == 1) == flat] for flat in (0, 1))
        self.optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=1e-2)
        self.plain = {"step": 0}
        self.state = {"model": self.model, "optimizer": self.optimizer, "plain": self.plain}

    def step(self, groups=(0, 1)):
        self.plain["step"] += 1
        inputs = torch.randn(4, 20, generator=torch.Generator().manual_seed(self.plain["step"]))
        self.model(inputs).square().mean().backward()
        gradients = [one.grad for one in self.model.parameters()]
        self.optimizer.zero_grad()
        whole = self.optimizer.param_groups
        for number in groups:
            for one, gradient in zip(self.model.parameters(), gradients, strict=True):
                one.grad = gradient if any(one is other for other in whole[number]["params"]) else None
            self.optimizer.param_groups = [whole[number]]
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.optimizer.param_groups = whole

    @property
    def step_number(self):
        return self.plain["step"]


def test_an_update_in_parts_is_one_step(make):
    training = Parts()
    checkpointer = make(verify_every=1)
    checkpointer.start(training.state)
    steps(training, checkpointer, 3)
    sent = checkpointer.storage_facts()["sent_bytes"]
    steps(training, checkpointer, 1)
    gradients = 4 * sum(one.numel() for one in training.model.parameters())
    # A sender counts what has gone out, which shadows may have answered to before.
    until(lambda: checkpointer.storage_facts()["sent_bytes"] - sent > gradients, "the gradients to be counted")
    assert checkpointer.storage_facts()["sent_bytes"] - sent < 1.5 * gradients + 2000
    for groups in ((0,), (), (1,), (1, 0)):  # a part that does not come leaves its parameters alone
        training.step(groups)
        checkpointer.save(training.step_number)
    training.step()  # nobody saves this one; the next step begins another iteration
    training.step()
    checkpointer.save(training.step_number)
    checkpointer.drain(WAIT_S)
    assert outcomes(checkpointer) == [Outcome.DURABLE] * 9
    facts = checkpointer.storage_facts()
    assert facts["diverged"] == facts["torn"] == 0
    fresh = Parts(seed=1)
    other = make()
    assert other.restore(fresh.state) == training.step_number == 10
    assert state_digest(fresh.state) == state_digest(training.state)
    fresh.step()
    training.step()
    assert state_digest(fresh.state) == state_digest(training.state)


# -- what is refused ---------------------------------------------------------------------------------------------------


class DeepSpeedLike:
    """DeepSpeed's optimizers hold torch's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def backward(self, loss):
        raise AssertionError("only looked for")


def test_what_shadows_cannot_follow_is_refused_at_the_start(make, tmp_path):
    training = SmallTraining()
    with pytest.raises(ConfigError, match="every step"):
        Checkmate(tmp_path, interval_steps=10)
    with pytest.raises(ConfigError, match="one optimizer, and this state has 0"):
        make().start({"model": training.model})
    engine = DeepSpeedLike(training.optimizer)
    with pytest.raises(ConfigError, match=r"has 0: -; optimizer is DeepSpeed's DeepSpeedLike: give .* LiveZero"):
        make().start({"scheduler": training.scheduler, "optimizer": engine})
    with pytest.raises(ConfigError, match=r"RMSprop.*SGD, Adam or AdamW"):
        make().start({"optimizer": torch.optim.RMSprop(training.model.parameters())})
    frozen = SmallTraining()
    frozen.model[1].weight.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"model\.1\.weight never gets a gradient"):
        make().start(frozen.state)
    with pytest.raises(ConfigError, match="no hook is registered"):
        make(tap="bucket").start(training.state)


def test_a_life_that_cannot_begin_leaves_no_thread(make, monkeypatch):
    def refuse(*_, **__):
        raise CheckpointError("the first seeds were not taken")

    def mover_for(tracked, stream, knobs):
        return DeviceMover(stream, torch.device("cpu"), 1 << 20, 0.0)

    # No GPU is here: the mover's own thread needs none.
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(incarnation, "_mover_for", mover_for)
    monkeypatch.setattr(incarnation, "_seed_first", refuse)
    before = set(threading.enumerate())  # those of an earlier test may still be ending
    with pytest.raises(CheckpointError, match="were not taken"):
        make().start(SmallTraining().state)
    until(
        lambda: not [one for one in set(threading.enumerate()) - before if one.name.startswith("checkmate-")],
        "all threads to end",
    )


def test_options_say_where_shadows_are(tmp_path, shadows):
    assert CheckmateOptions() == CheckmateOptions(policy="block")
    with pytest.raises(ConfigError, match="shadows="):
        Checkmate(tmp_path).start(SmallTraining().state)
    with pytest.raises(ConfigError, match="token_file="):
        Checkmate(tmp_path, shadows=shadows.addresses).latest()
    with pytest.raises(ConfigError, match="no HOST:PORT"):
        Checkmate(tmp_path, shadows=["nowhere"])
    with pytest.raises(ConfigError, match="twice"):
        Checkmate(tmp_path, shadows=["a:1", "a:1"])
    with pytest.raises(ConfigError, match="there is no token"):
        Checkmate(tmp_path, shadows=shadows.addresses, token_file=str(tmp_path / "none")).latest()
    readable = tmp_path / "token"
    readable.write_bytes((shadows.folder / "token").read_bytes())
    readable.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Checkmate(tmp_path, shadows=shadows.addresses, token_file=str(readable)).latest()


def test_another_token_another_order_and_another_job_are_refused(tmp_path, shadows):
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("a secret of another test")
    with pytest.raises(CheckpointError, match="token"):
        Checkmate(tmp_path, shadows=shadows.addresses, token_file=str(token)).latest()
    turned = {**shadows.knobs, "shadows": shadows.addresses[::-1]}
    with pytest.raises(MismatchError, match="in their order"):
        Checkmate(tmp_path, **turned).start(SmallTraining().state)
    (tmp_path / "checkmate.json").write_text('{"job": "%s"}' % ("ab" * 16))
    with pytest.raises(MismatchError, match="belongs to job abab"):
        Checkmate(tmp_path, **shadows.knobs).restore(SmallTraining().state)


def test_another_model_is_refused_before_anything_changes(make):
    training = SmallTraining()
    checkpointer = make()
    checkpointer.start(training.state)
    steps(training, checkpointer, 1)
    checkpointer.close()
    wide = SmallTraining(width=65)
    before = wide.digest()
    with pytest.raises(MismatchError, match=r"\(64, 64\).*\(65, 65\)"):
        make().restore(wide.state)
    assert wide.digest() == before
    lacking = SmallTraining(seed=1)
    del lacking.state["plain"]
    with pytest.raises(MismatchError, match="plain"):
        make().restore(lacking.state)


def test_a_step_that_is_not_held_is_refused_and_nobody_is_fenced_off(make):
    training = SmallTraining()
    checkpointer = make()
    checkpointer.start(training.state)
    steps(training, checkpointer, 2)
    with pytest.raises(NoCheckpoint, match="99"):
        make().restore(SmallTraining(seed=1).state, step=99)
    steps(training, checkpointer, 1)
    assert outcomes(checkpointer) == [Outcome.DURABLE] * 3


@pytest.mark.parametrize(
    "text",
    [
        f'{{"job": "{"ab" * 16}", "promised": {wrong}}}'
        for wrong in ("-1", "true", "1e3", '"7"', "[]", "9223372036854775808", "1" * 50, "NaN", '1, "promised": 2')
    ]
    + ["[]", "7", "{}", '{"job": 7}', f'{{"job": "{"ab" * 16}", "more": "{"a" * 5000}"}}'],
)
def test_a_jobs_file_that_cannot_be_believed_is_refused(text, tmp_path):
    (tmp_path / JOB_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=r"cannot be read .*remove it"):
        noted_job(tmp_path)


def test_a_jobs_file_says_the_first_step_that_was_complete_and_the_last_one(tmp_path):
    assert noted_job(tmp_path) is None
    note_job(tmp_path, "ab" * 16)  # as every life of earlier versions wrote it
    assert noted_job(tmp_path) == NotedJob("ab" * 16)
    promises = Promises(tmp_path, "ab" * 16, ReadableBy.OWNER)
    for step in (3, 4, 9):
        promises.made(step)
        assert noted_job(tmp_path) == NotedJob("ab" * 16, 3)
    promises.close()
    assert noted_job(tmp_path) == NotedJob("ab" * 16, 9)


def test_a_life_whose_directory_was_given_to_another_job_leaves_its_file_alone(tmp_path):
    promises = Promises(tmp_path, "ab" * 16, ReadableBy.OWNER)
    promises.made(3)
    promises.made(4)
    (tmp_path / JOB_FILE).unlink()
    note_job(tmp_path, "cd" * 16)
    promises.close()
    assert noted_job(tmp_path) == NotedJob("cd" * 16)


def test_a_jobs_file_that_cannot_be_written_costs_no_save(make, tmp_path, monkeypatch, caplog):
    training, checkpointer = SmallTraining(), make()
    checkpointer.start(training.state)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkmate_job, "write_atomically", full)
    steps(training, checkpointer, 2)
    assert outcomes(checkpointer) == [Outcome.DURABLE] * 2
    checkpointer.close()
    assert "checkmate.json: writing failed: No space left" in caplog.text
    assert noted_job(tmp_path / "job").promised is None


# -- bad days ----------------------------------------------------------------------------------------------------------


def test_a_second_life_fences_the_first_off_and_that_one_trains_on(make):
    training = SmallTraining()
    checkpointer = make()
    checkpointer.start(training.state)
    steps(training, checkpointer, 2)
    fresh = SmallTraining(seed=1)
    second = make()
    assert second.restore(fresh.state) == 2
    second.start(fresh.state)
    until(lambda: checkpointer.storage_facts()["fenced"], "the first life to hear of the second")
    steps(training, checkpointer, 2)
    assert outcomes(checkpointer)[-2:] == [Outcome.FAILED] * 2
    assert "another incarnation of this job has taken over" in checkpointer.events[-1].error
    steps(fresh, second, 2)
    assert outcomes(second) == [Outcome.DURABLE] * 2


def test_a_change_behind_the_optimizer_is_found_and_healed(make):
    training = SmallTraining()
    checkpointer = make(verify_every=1)
    checkpointer.start(training.state)
    steps(training, checkpointer, 2)
    with torch.no_grad():
        training.model[0].bias.add_(1)
    # Every bucket is compared in turn, and what differs is seeded anew.
    until(lambda: (steps(training, checkpointer, 1), checkpointer.storage_facts()["diverged"])[1], "the difference")
    until(lambda: (steps(training, checkpointer, 1), outcomes(checkpointer)[-1] is Outcome.DURABLE)[1], "healing")
    fresh = SmallTraining(seed=1)
    assert make().restore(fresh.state) == training.step_number
    assert fresh.digest() == training.digest()


def test_a_shadow_dies_and_another_one_is_seeded_while_training_goes_on(shadows, make):
    training = SmallTraining()
    checkpointer = make()
    checkpointer.start(training.state)
    steps(training, checkpointer, 3)
    shadows.kill(1)
    until(lambda: (steps(training, checkpointer, 1), outcomes(checkpointer)[-1] is Outcome.FAILED)[1], "a lost shadow")
    assert "is lost" in checkpointer.events[-1].error
    shadows.restart(1)
    until(lambda: (steps(training, checkpointer, 1), outcomes(checkpointer)[-1] is Outcome.DURABLE)[1], "a whole set")
    steps(training, checkpointer, 3)
    assert outcomes(checkpointer)[-3:] == [Outcome.DURABLE] * 3
    fresh = SmallTraining(seed=1)
    assert make().restore(fresh.state) == training.step_number
    assert fresh.digest() == training.digest()


def test_no_training_begins_anew_after_complete_steps_whichever_shadows_were_lost(tmp_path):
    """One that was started anew lacks them. Once all are, only the job's file tells of them."""
    shadows, made = Shadows(tmp_path, 2), []

    def attached(**how):
        training = SmallTraining()
        made.append(Checkmate(tmp_path / "job", **shadows.knobs, bucket_bytes=4096))
        parts = {name: part for name, part in training.state.items() if name != "rng"}
        return training, made[-1], made[-1].attach(**parts, **how)

    try:
        training, checkpointer, first = attached()
        for _ in range(2):
            training.step()
            checkpointer.step()
        checkpointer.drain(WAIT_S)
        checkpointer.close()
        shadows.kill(1)
        shadows.restart(1)
        with pytest.raises(CorruptCheckpoint, match=r"step 2 was complete on all; shadow 1 has been started again"):
            attached()
        assert made[-1].latest() is None
        with pytest.raises(NoCheckpoint, match="step 7"):
            attached(resume_step=7)
        for number in range(2):
            shadows.kill(number)
            shadows.restart(number)
        noted = tmp_path / "job" / "checkmate.json"
        with pytest.raises(CorruptCheckpoint, match=rf"{noted} says that step 2, .*to begin again, move {noted} away"):
            attached()
        assert made[-1].latest() is None
        with pytest.raises(NoCheckpoint, match="step 7"):
            attached(resume_step=7)
        job = json.loads(noted.read_text())["job"]
        noted.rename(tmp_path / "moved away")
        training, checkpointer, again = attached()
        assert [first, again] == [0, 0]
        assert json.loads(noted.read_text()).keys() == {"job"}, "no step of this life is complete yet"
        training.step()
        checkpointer.step()
        checkpointer.drain(WAIT_S)
        found = json.loads(noted.read_text())
        assert found["promised"] == 1 and found["job"] != job
    finally:
        for one in made:
            one.close()
        shadows.end()


@pytest.mark.slow
def test_what_was_spilled_survives_all_shadows(shadows, make):
    training = SmallTraining()
    checkpointer = make(spill_every=2)
    checkpointer.start(training.state)
    digests = {}
    for _ in range(7):
        steps(training, checkpointer, 1)
        digests[training.step_number] = training.digest()
    for number in range(2):
        shadows.kill(number)
    for number in range(2):
        shadows.restart(number)
    fresh = SmallTraining(seed=3)
    step = make().restore(fresh.state)
    assert step in (2, 4, 6), "while one is being written, the next one is left out"
    assert fresh.digest() == digests[step]


def paused_shadow(shadows, make, **knobs):
    """Train with one shadow stopped, then let it go on: the checkpointer, and how it went meanwhile."""
    training = SmallTraining(width=256)
    checkpointer = make(**knobs)
    checkpointer.start(training.state)
    steps(training, checkpointer, 3)
    shadows.pause(1)
    before = len(checkpointer.events)
    try:
        for _ in range(60):
            training.step()
            checkpointer.save(training.step_number)
        checkpointer.drain(WAIT_S)
    finally:
        shadows.resume(1)
    meanwhile = checkpointer.events[before:]
    facts = copy.deepcopy(checkpointer.storage_facts())
    until(
        lambda: (steps(training, checkpointer, 1), outcomes(checkpointer)[-1] is Outcome.DURABLE)[1],
        "the shadow to be up to date again",
    )
    fresh = SmallTraining(width=256, seed=1)
    assert make().restore(fresh.state) == training.step_number
    assert fresh.digest() == training.digest()
    return meanwhile, facts


@pytest.mark.parametrize(
    "policy", ["drop", pytest.param("block", marks=pytest.mark.slow), pytest.param("queue", marks=pytest.mark.slow)]
)
def test_a_shadow_that_stands_still_fails_saves_not_the_training(policy, shadows, make):
    meanwhile, facts = paused_shadow(shadows, make, policy=policy, patience_s=1.0, queue_bytes=1 << 20)
    assert meanwhile[-1].outcome is Outcome.FAILED
    assert "is lost" in meanwhile[-1].error
    assert facts["cut_off"] >= 1
    # With drop training never waits for a shadow; otherwise it waits until the shadow is given up.
    assert (facts["waits"] > 0) == (policy != "drop")


def test_a_pause_that_a_queue_can_hold_costs_no_step(shadows, make):
    training = SmallTraining()
    checkpointer = make(policy="queue", patience_s=300)
    checkpointer.start(training.state)
    steps(training, checkpointer, 2)
    shadows.pause(0)
    try:
        for _ in range(3):
            training.step()
            checkpointer.save(training.step_number)
        with pytest.raises(WaitTimeout, match=r"hold steps .*5$"):
            checkpointer.drain(0.2)
    finally:
        shadows.resume(0)
    checkpointer.drain(WAIT_S)
    assert outcomes(checkpointer) == [Outcome.DURABLE] * 5


def test_shadows_that_cannot_be_reached_are_named(tmp_path, shadows):
    knobs = {**shadows.knobs, "shadows": [*shadows.addresses[:1], "127.0.0.1:9"], "timeout_s": 2}
    with pytest.raises(CheckpointError, match=r"127\.0\.0\.1:9 cannot be reached"):
        Checkmate(tmp_path, **knobs).start(SmallTraining().state)
