"""Options for a remote place: what is refused, what is kept, and that older records keep their names."""

from __future__ import annotations

import os
import traceback

import pytest

from lastgood import PCcheck
from lastgood.checkpointers.pccheck.options import PCcheckOptions
from lastgood.errors import ConfigError


def refusal(**given) -> str:
    with pytest.raises(ConfigError) as caught:
        PCcheck("/nowhere/job", **given)
    return "".join(traceback.format_exception(caught.value))


def test_a_place_is_a_bucket_or_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ckpt = PCcheck("job", remote="remote", remote_every=3)
    monkeypatch.chdir("/")
    assert ckpt.options.remote == os.fspath(tmp_path / "remote")
    assert ckpt.options.remote_place.place == ckpt.options.remote
    options = PCcheckOptions(remote="s3://bucket/a/b", remote_region="us-east-2", remote_endpoint_url="http://h:1")
    place = options.remote_place
    assert (place.place, place.region, place.endpoint_url, place.profile) == (
        "s3://bucket/a/b",
        "us-east-2",
        "http://h:1",
        None,
    )
    assert PCcheckOptions().remote_place is None
    options = PCcheckOptions(resume_from="s3://bucket/old", remote_region="us-east-2")
    assert (options.resume_place.place, options.resume_place.options.region) == ("s3://bucket/old", "us-east-2")
    assert PCcheckOptions(resume_from="/old").resume_place is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"remote": "s3://"}, "is not s3://BUCKET"),
        ({"remote": "s3://x"}, "is not s3://BUCKET"),
        ({"remote": "gs://bucket/x"}, "is a URL"),
        ({"remote": "s3://bucket/a/../b"}, "no place"),
        ({"remote": "s3://bucket", "remote_endpoint_url": "ftp://host"}, "endpoint_url must be http"),
        ({"remote": "s3://bucket", "remote_every": 0}, "remote_every"),
        ({"remote": "s3://bucket", "remote_keep": 0}, "remote_keep"),
        ({"remote": "s3://bucket", "remote_mbps": 0}, "remote_mbps"),
        ({"remote_every": 3, "remote_region": "x"}, "remote_every, remote_region: only with remote"),
        ({"resume_from": "s3://bucket", "remote_every": 3}, "remote_every: only with remote"),
        ({"resume_from": "gs://bucket"}, "is a URL"),
        ({"remotes": "s3://bucket"}, "did you mean remote"),
    ],
)
def test_what_cannot_be_is_refused(given, words):
    assert words in refusal(**given)


def test_keys_are_refused_and_never_repeated():
    for given in (
        {"remote": "s3://AKIAKEY:hunter2@bucket/job"},
        {"remote": "s3://bucket", "remote_endpoint_url": "https://AKIAKEY:hunter2@host"},
        {"remote": "s3://AKIAKEY:hunter2@bucket/job", "remote_every": -1},
        {"resume_from": "s3://AKIAKEY:hunter2@bucket/job", "remote_region": "x"},
    ):
        told = refusal(**given)
        assert "hunter2" not in told and "AKIAKEY" not in told
        assert "remote" in told


def test_without_a_place_records_keep_their_names():
    assert [name for name in PCcheckOptions().model_dump() if name.startswith("remote")] == []
    dumped = PCcheckOptions(remote="s3://bucket/x", remote_keep=3).model_dump()
    assert {name: dumped[name] for name in dumped if name.startswith("remote")} == {
        "remote": "s3://bucket/x",
        "remote_keep": 3,
    }
    assert PCcheckOptions.model_validate(dumped).remote_keep == 3


def test_a_place_takes_one_slot_and_one_segment():
    alone, remote = PCcheckOptions(), PCcheckOptions(remote="s3://bucket/x")
    assert remote.slots == alone.slots + 1
    assert remote.disk_bytes(100) == alone.disk_bytes(100) + 100
    assert remote.host_bytes(1 << 30) == alone.host_bytes(1 << 30) + (32 << 20)
