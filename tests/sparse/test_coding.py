"""Sparse blocks as bytes: each comes back as it was, is as short as promised, and nothing else is taken for one."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.errors import CorruptCheckpoint
from lastgood.sparse.blocks import SparseGradient
from lastgood.sparse.coding import (
    BLOCK_HEADER_BYTES,
    Coding,
    choose_coding,
    decode,
    decode_group,
    encode,
    encode_group,
    encoded_bytes,
    most_encoded_bytes,
    most_group_bytes,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def drawn(elements, width, count, dtype, seed, *, clustered=False):
    rng = np.random.default_rng(seed)
    places = -(-elements // width)
    if clustered:
        begin = int(rng.integers(places - count + 1))
        chosen = np.arange(begin, begin + count)
    else:
        chosen = np.sort(rng.choice(places, count, replace=False))
    values = torch.from_numpy(rng.standard_normal(count * width)).to(dtype)
    if count and chosen[-1] == places - 1 and elements % width:
        values[-(places * width - elements) :] = 0
    return SparseGradient(elements, width, chosen.astype(np.uint32), values)


def same(found, wanted):
    assert (found.elements, found.width, found.finite) == (wanted.elements, wanted.width, wanted.finite)
    assert found.indices.dtype == np.uint32 and np.array_equal(found.indices, wanted.indices)
    assert found.values.dtype == wanted.values.dtype
    bits = torch.int32 if found.values.dtype == torch.float32 else torch.int16
    assert torch.equal(found.values.view(bits), wanted.values.view(bits))


@settings(max_examples=80, deadline=None)
@given(
    elements=st.integers(1, 5000) | st.sampled_from([255, 256, 257, 65_535, 65_536, 65_537, 140_000]),
    width=st.sampled_from([1, 16]),
    share=st.floats(0, 1) | st.sampled_from([0.0, 0.01, 1.0]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1 << 32),
    clustered=st.booleans(),
)
def test_a_block_comes_back_as_it_was(elements, width, share, dtype, seed, clustered):
    sparse = drawn(elements, width, round(share * -(-elements // width)), dtype, seed, clustered=clustered)
    content = encode(sparse)
    assert len(content) <= most_encoded_bytes(elements)
    same(decode(content, elements, "here"), sparse)
    same(decode(bytes(content), elements, "here"), sparse)


@pytest.mark.parametrize(
    ("places", "count", "coding"),
    [
        (1, 1, Coding.ALL),
        (70_000, 70_000, Coding.ALL),
        (70_000, 30_000, Coding.BITS),
        (70_000, 700, Coding.LOW_8),
        (10_000_000, 1000, Coding.LOW_16),
        (1 << 32, 3, Coding.NUMBERS),
    ],
)
def test_the_shortest_coding_is_chosen(places, count, coding):
    assert choose_coding(places, count) is coding
    shortest = min(encoded_bytes(one, places, count) for one in list(Coding)[coding is not Coding.ALL :])
    assert encoded_bytes(coding, places, count) == shortest
    rng = np.random.default_rng(0)
    indices = np.unique(rng.integers(0, places, count)) if count < 10 else np.sort(rng.permutation(places)[:count])
    sparse = SparseGradient(places, 1, indices.astype(np.uint32), torch.ones(len(indices)))
    content = encode(sparse)
    assert content[5] == choose_coding(places, len(indices))
    same(decode(content, places, "here"), sparse)


def test_the_last_places_of_the_largest_tensor():
    for indices in ([0, (1 << 32) - 1], [(1 << 32) - 2, (1 << 32) - 1], [0xFFFF, 0x10000]):
        sparse = SparseGradient(1 << 32, 1, np.array(indices, np.uint32), torch.tensor([1.0, 2.0]))
        same(decode(encode(sparse), 1 << 32, "here"), sparse)


def test_no_index_and_a_gradient_that_is_not_finite():
    nothing = SparseGradient(1000, 1, np.empty(0, np.uint32), torch.empty(0))
    same(decode(encode(nothing), 1000, "here"), nothing)
    for width in (1, 16):
        mark = SparseGradient(1000, width, np.empty(0, np.uint32), torch.empty(0, dtype=torch.float16), finite=False)
        same(decode(encode(mark), 1000, "here"), mark)
        assert len(encode(mark)) < 100


@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("elements", [100_000, 2_500_000])
@pytest.mark.parametrize(
    ("width", "dtype", "most"),
    [
        (16, torch.float32, 4.4),
        (1, torch.float32, 5.5),
        (16, torch.float16, 2.4),
        (16, torch.bfloat16, 2.4),
        (1, torch.float16, 3.5),
        (1, torch.bfloat16, 3.5),
    ],
)
def test_bytes_for_each_value_at_one_percent(width, dtype, most, elements, clustered):
    """With the chunks' headers, which hold all checksums: see test_exchange for the same on a wire."""
    count = elements // width // 100
    content = encode(drawn(elements, width, count, dtype, 1, clustered=clustered))
    with_chunks = len(content) + 64 * -(-len(content) // (64 << 10))
    assert with_chunks / (count * width) <= most


# -- what is none ------------------------------------------------------------------------------------------------------


def samples():
    yield drawn(1000, 1, 10, torch.float32, 2)
    yield drawn(1001, 16, 7, torch.bfloat16, 3)
    yield drawn(300, 1, 200, torch.float16, 4)
    yield drawn(300, 1, 300, torch.float32, 5)
    yield drawn(10_000_000, 1, 5, torch.float32, 6)
    yield SparseGradient(1000, 1, np.empty(0, np.uint32), torch.empty(0), finite=False)


def test_every_truncation_is_refused():
    for sparse in samples():
        content = bytes(encode(sparse))
        for length in range(len(content)):
            with pytest.raises(CorruptCheckpoint, match=r"^rank 1: "):
                decode(bytearray(content[:length]), sparse.elements, "rank 1")
        with pytest.raises(CorruptCheckpoint, match=r"^rank 1: "):
            decode(bytearray(content + b"\0"), sparse.elements, "rank 1")


def test_every_single_bit_gives_a_right_block_or_is_refused():
    for sparse in samples():
        content = bytearray(encode(sparse))
        for bit in range(min(len(content), 300) * 8):
            content[bit // 8] ^= 1 << bit % 8
            try:
                decode(content, sparse.elements, "rank 1").check("decoded")
            except CorruptCheckpoint as error:
                assert str(error).startswith("rank 1: ")
            content[bit // 8] ^= 1 << bit % 8


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_bytes_behind_a_right_header(data):
    width, dtype = data.draw(st.sampled_from([(1, 1), (16, 4), (1, 3)]))
    elements = data.draw(st.integers(1, 3000))
    places = -(-elements // width)
    count = data.draw(st.integers(0, min(places, 300)))
    coding = data.draw(st.sampled_from(list(Coding)))
    rest = encoded_bytes(coding, places, count) + count * width * (4 if dtype == 1 else 2)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    content = struct.pack("<4sBBBBB7xQQ", b"LGSB", 1, coding, dtype, width, 0, elements, count) + rng.bytes(rest)
    try:
        decode(content, elements, "rank 1").check("decoded")
    except CorruptCheckpoint as error:
        assert str(error).startswith("rank 1: ")


def broken(sparse, at, fields):
    content = bytearray(encode(sparse))
    content[at : at + len(fields)] = fields
    return content


SINGLE = drawn(1000, 1, 10, torch.float32, 2)
ALL = drawn(100, 1, 100, torch.float32, 2)


@pytest.mark.parametrize(
    ("content", "elements", "why"),
    [
        (broken(SINGLE, 0, b"LGR1"), 1000, "no sparse block"),
        (broken(SINGLE, 4, b"\2"), 1000, "version 2; this side speaks version 1"),
        (broken(SINGLE, 5, b"\5"), 1000, "unknown coding 5"),
        (broken(SINGLE, 6, b"\2"), 1000, "dtype 2"),
        (broken(SINGLE, 7, b"\4"), 1000, "width 4"),
        (broken(SINGLE, 8, b"\2"), 1000, "flags 2"),
        (broken(SINGLE, 8, b"\1"), 1000, "not finite, with 10 indices"),
        (broken(SINGLE, 12, b"\1"), 1000, "no sparse block"),
        (encode(SINGLE), 1001, "1000 elements, of a tensor of 1001"),
        (broken(SINGLE, 24, struct.pack("<Q", 1001)), 1000, "1001 indices of 1000"),
        (broken(SINGLE, 24, struct.pack("<Q", 1 << 63)), 1000, "indices of 1000"),
        (broken(SINGLE, 24, struct.pack("<Q", 11)), 1000, "whose header declares"),
        (broken(ALL, 24, struct.pack("<Q", 99)), 100, "99 indices of 100, coding ALL"),
        (broken(SINGLE, BLOCK_HEADER_BYTES, struct.pack("<f", float("nan"))), 1000, "not finite"),
        (broken(SINGLE, BLOCK_HEADER_BYTES + 50, b"\xff"), 1000, "bits set than for 10 indices"),
    ],
)
def test_what_is_wrong_is_named(content, elements, why):
    with pytest.raises(CorruptCheckpoint, match=f"^rank 1: .*{why}"):
        decode(content, elements, "rank 1")


@pytest.mark.parametrize("indices", [[5, 4], [5, 5], [4, 1 << 20]])
def test_wrong_indices_are_refused_on_both_sides(indices):
    sparse = SparseGradient(1 << 20, 1, np.array(indices, np.uint32), torch.ones(2))
    with pytest.raises(CorruptCheckpoint, match="a gradient to be sent"):
        encode(sparse)
    good = SparseGradient(1 << 20, 1, np.array([4, 5], np.uint32), torch.ones(2))
    content = encode(good).tobytes()[: BLOCK_HEADER_BYTES + 8]
    numbers = bytearray(content + np.array(indices, "<u4").tobytes())
    numbers[5] = Coding.NUMBERS
    with pytest.raises(
        CorruptCheckpoint, match=r"rank 1: not a sparse gradient: (indices do not ascend|index 1048576)"
    ):
        decode(numbers, 1 << 20, "rank 1")


# -- several tensors in a row ------------------------------------------------------------------------------------------


def joined(blocks):
    """Each begins at a multiple of 8."""
    content = b""
    for block in blocks:
        content += bytes(-len(content) % 8) + bytes(block)
    return content


@st.composite
def groups(draw):
    found = []
    for _ in range(draw(st.integers(1, 6))):
        elements, width = draw(st.integers(1, 150)), draw(st.sampled_from([1, 16]))
        count = round(draw(st.sampled_from([0.0, 0.02, 0.5, 1.0])) * -(-elements // width))
        found.append(drawn(elements, width, count, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 1 << 20))))
        if draw(st.integers(0, 9)) == 0:
            found[-1] = SparseGradient(elements, width, np.empty(0, np.uint32), torch.empty(0), finite=False)
    return found


@settings(max_examples=60, deadline=None)
@given(group=groups())
def test_a_group_is_its_blocks_in_a_row_and_comes_back(group):
    elements = tuple(one.elements for one in group)
    content = encode_group(group)
    assert bytes(content) == joined(encode(one) for one in group)
    assert len(content) <= most_group_bytes(elements)
    held = np.frombuffer(bytes(content), np.uint8)  # which nobody may write to
    odd = np.empty(len(content) + 1, np.uint8)[1:]
    odd[:] = content
    for given_content in (content, held, odd):
        found = decode_group(given_content, elements, "here")
        assert len(found) == len(group)
        for one, other in zip(found, group, strict=True):
            same(one, other)


def plainly(content, elements):
    """What `decode` says of the blocks of a group, or that it refuses one."""
    found, begin = [], 0
    try:
        for number, own in enumerate(elements):
            begin += -begin % 8
            end = len(content)
            for length in range(32, end - begin + 1) if number + 1 < len(elements) else [end - begin]:
                with contextlib.suppress(CorruptCheckpoint):
                    found.append(decode(bytes(content[begin : begin + length]), own, "here"))
                    begin += length
                    break
            else:
                return None
            if any(content[begin : begin + -begin % 8]) and number + 1 < len(elements):
                return None
    except (CorruptCheckpoint, ValueError):
        return None
    return found if begin == len(content) else None


@settings(max_examples=50, deadline=None)
@given(group=groups(), data=st.data())
def test_what_native_code_takes_python_takes_and_nothing_else(group, data):
    elements = tuple(one.elements for one in group)
    content = encode_group(group).copy()
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))].copy()
    wanted = plainly(content, elements)
    if wanted is None:
        with pytest.raises(CorruptCheckpoint, match="here"):
            decode_group(content, elements, "here")
    else:
        for one, other in zip(decode_group(content, elements, "here"), wanted, strict=True):
            same(one, other)


def test_groups_that_are_none_are_refused():
    good, other = drawn(100, 1, 5, torch.float32, 0), drawn(50, 16, 2, torch.bfloat16, 1)
    content = encode_group([good, other])
    for elements in ((100,), (100, 51), (50, 100), (100, 50, 50)):
        with pytest.raises(CorruptCheckpoint, match="here"):
            decode_group(content.copy(), elements, "here")
    bad = SparseGradient(100, 1, np.array([3, 3], np.uint32), torch.ones(2))
    with pytest.raises(CorruptCheckpoint, match="indices do not ascend"):
        encode_group([good, bad])
    with pytest.raises(CorruptCheckpoint, match="3 values for 2 indices"):
        encode_group([SparseGradient(100, 1, np.array([3, 4], np.uint32), torch.ones(3)), good])
    with pytest.raises(CorruptCheckpoint, match="of 0 elements"):
        encode_group([SparseGradient(0, 1, np.empty(0, np.uint32), torch.empty(0))])
