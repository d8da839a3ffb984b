"""Cutting a tensor one way and reading it another, held to plain indexing."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.checkpointers.ranks.boxes import Overlap, Source, cover, full_runs, row_offsets
from lastgood.state.shards import runs_of
from tests.state.support.shards import SHAPES, cuts, twin


def part_of(whole, indices):
    return whole[np.ix_(*indices)] if whole.ndim else whole.copy()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_cut_is_made_of_any_other(data):
    shape = data.draw(SHAPES)
    whole = np.arange(1, 1 + int(np.prod(shape, dtype=np.int64))).reshape(shape)
    mesh, placements = data.draw(cuts(shape))
    new_mesh, new_placements = data.draw(cuts(shape))
    sources, parts = [], {}
    for coordinate in product(*map(range, mesh)):
        runs = runs_of(shape, mesh, coordinate, placements)
        parts[coordinate] = part_of(whole, twin(shape, mesh, coordinate, placements))
        if parts[coordinate].size:
            sources.append(Source(coordinate, runs))
    for number, coordinate in enumerate(product(*map(range, new_mesh))):
        wanted = part_of(whole, twin(shape, new_mesh, coordinate, new_placements))
        if not wanted.size:
            continue
        target = np.zeros_like(wanted)
        times = np.zeros_like(wanted)
        for key, box in cover(runs_of(shape, new_mesh, coordinate, new_placements), sources, number):
            there = tuple(slice(at, at + size) for at, size in zip(box.source, box.shape, strict=True))
            here = tuple(slice(at, at + size) for at, size in zip(box.target, box.shape, strict=True))
            target[here] = parts[key][there]
            times[here] += 1
        assert (target == wanted).all()
        assert (times == 1).all(), "each element is read once"


def test_copies_are_read_in_turn_and_the_own_one_first():
    runs = full_runs((4,))
    sources = [Source(rank, runs) for rank in range(3)]
    assert [cover(runs, sources, turn)[0][0] for turn in range(4)] == [0, 1, 2, 0]
    assert cover(runs, sources, 1, own=2)[0][0] == 2


def test_what_is_missing_or_twice_there_is_refused():
    first, second = (((0, 3),),), (((2, 2),),)
    with pytest.raises(ValueError, match="3 of 4"):
        cover(full_runs((4,)), [Source(0, first)])
    with pytest.raises(ValueError, match="5 of 4"):
        cover(full_runs((4,)), [Source(0, first), Source(1, second)])
    with pytest.raises(ValueError, match="overlap"):
        cover(full_runs((5,)), [Source(0, first), Source(1, second)])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_rows_are_the_box(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    arrays = []
    for first in (0, 1000):
        axes = data.draw(st.permutations(range(len(shape))))
        extra = [data.draw(st.integers(0, 2)) for _ in shape]
        sizes = [shape[axis] + extra[axis] for axis in axes]
        memory = np.arange(first, first + int(np.prod(sizes))).reshape(sizes)
        arrays.append(memory.transpose(np.argsort(axes)))
    begin = [
        tuple(data.draw(st.integers(0, array.shape[at] - size)) for at, size in enumerate(shape)) for array in arrays
    ]
    strides = [tuple(step // array.itemsize for step in array.strides) for array in arrays]
    row, sources, targets = row_offsets(Overlap(begin[0], begin[1], shape), *strides)
    found = {(int(s) + i, int(t) + i) for s, t in zip(sources, targets, strict=True) for i in range(row)}
    boxes = [
        array[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))]
        for array, start in zip(arrays, begin, strict=True)
    ]
    expected = {(int(a), int(b) - 1000) for a, b in zip(boxes[0].reshape(-1), boxes[1].reshape(-1), strict=True)}
    assert found == expected
