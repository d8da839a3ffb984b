"""Ranks that die or fail at each stage of a save: an error on all that names them, and the older checkpoint stays."""

from __future__ import annotations

import random
import re
import signal

import pytest

from tests.integrations.rank_asker import Ranks
from tests.suggestions.following import follows, hear

pytestmark = pytest.mark.timeout(150)
TIMEOUT_S = 5


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    made = Ranks(tmp_path_factory.mktemp("ranks"), "dcp/dcp_rank.py")
    yield made
    made.end()


@pytest.mark.parametrize(
    ("where", "victim"),
    [
        pytest.param("before", 1, marks=pytest.mark.slow),
        pytest.param("plan", 1, marks=pytest.mark.slow),
        ("write", 2),
        pytest.param("finish", 0, marks=pytest.mark.slow),
        pytest.param("write", 0, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_is_named_on_all_others(ranks, tmp_path, where, victim):
    codes, answers, folder = ranks.ask(
        "bad_day", 3, place=str(tmp_path), where=where, victim=victim, dies=True, timeout_s=TIMEOUT_S
    )
    assert codes[victim] == -signal.SIGKILL
    assert answers[victim] == "saved"
    survivors = [answer for rank, answer in enumerate(answers) if rank != victim]
    for answer in survivors:
        assert isinstance(answer, dict), ranks.logs(folder)
        assert answer["seconds"] < TIMEOUT_S + 20
        assert answer["older"] == []
        # Rank 0 keeps the process group's store here, so with it all ways to hear of others are gone.
        assert "rank 0" in answer["text"] if victim == 0 else f"rank {victim}" in answer["text"]
        assert answer["kind"] in ("WaitTimeout", "CheckpointError")


def test_rank_0_is_named_where_the_store_outlives_it(ranks, tmp_path):
    _, answers, folder = ranks.ask(
        "bad_day",
        3,
        place=str(tmp_path),
        where="finish",
        victim=0,
        dies=True,
        timeout_s=TIMEOUT_S,
        store="file",
    )
    for answer in answers[1:]:
        assert isinstance(answer, dict), ranks.logs(folder)
        assert answer["kind"] == "WaitTimeout"
        assert re.search(r"rank 0 \(host \S+, process \d+\) .* while finishing", answer["text"])
        assert answer["seconds"] < TIMEOUT_S + 20
        assert answer["older"] == []


@pytest.mark.parametrize(
    ("where", "victim", "kind", "said"),
    [
        ("plan", 1, "ValueError", "cannot plan"),
        ("write", 2, "OSError", "Input/output error"),
        pytest.param("finish", 0, "OSError", "Input/output error", marks=pytest.mark.slow),
    ],
)
def test_an_error_of_a_rank_is_an_error_on_all_at_once(ranks, tmp_path, where, victim, kind, said):
    answers = ranks.run(
        "bad_day", 3, place=str(tmp_path), where=where, victim=victim, dies=False, timeout_s=60, again=True
    )
    for answer in answers:
        assert answer["kind"] == kind
        assert said in answer["text"]
        assert answer["seconds"] < 40
        assert answer["older"] == []
        assert answer["again"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_rank_that_is_late_is_waited_for(ranks, tmp_path):
    answers = ranks.run("bad_day", 2, place=str(tmp_path), where="before", victim=1, dies=False, late_s=3, timeout_s=60)
    for answer in answers:
        assert answer["kind"] == "nothing"


@follows("give all ranks one path, or call DCP with no_dist=True")
def test_folders_that_are_not_one_are_named(ranks, tmp_path):
    for answer in ranks.run("other_folders", 2, place=str(tmp_path)):
        assert answer["names"]["kind"] == "MismatchError"
        hear(answer["names"]["text"])
        assert "step-0" in answer["names"]["text"]
        assert "step-1" in answer["names"]["text"]
        assert answer["places"]["kind"] == "StorageError"
        assert "do not share it" in answer["places"]["text"]
    assert list(tmp_path.iterdir()) == []
    one = ranks.run("bad_day", 2, place=str(tmp_path), where="before", victim=1, dies=False, late_s=0, timeout_s=60)
    assert [answer["kind"] for answer in one] == ["nothing", "nothing"]


def test_a_rank_that_cannot_read_fails_the_load_of_all(ranks, tmp_path):
    for damaged, nowhere in ranks.run("failed_load", 2, place=str(tmp_path)):
        assert damaged["kind"] == "CorruptCheckpoint"
        assert "checksum" in damaged["text"]
        assert nowhere["kind"] == "NoCheckpoint"


def killed_at_a_random_moment(ranks, place, victims):
    """The step of the one checkpoint that is left: the older one until the new one takes its name."""
    place.mkdir()
    after_s = random.uniform(0.0, 0.4)
    _, told, _ = ranks.ask("save_until_killed", 2, place=str(place), timeout_s=2, kill=victims, kill_after_s=after_s)
    answers = ranks.run("newest_is_complete", 2, place=str(place))
    for answer in answers:
        assert answer["differs"] == [], f"after {after_s} s"
        assert answer["left"] == ["step-1"]
    assert all(answer["step"] >= max(step for step in told if step is not None) for answer in answers)
    return answers[0]["step"]


@pytest.mark.parametrize(
    "victims", [[0], pytest.param([1], marks=pytest.mark.slow), pytest.param([0, 1], marks=pytest.mark.slow)]
)
def test_a_kill_at_any_moment_leaves_one_complete_checkpoint(ranks, tmp_path, victims):
    """What a save said was saved is there, and the next save removes what was left."""
    assert killed_at_a_random_moment(ranks, tmp_path / "at", victims) >= 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kills_at_many_moments(ranks, tmp_path):
    steps = [killed_at_a_random_moment(ranks, tmp_path / str(number), [number % 2]) for number in range(14)]
    assert len(set(steps)) > 2
