"""Parts of batches of every form."""

from __future__ import annotations

from collections import UserDict, namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.errors import DataError
from lastgood.sparse.split import split

Pair = namedtuple("Pair", "given wanted")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 20), st.integers(1, 6))
def test_every_sample_is_in_one_part_and_parts_are_alike(samples, parts):
    batch = torch.arange(samples)
    found = split(batch, parts)
    assert torch.equal(torch.cat([part for part, _ in found]), batch)
    assert len(found) == max(1, min(parts, samples))
    sizes = [len(part) for part, _ in found]
    assert max(sizes) - min(sizes) <= 1
    assert sum(share for _, share in found) == pytest.approx(1)
    assert [share * max(1, samples) for _, share in found] == pytest.approx([size if samples else 1 for size in sizes])


def test_batches_keep_their_form():
    values = torch.arange(5)
    batch = {"a": (values, [values * 2]), "b": Pair(values, torch.tensor(7)), "c": "text", "d": UserDict(e=values)}
    (first, _), (second, share) = split(batch, 2)
    assert share == 3 / 5
    assert torch.equal(first["a"][1][0], torch.tensor([0, 2]))
    assert isinstance(second["a"], tuple)
    assert isinstance(second["b"], Pair)
    assert torch.equal(second["b"].given, torch.tensor([2, 3, 4]))
    assert second["b"].wanted == 7
    assert second["c"] == "text"
    assert isinstance(second["d"], UserDict)
    assert torch.equal(second["d"]["e"], torch.tensor([2, 3, 4]))


def test_one_part_is_the_batch_itself():
    batch = object()
    assert split(batch, 1) == [(batch, 1.0)]


@pytest.mark.parametrize(
    ("batch", "said"), [("text", "no tensor"), ([torch.ones(2), torch.ones(3)], r"tensors of \[2, 3\] samples")]
)
def test_what_cannot_be_split_is_refused(batch, said):
    with pytest.raises(DataError, match=said):
        split(batch, 2)
