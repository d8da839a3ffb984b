"""Fused Adam in pieces against torch's step of the whole tensors, to the bit, wherever the cuts lie."""

import pytest
import torch

from lastgood.optim import fused_step
from lastgood.optim.dense import DenseOptimizer
from lastgood.optim.host_adam import HostAdam
from lastgood.optim.rule import ClipNorm, ClipValue, UpdateRule
from lastgood.optim.spec import OptimizerSpec

PIECE = 192
"""Elements, in place of many thousands: most of the shapes below are cut, and most have a tail."""
COUNTS = [*range(34), 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 383, 384, 385, 1000, 1919, 4097]


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def assert_equal(ours, theirs, what):
    assert torch.equal(bits(ours), bits(theirs)), what


WAYS = [
    *(("torch", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)),
    *(("native", dtype) for dtype in (torch.float32, torch.float64)),
]


@pytest.fixture(params=["native", "torch"])
def way(request, monkeypatch):
    """By native code where it comes to the same bits, or all by torch's kernel."""
    if request.param == "torch":
        monkeypatch.setattr(HostAdam, "can", staticmethod(lambda *given: False))
    return request.param


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("way", "dtype"), WAYS, indirect=["way"], ids=str)
@pytest.mark.parametrize("kind", ["adam", "adamw"])
@pytest.mark.parametrize("more", [{}, {"amsgrad": True, "maximize": True}], ids=["plain", "amsgrad"])
def test_pieces_are_stepped_as_the_whole(monkeypatch, way, kind, dtype, threads, more):
    monkeypatch.setattr(fused_step, "PIECE_ELEMENTS", PIECE)
    source = torch.Generator().manual_seed(5)
    theirs = [torch.randn(count, generator=source).to(dtype) for count in COUNTS]
    ours = [p.clone() for p in theirs]
    chosen = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    optimizer = chosen(theirs, lr=0.01, weight_decay=0.05, fused=True, **more)
    shadow = DenseOptimizer(OptimizerSpec.of(optimizer), ours, [0] * len(ours), threads)
    clips = [ClipNorm(0.37), ClipValue(0.8), None, ClipNorm(0.901)]
    for number, clip in enumerate(clips):
        inverse_scale = 0.3 if number == 3 else None
        gradients = [torch.randn(count, generator=source).to(dtype) for count in COUNTS]
        for p, gradient in zip(theirs, gradients, strict=True):
            p.grad = gradient.clone()
            if inverse_scale is not None:
                p.grad.mul_(inverse_scale)
            if isinstance(clip, ClipNorm):
                p.grad.mul_(torch.tensor(clip.coefficient))
            elif clip is not None:
                p.grad.clamp_(-clip.limit, clip.limit)
        optimizer.step()
        kept = [gradient.clone() for gradient in gradients]
        shadow.step(gradients, UpdateRule.of(optimizer, inverse_scale=inverse_scale, clip=clip))
        for before, gradient in zip(kept, gradients, strict=True):
            assert_equal(gradient, before, "a gradient that was only read")
    for i, (p, own, state) in enumerate(zip(theirs, ours, shadow.state(), strict=True)):
        assert_equal(own, p, f"parameter of {COUNTS[i]} elements")
        assert set(state) == set(optimizer.state[p])
        for key, tensor in state.items():
            assert_equal(tensor, optimizer.state[p][key], f"{key} of {COUNTS[i]} elements")


def test_a_large_tensor_with_the_real_size_of_pieces(way):
    """Three pieces and a tail, so that torch's own threads cut each of them as well."""
    count = 2 * 2 * fused_step.PIECE_ELEMENTS + 12345
    theirs = [torch.linspace(-1, 1, 7), torch.linspace(-1, 1, count)]
    ours = [p.clone() for p in theirs]
    optimizer = torch.optim.AdamW(theirs, fused=True)
    shadow = DenseOptimizer(OptimizerSpec.of(optimizer), ours, [0, 0], 2)
    for clip in (0.7, 0.3):
        for p in theirs:
            p.grad = torch.linspace(-3, 2, p.numel())
        gradients = [p.grad.clone() for p in theirs]
        for p in theirs:
            p.grad.mul_(torch.tensor(clip))
        optimizer.step()
        shadow.step(gradients, UpdateRule.of(optimizer, clip=ClipNorm(clip)))
    for own, p in zip(ours, theirs, strict=True):
        assert_equal(own, p, f"{p.numel()} elements")


def test_pieces_of_a_missing_gradient_are_left_out(monkeypatch, way):
    monkeypatch.setattr(fused_step, "PIECE_ELEMENTS", 64)
    parameters = [torch.ones(100), torch.ones(200), torch.ones(70)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    shadow = DenseOptimizer(OptimizerSpec.of(optimizer), parameters, [0, 0, 0])
    shadow.step([torch.ones(100), None, torch.ones(70)], UpdateRule.of(optimizer, clip=ClipNorm(0.5)))
    assert torch.equal(parameters[1], torch.ones(200))
    assert [bool(state) for state in shadow.state()] == [True, False, True]
    # A parameter's step counts once, in however many pieces it was made.
    assert [float(state["step"]) for state in shadow.state() if state] == [1.0, 1.0]
    assert not (parameters[0] == 1).any() and not (parameters[2] == 1).any()


def test_the_memory_for_prepared_gradients_is_one_for_all_buckets():
    first = fused_step._buffer(torch.float32, 640)
    assert fused_step._buffer(torch.bfloat16, 64).data_ptr() == first.data_ptr()
    assert first.data_ptr() % 64 == 0
