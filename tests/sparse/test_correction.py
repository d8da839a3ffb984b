"""DGC's options by their own formulas, and the numbers that are reported of a residual."""

from __future__ import annotations

import pytest
import torch

from lastgood.errors import MismatchError
from lastgood.sparse.blocks import dense
from lastgood.sparse.compressors import make_compressor
from lastgood.sparse.correction import MomentumCorrection, ResidualAge, clip_gradient, energy_kept, warm_up


def gradient_of(elements, seed):
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def test_the_warm_up_is_the_papers():
    found = [warm_up(0.999, epoch, 4) for epoch in range(6)]
    assert found == pytest.approx([0.75, 0.937, 0.984, 0.996, 0.999, 0.999], abs=1e-3)
    assert warm_up(0.5, 0, 4) == 0.5
    assert warm_up(0.99, 0, 0) == 0.99
    with pytest.raises(ValueError, match="compression"):
        warm_up(1.0, 0, 4)


def test_clipping_leaves_each_node_its_part_of_the_norm():
    gradient = torch.tensor([3.0, 4.0])
    clip_gradient(gradient, 5.0, 2.0, 4)
    assert gradient.tolist() == pytest.approx([0.6, 0.8])
    clip_gradient(gradient, 1.0, 2.0, 4)
    assert gradient.tolist() == pytest.approx([0.6, 0.8])
    with pytest.raises(ValueError, match="norm"):
        clip_gradient(gradient, 1.0, 0.0, 4)


@pytest.mark.parametrize("nesterov", [False, True])
def test_all_sent_at_once_is_plain_gradients_and_nothing_is_multiplied(nesterov):
    correction = MomentumCorrection(40, 0.9, nesterov=nesterov)
    compressor = make_compressor("none", 40)
    for step in range(3):
        gradient = gradient_of(40, step)
        sparse = compressor.compress(correction.correct(gradient), torch.zeros(40), 40)
        correction.mask(sparse)
        assert torch.allclose(dense(sparse), gradient * (1.9 if nesterov else 1.0))
        assert not correction.velocity.any()


@pytest.mark.parametrize("name", ["topk", "v16"])
def test_velocity_is_forgotten_where_it_was_sent_and_only_there(name):
    correction, compressor = MomentumCorrection(41, 0.5), make_compressor(name, 41)
    expected, residual = torch.zeros(41), torch.zeros(41)
    for step in range(8):
        gradient = gradient_of(41, step)
        gradient[-1] = 100.0  # the short last block
        expected = expected * 0.5 + gradient
        corrected = correction.correct(gradient)
        assert torch.equal(corrected, expected)
        sparse = compressor.compress(corrected, residual, 5)
        correction.mask(sparse)
        for index in sparse.indices.tolist():
            expected[index * sparse.width : (index + 1) * sparse.width] = 0
        assert torch.equal(correction.velocity, expected)


def test_a_gradient_that_is_not_finite_leaves_no_trace():
    correction = MomentumCorrection(3, 0.9)
    correction.correct(torch.ones(3))
    bad = torch.tensor([1.0, float("nan"), 1.0])
    assert correction.correct(bad) is bad
    assert torch.equal(correction.velocity, torch.ones(3))


def test_a_velocity_goes_on_exactly_and_another_is_refused():
    first, second = MomentumCorrection(3, 0.9), MomentumCorrection(3, 0.9)
    first.correct(torch.ones(3))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.correct(torch.ones(3)), second.correct(torch.ones(3)))
    for other in (MomentumCorrection(4, 0.9), MomentumCorrection(3, 0.8), MomentumCorrection(3, 0.9, nesterov=True)):
        with pytest.raises(MismatchError, match="a velocity of"):
            other.load_state_dict(first.state_dict())


def test_energy_is_of_all_that_there_was():
    residual = torch.zeros(4)
    sparse = make_compressor("topk", 4).compress(torch.tensor([3.0, 4.0, 0.0, 0.0]), residual, 1)
    assert energy_kept(sparse, residual) == pytest.approx(16 / 25)
    nothing = make_compressor("topk", 4).compress(torch.zeros(4), torch.zeros(4), 1)
    assert energy_kept(nothing, torch.zeros(4)) == 1


def test_age_is_the_time_of_waiting():
    # Of 100 equal elements 10 go at each step, the longest waiting first: what is left waited for 0 to 9 more.
    age, residual = ResidualAge(), torch.zeros(100)
    assert age.iterations == 0
    compressor = make_compressor("topk", 100)
    for _ in range(200):
        compressor.compress(torch.ones(100), residual, 10)
        age.observe(torch.ones(100), residual)
    assert age.iterations == pytest.approx(4.5)
    age.observe(torch.full((100,), float("inf")), residual)
    assert age.iterations == pytest.approx(4.5)
