"""What was judged bad on the disk is bad in the bucket as well, for machines that know nothing of it."""

from __future__ import annotations

import logging

import pytest
import torch

from lastgood import PCcheck
from lastgood.checkpointers.ranks.directories import whole_checkpoints
from lastgood.checkpointers.remote.sending import tell_verdicts
from lastgood.checkpointers.remote.tier import RemoteTier
from lastgood.errors import NoGoodCheckpoint, StorageError
from lastgood.storage import Verdict, VerdictBook
from lastgood.storage.objects.commits import find_commits, retire
from lastgood.storage.objects.folder import FolderClient
from lastgood.storage.objects.judged import bad_verdicts
from lastgood.storage.objects.opening import ObjectPlace
from lastgood.storage.objects.sweep import sweep
from lastgood.storage.objects.view import RemoteView
from tests.checkpointers.support.stored_helpers import open_store, put

WAIT_S = 60


def small(step: int) -> dict:
    return {"step": step, "x": torch.full((100,), float(step))}


@pytest.fixture
def place(tmp_path):
    return tmp_path / "remote"


@pytest.fixture
def job(tmp_path, place):
    """A store of which steps 1 to 3 were sent, and its tier."""
    with open_store(tmp_path / "job", slots=5, keep=3) as store:
        tier = RemoteTier(ObjectPlace(str(place)), store.directory, every=1, keep=3)
        store.on_verdict = tier.judged
        for step in (1, 2, 3):
            tier.offer(store, put(store, step, small(step)))
            tier.drain(WAIT_S)
        yield store, tier
        tier.close(WAIT_S)


def judge(job, step: int, ok: bool, reason: str = "") -> None:
    store, tier = job
    store.judge(next(info.sequence for info in store.committed() if info.step == step), Verdict(step, ok, reason))
    tier.drain(WAIT_S)


def told(place) -> dict[int, str]:
    client = FolderClient(place)
    return {name.step: reason for name, reason in bad_verdicts(client, find_commits(client)).items()}


def files_of_verdicts(place):
    """Not the folders above them, whose names are random."""
    return [path for path in (place / "verdicts").rglob("*") if path.is_file()]


def test_a_verdict_on_what_was_sent_is_told_replaced_and_taken_back(job, place):
    judge(job, 3, False, "loss is nan")
    assert told(place) == {3: "loss is nan"}
    judge(job, 3, False, "a spike")
    judge(job, 1, False)
    assert told(place) == {3: "a spike", 1: ""}
    judge(job, 3, True)
    assert told(place) == {1: ""}
    store, tier = job
    assert store.take_back(next(info.sequence for info in store.committed() if info.step == 1), "")
    tier.drain(WAIT_S)
    assert told(place) == {}
    # Nothing of this counts as a checkpoint that was sent or that failed.
    assert (tier.counts.done, tier.counts.failed) == (3, 0)


def test_a_view_of_the_place_knows_it(job, place):
    judge(job, 3, False, "loss is nan")
    view = RemoteView(FolderClient(place))
    newest, before, *_ = view.committed()
    book = view.book()
    assert (newest.step, book.is_bad(newest.sequence), book.verdicts[newest.sequence].reason) == (
        3,
        True,
        "loss is nan",
    )
    assert not book.is_bad(before.sequence)


def test_what_could_not_be_told_is_told_with_the_next_checkpoint(job, place, monkeypatch, caplog):
    store, tier = job
    real = ObjectPlace.open

    def away(place):
        raise StorageError("s3://bucket: list failed after 8 retries: connect; is the server up?")

    monkeypatch.setattr(ObjectPlace, "open", away)
    judge(job, 3, False, "loss is nan")
    assert told(place) == {} and "is the server up" in caplog.text
    monkeypatch.setattr(ObjectPlace, "open", real)
    tier.offer(store, put(store, 4, small(4)))
    tier.drain(WAIT_S)
    assert told(place) == {3: "loss is nan"}


def test_a_life_that_ended_before_it_told_is_made_up_for(tmp_path, job, place):
    store, tier = job
    tier.close(WAIT_S)
    judge(job, 3, False, "loss is nan")
    assert told(place) == {}
    store.close()
    with open_store(tmp_path / "job", slots=5, keep=3) as again:
        later = RemoteTier(ObjectPlace(str(place)), again.directory, every=1, keep=3)
        later.resume(again, again.everywhere())
        later.close(WAIT_S)
    assert told(place) == {3: "loss is nan"}


def test_a_book_that_knows_nothing_takes_nothing_back(job, place, tmp_path):
    judge(job, 3, False, "loss is nan")
    client = FolderClient(place)
    found = find_commits(client)
    bad = tell_verdicts(client, found, VerdictBook(tmp_path / "a new disk"))
    assert [name.step for name in bad] == [3] and told(place) == {3: "loss is nan"}


def test_a_verdict_that_cannot_be_read_is_a_bad_one(job, place, caplog):
    judge(job, 3, False, "loss is nan")
    (file,) = files_of_verdicts(place)
    for content in (b"", b"{", file.read_bytes().replace(b"false", b"true"), b"x" * 10_000):
        file.write_bytes(content)
        assert told(place) == {3: "its verdict cannot be read"}
    assert "counts as bad" in caplog.text


def test_a_sweep_removes_verdicts_on_what_is_gone(job, place):
    judge(job, 2, False, "loss is nan")
    judge(job, 1, False, "loss is nan")
    client = FolderClient(place, clock=lambda: 4e9)
    retire(client, next(name for name in find_commits(client) if name.step == 2))
    sweep(client, guard_s=1e12, grace_s=0)
    assert [path.name[-1] for path in files_of_verdicts(place)] == ["1"]


def trained(directory, place, steps: int, **options) -> tuple[PCcheck, int]:
    ckpt = PCcheck(directory, interval_steps=1, remote=str(place), remote_every=1, **options)
    begun = ckpt.attach(model=torch.nn.Linear(8, 8))
    for _ in range(steps):
        ckpt.step()
        ckpt.drain()
        ckpt._beside.tier.drain(WAIT_S)
    return ckpt, begun


def test_a_new_machine_passes_a_bad_checkpoint_over(tmp_path, place):
    ckpt, _ = trained(tmp_path / "job", place, 3)
    assert ckpt.verdict(3, ok=False, reason="loss is nan")
    ckpt.close()
    lost, begun = trained(tmp_path / "new disk", place, 0)
    assert begun == 2
    lost.close()
    other = PCcheck(tmp_path / "another job", interval_steps=1, resume_from=str(place))
    assert other.attach(model=torch.nn.Linear(8, 8)) == 2
    other.close()
    assert [(one.step, one.bad) for one in whole_checkpoints(str(place))][:2] == [(3, "loss is nan"), (2, None)]


def test_a_machine_that_finds_only_bad_ones_says_why(tmp_path, place, caplog):
    caplog.set_level(logging.INFO, "lastgood")
    ckpt, _ = trained(tmp_path / "job", place, 1)
    ckpt.verdict(1, ok=False, reason="loss is nan")
    ckpt.close()
    with pytest.raises(NoGoodCheckpoint, match="loss is nan"):
        trained(tmp_path / "new disk", place, 0)
