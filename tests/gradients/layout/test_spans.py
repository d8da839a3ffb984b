"""Every byte of what ranks reduced reaches its place in the layout, once, whatever is in DDP's buckets."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.gradients.layout.layout import plan_layout
from lastgood.gradients.layout.spans import sent_range, spans_of
from lastgood.wire.records import DType


@given(st.integers(0, 200), st.integers(1, 9), st.sampled_from(["balanced", "artefact"]))
def test_pieces_of_all_ranks_are_the_whole_once(elements, ranks, cover):
    taken = np.zeros(elements, dtype=int)
    for rank in range(ranks):
        begin, end = sent_range(elements, rank, ranks, cover)
        assert 0 <= begin <= end <= elements
        taken[begin:end] += 1
    assert (taken == 1).all()


def test_covers_are_those_of_the_paper_and_of_its_artefact():
    # The facts' worked example: 1024 elements, 4 ranks.
    assert [sent_range(1024, rank, 4, "balanced") for rank in range(4)] == [
        (0, 256),
        (256, 512),
        (512, 768),
        (768, 1024),
    ]
    assert sent_range(1024, 0, 4, "artefact") == (0, 256)
    assert sent_range(1024, 3, 4, "artefact") == (256, 1024)
    assert all(begin == end for begin, end in (sent_range(1024, rank, 4, "artefact") for rank in (1, 2)))


@st.composite
def trainings(draw):
    sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=9))
    dtypes = draw(st.lists(st.sampled_from(["float32", "bfloat16"]), min_size=len(sizes), max_size=len(sizes)))
    order = draw(st.permutations(range(len(sizes))))
    strangers = draw(st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes)))
    cuts = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    limit = draw(st.integers(1, 64))
    return sizes, dtypes, order, strangers, cuts, limit


@settings(max_examples=200, deadline=None)
@given(trainings(), st.integers(1, 4), st.integers(1, 3), st.sampled_from(["balanced", "artefact"]))
def test_every_byte_arrives_where_the_layout_says(training, ranks, shadows, cover):
    sizes, dtypes, order, strangers, cuts, limit = training
    named = [(f"p{i}", (size,), dtype) for i, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True))]
    layout = plan_layout(named, {}, ranks=ranks, shadows=shadows, bucket_bytes=limit)
    arrived = [np.zeros(bucket.nbytes, dtype=int) for bucket in layout.buckets]
    values = [np.full(bucket.nbytes, -1) for bucket in layout.buckets]
    # DDP's buckets: one dtype each, any order, with parameters in between that no optimizer updates.
    reduced_buckets, last = [], None
    for index in order:
        if last != dtypes[index] or cuts[index]:
            reduced_buckets.append([])
        last = dtypes[index]
        reduced_buckets[-1] += [(None, strangers[index]), (index, sizes[index])]
    expected = {}
    for number, reduced in enumerate(reduced_buckets):
        itemsize = 4 if dtypes[reduced[1][0]] == "float32" else 2
        elements = sum(count for _, count in reduced)
        buffer = (np.arange(elements * itemsize) * 7 + number * 31) % 251
        begin = 0
        for index, count in reduced:
            if index is not None:
                expected[index] = buffer[begin * itemsize : (begin + count) * itemsize]
            begin += count
        for rank in range(ranks):
            dtype = DType[dtypes[reduced[1][0]]]
            spans = spans_of(layout, reduced, dtype, sent_range(elements, rank, ranks, cover))
            for span in spans:
                assert span.nbytes > 0
                assert span.dtype is layout.buckets[span.bucket].dtype
                arrived[span.bucket][span.offset : span.offset + span.nbytes] += 1
                values[span.bucket][span.offset : span.offset + span.nbytes] = buffer[
                    span.source : span.source + span.nbytes
                ]
            for one, following in pairwise(spans):
                joined = (one.bucket, one.offset + one.nbytes, one.source + one.nbytes)
                assert joined != (following.bucket, following.offset, following.source), (
                    "neighbours leave in one record"
                )
    for count in arrived:
        assert (count == 1).all()
    for index, parameter in enumerate(layout.parameters):
        found = values[parameter.bucket][parameter.offset : parameter.offset + parameter.nbytes]
        assert (found == expected[index]).all()


def test_a_gradient_of_another_size_is_refused():
    layout = plan_layout([("p", (4,), "float32")], {}, ranks=1, shadows=1)
    with pytest.raises(ValueError, match="p has 16 bytes of float32, its gradient 12 of float32"):
        spans_of(layout, [(0, 3)], DType.float32, (0, 3))


def test_a_gradient_of_another_type_of_the_same_size_is_refused():
    # As with DDP's mixed precision, which may reduce in another type than the parameters'.
    layout = plan_layout([("p", (4,), "float16")], {}, ranks=1, shadows=1)
    with pytest.raises(ValueError, match="p has 8 bytes of float16, its gradient 8 of bfloat16"):
        spans_of(layout, [(0, 4)], DType.bfloat16, (0, 4))


def test_buckets_end_where_another_owner_begins():
    named = [(f"p{i}", (2,), "float32") for i in range(4)]
    layout = plan_layout(named, {}, ranks=2, shadows=1, owners=[0, 0, 1, 1])
    assert [bucket.parameters for bucket in layout.buckets] == [(3, 2), (1, 0)]
