"""DeepSpeed trainings of two ranks, every step of which shadows keep: real processes, real connections, real kills."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.checkpointers.support.checkmate_shadows import Shadows
from tests.integrations.rank_asker import KILLED

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="lastgood[deepspeed] is not installed"
)
SURE, MOST = 4, 40
"""Steps that are durable before the kill, and of the training that is not disturbed."""


@pytest.fixture(scope="module")
def shadows(tmp_path_factory):
    made = Shadows(tmp_path_factory.mktemp("shadows"), 2)
    yield made
    made.end()


def knobs_of(shadows):
    return {**shadows.knobs, "bucket_bytes": 1024, "verify_every": 1}


def killed_and_restored(ranks, shadows, folder, seed=1, **kind):
    """A kill of all ranks, and the rest in fresh processes, against a training that nothing disturbs."""
    what = {**kind, "job": str(folder / "job"), "knobs": knobs_of(shadows), "steps": MOST, "sure": SURE}
    codes, lives, logs = ranks.ask("kept_by_shadows", seed=seed, within_s=0.5, **what)
    assert codes == [KILLED, KILLED] and None not in lives, ranks.logs(logs)
    again = ranks.run("restored_from_shadows", **what)
    assert len({one["restored"] for one in again}) == 1
    for life, rest in zip(lives, again, strict=True):
        plain = life["plain"]
        for one in (life, rest):
            assert set(one["outcomes"]) == {"durable"}, one["errors"]
            assert one["facts"]["diverged"] == one["facts"]["torn"] == 0
        assert life["kept"]["digests"] == first_of(plain["digests"], SURE)
        assert life["kept"]["losses"] == first_of(plain["losses"], SURE)
        restored = rest["restored"]
        assert SURE <= restored <= MOST - 3
        assert rest["digests"] == {str(step): plain["digests"][str(step)] for step in range(restored, restored + 4)}
        assert rest["losses"] == {str(step): plain["losses"][str(step)] for step in range(restored + 1, restored + 4)}
    if kind["stage"]:
        assert lives[0]["kept"]["digests"] != lives[1]["kept"]["digests"]  # parts, not copies


def first_of(found, steps):
    return {number: one for number, one in found.items() if int(number) <= steps}


def test_the_documented_example_is_killed_and_goes_on(ranks, shadows, tmp_path):
    """ZeRO 3, with several parts in each step. `attach` resumes, so this test must be the first of its shadows."""
    what = {"stage": 3, "groups": 2, "clip": 0.05, "sub_group_size": 60, "job": str(tmp_path / "job")}
    lives = []
    for steps in (3, 6):
        codes, answers, logs = ranks.ask("as_documented", knobs=knobs_of(shadows), steps=steps, **what)
        assert codes == [KILLED, KILLED] and None not in answers, ranks.logs(logs)
        lives.append(answers)
    for first, second in zip(*lives, strict=True):
        assert (first["begun"], second["begun"]) == ([0, 1, 2], [3, 4, 5])
        assert first["outcomes"] == second["outcomes"] == ["durable"] * 3
        for life, step in ((first, "3"), (second, "6")):
            assert life["digest"] == life["plain"]["digests"][step]
            assert life["loss"] == life["plain"]["losses"][step][-1]


KINDS = [
    {"stage": stage, "groups": groups, "clip": 0.05, "precision": precision, "sub_group_size": size}
    for stage, size in ((0, 10**12), (1, 10**12), (2, 10**12), (3, 10**12), (3, 60))
    for groups in (1, 2)
    for precision in ("fp32", "bf16")
    if stage or precision == "fp32"
]
KINDS.append({"stage": 0, "pipeline": True})
EVERYDAY = {"stage": 2, "groups": 2, "clip": 0.05, "precision": "fp32", "sub_group_size": 10**12}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id="-".join(map(str, kind.values())), marks=[] if kind == EVERYDAY else pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_a_killed_training_goes_on_as_if_nothing_had_been(ranks, shadows, tmp_path, kind):
    killed_and_restored(ranks, shadows, tmp_path, **kind)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("seed", range(2, 8))
def test_killed_at_many_instants(ranks, shadows, tmp_path, stage, seed):
    kind = {"stage": stage, "groups": 2, "clip": 0.05, "precision": ["fp32", "bf16"][seed % 2], "sub_group_size": 60}
    killed_and_restored(ranks, shadows, tmp_path, seed, **kind)


def test_what_cannot_be_followed_is_refused_at_the_start(ranks, shadows, tmp_path):
    (said,) = ranks.run("refused_by_checkmate", world=1, job=str(tmp_path / "job"), knobs=shadows.knobs)
    assert "optimizer is DeepSpeed's DeepSpeedZeroOptimizer: give the parts of LiveZero" in said[0]
    assert re.search(r"optimizer is DeepSpeed's \w+: give the parts of LiveZero in its place, with ZeRO 1, 2", said[1])
    assert "an optimizer that is offloaded is no part of this live state" in said[2]
