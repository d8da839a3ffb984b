"""DGC's options by their own formulas, and the numbers that are reported of a residual."""

from __future__ import annotations

import copy

import pytest
import torch

from lastgood.errors import ConfigError, MismatchError
from lastgood.sparse.blocks import dense
from lastgood.sparse.compressors import make_compressor
from lastgood.sparse.correction import (
    Correction,
    MomentumCorrection,
    clip_gradient,
    warm_up,
)
from lastgood.sparse.engine import Engine
from tests.sparse.support.reference import Reference
from tests.sparse.support.thread_ranks import together
from tests.sparse.support.workers import bits, loss_of, make


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


# -- in the engine -----------------------------------------------------------------------------------------------------


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(engine, model, rank, first, last):
    for iteration in range(first, last):
        engine.backward(loss_of(model, rank, iteration))
        engine.step()


@pytest.mark.parametrize(
    "correction",
    [
        Correction(momentum=0.8),
        Correction(clip=0.4),
        Correction(warm_up=4),
        Correction(momentum=0.5, clip=1.0, warm_up=3),
    ],
    ids=str,
)
def test_a_training_is_that_of_the_reference_with_the_same_options(correction):
    steps, ranks = 6, 2
    plain, _ = make()
    reference = Reference(plain, ranks, 0.1, momentum=0.0)
    reference.velocity_momentum, reference.clip = correction.momentum, correction.clip
    for iteration in range(steps):
        if iteration < correction.warm_up:  # exponentially, from a quarter
            reference.share = 0.25 * (0.1 / 0.25) ** (iteration / correction.warm_up)
        else:
            reference.share = 0.1
        reference.step([lambda model, rank=rank, i=iteration: loss_of(model, rank, i) for rank in range(ranks)])

    def work(place):
        model, _ = make()
        engine = Engine(model, plain_sgd(model), 0.9, "topk", 0, correction=correction, ranks=place)
        train(engine, model, place.rank, 0, steps)
        state = engine.state_dict()["layers"]
        engine.close()
        return bits(model), state

    for rank, (weights, layers) in enumerate(together(ranks, work)):
        for name, value in bits(plain).items():
            assert torch.equal(weights[name], value), name
        for name, held in layers.items():
            assert torch.equal(held["residual"], reference.residuals[rank][name])
            assert ("velocity" in held) == bool(correction.momentum)
            if correction.momentum:
                assert torch.equal(held["velocity"]["velocity"], reference.velocities[rank][name])


def test_a_training_with_a_velocity_goes_on_exactly_and_with_no_other_options():
    def made(**options):
        model, _ = make()
        return model, Engine(model, plain_sgd(model), 0.9, "topk", 0, correction=Correction(**options))

    model, engine = made(momentum=0.7)
    train(engine, model, 0, 0, 3)
    held, weights = copy.deepcopy(engine.state_dict()), bits(model)
    train(engine, model, 0, 3, 5)
    again, other = made(momentum=0.7)
    again.load_state_dict(weights)
    other.load_state_dict(held)
    train(other, again, 0, 3, 5)
    for name, value in bits(model).items():
        assert torch.equal(bits(again)[name], value), name
    engine.close()
    other.close()
    for options, said in (({}, "the engine has None"), ({"momentum": 0.6}, "velocity was 'momentum 0.7")):
        _, other = made(**options)
        with pytest.raises(MismatchError, match=said):
            other.load_state_dict(held)
        other.close()


def test_clipping_leaves_layers_that_are_not_finite_out():
    model, _ = make()
    with_nan = Engine(model, plain_sgd(model), 0.9, "topk", 0, correction=Correction(clip=1e-3))
    model.head.weight.register_hook(lambda grad: grad * float("inf"))
    before = bits(model)
    train(with_nan, model, 0, 0, 1)
    assert torch.equal(model.head.weight, before["head.weight"])
    moved = (model.norm.bias - before["norm.bias"]).norm()
    assert 0 < moved <= 0.1 * 1e-3
    with_nan.close()


def test_options_that_cannot_be_are_refused():
    for options in ({"momentum": 1.0}, {"momentum": -0.1}, {"clip": 0.0}, {"clip": float("nan")}, {"warm_up": -1}):
        with pytest.raises(ConfigError, match="a correction of momentum"):
            Correction(**options)
    for adam in (False, True):
        model, optimizer = make(adam)
        with pytest.raises(ConfigError, match="give it SGD with momentum=0"):
            Engine(model, optimizer, correction=Correction(momentum=0.9))
