"""Cleaning a bucket of a real server."""

from __future__ import annotations

import pytest

from lastgood.storage.objects.commits import find_commits
from lastgood.storage.objects.leftovers import clean
from lastgood.storage.objects.opening import ObjectPlace
from lastgood.storage.objects.s3 import S3Client
from tests.storage.objects.support.streams import Stream, save, send


@pytest.fixture
def place(server, url, monkeypatch):
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.credentials.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.credentials.secret_access_key)
    return ObjectPlace(url, server.options().region, server.endpoint_url)


def test_a_bucket_is_cleaned_of_uploads_and_half_checkpoints(server, place, url):
    with server.control("lastgood") as control:
        key = f"{url.removeprefix('s3://lastgood/')}/dcp/a/__1_0.distcp"
        upload_id = control.client.create_multipart_upload(Bucket="lastgood", Key=key)["UploadId"]
        control.client.upload_part(Bucket="lastgood", Key=key, UploadId=upload_id, PartNumber=1, Body=bytes(5 << 20))
        client = S3Client(url, server.options())
        client.put("dcp/a/__0_0.distcp", b"x" * 100)
        client.put("dcp/b/__0_0.distcp", b"x" * 100)
        client.put("dcp/c/__0_0.distcp", b"x" * 100)
        client.put("dcp/c/.metadata", b"x")
        job = S3Client(f"{url}/job", server.options())
        save(job, Stream((1, 2), step=3))
        send(job, Stream((4, 5), step=4))
        before = {info.key for info in client.list("")}
        assert len(before) > 8
        report = clean(place, older_s=86400.0, remove=True)
        assert report.troubles == [] and all(one.spared for one in report.found)
        assert {one.spared for one in report.found} == {
            "it is young",
            "a file of it is being uploaded",
            "young, or of an upload in progress",
        }
        assert {info.key for info in client.list("")} == before
        report = clean(place, older_s=-60.0, remove=True)
        assert [(one.kind, one.nbytes) for one in report.found if not one.spared] == [
            ("multipart upload", 5 << 20),
            ("half DCP checkpoint", 100),
            ("half DCP checkpoint", 100),
        ]
        assert {info.key for info in client.list("")} == before - {"dcp/a/__0_0.distcp", "dcp/b/__0_0.distcp"}
        assert [one.key for one in control.open_uploads() if one.key == key] == []
        assert [name.step for name in find_commits(job)] == [3]
        for one in (client, job):
            one.close()
