"""Servers and connections that fail: what is read is exact or an error, and nothing half is ever listed."""

from __future__ import annotations

import time
from datetime import datetime, timezone

import pytest

from lastgood.errors import CheckpointError, CorruptCheckpoint, MismatchError, StorageError
from lastgood.storage.objects.client import ObjectExists
from lastgood.storage.objects.commits import find_commits
from lastgood.storage.objects.s3 import Credentials, S3Client
from lastgood.storage.objects.upload import commit_parts
from lastgood.storage.objects.view import RemoteView
from tests.storage.objects.support.streams import Stream, read, save, send

ONE = Stream((1, 2, 3), step=7)


@pytest.mark.parametrize("fault", ["refuse", "reset", "lost"])
@pytest.mark.parametrize("path", ["segments", "manifests", "commits", "uploads"])
def test_a_save_survives_what_fails_once(faulty, bucket, proxy, fault, path):
    rule = proxy.fail(fault, "PUT", f"/{path}/")
    save(faulty, ONE)
    assert rule.met == 1
    view = RemoteView(bucket)
    assert read(view, view.newest()) == ONE.content


@pytest.mark.parametrize("fault", ["refuse", "reset", "cut", "short", "flip"])
def test_a_read_survives_what_fails_once(faulty, bucket, proxy, fault):
    save(bucket, ONE)
    view = RemoteView(faulty)
    info = view.newest()
    rule = proxy.fail(fault, "GET", "/segments/")
    try:
        assert read(view, info) == ONE.content
    except StorageError as error:
        assert fault == "short", error  # the server says that the object is shorter: not tried again
        assert "shorter" in str(error)
    assert rule.met == 1


def test_damage_on_the_way_that_stays_is_an_error(faulty, bucket, proxy):
    save(bucket, ONE)
    view = RemoteView(faulty)
    info = view.newest()
    proxy.fail("flip", "GET", "/segments/", times=99)
    with pytest.raises(CorruptCheckpoint, match=r"segments/.*step 7, chunk \d of 6: checksum"):
        read(view, info)
    with pytest.raises(CorruptCheckpoint):
        view.verify(info)


@pytest.mark.parametrize("path", ["/commits/.*/", "/manifests/"])
def test_a_damaged_document_is_no_checkpoint(faulty, bucket, proxy, path):
    save(bucket, ONE)
    proxy.fail("flip", "GET", path, times=99)
    view = RemoteView(faulty)
    assert view.committed() == []
    assert [status.state.value for status in view.statuses()] == ["torn"]


def test_retries_are_bounded_in_number_and_time(faulty, proxy):
    proxy.fail("refuse", "PUT", "/segments/", times=99)
    began_s = time.monotonic()
    with pytest.raises(
        StorageError, match=r"segments/.*put of 8192 bytes failed after 3 retries.*503 SlowDown.*overloaded"
    ):
        save(faulty, ONE)
    assert time.monotonic() - began_s < 25
    assert proxy.count("PUT", "/segments/") == 4
    assert find_commits(faulty) == []


def test_an_upload_that_failed_is_finished_by_sending_what_is_missing(faulty, proxy):
    proxy.fail("refuse", "PUT", "/segments/", times=4, after=2)
    with pytest.raises(StorageError):
        save(faulty, ONE)
    proxy.heal()
    _, (upload,) = save(faulty, ONE)
    assert proxy.count("PUT", "/segments/") == 1
    assert upload.kept_bytes == 2 * 8192
    view = RemoteView(faulty)
    assert read(view, view.newest()) == ONE.content


def test_a_lost_answer_to_the_commit_is_told_from_a_rival(faulty, bucket, proxy):
    rule = proxy.fail("lost", "PUT", "/commits/")
    commit, _ = save(faulty, ONE)
    assert rule.met == 1 and find_commits(bucket) == [ONE.name]
    # The same content once more is the same checkpoint; other content under that name is a rival's.
    assert save(bucket, ONE)[0] == commit
    with pytest.raises(MismatchError, match="sent by another process with other content"):
        save(faulty, Stream((9, 9, 9), step=7))
    view = RemoteView(bucket)
    assert read(view, view.newest()) == ONE.content


def test_every_answer_to_the_commit_is_lost(faulty, bucket, proxy):
    upload, part = send(faulty, ONE)
    proxy.fail("lost", "PUT", "/commits/", times=99)
    proxy.fail("reset", "GET", "/commits/", times=99)
    with pytest.raises(StorageError):
        commit_parts(upload, [part])
    assert find_commits(bucket) == [ONE.name]  # it has arrived
    proxy.heal()
    commit_parts(upload, [part])
    view = RemoteView(bucket)
    assert read(view, view.newest()) == ONE.content


def test_one_key_that_is_forbidden_is_named(faulty, proxy, bucket):
    save(bucket, ONE)
    view = RemoteView(faulty)
    info = view.newest()
    proxy.fail("refuse", "GET", "/segments/", after=1, times=99, status=403, code="AccessDenied")
    with pytest.raises(StorageError, match=r"segments/.*403 AccessDenied; let this user get, put, list and delete"):
        read(view, info)


def test_a_new_token_heals_an_expired_one(server, proxy, url):
    asked = []

    def keys() -> Credentials:
        asked.append(datetime.now(timezone.utc))
        return server.credentials

    client = S3Client(url, server.options(endpoint_url=proxy.url, credentials=keys))
    proxy.fail("refuse", "PUT", "/segments/", status=400, code="ExpiredToken")
    save(client, ONE)
    assert len(asked) == 2
    proxy.fail("refuse", "HEAD", "/commits/", status=403, code="")
    save(client, Stream((1,), step=8))
    assert len(asked) == 3
    proxy.fail("refuse", "PUT", "/segments/", times=2, status=400, code="ExpiredToken")
    with pytest.raises(StorageError, match="ExpiredToken; get a new session token"):
        save(client, Stream((1,), step=9))
    client.close()


def test_one_object_that_cannot_be_deleted_is_an_error(faulty, bucket, proxy):
    save(bucket, ONE)
    proxy.fail("refuse", "DELETE", "/segments/", after=1, status=403, code="AccessDenied")
    keys = [info.key for info in bucket.list("segments")]
    with pytest.raises(StorageError, match="delete failed: status 403 AccessDenied"):
        faulty.delete(keys)
    faulty.delete(keys)
    assert list(bucket.list("segments")) == []


def test_a_skewed_clock_is_named(faulty, proxy):
    proxy.fail("refuse", status=403, code="RequestTimeTooSkewed", times=99)
    with pytest.raises(StorageError, match="RequestTimeTooSkewed; the clock of this machine differs"):
        save(faulty, ONE)


def test_a_missing_bucket_is_named(server):
    client = S3Client("s3://no-such-bucket/job", server.options(retries=0))
    for call in (lambda: save(client, ONE), lambda: find_commits(client), lambda: send(client, ONE)):
        with pytest.raises(StorageError, match=r"no-such-bucket/job.*404 NoSuchBucket; make the bucket"):
            call()
    client.close()


def test_a_server_that_is_away_is_named(server, url, proxy):
    proxy.close()
    client = S3Client(url, server.options(endpoint_url=proxy.url, retries=1, retry_s=5.0))
    with pytest.raises(StorageError, match=r"list failed after 1 retries.*is the server at http.* up\?"):
        save(client, ONE)
    client.close()


def test_a_hanging_server_is_given_up(server, proxy, url):
    client = S3Client(url, server.options(endpoint_url=proxy.url, request_s=1.0, retries=0))
    proxy.fail("wait", "PUT", "/uploads/", seconds=60)
    began_s = time.monotonic()
    with pytest.raises(StorageError):
        save(client, ONE)
    assert time.monotonic() - began_s < 40
    client.close()


def test_a_create_whose_answer_was_lost_says_so(faulty, proxy):
    proxy.fail("lost", "PUT", "/a")
    with pytest.raises(ObjectExists):
        faulty.create("a", b"x")
    assert faulty.get("a", 1) == b"x"


@pytest.mark.slow  # every day a proxy breaks and refuses
def test_a_server_that_is_killed_in_mid_upload_and_restarted(server, bucket):
    client = S3Client(bucket.place, server.options(retries=2, retry_s=5.0))
    upload, part = send(client, ONE)
    server.kill()
    with pytest.raises(StorageError):
        send(client, Stream((4, 5, 6), step=8))
    with pytest.raises(CheckpointError):
        commit_parts(upload, [part])
    server.start()
    assert find_commits(client) == []
    commit_parts(upload, [part])
    save(client, Stream((4, 5, 6), step=8))
    view = RemoteView(client)
    assert [info.step for info in view.committed()] == [8, 7]
    for info, stream in zip(view.committed(), (Stream((4, 5, 6), step=8), ONE), strict=True):
        assert read(view, info) == stream.content
    client.close()
