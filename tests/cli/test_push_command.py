"""`lastgood push`, and what `inspect` says of a remote place."""

from __future__ import annotations

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from lastgood import PCcheck
from lastgood.checkpointers.rank_directory import rank_directory
from lastgood.cli import app
from lastgood.errors import ConfigError, CorruptCheckpoint, MismatchError, NoCheckpoint, NoGoodCheckpoint, StorageError
from lastgood.storage import SlotView, Verdict
from lastgood.storage.objects.commits import find_commits
from lastgood.storage.objects.folder import FolderClient
from lastgood.storage.objects.format import UPLOADS
from lastgood.storage.objects.view import RemoteView
from tests.checkpointers.support.stored_helpers import open_store, put


def call(*arguments) -> str:
    """What a command prints. Raises what it refuses with."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.fixture
def job(tmp_path):
    with open_store(tmp_path / "job") as store:
        for step in (1, 2, 3):
            put(store, step, {"x": torch.full((60_000,), float(step)), "frozen": torch.ones(60_000)})
    return tmp_path / "job"


@pytest.fixture
def place(tmp_path):
    return FolderClient(tmp_path / "remote")


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch):
    monkeypatch.setattr("lastgood.storage.objects.format.SEGMENT_BYTES", 64 * 1024)


def steps(place) -> list[int]:
    return [name.step for name in find_commits(place)]


def test_the_newest_is_sent_and_comes_back_exact(job, place):
    assert re.search(r"step 3 of incarnation 1: .* sent, 0 B were there", call("push", job, place.root))
    assert steps(place) == [3] and list(place.list(UPLOADS)) == []
    local, remote = SlotView(job), RemoteView(place)
    mine, theirs = local.newest(), remote.newest()
    assert remote.read_bytes(theirs, 0, theirs.stream_bytes) == local.read_bytes(mine, 0, mine.stream_bytes)
    assert "step 3 is there already" in call("push", job, place.root)
    found = json.loads(call("push", job, place.root, "--step", 2, "--json"))
    assert (found["step"], found["ranks"], found["was_there"]) == (2, 1, False)
    assert steps(place) == [3, 2]


def test_a_second_call_sends_what_is_missing(job, place, monkeypatch):
    real, made = FolderClient.create, []

    def create(client, key, content):
        if key.startswith("segments/"):
            if len(made) == 3:
                raise StorageError("cut")
            made.append(key)
        real(client, key, content)

    monkeypatch.setattr(FolderClient, "create", create)
    with pytest.raises(StorageError, match="cut"):
        call("push", job, place.root, "--threads", 1)
    assert steps(place) == []
    monkeypatch.setattr(FolderClient, "create", real)
    found = json.loads(call("push", job, place.root, "--json"))
    assert found["kept_bytes"] == 3 * 64 * 1024 and found["sent_bytes"] > 0


def test_all_ranks_are_sent_with_one_commit(tmp_path, place):
    job_id = bytes(range(16))
    for rank in range(2):
        folder = rank_directory(tmp_path / "job", rank)
        with open_store(folder, rank=rank, world_size=2, job_id=job_id) as store:
            put(store, 7, {"x": torch.full((100,), float(rank))})
    with pytest.raises(MismatchError, match="is one rank's part of a job; push"):
        call("push", rank_directory(tmp_path / "job", 0), place.root)
    told = call("push", tmp_path / "job", place.root)
    assert "rank 1 of 2" in told and "step 7" in told
    for rank in range(2):
        remote, local = RemoteView(place, rank), SlotView(rank_directory(tmp_path / "job", rank))
        info = remote.newest()
        assert remote.read_bytes(info, 0, info.stream_bytes) == local.read_bytes(local.newest(), 0, info.stream_bytes)


def test_what_cannot_be_sent_is_said(tmp_path, job, place):
    with pytest.raises(NoCheckpoint, match=r"no complete checkpoint of step 9; steps \[3, 2"):
        call("push", job, place.root, "--step", 9)
    with pytest.raises(NoCheckpoint):
        call("push", tmp_path / "nothing", place.root)
    with pytest.raises(ConfigError, match="--region: for s3://BUCKET/PREFIX only"):
        call("push", job, place.root, "--region", "x")
    with pytest.raises(ConfigError, match="holds a user or a key"):
        call("push", job, "s3://me:mine@bucket/x")
    with open_store(job) as store:
        for info in store.committed():
            store.judge(info.sequence, Verdict(info.step, False, "a spike"))
    with pytest.raises(NoGoodCheckpoint, match="all checkpoints are judged bad"):
        call("push", job, place.root)
    info = SlotView(job).newest()
    with info.path.open("r+b") as file:
        file.seek((1 << 20) + 5000)
        file.write(b"\xff\x01\xff")
    with pytest.raises(CorruptCheckpoint, match="chunk"):
        call("push", job, place.root, "--step", 3)
    assert steps(place) == []


def test_inspect_says_how_far_a_place_is_behind(tmp_path, place):
    ckpt = PCcheck(tmp_path / "job", interval_steps=1, remote=str(place.root), remote_every=2)
    ckpt.attach(model=torch.nn.Linear(8, 8))
    for _ in range(3):
        ckpt.step()
        ckpt.drain()
        ckpt._beside.tier.drain(60)
    ckpt.close()
    told = call("inspect", tmp_path / "job")
    assert re.search(rf"remote: {place.root} holds step 2, 1 steps and .* behind the newest here; 1 sent, 0 rep", told)
    found = json.loads(call("inspect", tmp_path / "job", "--json"))["remote"]
    assert (found["step"], found["sending"], found["lag_steps"], found["sent"], found["failed"]) == (2, None, 1, 1, 0)
    assert found["lag_s"] >= 0 and found["last_error"] == ""
    call("push", tmp_path / "job", place.root)
    assert steps(place) == [3, 2]
