"""Contents and digests: the same for any way to cut a tensor, and different for any bit."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lastgood.experiments.dcp import contents
from lastgood.experiments.dcp.contents import Piece, digest_of, fill

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8]
shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


def as_spread(monkeypatch, pieces):
    """`digest_of` and `fill` see these pieces, whatever the state is."""
    monkeypatch.setattr(contents, "pieces_of", lambda state, prefix="": iter(pieces))


def cuts(tensor, rows):
    """A tensor's rows as two pieces, as two ranks hold them."""
    shape = tuple(tensor.shape)
    rest = (0,) * (len(shape) - 1)
    yield Piece("model.a", tensor[:rows], shape, (0, *rest), 0, True)
    yield Piece("model.a", tensor[rows:], shape, (rows, *rest), 0, True)


@given(shape=shapes.filter(bool), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 9), cut=st.integers(0, 6))
def test_a_tensor_in_two_parts_is_as_one(shape, dtype, seed, cut):
    complete, parts = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    fill({"model": {"a": complete}}, seed)
    with pytest.MonkeyPatch.context() as patch:
        as_spread(patch, list(cuts(parts, min(cut, shape[0]))))
        fill({}, seed)
        digests = []
        for piece in cuts(parts, min(cut, shape[0])):
            as_spread(patch, [piece])
            digests.append(digest_of({}))
    assert torch.equal(complete, parts)
    assert sum(digest.spread for digest in digests) % (1 << 64) == digest_of({"model": {"a": complete}}).same


@given(shape=shapes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 9), data=st.data())
def test_every_bit_counts(shape, dtype, seed, data):
    tensor = torch.zeros(shape, dtype=dtype)
    fill({"a": tensor}, seed)
    before = digest_of({"a": tensor})
    raw = tensor.reshape(-1).view(torch.uint8)
    place = data.draw(st.integers(0, raw.numel() - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    assert digest_of({"a": tensor}) != before


def test_names_shapes_dtypes_and_places_count():
    found = [
        digest_of({"a": torch.arange(6)}),
        digest_of({"b": torch.arange(6)}),
        digest_of({"a": torch.arange(6).reshape(2, 3)}),
        digest_of({"a": torch.arange(6, dtype=torch.int32)}),
        digest_of({"a": torch.arange(6).flip(0)}),
        digest_of({"a": {"a": torch.arange(6)}}),
        digest_of({}),
    ]
    assert all(one != other for one, other in itertools.combinations(found, 2))


def test_contents_have_no_pattern_and_differ_by_seed():
    tensor, other = torch.zeros(100_000), torch.zeros(100_000)
    fill({"a": tensor}, 1)
    fill({"a": other}, 2)
    assert tensor.unique().numel() > 99_000
    assert abs(float(tensor.mean())) < 2e-4 and float(tensor.min()) >= -0.02 and float(tensor.max()) <= 0.02
    assert abs(float(torch.corrcoef(torch.stack([tensor, other]))[0, 1])) < 0.02
    assert abs(float(torch.corrcoef(torch.stack([tensor[1:], tensor[:-1]]))[0, 1])) < 0.02


def test_large_tensors_are_worked_on_in_parts(monkeypatch):
    monkeypatch.setattr(contents, "_ELEMENTS", 64)
    small_parts, at_once = torch.zeros(37, 11), torch.zeros(37, 11)
    fill({"a": small_parts}, 5)
    found = digest_of({"a": small_parts})
    monkeypatch.setattr(contents, "_ELEMENTS", 1 << 20)
    fill({"a": at_once}, 5)
    assert torch.equal(small_parts, at_once)
    assert digest_of({"a": at_once}) == found
