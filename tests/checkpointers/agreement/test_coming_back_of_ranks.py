"""Ranks go on from the newest step that each of them can reach, from its disk or from the place of its job."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lastgood.checkpointers.agreement.decide import begin
from lastgood.checkpointers.agreement.holdings import on_disk, with_place
from lastgood.checkpointers.rank_directory import rank_directory
from lastgood.errors import CorruptCheckpoint, MismatchError
from lastgood.storage import SlotView, VerdictBook
from lastgood.storage.objects.commits import find_commits
from lastgood.storage.objects.folder import FolderClient
from lastgood.storage.objects.format import CommitName
from lastgood.storage.objects.reachable import Reachable
from tests.checkpointers.support.job_of_ranks import Refused
from tests.checkpointers.support.pushed import flip, push_job, segment_key
from tests.checkpointers.support.rank_reports import JOB, report

NAMES = {step: CommitName(bytes.fromhex(JOB), 1, step) for step in range(1, 100)}
BOOK = VerdictBook(Path("nowhere"), kept=False)


def place(*steps, trouble=""):
    names = tuple(NAMES[step] for step in sorted(steps, reverse=True))
    highest = (1, max(steps)) if steps else (0, 0)
    job = bytes.fromhex(JOB) if steps else None
    return Reachable("s3://b/j", None, names, job, highest, 0, trouble)


# -- what is decided ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("disks", "there", "expected"),
    [
        ([[], [60, 50]], [50, 40], 50),  # one disk is new
        ([[], []], [50, 40], 50),  # all are
        ([[60, 50], [60, 50]], [50], 60),
        ([[60], [70]], [50], 50),  # they have nothing in common but what was sent
        ([[60], [60]], [], 60),
        ([[], []], [], None),
    ],
)
def test_the_newest_step_that_each_can_reach(disks, there, expected):
    mark = (1, min(map(max, filter(None, disks)))) if any(disks) else None
    reports = [
        with_place(
            report(
                rank,
                len(disks),
                [(1, step) for step in disk],
                job=JOB if disk else None,
                mark=mark if disk else None,
            ),
            place(*there),
            BOOK,
        )
        for rank, disk in enumerate(disks)
    ]
    found = begin(reports)
    assert found.candidates[:1] == (() if expected is None else ((1, expected),))
    assert found.job_id == (JOB if any(disks) or there else None)
    assert found.incarnation == (2 if any(disks) or there else 1)


def test_a_place_that_one_rank_cannot_look_at_is_no_beginning():
    near = with_place(report(0, 2, [(1, 60)], mark=(1, 60)), place(trouble="403"), BOOK)
    new = with_place(report(1, 2, job=None), place(50), BOOK)
    with pytest.raises(CorruptCheckpoint, match="s3://b/j cannot be looked at: 403"):
        begin([near, new])
    same = with_place(report(1, 2, [(1, 60)], mark=(1, 60)), place(50), BOOK)
    assert begin([near, same]).candidates[0] == (1, 60)


def test_an_old_copy_of_a_disk_is_still_refused_where_the_place_has_nothing_newer():
    old = with_place(report(0, 2, [(1, 30)], mark=(1, 30)), place(30), BOOK)
    new = with_place(report(1, 2, [(1, 60), (1, 30)], mark=(1, 60)), place(30), BOOK)
    with pytest.raises(MismatchError, match="older copy"):
        begin([old, new])


def test_another_jobs_place_is_refused(tmp_path):
    other = report(0, 1, (), job="cd" * 16, mark=(1, 5))
    with pytest.raises(MismatchError, match="give each job a place of its own"):
        with_place(other, place(50), BOOK)
    assert with_place(report(0, 1, (), job="cd" * 16), place(50), BOOK).job_id == JOB, "that one never got on"
    assert on_disk(report(0, 1), tmp_path / "none")[0] == report(0, 1)


# -- real ranks --------------------------------------------------------------------------------------------------------


@pytest.fixture
def sent(make_job, tmp_path):
    """A job of two ranks that has sent steps 2 and 4, and saved 5 after them; it is dead."""
    client = FolderClient(tmp_path / "remote")
    job = make_job()
    assert job.start(keep=4) == 0
    for step in range(1, 6):
        assert job.save_durably() == step
        if step in (2, 4):
            push_job(client, job.directory, step)
    job.kill()
    return job, client


def coming_back(job, client, **given):
    return job.start(keep=4, remote=str(client.root), remote_every=1000, **given)


def places(job):
    return [SlotView(rank_directory(job.directory, rank)).committed() for rank in range(job.world)]


def test_one_lost_disk_of_two(sent):
    job, client = sent
    id_before = find_commits(client)[0].job_id
    shutil.rmtree(rank_directory(job.directory, 1))
    assert coming_back(job, client) == 4, "step 5 is on one disk only"
    assert job.save_durably() == 5
    assert job.each("everywhere")[1] == [(2, 5)]
    assert {info.record.job_id for disk in places(job) for info in disk} == {id_before}
    job.kill()
    assert coming_back(job, client) == 5
    assert job.each("everywhere")[0][0] == (2, 5)


def test_all_disks_are_lost(sent):
    job, client = sent
    shutil.rmtree(job.directory)
    assert coming_back(job, client) == 4
    assert job.save_durably() == 5
    (mine, _), id_before = places(job), find_commits(client)[0].job_id
    assert [(info.incarnation, info.record.job_id) for info in mine] == [(2, id_before)]
    assert mine[0].sequence > 4
    push_job(client, job.directory, 5)
    assert [(name.incarnation, name.step) for name in find_commits(client)] == [(2, 5), (1, 4), (1, 2)]
    job.kill()
    shutil.rmtree(job.directory)
    assert coming_back(job, client) == 5


def test_a_damaged_newest_one_on_one_disk_is_fetched(sent):
    job, client = sent
    push_job(client, job.directory, 5)
    info = places(job)[1][0]
    flip(info.path, info.record.data_offset + 20000)
    assert coming_back(job, client) == 5
    job.kill()
    flip(info.path, info.record.data_offset + 40000)
    flip(client.root / segment_key(client, 5, 1, 1), 9)
    assert coming_back(job, client) == 4, "nor is it whole there: all take the one before"


def test_a_place_that_is_away(sent, tmp_path):
    job, client = sent
    (tmp_path / "file").write_text("")
    away = FolderClient.__new__(FolderClient)
    away.root = tmp_path / "file"  # a folder of objects cannot be made there
    assert coming_back(job, away) == 5, "disks are enough"
    job.kill()
    shutil.rmtree(rank_directory(job.directory, 0))
    job.fork()
    for number, rank in enumerate(job.ranks):
        rank.begin("attach", str(job.directory), number, **job.options(number, keep=4, remote=str(away.root)))
    for rank in job.ranks:
        with pytest.raises(Refused, match="file"):
            rank.result("attach")
    job.kill()
    assert coming_back(job, client) == 4


def test_another_number_of_ranks_is_told_what_to_do(sent, make_job):
    _, client = sent
    other = make_job(3)
    other.fork()
    for number, rank in enumerate(other.ranks):
        rank.begin("attach", str(other.directory), number, **other.options(number, remote=str(client.root)))
    for rank in other.ranks:
        with pytest.raises(Refused, match="of a job of 2 ranks, and this training has 3"):
            rank.result("attach")
