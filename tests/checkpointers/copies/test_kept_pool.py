"""The pool that a process keeps: used again where it fits, never by two at once, never after an error."""

from __future__ import annotations

import os
import threading

import pytest

from lastgood.checkpointers.copies.host import KeptPool

CHUNK = 1 << 16


def used(kept, chunks=3):
    with kept.use(chunks, CHUNK, pinned=False) as (pool, pinned):
        assert pinned is None
        return pool


def test_the_next_use_of_one_size_gets_the_same_pool():
    kept = KeptPool()
    first = used(kept)
    assert used(kept) is first
    assert used(kept, 4) is not first
    assert used(kept) is not first, "one is kept, of the newest size"


def test_two_users_at_once_have_a_pool_each():
    kept, inside, go_on = KeptPool(), threading.Event(), threading.Event()
    found = []

    def other():
        with kept.use(3, CHUNK, pinned=False) as (pool, _):
            found.append(pool)
            inside.set()
            go_on.wait(20)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(20)
    mine = used(kept)
    go_on.set()
    thread.join(20)
    assert mine is not found[0]
    assert used(kept) in (mine, found[0])


def test_a_pool_of_a_use_that_failed_is_not_kept():
    kept = KeptPool()
    with pytest.raises(OSError, match="full"), kept.use(3, CHUNK, pinned=False) as (first, _):
        raise OSError("full")
    assert used(kept) is not first


def test_a_fork_makes_its_own():
    kept = KeptPool()
    first = used(kept)
    child = os.fork()
    if not child:
        os._exit(0 if used(kept) is not first else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert used(kept) is first
