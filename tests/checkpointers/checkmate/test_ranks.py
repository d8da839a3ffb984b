"""Ranks that train together, with shadows that keep every step: real processes, real connections."""

from __future__ import annotations

import json
import random
import re
import time

import pytest
import torch

from lastgood.checkpointers.checkmate.system import Checkmate
from lastgood.errors import CheckpointError
from tests.checkpointers.support.checkmate_shadows import Shadows
from tests.checkpointers.support.rank_pool import RankPool
from tests.suggestions.following import advice, follows, hear

STEPS = 30


@pytest.fixture(scope="module")
def shadows(tmp_path_factory):
    made = Shadows(tmp_path_factory.mktemp("shadows"), 2)
    yield made
    made.end()


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    made = RankPool(3, tmp_path_factory.mktemp("pool"), "checkmate_rank.py")
    yield made
    made.end()


@pytest.fixture
def victims(tmp_path):
    """Ranks that a test kills."""
    made = RankPool(2, tmp_path, "checkmate_rank.py")
    yield made
    made.end()


def knobs_of(shadows, **more):
    return {**shadows.knobs, "bucket_bytes": 4096, "verify_every": 3, **more}


CASES = [
    {"optimizer": "adamw", "register": "watch"},
    {"optimizer": "sgd", "register": "hook", "clip": 0.5, "view": True},
    {"optimizer": "adamw fused", "register": "hook", "accumulate": 2, "clip": 0.5},
    {"optimizer": "sgd", "register": "watch", "scaled": True, "clip": 1.0},
    {"optimizer": "adamw", "register": "none", "knobs": {"tap": "step"}, "clip": 0.5},
]


EVERYDAY = (0, 1)
"""The others take as long again."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id="-".join(map(str, case.values())), marks=() if number in EVERYDAY else pytest.mark.slow)
        for number, case in enumerate(CASES)
    ],
)
def test_every_step_is_kept_and_the_training_is_the_one_without(case, pool, shadows, tmp_path):
    kept_and_equal(2, case, pool, shadows, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw fused"])
@pytest.mark.parametrize("register", ["watch", "none"])
@pytest.mark.parametrize("scaled", [False, True])
def test_every_step_is_kept_of_a_training_on_a_device(optimizer, register, scaled, pool, shadows, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    case = {"optimizer": optimizer, "register": register, "scaled": scaled, "clip": 0.5, "device": "cuda"}
    kept_and_equal(1, case, pool, shadows, tmp_path)


def kept_and_equal(world, case, pool, shadows, tmp_path):
    made = {key: value for key, value in case.items() if key not in ("register", "knobs")}
    plain = pool.run(world, "train", steps=14, **made)
    job = str(tmp_path / "job")
    knobs = knobs_of(shadows, **case.get("knobs", {}))
    half = pool.run(world, "train", steps=8, knobs=knobs, directory=job, register=case["register"], **made)
    for rank in range(world):
        assert half[rank]["outcomes"] == ["durable"] * 8, half[rank]["errors"]
        assert all(count > 0 for count in half[rank]["bytes"])
        assert half[rank]["facts"]["diverged"] == half[rank]["facts"]["torn"] == 0
    rest = pool.run(
        world, "train", steps=14, knobs=knobs, directory=job, register=case["register"], restore=True, **made
    )
    for rank in range(world):
        assert rest[rank]["restored"] == 8
        assert half[rank]["losses"] | rest[rank]["losses"] == plain[rank]["losses"]
        assert rest[rank]["digest"] == plain[rank]["digest"]
        assert rest[rank]["outcomes"] == ["durable"] * 6, rest[rank]["errors"]
        assert rest[rank]["facts"]["diverged"] == 0


def test_shards_of_fsdp_are_kept_by_every_rank(pool, shadows, tmp_path):
    job = str(tmp_path / "job")
    knobs = knobs_of(shadows)
    plain = pool.run(2, "sharded", knobs=None, directory=None, steps=9)
    half = pool.run(2, "sharded", knobs=knobs, directory=job, steps=5)
    rest = pool.run(2, "sharded", knobs=knobs, directory=job, steps=9, restore=True)
    for rank in range(2):
        assert half[rank]["outcomes"] == ["durable"] * 5
        assert rest[rank]["restored"] == 5
        assert half[rank]["diverged"] == rest[rank]["diverged"] == 0
        assert half[rank]["losses"] | rest[rank]["losses"] == plain[rank]["losses"]
        assert rest[rank]["digest"] == plain[rank]["digest"]


def test_gradients_that_are_changed_behind_the_tap_fail_that_step_and_are_healed(pool, shadows, tmp_path):
    job, knobs = str(tmp_path / "job"), knobs_of(shadows)
    answers = pool.run(2, "train", steps=12, knobs=knobs, directory=job, meddle=4)
    for answer in answers:
        assert answer["outcomes"][:4] == ["durable"] * 4
        assert answer["outcomes"][4] == "failed"
        assert answer["outcomes"][-1] == "durable"
    assert any("something changed gradients between backward() and step()" in error for error in answers[0]["errors"])
    restored = pool.run(2, "restore_only", knobs=knobs, directory=job)
    assert [one["step"] for one in restored] == [12, 12]
    assert [one["digest"] for one in restored] == [one["digest"] for one in answers]


def test_where_the_last_step_failed_on_rank_0_alone_the_others_hear_of_it_in_its_drain(pool, shadows, tmp_path):
    clip = {"clip": "torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-6)"}
    began = time.monotonic()
    for (answer,) in pool.run(2, "written", knobs=knobs_of(shadows), directory=str(tmp_path / "job"), loops=[clip]):
        assert (answer["said"], answer["outcomes"]) == ("", ["failed"] * 3)
    assert time.monotonic() - began < 60, "one waited for its own timeout"


@pytest.mark.parametrize("world", [2, 3])
def test_the_hook_averages_as_ddp_does_to_the_bit(world, pool):
    for without, with_hook in pool.run(world, "reduced_alike", elements=1001):
        assert without == with_hook


def test_another_number_of_ranks_is_refused_with_both(pool, shadows, tmp_path):
    job, knobs = str(tmp_path / "job"), knobs_of(shadows)
    pool.run(2, "train", steps=2, knobs=knobs, directory=job)
    (answer,) = pool.ask(1, "restore_only", knobs=knobs, directory=job)
    assert "saved by 2 ranks, and there are 1 now" in answer["error"]


@pytest.mark.slow
def test_a_shadow_comes_back_while_a_rank_reconnects_late(victims, tmp_path):
    """With policy block a rank waits for room at the new shadow, which waits for the other rank, which waits for it."""
    shadows = Shadows(tmp_path / "shadows", 2)
    try:
        job, stop = str(tmp_path / "job"), tmp_path / "stop"
        knobs = knobs_of(shadows, bucket_bytes=1 << 20, policy="block", patience_s=600)
        for rank in range(2):
            asked = {"work": "train_with_late_data", "rank": rank, "world": 2, "meeting": str(tmp_path / "meeting")}
            victims.send(rank, asked | {"knobs": knobs, "directory": job, "stop": str(stop), "late_s": 4.0})
        observer = Checkmate(job, **knobs)

        def wait_for_step(step):
            deadline = time.monotonic() + 120
            while True:
                try:
                    if (tmp_path / "job" / "checkmate.json").exists() and (observer.latest() or 0) >= step:
                        return
                except CheckpointError:
                    pass  # the new shadow holds nothing yet
                assert time.monotonic() < deadline, victims.errors[0].read_text()[-2000:]
                time.sleep(0.1)

        wait_for_step(5)
        reached = observer.latest()
        shadows.kill(1)
        shadows.restart(1)
        wait_for_step(reached + 30)
        stop.touch()
        for rank in range(2):
            answer = json.loads(victims.answers[rank].get(timeout=150))["ok"]
            assert answer["outcomes"][-1] == "durable"
    finally:
        shadows.end()


def test_steps_that_nobody_saves_are_followed_behind_the_hook(pool, shadows, tmp_path):
    job, knobs = str(tmp_path / "job"), knobs_of(shadows)
    answers = pool.run(2, "train", steps=6, knobs=knobs, directory=job, unsaved=[1, 3, 4])
    restored = pool.run(2, "restore_only", knobs=knobs, directory=job)
    for answer, again in zip(answers, restored, strict=True):
        assert answer["outcomes"] == ["durable"] * 3, answer["errors"]
        assert answer["facts"]["diverged"] == 0
        assert (again["step"], again["digest"]) == (6, answer["digest"])


def test_ranks_of_other_parameters_say_themselves_what_they_left_alone(pool, shadows, tmp_path):
    job, knobs = str(tmp_path / "job"), knobs_of(shadows)
    before = pool.run(2, "apart", knobs=knobs, directory=job, steps=9, left_out=3)
    assert [answer["outcomes"] for answer in before] == [["durable"] * 9] * 2
    after = pool.run(2, "apart", knobs=knobs, directory=job, steps=9, restore=True)
    assert [one["digest"] for one in after] == [one["digest"] for one in before]


def test_where_one_rank_cannot_restore_no_rank_changes_anything(pool, shadows, tmp_path):
    job, knobs = str(tmp_path / "job"), knobs_of(shadows)
    pool.run(2, "train", steps=2, knobs=knobs, directory=job)
    first, second = pool.run(2, "restore_unlike", knobs=knobs, directory=job)
    assert first["said"].startswith("CheckpointError: rank 1 could not restore step 2: step 2 of the shadows: the ")
    assert second["said"].startswith("MismatchError: step 2 of the shadows: the checkpoint lacks nothing and holds")
    assert not first["changed"] and not second["changed"]


@pytest.fixture
def written(pool, shadows, tmp_path):
    """What rank 0 says of trainings whose loops are given as lines of Python, in the order in which they are given."""

    def of(*loops, **more):
        knobs = knobs_of(shadows, policy="block", **more)
        first, second = pool.run(2, "written", knobs=knobs, directory=str(tmp_path / "job"), loops=loops)
        assert [one["outcomes"] for one in first] == [one["outcomes"] for one in second]
        return first

    return of


KEPT, HEALED = ["durable"] * 3, "durable"
CLIP = "{}(model.parameters(), 1e-6)"  # each gradient is larger
SCALED = {
    "backward": "scaler.scale(loss).backward()",
    "clip": "scaler.unscale_(optimizer)",
    "step": "scaler.step(optimizer); scaler.update()",
}


@follows("Clip with checkpointer.clip_grad_norm_ or clip_grad_value_, and put the GradScaler into the state")
def test_changes_of_gradients_that_shadows_repeat(written):
    by_torch = [{"clip": CLIP.format(f"torch.nn.utils.{name}")} for name in ("clip_grad_norm_", "clip_grad_value_")]
    for answer in written(*({"first": lines} for lines in (*by_torch, SCALED))):
        assert (answer["outcomes"][0], answer["outcomes"][-1]) == ("failed", HEALED), answer
        message = hear(answer["errors"][0])
    norm = advice(message, r"Clip with (checkpointer\.\w+)")
    value = norm.rpartition(".")[0] + "." + advice(message, r" or (clip_\w+), and put the GradScaler into the state")
    right = [{"clip": CLIP.format(call)} for call in (norm, value)]
    right += [{**SCALED, "beside": "scaler=scaler"}]
    right += [{**SCALED, "beside": "scaler=scaler", "clip": f"{SCALED['clip']}; {CLIP.format(norm)}"}]
    answers = written(*right)
    assert [answer["outcomes"] for answer in answers] == [KEPT] * 4, answers


@follows(
    "call clip_grad_norm_() or clip_grad_value_() once, with all",
    "checkmate: start(state) or attach(...) must be called first",
)
def test_one_clipping_of_all(written):
    name = "checkpointer.clip_grad_{}_"
    part = [{"clip": f"{name.format(kind)}([*model.parameters()][:2], 1e-6)"} for kind in ("norm", "value")]
    twice = {"clip": f"{CLIP.format(name.format('value'))}; {CLIP.format(name.format('norm'))}"}
    *refused, early, more = written(*part, {"before": CLIP.format("checkpointer.clip_grad_norm_")}, {"first": twice})
    hear(early["said"])
    assert "gradients were clipped more than once before one step" in more["errors"][0]
    calls = [re.findall(r"clip_grad_\w+", hear(answer["said"])) for answer in refused]
    assert calls[0] == calls[1] and len(calls[0]) == 2
    answers = written(*({"clip": CLIP.format(f"checkpointer.{call}")} for call in calls[0]))
    assert [answer["outcomes"] for answer in answers] == [KEPT] * 2, answers


@follows("shadows apply one update for each reduction")
def test_one_step_for_each_backward_pass(written):
    twice = {"step": "optimizer.step(); optimizer.step()"}
    around = {"loss": "loss = model.module(inputs).square().mean()"}
    answers = written({"first": twice}, {"first": around})
    for answer, words in zip(answers, ("has begun twice", "with no gradients reduced for it"), strict=True):
        assert (answer["outcomes"][0], answer["outcomes"][-1]) == ("failed", HEALED), answer
        advice(hear(answer["errors"][0]), words)


@follows("call the model itself, not its forward()")
def test_a_forward_pass_that_runs_no_hooks(written):
    around, right = written({"loss": "loss = model.forward(inputs).square().mean()"}, {})
    message = hear(around["errors"][0])
    assert around["outcomes"] == ["durable", "failed", "durable"] and "From here on gradients are copied" in message
    assert right["outcomes"] == KEPT


@follows("and no hook is registered: call checkpointer.watch(model)")
def test_a_hook_that_the_tap_needs(written):
    (refused,) = written({"before": ""}, tap="bucket")
    call = advice(hear(refused["said"]), r"call (checkpointer\.watch\(model\))")
    (right,) = written({"before": call}, tap="bucket")
    assert right["outcomes"] == KEPT


@follows("checkmate: each rank sends all of its optimizer's gradients; with DistributedDataParallel call")
def test_ranks_that_send_a_part_each(written, pool):
    before = pool.errors[0].stat().st_size
    (alone,) = written({"before": ""})
    said = pool.errors[0].read_text()[before:]
    call = advice(hear(said), r"call\s(checkpointer\.watch\(model\))")
    (watched,) = written({"before": call})
    assert (alone["outcomes"], watched["outcomes"]) == (KEPT, KEPT)
    assert watched["sent_bytes"] < 0.8 * alone["sent_bytes"]  # gradients in halves; seeds are rank 0's alone


def killed_and_restored(seed, pool, victims, shadows, directory, **made):
    job, knobs = str(directory / "job"), knobs_of(shadows)
    chance = random.Random(seed)
    plain = pool.run(2, "train", steps=STEPS, **made)
    for rank in range(2):
        asked = {"work": "train_until_killed", "rank": rank, "world": 2, "meeting": str(directory / f"meet-{seed}")}
        victims.send(rank, asked | {"knobs": knobs, "directory": job, "most": STEPS - 1, **made})
    observer = Checkmate(job, **knobs)
    reached, deadline = 0, time.monotonic() + 120
    while reached < 4:
        assert time.monotonic() < deadline, victims.errors[0].read_text()[-2000:]
        time.sleep(0.02)
        # What an older test has kept is not this one's: its first fence ends that.
        reached = (observer.latest() or 0) if (directory / "job" / "checkmate.json").exists() else 0
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


def test_killed_at_any_instant_it_goes_on_as_if_nothing_had_been(pool, victims, shadows, tmp_path):
    killed_and_restored(1, pool, victims, shadows, tmp_path, optimizer="adamw")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_killed_at_many_instants(seed, pool, victims, shadows, tmp_path):
    optimizer = ["sgd", "adamw", "adamw fused"][seed % 3]
    killed_and_restored(seed, pool, victims, shadows, tmp_path, optimizer=optimizer)


def needs_two_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw fused"])
def test_shadows_of_two_devices_hold_their_bits(optimizer, pool, shadows, tmp_path):
    needs_two_devices()
    made = {"optimizer": optimizer, "device": "cuda"}
    job, knobs = str(tmp_path / "job"), knobs_of(shadows)
    plain = pool.run(2, "train", steps=200, **made)
    live = pool.run(2, "train", steps=200, knobs=knobs, directory=job, **made)
    held = pool.run(2, "restore_only", knobs=knobs, directory=job, **made)
    for rank in range(2):
        assert live[rank]["outcomes"] == ["durable"] * 200, live[rank]["errors"]
        assert live[rank]["facts"]["diverged"] == live[rank]["facts"]["torn"] == 0
        assert (held[rank]["step"], held[rank]["digest"]) == (200, live[rank]["digest"])
        assert live[rank]["losses"] == plain[rank]["losses"]
        assert live[rank]["digest"] == plain[rank]["digest"]


@pytest.mark.gpu
@pytest.mark.parametrize(("seed", "optimizer"), [(1, "sgd"), (2, "adamw")])
def test_two_devices_go_on_after_a_kill(seed, optimizer, pool, victims, shadows, tmp_path):
    needs_two_devices()
    killed_and_restored(seed, pool, victims, shadows, tmp_path, optimizer=optimizer, device="cuda")
