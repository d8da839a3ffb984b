"""What every compressor promises: nothing is lost, nothing is chosen for its position, and a state goes on exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.errors import ConfigError, MismatchError
from lastgood.sparse.blocks import MAX_ELEMENTS, dense
from lastgood.sparse.compressors import COMPRESSORS, keep_count, make_compressor, most_places

NAMES = list(COMPRESSORS)
VALUES = ["float32", "float16", "bfloat16"]
SIZES = st.one_of(st.integers(1, 40), st.integers(41, 5000))


def gradient_of(elements, seed, dtype=torch.float32, scale=1.0):
    """Heavy tails, as gradients have."""
    drawn = np.random.default_rng(seed).standard_t(3, elements) * scale
    return torch.from_numpy(drawn.astype(np.float32)).to(dtype)


def exactly(*terms):
    """The sum without any rounding: twice the digits of a float32 hold all that is added here."""
    return sum(np.asarray(term, np.float64) for term in terms)


def compressed(name, gradient, residual, count, **options):
    maker = make_compressor(name, gradient.numel(), **options)
    return maker.compress(gradient, residual, count)


@pytest.mark.parametrize(
    ("elements", "ratio", "nodes", "count"),
    [(1000, 0.99, 1, 10), (1000, 0.99, 2, 5), (1000, 0.9, 1, 100), (10, 0.999, 1, 1), (1, 0.0, 3, 1), (7, 0.0, 2, 3)],
)
def test_keep_count_is_of_the_ratio_as_it_is_written(elements, ratio, nodes, count):
    assert keep_count(elements, ratio, nodes) == count


@pytest.mark.parametrize("arguments", [(10, 1.0, 1), (10, -0.1, 1), (0, 0.5, 1), (10, 0.5, 0)])
def test_keep_count_refuses_what_means_nothing(arguments):
    with pytest.raises(ValueError, match="compression"):
        keep_count(*arguments)


@settings(max_examples=60)
@given(
    name=st.sampled_from(NAMES),
    elements=SIZES,
    values=st.sampled_from(VALUES),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    scale=st.sampled_from([1.0, 1e-6, 3e4]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
    data=st.data(),
)
def test_what_is_sent_and_what_stays_add_up_to_the_bit(name, elements, values, dtype, scale, threads, seed, data):
    count = data.draw(st.integers(1, elements))
    compressor = make_compressor(name, elements, seed=seed, values=values, threads=threads)
    residual = torch.zeros(elements)
    for step in range(3):
        gradient = gradient_of(elements, seed + step, dtype, scale).clamp(-6e4, 6e4)
        given_gradient = gradient.clone()
        total = gradient.float() + residual
        sparse = compressor.compress(gradient, residual, count)
        sparse.check("here")
        assert torch.equal(gradient, given_gradient)
        assert sparse.values.dtype == getattr(torch, values)
        assert torch.equal(dense(sparse) + residual, total)
        assert (exactly(dense(sparse), residual) == exactly(total)).all()
        if values == "float32":
            chosen = dense(sparse) != 0
            assert not residual[chosen].any()
        kept = residual.clone()
        compressor.give_back(sparse, kept)
        assert torch.equal(kept, total)


@pytest.mark.parametrize("name", NAMES)
def test_the_new_residual_can_go_elsewhere(name):
    gradient, old = gradient_of(1000, 1), gradient_of(1000, 2)
    in_place, into = old.clone(), torch.empty(1000)
    first = compressed(name, gradient, in_place, 50)
    second = make_compressor(name, 1000).compress(gradient, old, 50, into=into)
    assert torch.equal(into, in_place)
    assert torch.equal(old, gradient_of(1000, 2))
    assert (first.indices == second.indices).all()


@given(elements=SIZES, seed=st.integers(0, 1 << 30), levels=st.sampled_from([1, 2, 7, 1 << 20]), data=st.data())
@settings(max_examples=40)
def test_topk_sends_exactly_the_largest(elements, seed, levels, data):
    count = data.draw(st.integers(1, elements))
    random = np.random.default_rng(seed)
    gradient = torch.from_numpy(random.integers(-levels, levels + 1, elements).astype(np.float32))
    sparse = compressed("topk", gradient, torch.zeros(elements), count)
    # Of equal magnitudes the first: a stable sort by falling magnitude.
    order = np.argsort(-np.abs(gradient.numpy()), kind="stable")[:count]
    assert sparse.indices.tolist() == sorted(order.tolist())


@pytest.mark.parametrize("name", ["threshold", "v16"])
@pytest.mark.parametrize("elements", [1, 15, 16, 17, 33, 1000, 4999])
def test_a_threshold_chooses_from_what_was_asked_to_a_quarter_more(name, elements):
    compressor = make_compressor(name, elements)
    residual = torch.zeros(elements)
    count = max(1, elements // 20)
    wanted = -(-count // compressor.width)
    for step in range(30):
        scale = 100.0 if step == 20 else 1.0 + step % 3 / 10
        sparse = compressor.compress(gradient_of(elements, step, scale=scale), residual, count)
        assert wanted <= len(sparse.indices) <= most_places(compressor.places, wanted)


@pytest.mark.parametrize("name", ["topk", "threshold", "v16"])
def test_choices_do_not_depend_on_where_an_element_lies(name):
    elements, count = 4800, 96
    width = COMPRESSORS[name].width
    order = np.random.default_rng(0).permutation(elements // width)
    straight, moved = make_compressor(name, elements), make_compressor(name, elements)
    residual, moved_residual = torch.zeros(elements), torch.zeros(elements)
    for step in range(10):
        gradient = gradient_of(elements, step)
        elsewhere = gradient.view(-1, width)[torch.from_numpy(order)].reshape(-1)
        first = straight.compress(gradient, residual, count)
        second = moved.compress(elsewhere, moved_residual, count)
        assert sorted(order[second.indices].tolist()) == first.indices.tolist()
        assert torch.equal(residual.view(-1, width)[torch.from_numpy(order)].reshape(-1), moved_residual)


@pytest.mark.parametrize("name", ["threshold", "v16"])
def test_a_threshold_follows_the_gradient(name):
    compressor = make_compressor(name, 20000)
    found = []
    for step in range(40):
        scale = 1.0 if step < 20 else 8.0
        compressor.compress(gradient_of(20000, step, scale=scale), torch.zeros(20000), 200)
        found.append(compressor.state_dict()["threshold"])
    assert max(found[15:20]) < 1.2 * min(found[15:20])
    assert 6 < found[-1] / found[19] < 10


def test_a_block_counts_by_its_mean_and_so_does_a_short_last_one():
    gradient = torch.zeros(35)
    gradient[0:16] = 1.0
    gradient[16:32] = -2.0
    gradient[32:35] = torch.tensor([3.0, -3.0, 3.0])
    sparse = compressed("v16", gradient, torch.zeros(35), 16)
    assert sparse.indices[-1] == 2
    assert sparse.values[-16:].tolist() == [3.0, -3.0, 3.0] + [0.0] * 13


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fill", [0.0, 1.0, -2.5, 1e-45, 3e38])
@pytest.mark.parametrize("elements", [1, 5, 16, 100, 2000])
def test_equal_elements(name, fill, elements):
    compressor = make_compressor(name, elements)
    count = max(1, elements // 10)
    for _ in range(3):
        residual = torch.zeros(elements)
        sparse = compressor.compress(torch.full((elements,), fill), residual, count)
        sparse.check("here")
        wanted = -(-count // compressor.width)
        most = most_places(compressor.places, wanted) if name in ("threshold", "v16") else wanted
        assert wanted <= len(sparse.indices) <= (compressor.places if name == "none" else most)
        assert torch.equal(dense(sparse) + residual, torch.full((elements,), fill))


@pytest.mark.parametrize("name", ["topk", "threshold", "v16"])
@pytest.mark.parametrize("size", [3e38, 1.0])
def test_one_huge_element_among_denormal_ones_goes(name, size):
    gradient = torch.full((1000,), 1e-44)
    gradient[777] = -size
    residual = torch.zeros(1000)
    sparse = compressed(name, gradient, residual, 10)
    assert dense(sparse)[777] == -size
    assert torch.equal(dense(sparse) + residual, gradient)


@pytest.mark.parametrize("values", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_narrow_values_saturate_and_what_is_left_over_stays(values, name):
    largest = torch.finfo(getattr(torch, values)).max
    sizes = [65504.0, 65519.9, 65520.0, 1e5, 2.0**29, 2.0**29 + 64, 2.0**33 + 1024, 2.0**39, 1e30, 3.4e38, 3.4028234e38]
    gradient = torch.tensor(sizes + [-size for size in sizes])
    residual = torch.zeros(len(gradient))
    sparse = compressed(name, gradient, residual, len(gradient), values=values)
    assert torch.isfinite(sparse.values).all()
    assert sparse.values.float().abs().max() <= largest
    assert (exactly(dense(sparse), residual) == exactly(gradient)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 500, 999])
@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_that_is_not_finite_changes_nothing(name, place, bad):
    compressor = make_compressor(name, 1000)
    old = gradient_of(1000, 1)
    residual = old.clone()
    compressor.compress(gradient_of(1000, 2), residual, 10)
    before, state = residual.clone(), compressor.state_dict()
    gradient = gradient_of(1000, 3)
    gradient[place] = bad
    sparse = compressor.compress(gradient, residual, 10)
    sparse.check("here")
    assert not sparse.finite
    assert not len(sparse.indices)
    assert torch.equal(residual, before)
    assert compressor.state_dict() == state
    compressor.give_back(sparse, residual)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("name", NAMES)
def test_a_sum_beyond_the_largest_number_is_not_finite(name):
    gradient, residual = torch.ones(40), torch.ones(40)
    gradient[33] = residual[33] = 3e38
    assert not compressed(name, gradient, residual, 4).finite
    assert residual.max() == torch.tensor(3e38)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_goes_on_exactly(name):
    first = make_compressor(name, 3000, seed=5)
    residual = torch.zeros(3000)
    for step in range(5):
        first.compress(gradient_of(3000, step), residual, 30)
    second, copy = make_compressor(name, 3000), residual.clone()
    second.load_state_dict(first.state_dict())
    for step in range(5, 10):
        one = first.compress(gradient_of(3000, step), residual, 30)
        other = second.compress(gradient_of(3000, step), copy, 30)
        assert one.indices.tolist() == other.indices.tolist()
        assert torch.equal(residual, copy)
    assert first.state_dict() == second.state_dict()


def test_a_state_of_another_kind_or_size_is_refused():
    state = make_compressor("v16", 100).state_dict()
    with pytest.raises(MismatchError, match="compressor 'v16', here it is 'threshold'"):
        make_compressor("threshold", 100).load_state_dict(state)
    with pytest.raises(MismatchError, match="elements 100, here it is 101"):
        make_compressor("v16", 101).load_state_dict(state)


def test_random_choices_are_even_and_other_ones_in_each_call():
    compressor = make_compressor("randomk", 500, seed=1)
    hits = np.zeros(500, int)
    seen = set()
    for _ in range(400):
        indices = compressor.compress(torch.ones(500), torch.zeros(500), 50).indices
        seen.add(indices.tobytes())
        hits[indices] += 1
    assert len(seen) == 400
    # 40 expected each, variance 36: chi-square of 499 degrees of freedom, six sigma.
    assert abs((((hits - 40) ** 2) / 36).sum() - 500) < 6 * (2 * 500) ** 0.5
    assert seen.isdisjoint({make_compressor("randomk", 500, seed=2)._order(50).indices.tobytes()})


def test_what_cannot_be_compressed_is_refused():
    with pytest.raises(ConfigError, match="no compressor 'top'; there are: topk, threshold, v16, randomk, none"):
        make_compressor("top", 10)
    with pytest.raises(ConfigError, match="values of type 'int8': choose float32, float16, bfloat16"):
        make_compressor("topk", 10, values="int8")
    for elements in (0, MAX_ELEMENTS + 1):
        with pytest.raises(ValueError, match="elements"):
            make_compressor("topk", elements)
    compressor = make_compressor("topk", 10)
    good = torch.zeros(10)
    for gradient, residual, count, why in (
        (torch.zeros(9), good, 1, "gradient of shape"),
        (torch.zeros(20)[::2], good, 1, "not 10 contiguous"),
        (good, torch.zeros(2, 5), 1, "residual of shape"),
        (good.double(), good, 1, "float64"),
        (good, good.half(), 1, "residual of type float16"),
        (good, good, 0, "0 of 10"),
        (good, good, 11, "11 of 10"),
    ):
        with pytest.raises(ValueError, match=why):
            compressor.compress(gradient, residual, count)
