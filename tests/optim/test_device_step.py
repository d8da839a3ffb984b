"""Native steps in CUDA's arithmetic: against what an H100 made, against a twin in numpy, and against each other."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood import _native
from lastgood.errors import MismatchError
from lastgood.optim.dense import DenseOptimizer
from lastgood.optim.rule import ClipNorm, ClipValue, UpdateRule
from tests.optim import cuda_cases, device_cases
from tests.optim.cuda_cases import DTYPES, STEPS, Case, raw
from tests.optim.cuda_twin import AdamTwin, SgdTwin, rounded_to

# Made by `python tests/optim/cuda_cases.py` and condensed by its --condense.
H100 = np.load(Path(__file__).parent / "data" / "h100_torch211.npz")
KNOWN = [case for case in cuda_cases.cases() if not case.capturable and case.dtype != "float16"]
VARIANTS = _native.step_variants()


def lanes_on_h100(case):
    """What the compiler of torch 2.11 for compute capability 9.0 contracted: (without, with) a loss scale."""
    if case.kind == "adam" and case.implementation == "fused" and case.dtype == "float32" and not case.amsgrad:
        return (0x00 if case.maximize else 0xEE), 0xFF
    if case.kind == "sgd" and case.implementation == "fused":
        return 0xFF, 0xF8
    return 0xFF, 0xFF


def powers_on_h100(case, step):
    if step > 30000:
        return [(step, 0.0, 0.0)]  # of no matter beside 1
    dtype = "float64" if case.dtype == "float64" else "float32"
    row = step - 1 if step <= STEPS else step - 1001 + STEPS
    return [(step, *(float(H100[f"pow/{beta} {dtype}"].view(dtype)[row]) for beta in case.betas))]


@pytest.mark.parametrize("case", KNOWN, ids=lambda case: case.name)
def test_equals_what_an_h100_made(case):
    sums, _ = device_cases.run(case, powers_on_h100, device_cases.spec_of(case, *lanes_on_h100(case)))
    assert np.array_equal(sums, H100[f"crc32/{case.name}"])


@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_other_instruction_sets_equal_it_too(variant):
    for case in KNOWN[::5]:
        spec = device_cases.spec_of(case, *lanes_on_h100(case))
        sums, _ = device_cases.run(case, powers_on_h100, spec, variant)
        assert np.array_equal(sums, H100[f"crc32/{case.name}"]), case.name


def test_the_gpu_data_says_where_it_is_from():
    meta = json.loads(str(H100["meta"]))
    assert meta["torch"].startswith("2.11") and meta["capability"] == [9, 0]
    assert {name for name in H100.files if name.startswith("crc32/")} == {f"crc32/{c.name}" for c in cuda_cases.cases()}


REALS = st.floats(0.0, 0.999)


@st.composite
def any_case(draw):
    kind = draw(st.sampled_from(["sgd", "adam", "adamw"]))
    fused = draw(st.booleans())
    momentum = draw(st.sampled_from([0.0, 0.9])) if kind == "sgd" else 0.0
    nesterov = momentum > 0 and draw(st.booleans())
    return Case(
        kind,
        "fused" if fused else draw(st.sampled_from(["foreach", "single"])),
        weight_decay=draw(st.sampled_from([0.0, 0.01, 0.7])),
        amsgrad=kind != "sgd" and draw(st.booleans()),
        maximize=draw(st.booleans()),
        momentum=momentum,
        dampening=0.0 if nesterov else draw(st.sampled_from([0.0, 0.3])),
        nesterov=nesterov,
        betas=(draw(REALS), draw(REALS)),
        eps=draw(st.sampled_from([1e-8, 1e-4])),
        lr=draw(st.floats(1e-5, 1.0)),
        dtype=draw(st.sampled_from(["float32", "float32", "bfloat16", "float64"])),
        misaligned=draw(st.booleans()),
        grad_scale=draw(st.sampled_from([0.0, 3.0])) if fused else 0.0,
    )


@settings(max_examples=60, deadline=None)
@given(
    case=any_case(),
    count=st.integers(1, 1600),
    seed=st.integers(0, 1000),
    lanes=st.integers(0, 255),
    threads=st.integers(1, 3),
    variant=st.sampled_from(VARIANTS),
)
def test_equals_its_twin(case, count, seed, lanes, threads, variant):
    spec = device_cases.spec_of(case, lanes, lanes)
    dtype = DTYPES[case.dtype]
    start = cuda_cases.parameters(seed, count)
    weight = torch.from_numpy(start.copy()).to(dtype)
    optimizer = DenseOptimizer(spec, [weight], [0], threads, places=[0])
    optimizer._way._variant = variant

    def power(beta, step):
        return np.float64(np.float32(beta ** float(step)))

    twin = (SgdTwin if case.kind == "sgd" else AdamTwin)(start, case, lanes, power)
    for step in range(3):
        grad = cuda_cases.gradients(seed + 5 + step, count, hard=True)
        powers = [(step + 1, *(float(power(beta, step + 1)) for beta in case.betas))]
        optimizer.step([torch.from_numpy(grad).to(dtype)], device_cases.rule_of(case, step, powers))
        twin.update(grad, case.rate(step))
        (state,) = optimizer.state()
        pairs = {"param": (weight, twin.p)}
        if case.kind != "sgd":
            pairs |= {"exp_avg": (state["exp_avg"], twin.m), "exp_avg_sq": (state["exp_avg_sq"], twin.v)}
            if case.amsgrad:
                pairs["max_exp_avg_sq"] = (state["max_exp_avg_sq"], twin.vmax)
        elif case.momentum:
            pairs["momentum_buffer"] = (state["momentum_buffer"], twin.buffer)
        for key, (ours, theirs) in pairs.items():
            assert_same_numbers(ours, torch.from_numpy(np.ascontiguousarray(theirs)).to(dtype), key)


def assert_same_numbers(ours, theirs, key):
    """Equal to the bit, but for the payload of what is no number."""
    none = torch.isnan(theirs)
    assert torch.equal(torch.isnan(ours), none), key
    assert np.array_equal(raw(ours)[~none.numpy()], raw(theirs)[~none.numpy()]), key


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_threads_and_pieces_change_nothing(implementation):
    case = Case("adam", implementation, 0.3, dtype="float32")
    count = 3 * 65536 + 1021
    found = []
    for threads, cut in ((1, [0, count]), (3, [0, count]), (2, [0, 65536, 65536 + 1021, count])):
        spec = replace(device_cases.spec_of(case), groups=(replace(device_cases.spec_of(case).groups[0], lanes=0xFF),))
        whole = torch.from_numpy(cuda_cases.parameters(3, count))
        parts = [whole[a:b] for a, b in pairwise(cut)]
        optimizer = DenseOptimizer(spec, parts, [0] * len(parts), threads)
        for step in range(2):
            grad = torch.from_numpy(cuda_cases.gradients(step, count, hard=False))
            optimizer.step(
                [grad[a:b] for a, b in pairwise(cut)],
                device_cases.rule_of(case, step, [(step + 1, 0.9, 0.99)]),
            )
        found.append(whole)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("clip", [ClipNorm(0.37), ClipValue(0.25), None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_unscaling_and_clipping_are_torchs(clip, dtype):
    case = Case("sgd", "foreach", momentum=0.9, lr=0.1, dtype=dtype)
    start = torch.from_numpy(cuda_cases.parameters(1, 999)).to(DTYPES[dtype])
    grad = torch.from_numpy(cuda_cases.floats(2, 999, -6, 6)).to(DTYPES[dtype])
    grad[7] = float("inf")
    weight = start.clone()
    optimizer = DenseOptimizer(device_cases.spec_of(case), [weight], [0], places=[0])
    kept = grad.clone()
    rule = replace(device_cases.rule_of(case, 0), inverse_scale=1 / 3, clip=clip)
    optimizer.step([grad], rule)
    assert torch.equal(raw_tensor(grad), raw_tensor(kept))  # gradients are left alone
    kept.mul_(1 / 3)
    if isinstance(clip, ClipNorm):
        torch._foreach_mul_([kept], torch.tensor(clip.coefficient))
    elif clip is not None:
        torch._foreach_clamp_min_([kept], -clip.limit)
        torch._foreach_clamp_max_([kept], clip.limit)
    twin = SgdTwin(start.to(torch.float64 if dtype == "float64" else torch.float32).numpy(), case)
    twin.update(kept.to(torch.float64 if dtype == "float64" else torch.float32).numpy(), case.rate(0))
    expected = torch.from_numpy(rounded_to(dtype)(twin.p)).to(DTYPES[dtype])
    assert_same_numbers(weight, expected, "param")


def raw_tensor(tensor):
    return torch.from_numpy(raw(tensor))


def test_a_step_whose_powers_are_missing_changes_nothing():
    case = Case("adamw", "fused", 0.01)
    weights = [torch.ones(5), torch.ones(7)]
    optimizer = DenseOptimizer(device_cases.spec_of(case), weights, [0, 0], places=[0, 1])
    grads = [torch.ones(5), torch.ones(7)]
    optimizer.step(grads, device_cases.rule_of(case, 0, [(1, 0.9, 0.999)]))
    before = [w.clone() for w in weights]
    with pytest.raises(MismatchError, match=r"parameter 0 makes its step 2, .* for 1: seed"):
        optimizer.step(grads, device_cases.rule_of(case, 1, [(1, 0.9, 0.999)]))
    assert all(torch.equal(a, b) for a, b in zip(before, weights, strict=True))
    assert float(optimizer.state()[0]["step"]) == 1


@pytest.mark.parametrize(
    "change, message",
    [
        ({"family": "graph"}, "no family 'graph'; there are: foreach, fused, single"),
        ({"dtype": "float8"}, "no dtype 'float8'"),
        ({"variant": "neon9"}, "no variant 'neon9'"),
        ({"divisor": 2.0}, "only fused kernels divide"),
        ({"kind": "sgd", "decay": "decoupled"}, "SGD has no decoupled weight decay"),
    ],
)
def test_native_refuses(change, message):
    values = torch.ones(4)
    tensor = (*[values.data_ptr()] * 4, 0, 4, -0.1, 1.0, False, True)
    numbers = {
        "kind": "adam",
        "family": "foreach",
        "dtype": "float32",
        "decay": "none",
        **dict.fromkeys(("lr", "weight_decay", "beta1", "beta2", "eps", "momentum", "dampening"), 0.5),
        "nesterov": False,
        "maximize": False,
        "factors": [],
        "limit": -1.0,
        "divisor": 0.0,
        "lanes": 255,
        "threads": 1,
    }
    with pytest.raises(ValueError, match=message):
        _native.device_step([tensor], **{**numbers, **change})
    with pytest.raises(ValueError, match="lacks an address"):
        _native.device_step([(0, *tensor[1:])], **numbers)
    assert torch.equal(values, torch.ones(4))


def test_update_rule_of_another_optimizer_is_refused():
    case = Case("sgd", "foreach")
    optimizer = DenseOptimizer(device_cases.spec_of(case), [torch.ones(3)], [0], places=[0])
    with pytest.raises(MismatchError, match="2 groups for an optimizer of 1"):
        optimizer.step([torch.ones(3)], UpdateRule(device_cases.rule_of(case, 0).groups * 2))
