"""Native fused Adam against torch's own kernel on gradients that torch prepared, to the bit."""

import logging
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood import _native
from lastgood.optim import host_adam
from lastgood.optim.host_adam import HostAdam, TorchAdam, makes_torchs_steps
from lastgood.optim.preparation import Preparation
from lastgood.optim.rule import ClipNorm, ClipValue, GroupRule, UpdateRule
from lastgood.optim.spec import GroupSpec
from tests.optim import cuda_cases

VARIANTS = _native.step_variants()
FAST = pytest.mark.skipif(VARIANTS == ["portable"], reason="without FMA instructions native code is not used")
BETA = st.floats(0.5000001, 0.9999)


def values(seed, count, dtype, hard=False):
    """Any sizes and signs; `hard`: with zeros, infinities, what is no number and what has no full exponent."""
    drawn = cuda_cases.gradients(seed, count, hard=hard)
    if hard:
        drawn[7::59] = np.inf
        drawn[8::61] = np.nan
    return torch.from_numpy(drawn).to(dtype)


def start(count, dtype, amsgrad):
    second = values(3, count, dtype).square()
    return [values(1, count, dtype), values(2, count, dtype), second, *([second * 0.9] if amsgrad else [])]


def assert_alike(ours, theirs):
    for own, other in zip(ours, theirs, strict=True):
        nothing = torch.isnan(other)
        assert torch.equal(torch.isnan(own), nothing)
        number = torch.int32 if own.dtype == torch.float32 else torch.int64
        assert torch.equal(own.view(number)[~nothing], other.view(number)[~nothing])


def assert_steps_alike(kind, flags, rule, dtype, count, threads=1, variant="", steps=3):
    ours, theirs = (start(count, dtype, flags.amsgrad) for _ in range(2))
    for made in range(1, steps + 1):
        step, gradient = torch.tensor(float(made)), values(10 + made, count, dtype, hard=True)
        kept, prepared = gradient.clone(), gradient.clone()
        HostAdam(kind, flags, rule.groups[0], rule, threads)([[*ours, gradient]], [step], variant)
        Preparation(rule)([prepared], [prepared])
        TorchAdam(kind, flags, rule.groups[0])([[*theirs, prepared]], [step])
        assert_alike(ours, theirs)
        assert_alike([gradient], [kept])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_equals_torchs_kernel(kind, dtype, variant):
    for amsgrad in (False, True):
        for maximize in (False, True):
            for decay in (0.0, 0.37):
                numbers = GroupRule(lr=0.013, betas=(0.9, 0.98), eps=1e-6, weight_decay=decay)
                for clip in (None, ClipNorm(0.37), ClipValue(0.8), ClipNorm(math.nan)):
                    rule = UpdateRule((numbers,), inverse_scale=0.3 if maximize else None, clip=clip)
                    flags = GroupSpec((0,), amsgrad=amsgrad, maximize=maximize)
                    assert_steps_alike(kind, flags, rule, dtype, 1024, variant=variant, steps=2)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["adam", "adamw"]),
    amsgrad=st.booleans(),
    lr=st.floats(1e-6, 2.0),
    tensor_lr=st.sampled_from(["", "float32"]),
    betas=st.tuples(BETA, st.floats(0.0, 0.9999)),
    eps=st.sampled_from([0.0, 1e-8, 1e-3]),
    decay=st.sampled_from([0.0, 0.01, 1.7]),
    inverse=st.sampled_from([None, 1.0, 2**-16, 1 / 3]),
    clip=st.one_of(st.none(), st.floats(0, 2).map(ClipNorm), st.floats(0, 2).map(ClipValue)),
    vectors=st.integers(1, 40),
    wide=st.booleans(),
    variant=st.sampled_from(VARIANTS),
)
def test_equals_it_with_any_numbers(
    kind, amsgrad, lr, tensor_lr, betas, eps, decay, inverse, clip, vectors, wide, variant
):
    dtype = torch.float64 if wide else torch.float32
    numbers = GroupRule(
        lr=float(np.float32(lr)) if tensor_lr else lr, tensor_lr=tensor_lr, betas=betas, eps=eps, weight_decay=decay
    )
    rule = UpdateRule((numbers,), inverse_scale=inverse, clip=clip)
    assert_steps_alike(
        kind, GroupSpec((0,), amsgrad=amsgrad), rule, dtype, vectors * (8 if wide else 16), variant=variant
    )


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(threads):
    numbers = GroupRule(lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.05)
    rule = UpdateRule((numbers,), clip=ClipNorm(0.5))
    assert_steps_alike("adamw", GroupSpec((0,)), rule, torch.float32, (3 << 16) + 160, threads)


@FAST
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_it_is_used_with_this_torch(kind, dtype):
    # Fails where a new torch contracts otherwise: steps are right then, by torch's kernel, and slower.
    assert makes_torchs_steps(kind, dtype)


@FAST
@pytest.mark.parametrize("key", ["beta1", "beta2", "eps", "weight_decay", "lr"])
def test_a_kernel_that_rounds_otherwise_is_noticed(monkeypatch, caplog, key):
    class Other(TorchAdam):
        def __init__(self, *given):
            super().__init__(*given)
            self._arguments[key] *= 2 if key == "eps" else 1 + 1e-6

    monkeypatch.setattr(host_adam, "TorchAdam", Other)
    with caplog.at_level(logging.INFO):
        assert not makes_torchs_steps.__wrapped__("adam", "float32")
    assert "fused adam of float32" in caplog.text


def test_what_the_kernel_makes_otherwise_is_left_to_it():
    def can(dtype=torch.float32, beta1=0.9, **rule):
        numbers = GroupRule(lr=0.1, betas=(beta1, 0.999))
        return HostAdam.can("adam", dtype, numbers, UpdateRule((numbers,), **rule))

    assert can() == (VARIANTS != ["portable"])
    assert not can(dtype=torch.bfloat16)
    assert not can(beta1=0.5) and not can(beta1=0.5000000001)
    assert not can(grad_scale=2.0)


def test_whole_vectors_are_counted_by_their_bytes():
    assert [HostAdam.whole(torch.empty(count)) for count in (0, 15, 16, 47)] == [0, 0, 16, 32]
    assert HostAdam.whole(torch.empty(15, dtype=torch.float64)) == 8


def step(tensors, **changed):
    numbers = {"lr": 0.1, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.9, "eps": 0.1, "factor1": 1.0, "factor2": 1.0}
    flags = {"wide": False, "decoupled": False, "maximize": False, "limit": math.inf, "threads": 1}
    _native.host_adam(tensors, **{**numbers, **flags, **changed})


def test_native_code_refuses_what_it_would_make_wrong():
    with pytest.raises(ValueError, match="must be above"):
        step([], beta1=0.5000000001)
    with pytest.raises(ValueError, match="beta1"):
        step([], beta1=math.nan)
    with pytest.raises(ValueError, match="limit"):
        step([], limit=-1.0)
    with pytest.raises(ValueError, match="17 elements are not whole 64 bytes"):
        step([(64, 64, 64, 64, 0, 17, 0.1, 1.0)])
    with pytest.raises(ValueError, match="lacks an address"):
        step([(64, 0, 64, 64, 0, 16, 0.1, 1.0)])
    with pytest.raises(ValueError, match="no variant 'sse9'"):
        step([], variant="sse9")
