"""The remote tier of several ranks: one checkpoint of all of them, or none; and who is at fault is named."""

from __future__ import annotations

import pytest

from lastgood.checkpointers.rank_directory import rank_directory
from lastgood.checkpointers.remote.status import read_status
from lastgood.storage.objects.commits import find_commits
from lastgood.storage.objects.folder import FolderClient
from lastgood.storage.objects.format import UPLOADS
from lastgood.storage.objects.view import RemoteView
from lastgood.storage.reader import SlotView
from tests.support.patience import wait_until

WAIT_S = 60


@pytest.fixture
def place(tmp_path):
    return FolderClient(tmp_path / "remote")


def start(job, place, **given) -> int:
    return job.start(remote=str(place.root), **{"remote_every": 1, "remote_keep": 5, **given})


def there(place) -> list[tuple[int, int]]:
    return [(name.incarnation, name.step) for name in find_commits(place)]


def same_as_slots(job, place) -> None:
    """Every part that is there is the stream that the rank's slot holds, as far as that still does."""
    compared = 0
    for rank in range(job.world):
        slots = SlotView(rank_directory(job.directory, rank))
        local = {(info.incarnation, info.step): info for info in slots.committed()}
        remote = RemoteView(place, rank)
        for info in remote.committed():
            mine = local.get((info.incarnation, info.step))
            if mine is not None:
                compared += 1
                whole = remote.read_bytes(info, 0, info.stream_bytes)
                assert whole == slots.read_bytes(mine, 0, mine.stream_bytes)
    assert compared


def test_all_ranks_send_their_parts_of_the_same_checkpoints(make_job, place):
    job = make_job(3)
    assert start(job, place, remote_every=2) == 0
    for _ in range(5):
        job.save_durably()
        job.each("remote")
    assert job.each("remote") == [(2, 0, 0, "")] * 3
    assert there(place) == [(1, 4), (1, 2)]
    same_as_slots(job, place)
    assert list(place.list(UPLOADS)) == [], "every rank took its note away"
    job.each("close")
    job.kill()
    assert start(job, place, remote_every=2) == 5
    job.save_durably()
    assert job.each("remote") == [(1, 0, 0, "")] * 3
    assert there(place) == [(2, 6), (1, 4), (1, 2)]
    assert {read_status(rank_directory(job.directory, rank)).committed.step for rank in range(3)} == {6}


def test_a_slow_rank_is_waited_for_and_no_other_checkpoint_is_chosen_meanwhile(make_job, place, tmp_path):
    job = make_job(2)
    start(job, place)
    release = tmp_path / "release"
    job.ranks[1]("hold_remote", "finish", str(release))
    job.save_durably()
    wait_until((tmp_path / "release.reached").exists, "rank 1 to send", WAIT_S)
    for _ in range(3):
        job.save_durably()
    assert there(place) == []
    release.touch()
    assert job.each("remote") == [(1, 1, 0, ""), (1, 0, 0, "")], "put off once, on rank 0"
    job.save_durably()
    assert [one[0] for one in job.each("remote")] == [2, 2]
    assert there(place) == [(1, 5), (1, 1)]


def test_a_rank_whose_part_does_not_come_is_named_and_the_next_checkpoint_is_sent(make_job, place, tmp_path):
    job = make_job(2)
    start(job, place)
    job.ranks[0]("lose_remote_patience", 0.5)
    release = tmp_path / "release"
    job.ranks[1]("hold_remote", "tell", str(release))
    job.save_durably()
    sent, _, failed, why = job.ranks[0]("remote")
    assert (sent, failed) == (0, 1)
    assert "step 1 is not committed: waited" in why and "for the part of rank 1" in why
    job.ranks[0]("lose_remote_patience", 60.0)
    job.save_durably()
    release.touch()
    assert [one[:3] for one in job.each("remote")] == [(1, 0, 1), (1, 0, 1)]
    assert there(place) == [(1, 2)]
    assert read_status(rank_directory(job.directory, 1)).failed == 1
    same_as_slots(job, place)


def test_a_rank_that_dies_while_it_sends_leaves_no_checkpoint_and_the_next_incarnation_goes_on(
    make_job, place, tmp_path
):
    job = make_job(2)
    start(job, place)
    job.save_durably()
    assert [one[0] for one in job.each("remote")] == [1, 1]
    release = tmp_path / "release"
    job.ranks[1]("hold_remote", "finish", str(release))
    job.ranks[0]("lose_remote_patience", 1.0)
    job.save_durably()
    wait_until((tmp_path / "release.reached").exists, "rank 1 to send", WAIT_S)
    job.ranks[1].kill()
    sent, _, failed, why = job.ranks[0]("remote")
    assert (sent, failed) == (1, 1) and "part of rank 1" in why
    assert job.ranks[0].save() == 3, "training goes on"
    assert there(place) == [(1, 1)]
    job.kill()
    assert start(job, place) == 2
    assert [one[:3] for one in job.each("remote")] == [(1, 0, 0)] * 2, "it goes on with step 2"
    assert there(place) == [(1, 2), (1, 1)]
    same_as_slots(job, place)


def test_rank_0_that_dies_before_the_commit_goes_on_with_it(make_job, place, tmp_path):
    job = make_job(2)
    start(job, place)
    job.ranks[0]("hold_remote", "refuse_late", str(tmp_path / "release"))
    job.save_durably()
    wait_until((tmp_path / "release.reached").exists, "rank 0 to send", WAIT_S)
    job.kill()
    assert there(place) == []
    assert start(job, place) == 1
    assert [one[:3] for one in job.each("remote")] == [(1, 0, 0)] * 2
    assert there(place) == [(1, 1)]
    same_as_slots(job, place)


@pytest.mark.slow
def test_an_old_incarnation_that_wakes_up_harms_nothing(make_job, place, tmp_path):
    from lastgood.storage.objects.sweep import sweep

    job = make_job(2)
    start(job, place, remote_keep=1)
    job.save_durably()
    assert [one[0] for one in job.each("remote")] == [1, 1]
    release = tmp_path / "release"
    job.ranks[0]("hold_remote", "refuse_late", str(release))
    job.save_durably()
    wait_until((tmp_path / "release.reached").exists, "rank 0 to send", WAIT_S)
    for rank in job.ranks:
        rank.stop()
    old, job.ranks = job.ranks, []
    other = make_job(2)
    other.directory.mkdir(parents=True)
    for rank in range(2):
        folder = rank_directory(job.directory, rank)
        target = rank_directory(other.directory, rank)
        target.mkdir()
        for path in folder.iterdir():
            if path.name != "lock":
                (target / path.name).write_bytes(path.read_bytes())
    other.digests = job.digests
    try:
        assert start(other, place, remote_keep=1) == 2
        for _ in range(2):
            other.save_durably()
            other.each("remote")
        before = there(place)
        assert before == [(2, 4)]
        release.touch()
        for rank in old:
            rank.go_on()
        old[0]("remote")
        assert there(place) == before, "what the new one took away, nobody commits any more; nor is it newer"
        sweep(place)
        same_as_slots(other, place)
    finally:
        for rank in old:
            rank.kill()
