"""Buckets, and the uploads in parts that other tools left: found with their sizes, and ended."""

from __future__ import annotations

import time

import pytest

from lastgood.errors import ConfigError, StorageError
from lastgood.storage.objects.control import S3Control

PART = bytes(5 << 20)


def test_uploads_that_others_left_are_found_and_ended(server, url):
    with S3Control(url, server.options()) as control, S3Control("s3://lastgood", server.options()) as whole:
        for key, parts in (("a", 2), ("b/c", 1), ("d", 0)):
            begun = control.client.create_multipart_upload(Bucket=control.bucket, Key=f"{control.prefix}/{key}")
            for number in range(1, parts + 1):
                control.client.upload_part(
                    Bucket=control.bucket,
                    Key=f"{control.prefix}/{key}",
                    UploadId=begun["UploadId"],
                    PartNumber=number,
                    Body=PART,
                )
        found = list(control.open_uploads())
        names = sorted((one.key.removeprefix(f"{control.prefix}/"), one.nbytes) for one in found)
        assert names == [("a", 2 * len(PART)), ("b/c", len(PART)), ("d", 0)]
        assert all(abs(time.time() - one.begun_s) < 600 for one in found)
        assert {one.key for one in found} <= {one.key for one in whole.open_uploads()}
        control.abort(found)
        control.abort(found)
        assert list(control.open_uploads()) == []


def test_keys_that_are_given_need_no_profile(server, url, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "a-profile-that-there-is-not")
    with S3Control(url, server.options()) as control:
        assert list(control.open_uploads()) == []


def test_a_missing_bucket_is_named(server):
    with S3Control("s3://nowhere-at-all", server.options(retries=0)) as control:
        with pytest.raises(StorageError, match="s3://nowhere-at-all: listing open uploads failed: NoSuchBucket"):
            list(control.open_uploads())
        control.make_bucket()
        control.make_bucket()
        assert list(control.open_uploads()) == []


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="is not s3://BUCKET"):
        S3Control("gs://x")
