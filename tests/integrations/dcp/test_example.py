"""The FSDP2 example: killed, and continued on the same and on other numbers of ranks."""

from __future__ import annotations

import re
import shutil

import pytest

from tests.integrations.rank_asker import KILLED, Ranks

pytestmark = pytest.mark.timeout(200)
STEP = re.compile(r"step (\d+): loss ([0-9.]+)")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    made = Ranks(tmp_path_factory.mktemp("ranks"), "dcp/example_rank.py")
    yield made
    made.end()


def losses(folder):
    return {int(step): float(loss) for step, loss in STEP.findall((folder / "rank-0.log").read_text())}


def train(ranks, place, world, steps, victim=None):
    codes, _, folder = ranks.ask("train", world, place=str(place), steps=steps, victim=victim)
    if victim is None:
        assert codes == [0] * world, ranks.logs(folder)
    else:
        assert codes[victim] == KILLED, ranks.logs(folder)
    return losses(folder), (folder / "rank-0.log").read_text()


@pytest.mark.slow
def test_a_killed_training_goes_on_with_the_same_losses_on_any_number_of_ranks(ranks, tmp_path):
    killed, _ = train(ranks, tmp_path / "killed", 2, 100_000, victim=1)
    complete = [path for path in (tmp_path / "killed").glob("step-*") if (path / ".metadata").exists()]
    newest = max(int(path.name.removeprefix("step-")) for path in complete)
    shutil.copytree(tmp_path / "killed", tmp_path / "others")
    steps = newest + 8

    undisturbed, _ = train(ranks, tmp_path / "undisturbed", 2, steps)
    same, told = train(ranks, tmp_path / "killed", 2, steps)
    others, _ = train(ranks, tmp_path / "others", 3, steps)

    assert f"goes on from step-{newest}" in told
    assert len(undisturbed) == steps
    assert {**undisturbed, **killed} == {**killed, **undisturbed}, "where both have a step, both have its loss"
    assert same == {step: undisturbed[step] for step in range(newest + 1, steps + 1)}
    assert list(others) == list(same)
    assert others == pytest.approx(same, rel=1e-4)  # sums of three parts, and of two
    assert undisturbed[steps] < undisturbed[1]
