"""Documents from outside: each rule is held, by name, and none takes more memory than its bytes allow."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from dataclasses import replace

import pytest

from lastgood.errors import CheckpointError, CorruptCheckpoint, MismatchError
from lastgood.storage.objects import format as objects
from lastgood.storage.objects.commits import read_commit, read_manifest
from lastgood.storage.objects.folder import FolderClient
from lastgood.storage.objects.format import (
    BadVerdict,
    Commit,
    CommitName,
    Manifest,
    Part,
    UploadNote,
    object_key,
    segment_bytes_for,
)
from lastgood.storage.objects.view import RemoteView
from tests.storage.objects.support.streams import JOB, Stream, save

ONE = Stream((1, 2, 3), step=7)
NAME = f"{'0' * 16}-{'1' * 64}"


@pytest.fixture
def client(tmp_path):
    return FolderClient(tmp_path / "objects")


@pytest.fixture
def manifest(client):
    commit, _ = save(client, ONE)
    return read_manifest(client, ONE.name, commit.parts[0], 0, 1)


def changed(content: bytes, **fields) -> bytes:
    described = json.loads(content)
    for name, value in fields.items():
        if value is None:
            del described[name]
        else:
            described[name] = value
    return json.dumps(described).encode()


def test_documents_come_back(manifest):
    assert Manifest.decode(manifest.encode(), "here") == manifest
    commit = Commit(ONE.name, (Part(NAME, 5), Part(NAME[::-1][:0] + f"{'2' * 16}-{'1' * 64}", 7)))
    assert Commit.decode(commit.encode(), "here", ONE.name) == commit
    note = UploadNote(ONE.name, 3, (CommitName(JOB, 1, 2),))
    assert UploadNote.decode(note.encode(), "here") == note
    told = UploadNote(ONE.name, 3, (), Part(f"{ONE.name.tag}-{'0' * 64}", 77))
    assert UploadNote.decode(told.encode(), "here") == told
    verdict = BadVerdict(ONE.name, "loss is nan")
    assert BadVerdict.decode(verdict.encode(), "here", ONE.name) == verdict
    assert b"part" not in note.encode()
    with pytest.raises(CorruptCheckpoint, match="no manifest"):
        UploadNote.decode(told.encode().replace(b",77]", b",0]"), "here")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"segments": [["../../etc/passwd", None]] * 3}, "is no segment"),
        ({"segments": [[NAME, None]] * 3}, "twice"),
        ({"segments": [[NAME, None]] * 2}, "2 segments instead of 3"),
        ({"segments": [[NAME, "x" * 64], [NAME, None], [NAME, None]]}, "is no segment"),
        ({"segments": {}}, "segments is"),
        ({"segments": [NAME, NAME, NAME]}, "is no segment"),
        ({"stream_bytes": 1 << 63}, "bytes in hexadecimal digits belong there|is outside of"),
        ({"stream_bytes": 1 << 64}, "stream_bytes is"),
        ({"stream_bytes": -1}, "stream_bytes is"),
        ({"stream_bytes": True}, "stream_bytes is"),
        ({"stream_bytes": 1.5}, "stream_bytes is"),
        ({"chunk_bytes": 0}, "chunks of 0 bytes"),
        ({"chunk_bytes": 1000}, "hexadecimal digits|not a multiple"),
        ({"segment_bytes": 5000}, "no whole chunks"),
        ({"segment_bytes": 1 << 40}, "no whole chunks"),
        ({"segment_bytes": 0}, "no whole chunks"),
        ({"meta_offset": 1 << 40}, "meta data"),
        ({"table": "00" * 24}, "checksum table with digest"),
        ({"table": "zz" * 24}, "hexadecimal"),
        ({"table": "00"}, "hexadecimal"),
        ({"layout_digest": "ab"}, "32 bytes in hexadecimal"),
        ({"job_id": JOB.hex().upper()}, "16 bytes in hexadecimal"),
        ({"rank": 1}, "rank 1 of 1 is impossible"),
        ({"world_size": 0}, "impossible"),
        ({"kind": "commit"}, "no manifest of this format"),
        ({"step": None}, "it has no step"),
        ({"further": 1}, "'further' has no place in it"),
        ({"segments": [[]] * 100_000}, "more lists in them"),
    ],
)
def test_each_rule_of_a_manifest(manifest, fields, told):
    with pytest.raises(CorruptCheckpoint, match=told) as caught:
        Manifest.decode(changed(manifest.encode(), **fields), "s3://b/m")
    assert "s3://b/m" in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"format": 1, "format": 2}', b"\xff", b"1" * 9999])
def test_what_is_no_document_at_all(content):
    for kind in (Manifest, UploadNote):
        with pytest.raises(CorruptCheckpoint, match="here"):
            kind.decode(content, "here")
    for named in (Commit, BadVerdict):
        with pytest.raises(CorruptCheckpoint, match="here"):
            named.decode(content, "here", ONE.name)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"checkpoint": str(ONE.name._replace(step=8))}, "it is that on"),
        ({"ok": True}, "and calls it good"),
        ({"ok": 0}, "ok is 0"),
        ({"reason": 5}, "reason is 5"),
        ({"reason": None}, "it has no reason"),
        ({"further": 1}, "'further' has no place in it"),
        ({"kind": "upload"}, "no verdict of this format"),
    ],
)
def test_each_rule_of_a_verdict(fields, told):
    content = BadVerdict(ONE.name, "").encode()
    with pytest.raises(CorruptCheckpoint, match=told):
        BadVerdict.decode(changed(content, **fields), "here", ONE.name)


def test_another_version_is_named(manifest):
    with pytest.raises(MismatchError, match="version 2 of the manifest; this program knows version 1"):
        Manifest.decode(changed(manifest.encode(), version=2), "here")


def signed(line: bytes) -> bytes:
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"manifests": [["../x", 5]]}, "is no manifest"),
        ({"manifests": [[NAME, 1 << 40]]}, "is no manifest"),
        ({"manifests": [[NAME, 5], [NAME, 5]], "world_size": 2}, "twice"),
        ({"manifests": [], "world_size": 0}, "0 manifests for 0 ranks"),
        ({"world_size": 1 << 30}, "1 manifests for"),
        ({"step": 8}, "it is that of job"),
        ({"job_id": "00" * 16}, "it is that of job 0000"),
    ],
)
def test_each_rule_of_a_commit(fields, told):
    line = Commit(ONE.name, (Part(NAME, 5),)).encode().split(b"\n")[0]
    with pytest.raises(CorruptCheckpoint, match=told):
        Commit.decode(signed(changed(line, **fields)), "here", ONE.name)


def test_a_commit_says_its_own_digest():
    content = bytearray(Commit(ONE.name, (Part(NAME, 5),)).encode())
    content[30] ^= 1
    with pytest.raises(CorruptCheckpoint, match="does not have the digest that stands in it"):
        Commit.decode(bytes(content), "here", ONE.name)


@pytest.mark.parametrize("text", ["", "x", "../..", f"{JOB.hex()}/1-2", f"{JOB.hex()}/{'9' * 20}-{0:020d}"])
def test_what_is_no_name_of_a_checkpoint(text):
    assert CommitName.parse(text) is None


def test_names_have_the_order_of_checkpoints():
    names = [CommitName(JOB, incarnation, step) for incarnation in (1, 2, 10) for step in (1, 9, 10, 1 << 63)]
    assert sorted(map(str, names)) == [str(name) for name in names]
    assert [CommitName.parse(str(name)) for name in names] == names


def test_a_manifest_of_another_checkpoint_or_rank_is_not_taken(client):
    first, _ = save(client, ONE)
    second, _ = save(client, Stream((1,), step=8))
    mixed = Commit(second.name, first.parts)
    client.put(second.name.key, mixed.encode())
    with pytest.raises(CorruptCheckpoint, match="stands in the commit of"):
        RemoteView(client).look(second.name)
    assert [info.step for info in RemoteView(client).committed()] == [7]
    with pytest.raises(CorruptCheckpoint, match="rank 0 of 1"):
        read_manifest(client, ONE.name, first.parts[0], 1, 2)


def test_a_manifest_that_is_larger_than_its_commit_says_is_not_read(client):
    commit, _ = save(client, ONE)
    key = object_key(objects.MANIFESTS, commit.parts[0].name)
    client.put(key, bytes(commit.parts[0].nbytes + 1))
    with pytest.raises(CheckpointError, match="over the limit"):
        RemoteView(client).look(ONE.name)
    assert read_commit(client, ONE.name) == commit


def test_a_document_takes_memory_in_proportion():
    evil = b'{"format":"lastgood-objects","kind":"manifest","version":1,"segments":[' + b"[]," * 500_000 + b"[]]}"
    tracemalloc.start()
    with pytest.raises(CorruptCheckpoint):
        Manifest.decode(evil, "here")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * len(evil)


def test_what_lies_among_commits_and_is_none_is_left_out(client):
    save(client, ONE)
    client.put("commits/readme.txt", b"hello")
    client.put(f"commits/{JOB.hex()}/x", b"hello")
    assert RemoteView(client).names() == [ONE.name]


def test_several_jobs_are_named(client):
    save(client, ONE)
    other = replace(ONE, job_id=bytes(16))
    save(client, other)
    with pytest.raises(MismatchError, match="several jobs: 0000"):
        RemoteView(client).names()
    assert RemoteView(client, job_id=JOB).names() == [ONE.name]
    assert RemoteView(client, job_id=bytes(16)).names() == [other.name]


@pytest.mark.parametrize(
    ("stream_mib", "segment_mib"), [(1, 4), (300, 4), (400, 4), (799, 4), (800, 8), (3200, 32), (1 << 20, 32)]
)
def test_segments_are_a_hundredth_of_a_stream_in_bounds(stream_mib, segment_mib):
    for chunk in (64 * 1024, 4 << 20):
        assert segment_bytes_for(chunk, stream_mib << 20) == segment_mib << 20
    assert segment_bytes_for(5 << 20, stream_mib << 20) % (5 << 20) == 0
    assert segment_bytes_for(64 << 20, stream_mib << 20) == 64 << 20
