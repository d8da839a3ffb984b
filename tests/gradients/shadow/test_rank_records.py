"""Memory for side records is bounded, whoever sends them at the same time."""

from __future__ import annotations

from lastgood.gradients.layout.entries import Side
from lastgood.gradients.shadow.rank_records import RankRecords
from lastgood.gradients.shadow.spill_store import SideRecord


def record(rank: int, nbytes: int) -> SideRecord:
    return SideRecord(Side(rank=rank, iteration=1, step=1, layout={}, nbytes=nbytes), bytes(nbytes))


def test_room_that_one_record_is_arriving_in_is_not_another_s():
    records = RankRecords(100)
    assert records.reserve(60)
    assert not records.reserve(41)
    assert records.reserve(40)
    records.release(40)  # it did not come
    records.put(record(0, 60))
    records.release(60)
    assert not records.reserve(41) and records.reserve(40)
    records.release(40)
    records.drop(1)
    assert records.reserve(100)
