"""One process that saves into a bucket: the bits come back, nothing is there before the commit, bad days are told."""

from __future__ import annotations

import dataclasses
import logging
import pickle
import re
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import CorruptCheckpoint, MismatchError, NoCheckpoint, StateError, StorageError
from lastgood.integrations.dcp import Credentials, LastgoodReader, LastgoodWriter, S3Options
from lastgood.integrations.dcp.bucket import job_id_of
from lastgood.storage.objects.commits import commits_of, find_commits
from lastgood.storage.objects.sweep import sweep
from lastgood.units import MIB
from tests.integrations.dcp.states import emptied, example, refused, same
from tests.storage.objects.support.plain_reader import newest, streams

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


@pytest.fixture
def options(server):
    return server.options(retries=3, retry_s=20.0, request_s=20.0)


@pytest.fixture
def through(options, proxy):
    """Options of the same bucket, through the proxy."""
    return dataclasses.replace(options, endpoint_url=proxy.url)


def save(state, url, options, planner=None, **others):
    dcp.save(state, storage_writer=LastgoodWriter(url, s3=options, timeout_s=30, **others), planner=planner)


def load(into, url, options, **others):
    dcp.load(into, storage_reader=LastgoodReader(url, s3=options, timeout_s=30, **others))
    return into


def comes_back(state, url, options):
    return same(load(emptied(state), url, options), state)


class Between(DefaultSavePlanner):
    """Does something when the plan of all is made and nothing is written yet."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def finish_plan(self, new_plan):
        what, self.what = self.what, None
        what()
        return super().finish_plan(new_plan)


def test_a_state_comes_back_to_the_bit(url, options, bucket):
    save(example(), url, options)
    assert comes_back(example(), url, options)
    assert [name.job_id for name in find_commits(bucket)] == [job_id_of(None)]
    assert list(bucket.list("uploads")) == []


def test_the_stream_is_read_without_lastgood(url, options, bucket):
    state = {"w": torch.arange(3000, dtype=torch.int32)}
    save(state, url, options)
    key = newest((info.key, info.nbytes) for info in bucket.list("commits"))
    stream, metadata = streams(key, lambda key: bucket.get(key, MIB))
    assert stream[: 4 * 3000] == state["w"].numpy().tobytes()
    assert b"torch.distributed.checkpoint.metadata" in metadata


def test_a_state_of_several_segments_in_little_memory(url, options, bucket):
    state = {f"w{number}": torch.randn(5 * MIB // 4 + number) for number in range(8)}
    save(state, url, options, writer_threads=3, pool_bytes=1)
    assert len(list(bucket.list("segments"))) == -(-(8 * 5 * MIB) // (16 * MIB)) + 1
    assert comes_back(state, url, options)


def test_only_what_is_asked_for_is_fetched(url, options, through, proxy):
    state = {"few": torch.randn(1000), "many": torch.randn(40 * MIB // 4)}
    save(state, url, options)
    few = {"few": torch.zeros(1000)}
    load(few, url, through)
    assert torch.equal(few["few"], state["few"])
    assert proxy.count("GET", "/segments/") == 2  # one for the metadata, one for the tensor


def test_many_values_are_fetched_at_once(url, options, through, proxy):
    state = {f"value {number}": {"lr": number} for number in range(50)}
    save(state, url, options)
    assert comes_back(state, url, through)
    assert proxy.count("GET", "/segments/") == 2


def test_a_save_again_takes_the_name_and_what_was_there_is_swept(url, options, bucket):
    first, second = {"w": torch.randn(900)}, {"w": torch.randn(900)}
    save(first, url, options)
    (older,) = find_commits(bucket)
    save(second, url, options)
    assert comes_back(second, url, options)
    assert len(find_commits(bucket)) == 1
    assert commits_of(bucket)[older].nbytes == 0
    time.sleep(2.1)  # times of objects are whole seconds
    report = sweep(bucket, guard_s=0, grace_s=-3)
    assert (report.segments, report.manifests) == (2, 2)
    assert comes_back(second, url, options)


def test_nothing_is_there_before_the_commit(url, options, bucket):
    seen = []
    save(
        example(), url, options, Between(lambda: seen.append((find_commits(bucket), len(list(bucket.list("uploads"))))))
    )
    assert seen == [([], 1)]


@pytest.mark.parametrize("older", [False, True])
def test_of_two_saves_at_once_the_later_one_stays(url, options, older):
    states = [{"w": torch.full((100,), float(number))} for number in range(3)]
    if older:
        save(states[0], url, options)
    error = refused(lambda: save(states[1], url, options, Between(lambda: save(states[2], url, options))))
    assert isinstance(error, MismatchError)
    assert "a save of this name that began later is complete already" in str(error)
    assert comes_back(states[2], url, options)


def test_a_clock_that_runs_behind_is_told(url, options, monkeypatch):
    save({"w": torch.ones(3)}, url, options)
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() - 60 * 10**9)
    error = refused(lambda: save({"w": torch.zeros(3)}, url, options))
    assert isinstance(error, StorageError)
    assert re.search(r"began [1-6]\d\.\d s later than this one.*the clock of this host is behind", str(error))
    assert comes_back({"w": torch.ones(3)}, url, options)


def test_an_older_save_that_is_late_is_not_committed_after_the_sweep_of_its_note(url, options, bucket):
    def given_up():
        time.sleep(2.1)
        assert len(sweep(bucket, guard_s=-3).given_up) == 1

    error = refused(lambda: save({"w": torch.ones(3)}, url, options, Between(given_up)))
    assert "given up by a sweep" in str(error)
    assert find_commits(bucket) == []


def test_what_is_not_there_is_told(url, options, bucket):
    into = {"w": torch.zeros(3)}
    error = refused(lambda: load(into, url, options))
    assert isinstance(error, NoCheckpoint)
    assert re.search(r"s3://lastgood/\w+: holds no complete checkpoint: no commit, and no \.metadata", str(error))


def test_what_torch_wrote_is_read_from_a_bucket_too(tmp_path, url, options, bucket):
    dcp.save(example(), storage_writer=dcp.FileSystemWriter(tmp_path / "torch", thread_count=2))
    for path in (tmp_path / "torch").iterdir():
        bucket.put(path.name, path.read_bytes())
    assert comes_back(example(), url, options)
    (first,) = (path.name for path in (tmp_path / "torch").glob("__0_0*"))
    bucket.delete([first])
    into = emptied(example())
    error = refused(lambda: load(into, url, options))
    assert isinstance(error, CorruptCheckpoint)
    assert f"lacks {first}" in str(error)


def test_what_has_no_plain_bytes_is_refused(url, options, bucket):
    error = refused(lambda: save({"s": torch.eye(3).to_sparse()}, url, options))
    assert isinstance(error, StateError)
    assert find_commits(bucket) == []


# -- bad days ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["refuse", "reset", "lost"])
@pytest.mark.parametrize("path", ["segments", "manifests", "commits", "uploads"])
def test_a_save_survives_what_fails_once(url, options, through, proxy, fault, path):
    rule = proxy.fail(fault, "PUT", f"/{path}/")
    save(example(), url, through)
    assert rule.met == 1
    assert comes_back(example(), url, options)


@pytest.mark.parametrize("path", ["segments", "manifests", "commits", "uploads"])
def test_a_server_that_stays_overloaded_fails_the_save_and_no_other(url, options, through, proxy, path):
    older = {"w": torch.randn(70)}
    save(older, url, options)
    proxy.fail("refuse", "PUT", f"/{path}/", times=99)
    began_s = time.monotonic()
    error = refused(lambda: save({"w": torch.zeros(70)}, url, through))
    assert isinstance(error, StorageError)
    assert re.search(rf"{path}/.*503 SlowDown", str(error))
    assert time.monotonic() - began_s < 25
    assert comes_back(older, url, options)
    proxy.heal()
    newer = {"w": torch.randn(70)}
    save(newer, url, through)
    assert comes_back(newer, url, options)


@pytest.mark.parametrize("fault", ["refuse", "reset", "cut", "flip"])
def test_a_load_survives_what_fails_once(url, options, through, proxy, fault):
    save(example(), url, options)
    rule = proxy.fail(fault, "GET", "/segments/", after=1)
    assert comes_back(example(), url, through)
    assert rule.met == 1


@pytest.mark.parametrize(
    ("fault", "path", "kind", "said"),
    [
        ("flip", "/segments/", CorruptCheckpoint, "checksum 0x"),
        ("short", "/segments/", StorageError, "shorter than what was put"),
        ("flip", "/manifests/", CorruptCheckpoint, "digest"),
        ("flip", "/commits/.*-", CorruptCheckpoint, "digest"),
    ],
)
def test_damage_is_never_loaded(url, options, through, proxy, fault, path, kind, said):
    state = {"w": torch.randn(5000)}
    save(state, url, options)
    proxy.fail(fault, "GET", path, times=99)
    into = {"w": torch.full((5000,), 7.0)}
    error = refused(lambda: load(into, url, through))
    assert isinstance(error, kind)
    assert said in str(error)
    assert torch.equal(into["w"], torch.full((5000,), 7.0))


def test_a_segment_that_is_lost_is_named(url, options, bucket):
    save({"w": torch.randn(5 * MIB)}, url, options, writer_threads=1)
    segments = [info.key for info in bucket.list("segments")]
    largest = max(bucket.list("segments"), key=lambda info: info.nbytes).key
    bucket.delete([largest])
    assert len(segments) == 2
    error = refused(lambda: load({"w": torch.zeros(5 * MIB)}, url, options))
    assert largest in str(error)


def test_another_bucket_that_is_not_there(options):
    error = refused(lambda: save({"w": torch.ones(3)}, "s3://no-such-bucket/run", options))
    assert isinstance(error, StorageError)
    assert re.search(r"s3://no-such-bucket/run.*NoSuchBucket; make the bucket", str(error))


def test_wrong_keys_are_told_and_not_shown(url, options, caplog):
    caplog.set_level(logging.DEBUG)
    wrong = Credentials(options.credentials.access_key_id, "not the secret of this server")
    wrongly = dataclasses.replace(options, credentials=wrong)
    for call in (
        lambda: save({"w": torch.ones(3)}, url, wrongly),
        lambda: load({"w": torch.ones(3)}, url, wrongly),
    ):
        error = refused(call)
        assert isinstance(error, StorageError)
        assert "403" in str(error)
        told = f"{error}{error.__cause__}{caplog.text}{wrongly!r}"
        assert wrong.secret_access_key not in told
        assert wrong.access_key_id not in told


def test_keys_of_the_environment_are_in_no_pickle(url, server, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.credentials.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.credentials.secret_access_key)
    options = S3Options(region="us-east-1", endpoint_url=server.endpoint_url)
    writer, reader = LastgoodWriter(url, s3=options), LastgoodReader(url, s3=options)
    dcp.save({"w": torch.ones(3)}, storage_writer=writer)
    into = {"w": torch.zeros(3)}
    dcp.load(into, storage_reader=reader)
    assert torch.equal(into["w"], torch.ones(3))
    for one in (writer, reader):
        content = pickle.dumps(one)
        assert server.credentials.secret_access_key.encode() not in content
        assert server.credentials.access_key_id.encode() not in content
        assert pickle.loads(content).checkpoint_id == url


def test_one_writer_and_one_reader_for_several_names(url, options):
    writer, reader = LastgoodWriter(f"{url}/1", s3=options), LastgoodReader(f"{url}/1", s3=options)
    for step in (1, 2):
        dcp.save({"w": torch.full((3,), float(step))}, storage_writer=writer, checkpoint_id=f"{url}/{step}")
    for step in (1, 2):
        into = {"w": torch.zeros(3)}
        dcp.load(into, storage_reader=reader, checkpoint_id=f"{url}/{step}")
        assert torch.equal(into["w"], torch.full((3,), float(step)))


@pytest.mark.slow  # a server that starts again takes writes only after some seconds
def test_a_server_that_dies_in_the_middle_and_comes_back(url, options, server, bucket):
    older = {"w": torch.randn(70)}
    save(older, url, options)
    began_s, few = time.monotonic(), dataclasses.replace(options, retries=1, retry_s=3.0)
    error = refused(lambda: save({"w": torch.zeros(MIB)}, url, few, Between(server.kill)))
    try:
        assert isinstance(error, StorageError)
        assert f"is the server at {server.endpoint_url} up?" in str(error)
        assert time.monotonic() - began_s < 30
    finally:
        server.start()
    assert comes_back(older, url, options)
    newer = {"w": torch.randn(MIB)}
    save(newer, url, options)
    assert comes_back(newer, url, options)


def test_inspect_and_verify_know_the_ranks_parts_and_the_metadata(url, server, options, bucket, monkeypatch):
    save({"w": torch.ones(5)}, url, options)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.credentials.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.credentials.secret_access_key)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint_url)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    shown = CliRunner().invoke(app, ["inspect", url, "--layout"], catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    assert "file.w" in shown.output
    assert ".metadata" in shown.output
    verified = CliRunner().invoke(app, ["verify", url], catch_exceptions=False)
    assert verified.exit_code == 0, verified.output
    assert verified.output.count("whole") >= 2
    largest = max(bucket.list("segments"), key=lambda info: info.nbytes)
    content = bytearray(bucket.get(largest.key, MIB))
    content[1] ^= 1
    bucket.put(largest.key, content)
    assert CliRunner().invoke(app, ["verify", url]).exit_code != 0
