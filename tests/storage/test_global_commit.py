"""Checkpoints of a job of several ranks: what all hold, what may yet turn out to be held by all, what is dropped."""

from __future__ import annotations

from pathlib import Path

import pytest
from slot_helpers import commit, content_of, give, load, open_store, save, steps

from lastgood.errors import MismatchError, StorageError, WaitTimeout
from lastgood.storage import SlotInfo, SlotStore, Verdict
from lastgood.storage.format import seal_json, unseal_json
from lastgood.storage.global_commit import GLOBAL_FILE, GlobalCommit

NBYTES = 50_000


def shared_store(directory: Path, **knobs: object) -> SlotStore:
    store = open_store(directory, rank=1, world_size=3, **{"slots": 4, "keep": 1, **knobs})
    store.share(7, [info.sequence for info in store.committed()])
    return store


def of_step(store: SlotStore, step: int) -> SlotInfo:
    return next(info for info in store.committed() if info.step == step)


def begin_fails(store: SlotStore) -> None:
    with pytest.raises(WaitTimeout, match="free slot"):
        store.begin(99, NBYTES, 0.05)


def test_only_a_newer_one_of_all_ranks_makes_older_ones_free(tmp_path: Path) -> None:
    with shared_store(tmp_path) as store:
        for step in (1, 2, 3, 4):
            assert save(store, step, NBYTES) == "durable"
        assert store.everywhere() == []
        begin_fails(store)
        store.confirm(of_step(store, 1))
        assert store.global_commit() == GlobalCommit(7, 1, of_step(store, 1).sequence)
        begin_fails(store)  # the others may have gone on to any of the newer ones
        store.confirm(of_step(store, 3))
        assert save(store, 5, NBYTES) == "durable"
        assert steps(store) == [5, 4, 3, 2], "the oldest goes first"
        store.drop(of_step(store, 4))
        assert save(store, 6, NBYTES) == "durable"
        assert set(steps(store)) >= {3, 5, 6}
        assert [info.step for info in store.everywhere()] == [3]
        assert load(store, of_step(store, 3)) == content_of(3, NBYTES)
    # A view, and a later life, know it too.
    commit = SlotStore.peek(tmp_path).global_commit()
    assert commit is not None and commit.step == 3
    with open_store(tmp_path, rank=1, world_size=3) as store:
        assert store.incarnation == 8


def test_a_newer_one_of_this_rank_alone_supersedes_nothing(tmp_path: Path) -> None:
    with shared_store(tmp_path, slots=5) as store:
        writes = [store.begin(step, NBYTES, 20.0) for step in (1, 2, 3, 4)]
        for step, write in enumerate(writes, 1):
            give(write, content_of(step, NBYTES))
        assert commit(writes[1]) == "durable"
        assert commit(writes[0]) == "durable", "older, and the other ranks may have it"
        assert commit(writes[3]) == "durable"
        store.confirm(of_step(store, 4))
        assert commit(writes[2]) == "superseded"


def test_a_bad_one_does_not_crowd_out_the_newest_good_one(tmp_path: Path) -> None:
    with shared_store(tmp_path, slots=2) as store:
        for step in (1, 2):
            save(store, step, NBYTES)
            store.confirm(of_step(store, step))
        store.judge(of_step(store, 2).sequence, Verdict(2, False, "spike"))
        for step in (3, 4):
            save(store, step, NBYTES)
            store.drop(of_step(store, step))
        assert steps(store) == [1]


def test_restarts_are_forgotten_when_all_ranks_got_on(tmp_path: Path) -> None:
    with shared_store(tmp_path) as store:
        save(store, 1, NBYTES)
        store.confirm(of_step(store, 1))
    with shared_store(tmp_path) as store:
        first = of_step(store, 1)
        store.count_restart(first)
        save(store, 2, NBYTES)
        assert store.book().restarts == {first.sequence: (1, 1)}, "one rank alone"
        store.confirm(of_step(store, 2))
        assert store.book().restarts == {}


def test_a_step_that_was_reached_before_is_no_progress(tmp_path: Path) -> None:
    """Of several ranks as well; until there is some, what the life began at stays."""
    with shared_store(tmp_path, keep=2) as store:
        for step in (5, 10):
            save(store, step, NBYTES)
            store.confirm(of_step(store, step))
    with open_store(tmp_path, rank=1, world_size=3, slots=4, keep=2) as store:
        origin = of_step(store, 5)
        store.share(8, [info.sequence for info in store.committed()], 12)
        store.count_restart(origin)
        for step in (10, 11, 12):
            save(store, step, NBYTES)
            store.confirm(of_step(store, step))
            assert store.book().restarts == {origin.sequence: (5, 1)}
            assert origin in store.committed()
        save(store, 13, NBYTES)
        store.confirm(of_step(store, 13))
        assert (store.book().restarts, store.book().reached) == ({}, 13)
        save(store, 14, NBYTES)
        assert origin not in store.committed()


def test_what_was_not_of_all_is_dropped_at_the_beginning(tmp_path: Path) -> None:
    with shared_store(tmp_path) as store:
        for step in (1, 2):
            save(store, step, NBYTES)
        store.confirm(of_step(store, 1))
    with open_store(tmp_path, rank=1, world_size=3, slots=4, keep=1) as store:
        store.share(9, [of_step(store, 1).sequence])
        assert steps(store) == [1]
        for step in (2, 3, 4):
            save(store, step, NBYTES)
        assert sorted(steps(store)) == [1, 2, 3, 4]
        assert of_step(store, 2).incarnation == 9


def test_a_mark_that_cannot_be_written_frees_nothing(tmp_path: Path) -> None:
    with shared_store(tmp_path) as store:
        for step in (1, 2):
            save(store, step, NBYTES)
        store.confirm(of_step(store, 1))
        blocked = tmp_path / GLOBAL_FILE
        blocked.unlink()
        blocked.mkdir()
        with pytest.raises(StorageError, match=GLOBAL_FILE):
            store.confirm(of_step(store, 2))
        assert [info.step for info in store.everywhere()] == [1]
        save(store, 3, NBYTES)
        save(store, 4, NBYTES)
        begin_fails(store)
        blocked.rmdir()
        store.confirm(of_step(store, 3))
        assert save(store, 5, NBYTES) == "durable"


def test_a_mark_that_cannot_be_read_is_no_mark(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with shared_store(tmp_path) as store:
        save(store, 1, NBYTES)
        store.confirm(of_step(store, 1))
    path = tmp_path / GLOBAL_FILE
    whole = path.read_bytes()
    for spoilt in (b"", whole[:-20], whole.replace(b'"step": 1', b'"step": 2'), b"[" * 5000, b"null", b"{}"):
        path.write_bytes(spoilt)
        caplog.clear()
        assert SlotStore.peek(tmp_path).global_commit() is None
        assert GLOBAL_FILE in caplog.text
    path.write_bytes(seal_json({**unseal_json(whole), "version": 9}))
    with pytest.raises(MismatchError, match="version 9"):
        SlotStore.peek(tmp_path).global_commit()
    path.unlink()
    assert SlotStore.peek(tmp_path).global_commit() is None
