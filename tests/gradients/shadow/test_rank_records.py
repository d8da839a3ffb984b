"""Memory for side records is bounded, whoever sends them at the same time."""

from __future__ import annotations

from lastgood.gradients.layout.entries import Side
from lastgood.gradients.shadow.rank_records import SideShelf
from lastgood.gradients.shadow.spill_store import SideRecord


def record(rank: int, nbytes: int) -> SideRecord:
    return SideRecord(Side(rank=rank, iteration=1, step=1, layout={}, nbytes=nbytes), bytes(nbytes))


def test_room_that_one_record_is_arriving_in_is_not_another_s():
    shelf = SideShelf(100)
    assert shelf.reserve(60)
    assert not shelf.reserve(41)
    assert shelf.reserve(40)
    shelf.release(40)  # it did not come
    shelf.put(record(0, 60))
    shelf.release(60)
    assert not shelf.reserve(41) and shelf.reserve(40)
    shelf.release(40)
    shelf.drop(1)
    assert shelf.reserve(100)
