"""The kernels that write and read indices of sparse blocks, beside their plain twin. Needs no torch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood import _native
from lastgood.sparse.coding import Coding, encoded_bytes
from tests.sparse.support.coding_twin import read_indices, write_indices


def written(coding, indices, places):
    """By the kernel, between bytes that it must leave as they are."""
    nbytes = encoded_bytes(coding, places, len(indices))
    memory = np.full(nbytes + 16, 0xA5, np.uint8)
    numbers = np.array(indices, np.uint32)
    _native.sparse_write_indices(coding, numbers.ctypes.data, len(numbers), places, memory.ctypes.data + 8, nbytes)
    assert (memory[:8] == 0xA5).all() and (memory[nbytes + 8 :] == 0xA5).all()
    return memory[8 : nbytes + 8].tobytes()


def read(coding, content, places, count):
    source = np.frombuffer(bytearray(content), np.uint8)
    target = np.full(count + 4, 0xA5A5A5A5, np.uint32)
    good = _native.sparse_read_indices(coding, source.ctypes.data, len(content), places, count, target.ctypes.data + 8)
    assert (target[:2] == 0xA5A5A5A5).all() and (target[count + 2 :] == 0xA5A5A5A5).all()
    return target[2 : count + 2].tolist() if good else None


CASES = st.tuples(
    st.integers(1, 3000) | st.sampled_from([255, 256, 257, 65_535, 65_536, 65_537, 200_000]),
    st.floats(0, 1) | st.just(1.0),
    st.integers(0, 1 << 32),
)


@settings(max_examples=80, deadline=None)
@given(CASES)
def test_they_write_and_read_as_the_twin(case):
    places, share, seed = case
    count = round(places * share)
    indices = np.sort(np.random.default_rng(seed).choice(places, count, replace=False)).astype(np.uint32)
    for coding in list(Coding)[count < places :]:
        content = written(coding, indices, places)
        assert content == write_indices(coding, indices, places)
        assert read(coding, content, places, count) == indices.tolist()


@settings(max_examples=150, deadline=None)
@given(CASES, st.sampled_from(list(Coding)[1:]), st.booleans())
def test_they_read_anything_as_the_twin(case, coding, flip):
    places, share, seed = case
    count = round(places * share)
    rng = np.random.default_rng(seed)
    content = bytearray(rng.bytes(encoded_bytes(coding, places, count)))
    if flip and content:
        indices = np.sort(rng.choice(places, count, replace=False)).astype(np.uint32)
        content = bytearray(write_indices(coding, indices, places))
        content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    assert read(coding, content, places, count) == read_indices(coding, bytes(content), places, count)


def test_the_largest_numbers():
    places = 1 << 32
    for coding, indices in [(Coding.NUMBERS, [0, places - 1]), (Coding.LOW_16, [0, 65_535, 65_536, places - 1])]:
        assert read(coding, written(coding, indices, places), places, len(indices)) == indices


@pytest.mark.parametrize("indices", [[1, 1], [2, 1], [1, 100]])
def test_wrong_indices_are_refused_before_a_byte_is_written(indices):
    for coding in list(Coding)[1:]:
        with pytest.raises(ValueError, match="do not ascend, or are beyond the last place"):
            written(coding, indices, 100)


@pytest.mark.parametrize(
    ("coding", "places", "count", "nbytes"),
    [
        (5, 10, 1, 4),
        (4, 10, 1, 5),
        (4, 10, 11, 44),
        (0, 10, 9, 0),
        (1, 0, 0, 0),
        (4, (1 << 32) + 1, 1, 4),
        (1, 10, 1, 1),
    ],
)
def test_lengths_that_no_block_has_are_refused(coding, places, count, nbytes):
    memory = np.zeros(100, np.uint32)
    address = memory.ctypes.data
    with pytest.raises(ValueError, match="indices"):
        _native.sparse_write_indices(coding, address, count, places, address + 200, nbytes)
    with pytest.raises(ValueError, match="indices"):
        _native.sparse_read_indices(coding, address, nbytes, places, count, address + 200)
