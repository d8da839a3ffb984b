from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgood.errors import ConfigError
from lastgood.wire.gloo import GlooMessage, GlooRing
from tests.mirror.support import live
from tests.mirror.support.frames import read, read_pcap
from tests.mirror.support.plain.gloo import GlooParser
from tests.mirror.support.rebuild import ALLREDUCE, collectives


@pytest.mark.parametrize(
    ("nbytes", "ranks", "segments", "chunk", "size", "last"),
    [
        (25 << 20, 2, 26, 13, 1_008_248, 1_008_200),
        (25 << 20, 4, 28, 7, 936_232, 936_136),
        (4_000_000, 3, 6, 2, 666_668, 666_660),
        (40, 4, 8, 2, 8, 0),
        (4, 2, 4, 2, 4, 0),
    ],
)
def test_layouts_that_were_measured(nbytes, ranks, segments, chunk, size, last):
    ring = GlooRing(nbytes, ranks, 4)
    assert (ring.segments, ring.segments // ranks, ring.segment_bytes) == (segments, chunk, size)
    begin, end = ring.span(segments - 1)
    assert end - begin == last


def test_one_element_passes_as_a_partial_sum_and_comes_back():
    ring = GlooRing(4, 2, 4)
    assert ring.sent(1) == [GlooMessage(0, 0, 4, False)]
    assert ring.sent(0) == ring.received(1) == [GlooMessage(0, 0, 4, True)]
    assert GlooRing(0, 5, 4).sent(0) == []


@given(
    elements=st.integers(1, 400),
    ranks=st.integers(2, 7),
    item=st.sampled_from([1, 2, 4, 8]),
    largest=st.integers(1, 100),
)
def test_every_rank_ends_with_the_sum(elements, ranks, item, largest):
    import lastgood.wire.gloo as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_SEGMENT_BYTES", largest)
        ring = GlooRing(elements * item, ranks, item)
        sent = [ring.sent(rank) for rank in range(ranks)]
        received = [ring.received(rank) for rank in range(ranks)]
        chunk = ring.segments // ranks
    have = [[{rank} for _ in range(elements)] for rank in range(ranks)]
    # Each rank keeps the order of its own messages; a segment is sent once its sum came from the rank after.
    done = [0] * ranks
    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            before = (rank - 1) % ranks
            assert received[before] == sent[rank]
            if done[rank] == len(sent[rank]):
                continue
            one = sent[rank][done[rank]]
            span = range(one.begin // item, one.end // item)
            assert span and one.begin % item == one.end % item == 0
            needed = ranks if one.final else None
            sums = [have[rank][element] for element in span]
            if needed is not None and any(len(each) < ranks for each in sums):
                continue
            step = (rank + 1 - one.segment // chunk) % ranks
            if not one.final and any(len(each) != 1 + (-step) % ranks for each in sums):
                continue
            for element in span:
                if one.final:
                    have[before][element] = set(have[rank][element])
                else:
                    have[before][element] = have[before][element] | have[rank][element]
            done[rank] += 1
            moved = True
    assert done == [len(each) for each in sent]
    assert all(each == set(range(ranks)) for row in have for each in row)


def test_finals_of_one_rank_are_complete_and_two_chunks_come_once():
    for ranks in range(2, 7):
        ring = GlooRing(4096 * ranks * 4, ranks, 4)
        for rank in range(ranks):
            sent = {one.segment for one in ring.sent(rank) if one.final}
            received = {one.segment for one in ring.received(rank) if one.final}
            assert sent | received == set(range(ring.segments))
            chunk = ring.segments // ranks
            once = {segment // chunk for segment in sent ^ received}
            assert once == {rank, (rank - 1) % ranks}


@pytest.mark.parametrize("sizes", [(4, 1, 4), (-4, 2, 4), (5, 2, 4), (4, 2, 0), (4, 70_000, 4), (1 << 60, 2, 4)])
def test_sizes_that_no_ring_has_are_refused(sizes):
    with pytest.raises(ConfigError):
        GlooRing(*sizes)


CALLS = [
    *((elements, "float32") for elements in (1, 2, 3, 7, 10, 100, 65_537, 262_144 * 3 + 5)),
    *((elements, "float16") for elements in (1, 9, 1_000_003)),
    *((elements, "float64") for elements in (5, 300_007)),
    (4097, "bfloat16"),
    (1_500_001, "int8"),
]
ITEM_BYTES = {"float32": 4, "float16": 2, "float64": 8, "bfloat16": 2, "int8": 1}


@pytest.mark.root
@pytest.mark.skipif(not live.can_run(), reason="needs root, to make network namespaces")
@pytest.mark.parametrize(
    ("ranks", "watched"),
    [pytest.param(2, 1, marks=pytest.mark.slow), (3, 0), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_the_installed_torch_sends_these_messages(tmp_path, ranks, watched):
    """Every size and dtype: the messages of the watched rank have these lengths, and the final ones carry the sum."""
    options = {"calls": CALLS}
    live.train(tmp_path, ranks, 0, options, watched=watched, program="tests.mirror.support.reduce_rank")
    truth = np.load(tmp_path / "truth.npz")
    addresses = [live.address(rank) for rank in range(ranks)]
    found = read(GlooParser(), read_pcap(tmp_path / "capture.pcap"), 500)
    reductions = [one for one in collectives(found, addresses[watched]) if one.prefix == ALLREDUCE]
    assert len(reductions) == len(CALLS)
    for number, ((elements, dtype), one) in enumerate(zip(CALLS, reductions, strict=True)):
        item = ITEM_BYTES[dtype]
        assert one.reduced(watched, addresses, [elements * item], item) == truth[f"sum.{number}"].tobytes()
