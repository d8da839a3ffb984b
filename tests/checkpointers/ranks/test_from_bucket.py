"""A job whose checkpoints are objects is gone on from as from its directories: to the bit, on any number of ranks."""

from __future__ import annotations

import secrets
import shutil

import pytest
import torch

from lastgood import PCcheck
from lastgood.checkpointers.ranks.reshard import restore_ranks
from lastgood.errors import CheckpointError, ConfigError, CorruptCheckpoint, MismatchError, StorageError
from lastgood.state import state_digest
from lastgood.storage.objects.folder import FolderClient
from lastgood.storage.objects.s3 import S3Client
from tests.checkpointers.support.pushed import (
    changed_document,
    commit_key,
    failing,
    flip,
    manifest_of,
    push_job,
    reads,
    segment_key,
)
from tests.checkpointers.support.rank_pool import RankPool
from tests.checkpointers.support.rank_states import a_state, save


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    made = RankPool(3, tmp_path_factory.mktemp("pool"))
    yield made
    made.end()


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Three ranks' checkpoints of steps 10 and 20: directory and objects, for tests that copy them."""
    folder = tmp_path_factory.mktemp("kept")
    for rank in range(3):
        save(folder / "job", rank, 3, 10, 20)
    push_job(FolderClient(folder / "objects"), folder / "job")
    return folder


@pytest.fixture
def client(kept, tmp_path):
    shutil.copytree(kept / "objects", tmp_path / "objects")
    return FolderClient(tmp_path / "objects")


def comparable(state):
    return state_digest({name: part for name, part in state.items() if name != "rng"})


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1)])
def test_another_number_of_ranks_gets_the_same_bits(pool, tmp_path, before, after):
    ranks = pool.run(before, "save", job=str(tmp_path / "job"), kind="fsdp")
    push_job(FolderClient(tmp_path / "objects"), tmp_path / "job")
    shutil.rmtree(tmp_path / "job")
    kind = "plain" if after == 1 else "fsdp"
    again = pool.run(after, "load", job=str(tmp_path / "objects"), kind=kind, own_job=str(tmp_path / "new"))
    for answer in again:
        assert (answer["step"], answer["sums"], answer["as_sliced"]) == (2, ranks[0]["sums"], [])
        assert answer["in_place"]


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_rank_fetches_what_it_needs_and_hardly_more(pool, tmp_path, after):
    ranks = pool.run(2, "save_wide", job=str(tmp_path / "job"))
    assert [rank["outcomes"] for rank in ranks] == [[["durable", None]]] * 2
    push_job(FolderClient(tmp_path / "objects"), tmp_path / "job", segment_chunks=64)
    for answer in pool.run(after, "load_wide", job=str(tmp_path / "objects")):
        assert answer["sums"] == ranks[0]["sums"]
        assert answer["needed"] <= answer["fetched"] <= 1.05 * answer["needed"]


@pytest.fixture(scope="module")
def wide(pool, tmp_path_factory):
    """A job of two ranks with parts of many chunks, as objects; and what its tensors hold."""
    folder = tmp_path_factory.mktemp("wide")
    ranks = pool.run(2, "save_wide", job=str(folder / "job"))
    push_job(FolderClient(folder / "objects"), folder / "job", segment_chunks=64)
    return folder / "objects", ranks[0]["sums"]


def test_ranks_that_need_the_same_fetch_it_once(pool, wide):
    job, sums = wide
    ranks = pool.run(3, "load_wide", job=str(job), plain=True, together=True)
    assert [rank["sums"] for rank in ranks] == [sums] * 3
    assert sum(rank["fetched"] for rank in ranks) <= 1.1 * ranks[0]["needed"]
    assert max(rank["fetched"] for rank in ranks) < 0.5 * ranks[0]["needed"], "each fetches its share"
    # Parts that overlap in nothing but their ends: nothing is passed on that only one needs.
    for rank in pool.run(3, "load_wide", job=str(job), together=True):
        assert rank["sums"] == sums and rank["fetched"] <= 1.05 * rank["needed"]


@pytest.mark.parametrize("fault", ["store", "lost", "late", "absent"])
def test_no_rank_depends_on_another_that_fetches_for_it(pool, wide, fault):
    job, sums = wide
    ranks = pool.run(3, "load_wide", job=str(job), plain=True, together=True, fault=fault)
    assert [rank["sums"] for rank in ranks] == [sums] * 3
    assert all(rank["took_s"] < 40 for rank in ranks)
    if fault == "absent":
        assert all(not rank["taken"] for rank in ranks)
    else:
        assert all(rank["taken"] for rank in ranks)


@pytest.mark.parametrize(("kind", "replicated"), [("fsdp", "none"), ("plain", "ddp")])
@pytest.mark.parametrize("lost", [[1], [0, 1]])
def test_what_one_rank_wrote_for_all_comes_back_too(pool, tmp_path, kind, replicated, lost):
    given = {"job": str(tmp_path / "job"), "remote": str(tmp_path / "remote"), "kind": kind, "replicated": replicated}
    first = pool.run(2, "agreed", steps=1, **given)
    assert [rank["outcomes"] for rank in first] == [[["durable", None]]] * 2
    for rank in lost:
        shutil.rmtree(tmp_path / "job" / f"rank-0000{rank}")
    again = pool.run(2, "agreed", steps=1, **given)
    for rank in again:
        assert (rank["began"], rank["restored"]) == (1, first[0]["sums"])
        assert rank["outcomes"] == [["durable", None]]
    shutil.rmtree(tmp_path / "job")
    third = pool.run(2, "agreed", steps=0, **given)
    assert [(rank["began"], rank["restored"]) for rank in third] == [(2, again[0]["sums"])] * 2
    for rank in third:  # where each needs its own part alone, nothing is passed on
        if replicated == "none":
            assert rank["passed_on"] == []
        else:
            ((wanted, left),) = rank["passed_on"]
            assert left < wanted
    # And on another number of ranks, as a new job that has a place of its own.
    moved = {**given, "job": str(tmp_path / "new"), "remote": str(tmp_path / "new-remote")}
    for _ in range(2):
        more = pool.run(3, "agreed", steps=0, resume_from=given["remote"], **moved)
        assert [(rank["began"], rank["restored"]) for rank in more] == [(2, again[0]["sums"])] * 3


def test_equal_ranks_restore_as_from_their_directories(client, kept):
    for rank, world in ((0, 1), (1, 3), (1, 2)):
        found = []
        for job in (kept / "job", client.root):
            state = a_state(seed=1)
            assert restore_ranks(job, state, (rank, world), 2) == 20
            found.append(comparable(state))
        assert found[0] == found[1] == comparable(a_state())
    state = a_state(seed=1)
    assert restore_ranks(client.root, state, (0, 1), 2, 10) == 10


def test_a_chunk_of_many_small_tensors_is_fetched_once(client, monkeypatch):
    with reads(monkeypatch) as seen:
        restore_ranks(client.root, a_state(seed=1), (0, 3), 2)
    chunks = [key for key, _ in seen if key.startswith("segments/")]
    manifest = manifest_of(client, 20)[1]
    assert sum(nbytes for key, nbytes in seen if key.startswith("segments/")) <= sum(
        manifest_of(client, 20, rank)[1].record.stream_bytes for rank in range(3)
    )
    assert len(chunks) <= 3 * manifest.record.chunks


# -- bad days ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["segment", "manifest", "commit", "missing segment", "missing manifest"])
def test_one_rank_takes_the_checkpoint_before_a_damaged_one(client, what, caplog):
    key = {
        "segment": segment_key(client, 20, 0, 1),
        "manifest": manifest_of(client, 20, 1)[0],
        "commit": commit_key(client, 20),
    }[what.rpartition(" ")[2]]
    path = client.root / key
    path.unlink() if what.startswith("missing") else flip(path, 5 if what == "segment" else -1)
    state = a_state(seed=1)
    assert restore_ranks(client.root, state, (0, 1), 2) == 10
    assert key in caplog.text and "trying the checkpoint before it" in caplog.text
    assert comparable(state) == comparable(a_state())
    # Several would go on from two steps: they are told which to name.
    with pytest.raises(CorruptCheckpoint, match=r"cannot be read on rank 1: .*there are \[10\]") as caught:
        restore_ranks(client.root, a_state(seed=1), (1, 2), 2)
    assert key in str(caught.value)
    assert restore_ranks(client.root, a_state(seed=1), (1, 2), 2, 10) == 10


def test_a_manifest_that_names_a_wrong_segment_is_found_by_checksums(client):
    """Both of the manifest's digests are right: only the bytes are another segment's."""
    name = manifest_of(client, 20)[0]
    one, other = (client.root / segment_key(client, 20, index) for index in (0, 1))
    shutil.copy(other, one)
    with pytest.raises(CorruptCheckpoint, match="segments/"):
        restore_ranks(client.root, a_state(seed=1), (0, 3), 2, 20)
    # One that was changed to name another one has no longer the digest in its name.
    content = changed_document(client.root / name, rank=0, segment_bytes=4096)
    (client.root / name).write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match="does not have the digest in its name"):
        restore_ranks(client.root, a_state(seed=1), (0, 3), 2, 20)


def test_half_a_commit_is_no_checkpoint(client, caplog):
    path = client.root / commit_key(client, 20)
    path.write_bytes(path.read_bytes()[:-70])
    assert restore_ranks(client.root, a_state(seed=1), (0, 1), 2) == 10
    assert str(path) in caplog.text


def test_nothing_there_or_out_of_reach_never_begins_anew(client, tmp_path, monkeypatch):
    def attach(place, name):
        return PCcheck(tmp_path / name, interval_steps=1, resume_from=str(place)).attach(**parts(a_state(seed=1)))

    with (
        failing(monkeypatch, StorageError("commits: list failed: is the server up?")),
        pytest.raises(StorageError, match="is the server up"),
    ):
        attach(client.root, "away")
    for info in list(client.list("commits")):
        (client.root / info.key).unlink()
    with pytest.raises(CheckpointError, match=r"resume_from: .*objects: there is no checkpoint"):
        attach(client.root, "empty")
    with pytest.raises(ConfigError, match="is a URL"):
        attach("gs://bucket/job", "other")
    assert not (tmp_path / "away").exists() and not (tmp_path / "other").exists()


def parts(state):
    return {name: part for name, part in state.items() if name != "rng"}


def test_other_shapes_are_named(client):
    state = a_state(seed=1)
    state["model"][0].weight = torch.nn.Parameter(torch.zeros(3, 40))
    with pytest.raises(MismatchError, match=r"model.0.weight.*\(30, 40\).*\(3, 40\)"):
        restore_ranks(client.root, state, (0, 1), 2)


# -- a real server -----------------------------------------------------------------------------------------------------


def test_a_training_goes_on_from_a_bucket(server, proxy, kept, tmp_path, monkeypatch):
    keys = server.credentials
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", keys.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", keys.secret_access_key)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    url = f"s3://lastgood/{secrets.token_hex(8)}"
    client = S3Client(url, server.options())
    push_job(client, kept / "job")
    proxy.fail("flip", "GET", "/segments/")
    proxy.fail("cut", "GET", "/segments/", after=1)
    held = PCcheck(tmp_path / "new", interval_steps=1, resume_from=url)
    state = a_state(seed=1)
    assert held.restore(state) == 20
    assert comparable(state) == comparable(a_state())
    assert str(held._place_of(20)) == url
    proxy.fail("refuse", "GET", "/segments/", times=999, status=403, code="AccessDenied")
    with pytest.raises(CorruptCheckpoint, match=r"segments/.*403 AccessDenied") as caught:
        PCcheck(tmp_path / "other", resume_from=url).restore(a_state(seed=1))
    assert url in str(caught.value)
    for secret in (keys.access_key_id, keys.secret_access_key):
        assert secret not in str(caught.value)
    client.close()
