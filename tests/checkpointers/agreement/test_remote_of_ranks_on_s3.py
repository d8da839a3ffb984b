"""The remote tier of several ranks on a real S3 server: killed, and back on what is there."""

from __future__ import annotations

import shutil

import pytest

from lastgood.checkpointers.rank_directory import rank_directory
from lastgood.storage.objects.commits import find_commits
from tests.support.patience import wait_until


@pytest.fixture
def remote(server, url):
    """What ranks are told; their keys are theirs."""
    return {
        "remote": url,
        "remote_region": "us-east-1",
        "remote_endpoint_url": server.endpoint_url,
        "remote_every": 2,
        "remote_keep": 5,
        "keys": {
            "AWS_ACCESS_KEY_ID": server.credentials.access_key_id,
            "AWS_SECRET_ACCESS_KEY": server.credentials.secret_access_key,
        },
    }


def there(bucket):
    return [(name.incarnation, name.step) for name in find_commits(bucket)]


def test_two_ranks_send_are_killed_and_come_back_from_there(bucket, make_job, remote):
    job = make_job(2)
    assert job.start(**remote) == 0
    for _ in range(5):
        job.save_durably()
        job.each("remote")
    assert there(bucket) == [(1, 4), (1, 2)]
    job.kill()
    # A new machine for one of them: it fetches its part of step 4, and the other one reads its disk.
    shutil.rmtree(rank_directory(job.directory, 1))
    assert job.start(**remote) == 4
    job.save_durably()
    job.save_durably()
    job.each("remote")
    newest = there(bucket)[0]
    assert newest[0] == 2
    job.kill()
    # New machines for all.
    shutil.rmtree(job.directory)
    assert job.start(**remote) == newest[1]
    assert job.save_durably() == newest[1] + 1


@pytest.mark.slow
def test_ranks_that_are_killed_while_they_send_leave_no_half(bucket, make_job, remote, tmp_path):
    job = make_job(2)
    job.start(**{**remote, "remote_every": 1})
    job.save_durably()
    assert [one[0] for one in job.each("remote")] == [1, 1]
    release = tmp_path / "release"
    job.ranks[1]("hold_remote", "finish", str(release))
    job.save_durably()
    wait_until((tmp_path / "release.reached").exists, "rank 1 to send", 60)
    job.kill()
    assert there(bucket) == [(1, 1)]
    shutil.rmtree(job.directory)
    assert job.start(**{**remote, "remote_every": 1}) == 1
    job.save_durably()
    job.each("remote")
    assert there(bucket)[0] == (2, 2)
