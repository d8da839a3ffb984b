"""Trying a store: all that works, each thing that does not, and nothing left behind."""

from __future__ import annotations

import pytest

from lastgood.errors import StorageError
from lastgood.storage.objects.folder import FolderClient
from lastgood.storage.objects.s3 import Credentials, S3Client
from lastgood.storage.objects.trial import try_store

ALL = ["list", "put", "get", "get a range", "create only what is not there", "delete"]


class Failing(FolderClient):
    """A folder in which one call does not do what it promises."""

    bad = ""

    def list(self, folder, after=""):
        if self.bad == "list":
            raise StorageError("no list")
        return super().list(folder, after)

    def create(self, key, content):
        if self.bad == "overwrites":
            return self.put(key, content)
        if self.bad == "create":
            raise StorageError("no create")
        return super().create(key, content)

    def get(self, key, most_bytes):
        found = super().get(key, most_bytes)
        return found[:-1] + b"x" if self.bad == "get" else found

    def get_range(self, key, begin, nbytes):
        return super().get_range(key, begin + (self.bad == "range"), nbytes)

    def delete(self, keys):
        if self.bad != "delete":
            super().delete(keys)


def left_in(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_folder_can_do_all_of_it_and_nothing_stays(tmp_path):
    assert [(one.what, one.error) for one in try_store(FolderClient(tmp_path))] == [(what, None) for what in ALL]
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("bad", "what", "said"),
    [
        ("list", "list", "no list"),
        ("create", "put", "no create"),
        ("get", "get", "is not what was put"),
        ("range", "get a range", "is not what was put"),
        ("overwrites", "create only what is not there", "If-None-Match is not honoured"),
        ("delete", "delete", "still there"),
    ],
)
def test_each_thing_that_does_not_work_is_named(tmp_path, bad, what, said):
    client = Failing(tmp_path)
    client.bad = bad
    failed = {one.what: one.error for one in try_store(client) if one.error is not None}
    assert next(iter(failed)) == what
    assert said in failed[what]


def test_a_real_bucket_can_do_all_of_it(bucket):
    assert [one.error for one in try_store(bucket)] == [None] * len(ALL)
    assert list(bucket.list("trial")) == []


def test_a_missing_bucket_and_a_wrong_key_are_said_without_the_key(server):
    (missing,) = try_store(S3Client("s3://no-such-bucket/x", server.options(retries=0)))
    assert "make the bucket" in missing.error
    wrong = Credentials("lastgood-nobody", "a-secret-that-is-wrong")
    (refused,) = try_store(S3Client("s3://lastgood/x", server.options(retries=0, credentials=wrong)))
    assert refused.what == "list"
    assert "credentials" in refused.error
    assert "a-secret" not in refused.error
