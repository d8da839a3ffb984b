"""Slots become objects and come back: exact, in bounded memory, and only what changed is sent."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.addresses import memory_address
from lastgood.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpoint,
    MismatchError,
    NoCheckpoint,
    StorageError,
    WaitTimeout,
)
from lastgood.storage import SlotStore, SlotView
from lastgood.storage.objects.commits import Base, find_base, find_commits, retire
from lastgood.storage.objects.folder import FolderClient
from lastgood.storage.objects.format import MANIFESTS, SEGMENTS, Manifest, object_key
from lastgood.storage.objects.upload import PartUpload, commit_parts, told_parts, upload_slot
from lastgood.storage.objects.view import RemoteView
from tests.storage.objects.support.streams import CHUNK, JOB, SEGMENT, Stream, read, save, send

NBYTES = 10 * SEGMENT + 777
TIMEOUT_S = 60.0


@pytest.fixture
def client(tmp_path):
    return FolderClient(tmp_path / "objects")


@pytest.fixture
def store(tmp_path):
    with SlotStore(tmp_path / "slots", slots=3, chunk_bytes=CHUNK, pool_bytes=16 * CHUNK, job_id=JOB) as store:
        yield store


def write_slot(store: SlotStore, step: int, content: bytes, meta_bytes: int = 40):
    write = store.begin(step, len(content))
    memory = bytearray(content)
    address, keep = memory_address(memory, 0, len(memory))
    write.copy_host([(address, len(memory))], TIMEOUT_S, 1)
    assert write.commit(len(content) - meta_bytes, meta_bytes, bytes(range(32)), TIMEOUT_S) == "durable"
    del keep
    return write.info


def push(client, view: SlotView, info, **options):
    """As the tier does it."""
    base = find_base(client, info.record.rank, info.record.job_id)
    upload = PartUpload(client, info.record, base=base, segment_bytes=SEGMENT, hashed=base is None)
    with view.hold(info):
        part = upload_slot(upload, view, info, **options)
    commit_parts(upload, [part])
    upload.done()
    return upload


@pytest.mark.parametrize("threads", [1, 4])
def test_a_slot_comes_back_with_the_surface_of_a_slot(store, client, threads):
    content = os.urandom(NBYTES)
    info = write_slot(store, 5, content)
    push(client, store, info, threads=threads)
    view = RemoteView(client)
    found = view.newest()
    assert found.record == info.record
    assert (found.step, found.incarnation, found.stream_bytes) == (5, store.incarnation, NBYTES)
    assert read(view, found, threads) == content
    assert view.read_meta(found) == content[-40:]
    assert view.read_bytes(found, CHUNK - 3, 2 * SEGMENT) == content[CHUNK - 3 : CHUNK - 3 + 2 * SEGMENT]
    view.verify(found)
    assert [status.state.value for status in view.statuses()] == ["whole"]
    assert str(found.path).startswith(str(client.root))
    with view.hold(found):
        assert view.global_commit() is None and not view.held


def test_only_chunks_that_are_asked_for_are_fetched(store, client, monkeypatch):
    content = os.urandom(NBYTES)
    push(client, store, write_slot(store, 5, content))
    view = RemoteView(client)
    info = view.newest()
    fetched = []
    real = FolderClient.get_range
    monkeypatch.setattr(
        FolderClient, "get_range", lambda self, key, begin, n: fetched.append(n) or real(self, key, begin, n)
    )
    memory = bytearray(30)
    address, keep = memory_address(memory, 0, 30)
    view.read_into(info, [(0, 7 * CHUNK), (address, 10), (0, 5 * CHUNK), (address + 10, 20)], offset=100)
    del keep
    assert bytes(memory) == content[100 + 7 * CHUNK :][:10] + content[110 + 12 * CHUNK :][:20]
    assert sum(fetched) == 2 * CHUNK
    fetched.clear()
    view.verify(info)
    assert sum(fetched) == NBYTES


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 5), (NBYTES - 4, 5), (NBYTES + 1, 0), (0, NBYTES + 1)])
def test_what_is_outside_of_the_stream_is_refused(store, client, offset, nbytes):
    push(client, store, write_slot(store, 5, os.urandom(NBYTES)))
    view = RemoteView(client)
    with pytest.raises(CorruptCheckpoint, match="outside of a stream"):
        view.read_into(view.newest(), [(0, nbytes)], offset=offset)


def test_what_did_not_change_is_not_sent_again(store, client):
    content = bytearray(os.urandom(NBYTES))
    first = push(client, store, write_slot(store, 1, bytes(content)))
    assert (first.sent_bytes, first.kept_bytes) == (NBYTES, 0)
    content[3 * SEGMENT + 5] ^= 1
    second = push(client, store, write_slot(store, 2, bytes(content)))
    assert (second.sent_bytes, second.kept_bytes) == (SEGMENT, NBYTES - SEGMENT)
    third = push(client, store, write_slot(store, 3, bytes(content)))
    # The one that changed was sent without its digest: once more, and never again.
    assert third.sent_bytes == SEGMENT
    assert push(client, store, write_slot(store, 4, bytes(content))).sent_bytes == 0
    view = RemoteView(client)
    assert [info.step for info in view.committed()] == [4, 3, 2, 1]
    assert read(view, view.newest()) == content


def test_checksums_alone_do_not_make_segments_the_same(client):
    """CRC32C collides; the digest decides."""
    old, new = Stream((1, 2), step=1), Stream((1, 3), step=2)
    save(client, old, hashed=True)
    base = find_base(client, 0)
    _, part = send(client, new)
    theirs = Manifest.decode(client.get(object_key(MANIFESTS, part.name), part.nbytes), "new")
    # A base that claims the checksums of what comes, with the digests of what it has.
    lying = Base(base.name, replace(base.manifest, record=theirs.record, table=theirs.table))
    again = replace(new, incarnation=2)
    upload, part = send(client, again, lying)
    commit_parts(upload, [part])
    assert upload.kept_bytes == SEGMENT
    view = RemoteView(client)
    assert read(view, view.look(again.name)) == new.content


def test_a_base_of_another_shape_is_no_base(client):
    save(client, Stream((1, 2, 3)), hashed=True)
    base = find_base(client, 0)
    assert base is not None
    upload, _ = send(client, Stream((1, 2, 3), step=2, world_size=2), base)
    assert upload.kept_bytes == 0
    upload, _ = send(client, Stream((1, 2), step=3), base)
    assert upload.kept_bytes == SEGMENT  # the last one is shorter
    upload, _ = send(client, Stream((1, 2, 3, 4), step=4), base)
    assert upload.kept_bytes == 2 * SEGMENT


def test_an_upload_that_is_repeated_sends_nothing(client):
    one = Stream((1, 2, 3))
    first, _ = send(client, one)
    second, part = send(client, one)
    assert (first.sent_bytes, second.sent_bytes) == (len(one.content), 0)
    commit_parts(second, [part])


def test_a_slot_that_changed_while_it_was_read_is_not_committed(store, client):
    info = write_slot(store, 5, os.urandom(NBYTES))
    with pytest.raises(CorruptCheckpoint):
        upload = PartUpload(client, replace(info.record, table_digest=bytes(32)), segment_bytes=SEGMENT)
        upload_slot(upload, store, info)
    assert find_commits(client) == []


def test_a_source_that_fails_or_a_pace_that_gives_up_ends_the_upload(store, client):
    info = write_slot(store, 5, os.urandom(NBYTES))
    paced = []

    def pace(nbytes):
        paced.append(nbytes)
        if len(paced) == 4:
            raise WaitTimeout("enough")

    with pytest.raises(WaitTimeout, match="enough"):
        upload_slot(PartUpload(client, info.record, segment_bytes=SEGMENT), store, info, threads=2, pace=pace)
    assert len(paced) < 8
    assert find_commits(client) == []


def test_a_damaged_segment_is_never_delivered(client):
    save(client, Stream((1, 2, 3)))
    view = RemoteView(client)
    info = view.newest()
    key = object_key(SEGMENTS, info.manifest.segments[1].name)
    content = bytearray(client.get(key, 1 << 20))
    content[CHUNK + 1] ^= 8
    client.put(key, content)
    memory = bytearray(info.stream_bytes)
    address, keep = memory_address(memory, 0, len(memory))
    with pytest.raises(CorruptCheckpoint, match=r"step 1, chunk 3 of 6: checksum 0x[0-9a-f]{8} instead of 0x"):
        view.read_into(info, [(address, len(memory))], 1)
    del keep
    assert memory[SEGMENT + CHUNK : 2 * SEGMENT] == bytes(CHUNK)
    client.put(key, content[:-1])
    with pytest.raises(StorageError, match="ends at byte"):
        view.verify(info)
    client.delete([key])
    with pytest.raises(StorageError, match="is not there"):
        view.verify(info)


def test_a_read_has_a_limit_of_time(client):
    save(client, Stream((1, 2, 3)))
    view = RemoteView(client)
    with pytest.raises(WaitTimeout, match="for its segments"):
        view.verify(view.newest(), timeout_s=-1.0)


def test_several_ranks_commit_together(client):
    ranks = [Stream((rank, rank + 1), step=3, rank=rank, world_size=3) for rank in range(3)]
    save(client, *ranks)
    for stream in ranks:
        view = RemoteView(client, stream.rank)
        assert read(view, view.newest()) == stream.content
    with pytest.raises(MismatchError, match="has 3 ranks, and rank 3 is asked for"):
        RemoteView(client, 3).newest()


def test_a_commit_needs_the_manifests_of_all_ranks(client):
    ranks = [Stream((rank,), step=3, rank=rank, world_size=2) for rank in range(2)]
    sent = [send(client, stream) for stream in ranks]
    parts = [part for _, part in sent]
    with pytest.raises(MismatchError, match="1 parts of 2 ranks"):
        commit_parts(sent[0][0], parts[:1])
    client.delete([object_key("manifests", parts[1].name)])
    with pytest.raises(Exception, match="the manifest of a rank is not there"):
        commit_parts(sent[0][0], parts)
    assert find_commits(client) == []


def test_what_was_taken_away_is_not_found(client):
    save(client, Stream((1,), step=1))
    save(client, Stream((2,), step=2))
    retire(client, Stream((2,), step=2).name)
    retire(client, Stream((2,), step=2).name)
    assert [info.step for info in RemoteView(client).committed()] == [1]
    retire(client, Stream((1,), step=1).name)
    with pytest.raises(NoCheckpoint, match="nothing was committed there"):
        RemoteView(client).newest()


def test_an_upload_of_more_than_a_week_is_not_committed(client):
    now = [1e6]
    upload = PartUpload(client, Stream((1,)).record, segment_bytes=SEGMENT, clock=lambda: now[0])
    upload.begin()
    upload.send(0, Stream((1,)).content)
    part = upload.finish(0, 0, bytes(32))
    now[0] += 8 * 86400
    with pytest.raises(Exception, match="began more than a week ago"):
        commit_parts(upload, [part])


def test_segments_of_a_wrong_size_are_refused(client):
    record = Stream((1, 2)).record
    for size in (0, 1, CHUNK + 1, 1 << 33):
        with pytest.raises(ConfigError, match="segment_bytes must be a multiple"):
            PartUpload(client, record, segment_bytes=size)
    upload = PartUpload(client, record, segment_bytes=SEGMENT)
    with pytest.raises(ConfigError, match="segment 0 has 8192 bytes, not 5"):
        upload.send(0, b"12345")
    upload.send(0, bytes(SEGMENT))
    with pytest.raises(Exception, match=r"segments \[1\] were not sent"):
        upload.finish(0, 0, bytes(32))


@given(cuts=st.lists(st.integers(0, 3 * SEGMENT), max_size=12), hashed=st.booleans())
@settings(max_examples=60)
def test_a_segment_may_be_sent_in_any_pieces(tmp_path_factory, cuts, hashed):
    stream = Stream((1, 2, 3))
    names = []
    for pieces in (sorted(cuts), []):
        client = FolderClient(tmp_path_factory.mktemp("pieces"))
        upload = PartUpload(client, stream.record, segment_bytes=SEGMENT, hashed=hashed)
        upload.begin()
        for index in range(upload.segments):
            begin = index * SEGMENT
            end = begin + upload.size_of(index)
            edges = [begin, *(cut for cut in pieces if begin < cut < end), end]
            upload.send(index, *(stream.content[a:b] for a, b in pairwise(edges)))
        commit_parts(upload, [upload.finish(0, 0, bytes(32))])
        assert read(RemoteView(client), RemoteView(client).newest()) == stream.content
        names.append(sorted(info.key for info in client.list(SEGMENTS)))
    assert names[0] == names[1]


def test_an_empty_stream(client):
    empty = Stream((1,), short=SEGMENT)
    save(client, empty)
    view = RemoteView(client)
    assert read(view, view.newest()) == b""


def test_ranks_tell_their_parts_to_the_one_that_commits(client):
    streams = [Stream((rank,), rank=rank, world_size=3) for rank in range(3)]
    sent = [send(client, stream) for stream in streams]
    for rank in (0, 2):
        sent[rank][0].tell(sent[rank][1])
    assert told_parts(client, streams[0].name, 3) == {0: sent[0][1], 2: sent[2][1]}
    assert told_parts(client, streams[0].name, 3, {2: sent[2][1]}) == {0: sent[0][1], 2: sent[2][1]}
    again, part = send(client, streams[1])
    again.tell(part)
    again.beat()
    told = told_parts(client, streams[0].name, 3, {0: sent[0][1]})
    commit_parts(sent[0][0], [told[rank] for rank in range(3)])
    for rank, stream in enumerate(streams):
        view = RemoteView(client, rank)
        assert read(view, view.newest()) == stream.content
    for upload, _ in sent:
        upload.done()
    again.done()
    assert told_parts(client, streams[0].name, 3) == {}


@pytest.mark.parametrize("rival_rank", [0, 1])
@pytest.mark.parametrize("rival_world", [2, 3])
def test_parts_of_two_copies_of_a_job_are_not_mixed(client, rival_rank, rival_world):
    ours = [Stream((1,), rank=rank, world_size=2) for rank in range(2)]
    sent = [send(client, stream) for stream in ours]
    for upload, part in sent:
        upload.tell(part)
    mine = {0: sent[0][1]}
    rival, part = send(client, Stream((2,), rank=rival_rank, world_size=rival_world))
    rival.tell(part)
    with pytest.raises(MismatchError, match="sent by another process with other content; two jobs, or two copies of"):
        told_parts(client, ours[0].name, 2, mine)
    rival.done()
    assert told_parts(client, ours[0].name, 2, mine) == {0: sent[0][1], 1: sent[1][1]}


def test_a_rank_that_began_again_may_have_taken_over_other_segments(client):
    save(client, Stream((1, 2), step=1))
    now = Stream((1, 3), step=2)
    whole, part = send(client, now)
    whole.tell(part)
    again, smaller = send(client, now, find_base(client, 0, now.job_id), hashed=True)
    again.tell(smaller)
    assert part != smaller
    assert told_parts(client, now.name, 1)[0] in (part, smaller)


def test_a_part_that_took_more_than_a_week_is_not_told(client):
    now = [0.0]
    upload, part = send(client, Stream((1,)), clock=lambda: now[0])
    now[0] = 8 * 86400.0
    with pytest.raises(CheckpointError, match="more than a week ago"):
        upload.tell(part)
    assert told_parts(client, Stream((1,)).name, 1) == {}
