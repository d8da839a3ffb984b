"""The global norm from shards, against torch's own clip_grad_norm_ over the whole model."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.errors import MismatchError
from lastgood.optim.norms import clip_by_norm, global_norm, parameter_norms


@given(
    shapes=st.lists(st.sampled_from([(1,), (7, 3), (64,), (1000,)]), min_size=1, max_size=6),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), min_size=6, max_size=6),
    norm_type=st.sampled_from([2.0, 1.0, math.inf]),
    max_norm=st.floats(0.01, 1e3),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=50, deadline=None)
def test_equals_torchs_to_the_bit(shapes, dtypes, norm_type, max_norm, seed):
    source = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(s, generator=source).to(d) for s, d in zip(shapes, dtypes, strict=False)]
    parameters = [torch.zeros_like(g).requires_grad_() for g in gradients]
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g.clone()
    theirs = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    norms = [parameter_norms([g], norm_type)[0] for g in gradients]
    total = global_norm(norms, norm_type)
    assert total.dtype == theirs.dtype and torch.equal(total, theirs)
    clip = clip_by_norm(total, max_norm)
    for p, g in zip(parameters, gradients, strict=True):
        assert torch.equal(g.mul_(torch.tensor(clip.coefficient, dtype=getattr(torch, clip.dtype))), p.grad)


def test_no_gradients_and_no_numbers():
    assert float(global_norm([])) == 0.0
    assert clip_by_norm(torch.tensor(0.0), 1.0).coefficient == 1.0
    assert math.isnan(clip_by_norm(torch.tensor(math.nan), 1.0).coefficient)
    with pytest.raises(MismatchError, match="one number"):
        global_norm([torch.ones(2)])
