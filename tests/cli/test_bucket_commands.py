"""`inspect`, `verify` and `export` of a job whose checkpoints are objects say what they say of its directory."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from lastgood.checkpointers.export.formats import load_exported
from lastgood.cli import app
from lastgood.errors import CheckpointError, ConfigError, CorruptCheckpoint, LastgoodError, NoCheckpoint, StorageError
from lastgood.integrations.dcp import LastgoodWriter
from lastgood.state import state_digest
from lastgood.storage.objects.commits import retire
from lastgood.storage.objects.folder import FolderClient
from lastgood.storage.objects.format import CommitName
from lastgood.storage.objects.s3 import S3Client
from tests.checkpointers.support.pushed import (
    commit_key,
    failing,
    flip,
    manifest_of,
    push_job,
    reads,
    segment_key,
)
from tests.checkpointers.support.rank_states import a_state, save
from tests.checkpointers.support.stored_helpers import open_store, put


@pytest.fixture
def alone(tmp_path):
    """A job of one rank with two checkpoints, and the same as objects."""
    with open_store(tmp_path / "alone") as store:
        for step in (10, 20):
            put(store, step, {**a_state(), "step": step})
    client = FolderClient(tmp_path / "alone-objects")
    push_job(client, tmp_path / "alone")
    return tmp_path / "alone", client


@pytest.fixture
def ranked(tmp_path):
    """The same of three ranks."""
    for rank in range(3):
        save(tmp_path / "ranked", rank, 3, 10, 20)
    client = FolderClient(tmp_path / "ranked-objects")
    push_job(client, tmp_path / "ranked")
    return tmp_path / "ranked", client


def call(*arguments):
    """Exit code, what is printed, and what is raised."""
    done = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "250"})
    if done.exception is not None and not isinstance(done.exception, (SystemExit, LastgoodError)):
        raise done.exception
    error = done.exception if isinstance(done.exception, LastgoodError) else None
    return (done.exit_code if error is None else error.exit_code), done.stdout, error


def told(*arguments):
    code, printed, error = call(*arguments, "--json")
    return code, json.loads(printed) if printed else None, error


def without_places(slots):
    own = {"file", "sequence", "age_s", "file_bytes", "bytes_per_s", "newest", "detail"}
    return [{name: value for name, value in slot.items() if name not in own} for slot in slots if slot["step"]]


def test_inspect_of_one_rank(alone):
    directory, client = alone
    _, there, _ = told("inspect", client.root, "--layout")
    _, here, _ = told("inspect", directory, "--layout")
    by_step = {slot["step"]: slot for slot in without_places(here["slots"])}
    assert without_places(there["slots"]) == [by_step[20], by_step[10]]
    assert [slot["newest"] for slot in there["slots"]] == [True, False]
    assert there["layout"]["tensors"] == here["layout"]["tensors"]
    assert there["layout"]["values"] == here["layout"]["values"]
    assert (there["in_use"], there["other_checkpoints"], there["trouble"]) == (False, [], [])
    code, printed, _ = call("inspect", client.root)
    assert code == 0 and "whole, newest" in printed and f"{client.root}, the newest was written" in printed
    assert "step 10" in call("inspect", client.root, "--step", 10)[1]


def test_inspect_and_verify_of_several_ranks(ranked):
    directory, client = ranked
    _, here, _ = told("inspect", directory)
    _, there, _ = told("inspect", client.root)
    assert there["whole"] == here["whole"] == [{"step": step, "incarnation": 1, "bad": None} for step in (20, 10)]
    assert [[slot["rank"] for slot in rank["slots"]] for rank in there["ranks"]] == [[0, 0], [1, 1], [2, 2]]
    printed = call("inspect", client.root)[1]
    assert f"{client.root}, rank 2" in printed and "complete on all ranks: 20 (incarnation 1), 10" in printed
    code, found, _ = told("verify", client.root)
    assert (code, found["restore"], found["trouble"]) == (0, 20, [])
    assert [[slot["result"] for slot in rank["slots"]] for rank in found["ranks"]] == [["whole", "whole"]] * 3
    assert told("verify", client.root, "--step", 10)[1]["whole"] == [{"step": 10, "incarnation": 1, "bad": False}]


def test_verify_reads_each_chunk_of_each_rank(ranked, monkeypatch):
    _, client = ranked
    sizes = [info.nbytes for info in client.list("segments")]
    with reads(monkeypatch) as seen:
        assert call("verify", client.root)[0] == 0
    fetched = {}
    for key, nbytes in seen:
        if key.startswith("segments/"):
            fetched[key] = fetched.get(key, 0) + nbytes
    assert len(fetched) == len(sizes) and sum(fetched.values()) >= sum(sizes)


@pytest.mark.parametrize("to", ["safetensors", "pt"])
def test_an_export_is_that_of_the_directory(alone, ranked, tmp_path, to):
    for directory, client in (alone, ranked):
        exported = []
        for number, place in enumerate((directory, client.root)):
            out = tmp_path / f"{directory.name}-{number}"
            code, done, _ = told("export", place, out, "--to", to)
            assert (code, done["step"]) == (0, 20)
            exported.append(state_digest(load_exported(out)))
        assert exported[0] == exported[1]
    code, done, _ = told("export", client.root, tmp_path / "older", "--step", 10)
    assert (code, done["step"]) == (0, 10)
    code, _, error = call("export", client.root, tmp_path / "none", "--step", 11)
    assert code == 1 and isinstance(error, NoCheckpoint) and "[20, 10]" in str(error)


@pytest.mark.parametrize("kind", ["alone", "ranked"])
@pytest.mark.parametrize("what", ["segment", "manifest", "commit", "missing segment", "missing manifest"])
def test_damage_exits_1_and_names_the_key(request, tmp_path, kind, what):
    _, client = request.getfixturevalue(kind)
    rank = 0 if kind == "alone" else 1
    key = {
        "segment": segment_key(client, 20, 1, rank),
        "manifest": manifest_of(client, 20, rank)[0],
        "commit": commit_key(client, 20),
    }[what.rpartition(" ")[2]]
    path = client.root / key
    path.unlink() if what.startswith("missing") else flip(path)
    code, found, error = told("verify", client.root)
    assert code == 1 and error is None
    slots = found["slots"] if kind == "alone" else found["ranks"][rank]["slots"]
    assert [(slot["step"], slot["result"], slot["damaged"]) for slot in slots] == [
        (20, "damaged", True),
        (10, "whole", False),
    ]
    assert key in slots[0]["detail"]
    assert found["restore"] == 10
    if kind == "ranked":
        others = [rank["slots"][0]["result"] for rank in (found["ranks"][0], found["ranks"][2])]
        assert others == (["damaged"] * 2 if what == "commit" else ["whole"] * 2)
        assert [one["step"] for one in found["whole"]] == [10]
    _, looked, _ = told("inspect", client.root)
    looked = looked["slots"] if kind == "alone" else looked["ranks"][rank]["slots"]
    assert looked[0]["state"] == ("whole" if what.endswith("segment") else "torn")
    # An export never takes what is damaged: it names it, or takes the one before it.
    code, done, error = told("export", client.root, tmp_path / "out")
    if error is None:
        assert (code, done["step"], kind) == (0, 10, "alone")
    else:
        assert code == 1 and key in str(error)
    assert told("export", client.root, tmp_path / "older", "--step", 10)[0] == 0


def test_what_is_taken_away_is_not_there(alone):
    _, client = alone
    retire(client, next(CommitName.parse(one.key.removeprefix("commits/")) for one in client.list("commits")))
    assert [slot["step"] for slot in told("inspect", client.root)[1]["slots"]] == [20]
    for info in list(client.list("commits")):
        retire(client, CommitName.parse(info.key.removeprefix("commits/")))
    code, printed, _ = call("inspect", client.root)
    assert (code, printed) == (0, f"{client.root}: there is no checkpoint here\n")
    code, _, error = call("verify", client.root)
    assert code == 1 and isinstance(error, NoCheckpoint)


def test_a_store_that_cannot_be_reached_is_an_error(alone, monkeypatch):
    _, client = alone
    with failing(monkeypatch, StorageError("commits: list failed")):
        for command in ("inspect", "verify"):
            code, _, error = call(command, client.root)
            assert code == 1 and "list failed" in str(error)


def test_one_key_that_is_forbidden_hides_no_other_checkpoint(alone, monkeypatch):
    _, client = alone
    key = manifest_of(client, 20)[0]
    with failing(monkeypatch, StorageError(f"{key}: 403 AccessDenied"), lambda asked: asked == key):
        code, found, _ = told("verify", client.root)
    assert code == 1
    assert [(slot["step"], slot["result"]) for slot in found["slots"]] == [(20, "damaged"), (10, "whole")]
    assert "403" in found["slots"][0]["detail"]


def test_two_jobs_in_one_place_are_shown_and_refused(alone, ranked, tmp_path):
    _, client = alone
    push_job(client, ranked[0])
    code, _, error = call("inspect", client.root)
    assert code == 1 and "several jobs" in str(error) and "give each a prefix of its own" in str(error)


def test_flags_of_a_bucket_are_refused_for_a_folder(alone):
    for command in (["inspect"], ["verify"], ["export", "out"]):
        arguments = [command[0], alone[0], *command[1:], "--endpoint-url", "http://x"]
        code, _, error = call(*arguments)
        assert code == 2 and isinstance(error, ConfigError) and "--endpoint-url: for s3://" in str(error)


def test_commands_of_folders_load_nothing_of_s3(alone):
    script = (
        "import sys; from lastgood.cli import app\n"
        f"try: app(['verify', {str(alone[0])!r}])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print(*({'boto3', 'botocore', 'obstore'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""


# -- a real server -----------------------------------------------------------------------------------------------------


@pytest.fixture
def reached(server, monkeypatch):
    """The environment that a user of the server has."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.credentials.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.credentials.secret_access_key)
    return ["--region", "us-east-1", "--endpoint-url", server.endpoint_url]


def test_commands_on_a_real_server(server, reached, ranked, tmp_path, monkeypatch):
    directory, _ = ranked
    url = f"s3://lastgood/{secrets.token_hex(8)}"
    client = S3Client(url, server.options())
    push_job(client, directory)
    code, found, _ = told("verify", url, *reached)
    assert (code, found["restore"], found["directory"]) == (0, 20, url)
    printed = call("inspect", url, *reached)[1]
    assert f"{url}, rank 1" in printed
    for number, place in enumerate(((directory,), (url, *reached))):
        assert call("export", place[0], tmp_path / str(number), *place[1:])[0] == 0
    digests = [state_digest(load_exported(tmp_path / number)) for number in "01"]
    assert digests[0] == digests[1]
    key = segment_key(client, 20, 0, 2)
    content = bytearray(client.get(key, 1 << 30))
    content[-1] ^= 1
    client.put(key, content)
    code, found, _ = told("verify", url, *reached)
    assert (code, found["restore"]) == (1, 10)
    assert f"{url}/{key}" in found["ranks"][2]["slots"][0]["detail"]
    code, _, error = call("export", url, tmp_path / "damaged", *reached)
    assert code == 1 and isinstance(error, CorruptCheckpoint) and key in str(error)
    client.close()
    # The environment alone says where it is as well.
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint_url)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    assert call("inspect", url)[0] == 0


def test_what_was_saved_behind_dcp_is_looked_into_as_well(server, reached, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint_url)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    url = f"s3://lastgood/{secrets.token_hex(8)}/step-1"
    dcp.save({"model": {"w": torch.ones(10, 3)}}, storage_writer=LastgoodWriter(url), no_dist=True)
    found = told("inspect", url, "--layout")[1]
    named = {tensor["name"]: tensor["shape"] for rank in found["ranks"] for tensor in rank["layout"]["tensors"]}
    assert [10, 3] in named.values() and any(name.endswith(".metadata") for name in named)
    assert told("verify", url)[0] == 0
    assert call("export", url, tmp_path / "out")[0] == 0


def test_a_missing_bucket_and_wrong_keys_are_named_and_no_secret_is(server, reached, monkeypatch):
    code, _, error = call("inspect", "s3://no-such-bucket/job", *reached)
    assert code == 1 and isinstance(error, CheckpointError)
    assert "s3://no-such-bucket/job" in str(error) and "make the bucket, or correct its name" in str(error)
    secret = secrets.token_hex(20)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    code, printed, error = call("verify", "s3://lastgood/job", *reached)
    assert code == 1 and "check the" in str(error)
    for text in (printed, str(error)):
        assert secret not in text and server.credentials.access_key_id not in text


def test_other_urls_are_refused():
    for url in ("gs://b/j", "file:///tmp/x"):
        code, _, error = call("inspect", url)
        assert code == 2 and "is a URL" in str(error)
