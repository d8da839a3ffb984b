"""The native compressors against their plain twin: the same choices and the same bits, however they are computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood import _native
from lastgood.sparse.compressors import COMPRESSORS, make_compressor
from tests.sparse.support.compress_twin import Twin, draw

NAMES = list(COMPRESSORS)
VARIANTS = _native.step_variants()
VALUES = ["float32", "float16", "bfloat16"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PIECE = 1 << 16
MAGNITUDES = {
    "tails": lambda random, n: random.standard_t(3, n),
    "sorted": lambda random, n: np.sort(random.standard_t(3, n)),
    "levels": lambda random, n: random.integers(-3, 4, n),
    "equal": lambda random, n: np.full(n, -1.5),
    "zero": lambda random, n: np.zeros(n),
    "few": lambda random, n: random.standard_normal(n) * (random.random(n) < 0.001),
    "denormal": lambda random, n: random.integers(-50, 50, n) * 1e-45,
    "one level of 16 bits": lambda random, n: (
        random.integers(0x3F800000, 0x3F808000, n).astype(np.uint32).view(np.float32)
    ),
    "overflow": lambda random, n: np.where(random.random(n) < 1e-4, 2e38, 1.0),
    "huge": lambda random, n: random.standard_normal(n) * 10.0 ** random.integers(-30, 37, n),
}


def gradient_of(kind, elements, seed, dtype=torch.float32):
    drawn = MAGNITUDES[kind](np.random.default_rng(seed), elements)
    found = torch.from_numpy(np.asarray(drawn, np.float32))
    return found.to(dtype).nan_to_num() if dtype != torch.float32 else found


def bits(values):
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16).tolist()


def same(one, other):
    return np.array_equal(one.numpy().view(np.uint32), other.numpy().view(np.uint32))


def check_against_twin(name, kind, elements, count, *, seed, dtype, values, threads, variant, sample, residuals, steps):
    twin = Twin(name, elements, seed=seed, values=values)
    native = make_compressor(name, elements, seed=seed, values=values, threads=threads)
    native.variant, native.sample = variant, sample
    # Off the alignment of every vector, as a view into a larger tensor may be.
    held = torch.zeros(elements + 1)[1:]
    expected = torch.zeros(elements)
    for step in range(steps):
        gradient = gradient_of(kind, elements, seed + step, dtype)
        keeps = residuals != "none"
        wanted = twin.compress(gradient, expected if keeps else None, count)
        into = torch.empty(elements) if residuals == "into" else None  # aligned, as the kernels that stream ask
        found = native.compress(gradient, held if keeps else None, count, into=into)
        found.check("here")
        assert found.finite == wanted.finite
        assert np.array_equal(found.indices, wanted.indices)
        assert bits(found.values) == bits(wanted.values)
        assert native.state_dict() == twin.state_dict()
        if into is not None and not found.finite:
            # What went into the other place does not count, and the residual that stays has no part of this gradient.
            expected = held.clone()
        elif into is not None:
            held = into
        assert same(held, expected)


@settings(max_examples=120)
@given(
    name=st.sampled_from(NAMES),
    kind=st.sampled_from(list(MAGNITUDES)),
    elements=st.one_of(st.integers(1, 70), st.integers(71, 5000), st.integers(PIECE - 20, 3 * PIECE)),
    ratio=st.sampled_from([0.0, 0.0003, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 1 << 20),
    dtype=st.sampled_from(DTYPES),
    values=st.sampled_from(VALUES),
    threads=st.integers(1, 3),
    variant=st.sampled_from(VARIANTS),
    sample=st.sampled_from([0, 1, 30]),
    residuals=st.sampled_from(["in place", "into", "none"]),
)
def test_native_compressors_choose_as_the_twin_does(elements, ratio, **case):
    check_against_twin(elements=elements, count=max(1, int(elements * ratio)), steps=3, **case)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["topk", "threshold", "v16"])
def test_large_ones_are_written_past_the_caches(name, variant):
    values = {"avx2": "float16"}.get(variant, "float32")
    case = {"seed": 1, "dtype": torch.float32, "values": values, "threads": 2, "sample": 0, "steps": 2}
    elements = (4 << 20) + 17
    check_against_twin(name, "tails", elements, elements // 100, variant=variant, residuals="into", **case)


def sampled_places(places, size):
    """Where the native code looks first: at one place in each of `size` stretches."""
    found = np.empty(size, np.int64)
    for number in range(size):
        state = number + 1
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
        state = (state ^ state >> 27) * 0x94D049BB133111EB % (1 << 64)
        begin = places * number // size
        length = places * (number + 1) // size - begin
        found[number] = begin + ((state ^ state >> 31) >> 32) * length // (1 << 32)
    return found


@pytest.mark.parametrize("residuals", ["in place", "into"])
@pytest.mark.parametrize("name", ["topk", "v16"])
def test_a_sample_that_misleads_loses_nothing(name, residuals):
    """All is heavy but what was looked at, so that much more is found than there is room for."""
    width = make_compressor(name, 1).width
    elements = (4 << 20) + 16
    places = elements // width
    gradient = gradient_of("tails", elements, 1).abs() + 1
    gradient.view(-1, width)[sampled_places(places, max(2048, min(places // 256, 24576)))] = 1e-3
    twin, native = Twin(name, elements), make_compressor(name, elements, threads=2)
    expected, held = torch.zeros(elements), torch.zeros(elements)
    into = torch.empty(elements) if residuals == "into" else None
    wanted, found = twin.compress(gradient, expected, 5000), native.compress(gradient, held, 5000, into=into)
    assert np.array_equal(found.indices, wanted.indices)
    assert bits(found.values) == bits(wanted.values)
    assert same(held if into is None else into, expected)
    assert native.reads > 3  # it was misled


@pytest.mark.parametrize("kind", list(MAGNITUDES))
@pytest.mark.parametrize("name", ["topk", "threshold", "v16"])
def test_no_input_costs_more_than_six_reads(name, kind):
    elements = 5 * PIECE + 7
    compressor = make_compressor(name, elements)
    residual, into = torch.zeros(elements), torch.empty(elements)
    for step in range(4):
        # Each step lets the last one's threshold fail: another size, another order.
        gradient = gradient_of(kind, elements, step) * (0.01, 1.0, 0.001, 0.1)[step]
        for one, other in ((None, None), (residual, into)):
            sparse = compressor.compress(gradient.flip(0) if step % 2 else gradient, one, elements // 100, into=other)
            assert compressor.reads <= 6
            if kind != "overflow":
                assert sparse.finite
        residual, into = into, residual


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_is_usually_read_once(name):
    elements = 5 * PIECE
    compressor = make_compressor(name, elements)
    for step in range(3):
        compressor.compress(gradient_of("tails", elements, step), None, elements // 100)
        assert compressor.reads == 1


@settings(max_examples=50)
@given(
    places=st.one_of(st.integers(1, 70), st.integers(1 << 31, 1 << 32)),
    share=st.floats(0, 1),
    seed=st.integers(0, (1 << 64) - 1),
    call=st.integers(0, 1 << 40),
)
def test_draws_are_those_of_the_twin(places, share, seed, call):
    count = max(1, int(min(places, 1000) * share))
    found = np.empty(count, np.uint32)
    _native.sparse_draw(places, count, seed, call, found.ctypes.data)
    assert np.array_equal(found, draw(places, count, seed, call))
    assert (found[1:] > found[:-1]).all()
    assert found[-1] < places


def test_unknown_names_are_refused():
    compressor = make_compressor("topk", 10)
    compressor.variant = "mmx"
    with pytest.raises(ValueError, match="no variant 'mmx'"):
        compressor.compress(torch.zeros(10), None, 1)


@pytest.mark.slow  # 13 GB of memory
@pytest.mark.parametrize("name", ["topk", "threshold", "v16", "randomk"])
def test_more_than_two_to_the_32_bytes(name):
    elements = (1 << 30) + 4099
    needed = 2.2 * 4 * elements
    if needed > available_bytes():
        pytest.skip(f"needs {needed / 1e9:.0f} GB of memory")
    gradient = torch.empty(elements)
    for begin in range(0, elements, 1 << 26):
        gradient[begin : begin + (1 << 26)].normal_(generator=torch.Generator().manual_seed(begin))
    last = torch.tensor([50.0, -60.0, 70.0])
    gradient[-3:] = last
    residual = torch.zeros(elements)
    compressor = make_compressor(name, elements, seed=3)
    sparse = compressor.compress(gradient, residual, 1 << 16)
    assert len(sparse.indices) >= (1 << 16) / sparse.width
    assert (sparse.indices[1:] > sparse.indices[:-1]).all()
    if name != "randomk":
        assert sparse.indices[-1] == sparse.places - 1
        assert sparse.values.abs().max() == 70
    places = torch.from_numpy(sparse.indices.astype(np.int64))
    if sparse.width == 1:
        assert torch.equal(gradient[places], sparse.values)
        gradient[places] = 0
    else:
        for place, values in zip(places.tolist(), sparse.values.view(-1, 16), strict=True):
            own = gradient[place * 16 : place * 16 + 16]
            assert torch.equal(own, values[: len(own)])
            own.zero_()
    assert torch.equal(gradient, residual)


@pytest.mark.slow  # 13 GB of memory, half a minute
@pytest.mark.parametrize("name", ["v16", "topk"])
def test_elements_beyond_two_to_the_31_of_a_gradient_of_more_than_two_to_the_32_bytes(name):
    """In 16 bits, with the residual in place, on two threads."""
    elements = (1 << 31) + 4099
    needed = 1.05 * (2 + 4) * elements
    if needed > available_bytes():
        pytest.skip(f"needs {needed / 1e9:.0f} GB of memory")
    gradient = torch.zeros(elements, dtype=torch.bfloat16)
    places = [5, (1 << 30) + 7, (1 << 31) - 1, 1 << 31, elements - 1]
    spread = torch.arange(0, elements, 9973)
    gradient[spread] = torch.rand(len(spread), generator=torch.Generator().manual_seed(1)).bfloat16() + 0.5
    gradient[places] = 7.0
    residual = torch.zeros(elements)
    residual[places[1]] = 1.0
    compressor = make_compressor(name, elements, threads=2)
    count = len(spread) // 2 * compressor.width
    sparse = compressor.compress(gradient, residual, count)
    sparse.check("here")
    assert count <= len(sparse.values) <= 1.3 * count
    found = {place: np.searchsorted(sparse.indices, place // sparse.width) for place in places}
    for place, at in found.items():
        assert sparse.indices[at] == place // sparse.width
        assert sparse.values[at * sparse.width + place % sparse.width] == 7.0 + (place == places[1])
        assert residual[place] == 0
    # What stays behind is what was not sent, piece by piece: there is no memory for another copy.
    sent = torch.from_numpy(sparse.indices.astype(np.int64))
    values = sparse.values.view(-1, sparse.width)
    step = 1 << 27
    for begin in range(0, elements, step):
        expected = gradient[begin : begin + step].float()
        if begin <= places[1] < begin + step:
            expected[places[1] - begin] += 1.0
        low, high = np.searchsorted(sparse.indices, [begin // sparse.width, (begin + step) // sparse.width])
        padded = torch.nn.functional.pad(expected, (0, -len(expected) % sparse.width)).view(-1, sparse.width)
        padded[sent[low:high] - begin // sparse.width] -= values[low:high]
        assert torch.equal(padded.view(-1)[: len(expected)], residual[begin : begin + step])


def available_bytes():
    import psutil

    return psutil.virtual_memory().available
