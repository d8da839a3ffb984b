"""The garbage collector is held only inside, however it ends and however many are inside."""

from __future__ import annotations

import gc
import threading

import pytest

from lastgood.integrations.dcp.collector import no_collection


@pytest.fixture(autouse=True)
def as_before():
    was_on = gc.isenabled()
    yield
    (gc.enable if was_on else gc.disable)()


def test_nothing_is_collected_inside():
    gc.enable()
    counted = gc.get_stats()
    with no_collection():
        kept = [[one] for one in range(100_000)]
        assert gc.get_stats() == counted
    assert gc.isenabled() and len(kept) == 100_000


def test_an_error_lets_it_go():
    gc.enable()
    with pytest.raises(ValueError, match="x"), no_collection():
        raise ValueError("x")
    assert gc.isenabled()


def test_one_that_was_off_stays_off():
    gc.disable()
    with no_collection():
        pass
    assert not gc.isenabled()


def test_the_last_of_several_threads_lets_it_go():
    gc.enable()
    inside, leave = threading.Event(), threading.Event()

    def other():
        with no_collection():
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=other)
    with no_collection():
        thread.start()
        assert inside.wait(20)
    assert not gc.isenabled()
    leave.set()
    thread.join(20)
    assert gc.isenabled()
