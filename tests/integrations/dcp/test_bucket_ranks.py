"""Several ranks that save into a bucket: the same bits on any number of ranks, and who dies or fails is named."""

from __future__ import annotations

import random
import re
import signal

import pytest

from lastgood.storage.objects.commits import find_commits
from tests.integrations.rank_asker import Ranks

pytestmark = pytest.mark.timeout(150)
TIMEOUT_S = 5


@pytest.fixture(scope="module")
def ranks(server, tmp_path_factory):
    made = Ranks(tmp_path_factory.mktemp("ranks"), "dcp/bucket_rank.py")
    yield made
    made.end()


@pytest.fixture
def where(server, url):
    keys = server.credentials
    return {"endpoint": server.endpoint_url, "keys": [keys.access_key_id, keys.secret_access_key], "url": url}


@pytest.mark.parametrize(
    ("world", "hows", "cached"),
    [
        (2, ["sync", "process"], False),
        pytest.param(3, ["thread"], False, marks=pytest.mark.slow),
        pytest.param(2, ["sync"], True, marks=pytest.mark.slow),
    ],
)
def test_what_is_saved_comes_back(ranks, where, world, hows, cached):
    for answer in ranks.run("in_bucket", world, hows=hows, cached=cached, **where):
        assert answer
        assert not any(answer.values()), answer


def test_another_number_of_ranks_loads_it_placed_in_another_way(ranks, where):
    ranks.run("in_bucket", 3, hows=["sync"], **where)
    placed = {"rows": 1, "columns": 0, "both": None, "small": 1, "empty": 1, "scalar": None}
    there = {**where, "url": f"{where['url']}/sync"}
    assert ranks.run("loads_from_bucket", 2, seed=len("sync"), placed=placed, **there) == [[], []]


@pytest.mark.parametrize(("stage", "victim"), [pytest.param("write", 2, marks=pytest.mark.slow), ("finish", 0)])
def test_a_rank_that_dies_is_named_on_all_others(ranks, where, stage, victim):
    codes, answers, folder = ranks.ask(
        "bad_day_in_bucket", 3, where=stage, victim=victim, dies=True, timeout_s=TIMEOUT_S, store="file", **where
    )
    assert codes[victim] == -signal.SIGKILL
    for rank, answer in enumerate(answers):
        if rank == victim:
            continue
        assert isinstance(answer, dict), ranks.logs(folder)
        assert answer["kind"] == "WaitTimeout"
        stages = {"write": "writing", "finish": "finishing"}
        assert re.search(rf"rank {victim} \(host \S+, process \d+\) .* while {stages[stage]}", answer["text"])
        assert answer["seconds"] < TIMEOUT_S + 20
        assert answer["older"] == []


@pytest.mark.parametrize(
    ("stage", "victim", "kind", "said"),
    [
        ("plan", 1, "ValueError", "cannot plan"),
        ("write", 2, "OSError", "Input/output error"),
        ("finish", 0, "OSError", "Input/output error"),
        ("elsewhere", 1, "StorageError", "does not know this access key"),
    ],
)
def test_an_error_of_a_rank_is_an_error_on_all_at_once(ranks, where, stage, victim, kind, said):
    for answer in ranks.run("bad_day_in_bucket", 3, where=stage, victim=victim, dies=False, timeout_s=60, **where):
        assert answer["kind"] == kind, answer
        assert said in answer["text"]
        assert answer["seconds"] < 40
        assert answer["older"] == []
        assert answer["again"] == []


def test_ranks_that_find_different_saves_load_neither(ranks, where):
    for answer in ranks.run("saved_anew_meanwhile", 2, **where):
        assert answer["kind"] == "MismatchError"
        assert "different saves: it was saved anew while they looked" in answer["text"]
        assert answer["again"] == []


@pytest.mark.parametrize(
    "victims", [[0], pytest.param([1], marks=pytest.mark.slow), pytest.param([0, 1], marks=pytest.mark.slow)]
)
def test_a_kill_at_any_moment_leaves_one_checkpoint_that_is_whole(ranks, where, bucket, victims):
    after_s = random.uniform(0.0, 0.4)
    _, told, _ = ranks.ask("saves_until_killed", 2, kill=victims, kill_after_s=after_s, **where)
    for answer in ranks.run("what_is_left", 2, **where):
        assert answer["differs"] == [], f"after {after_s} s"
        assert answer["step"] in (told[victims[0]], told[victims[0]] + 1), f"after {after_s} s"
    assert 1 <= len(find_commits(bucket)) <= 2
