"""The trainer's side: what a CUDA trainer must tell beside its hyperparameters. Powers are asked of the CPU here."""

import math

import numpy as np
import pytest
import torch

from lastgood.errors import ConfigError
from lastgood.optim import trainer
from lastgood.optim.rule import UpdateRule
from lastgood.optim.spec import GroupSpec, OptimizerSpec
from lastgood.optim.trainer import DevicePowers, RuleMaker
from tests.optim.cuda_spec import as_cuda


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_are_the_devices_own(dtype, monkeypatch):
    monkeypatch.setattr(trainer, "_WINDOW", 8)
    powers = DevicePowers("cpu")
    for step in (1, 2, 9, 3, 500, 8):
        ((count, one, two),) = powers.rows((0.9, 0.999), dtype, [step])
        exponent = torch.tensor(float(step), dtype=dtype)
        assert count == step
        assert one == float(torch.tensor(0.9, dtype=dtype).pow(exponent))
        assert two == float(torch.tensor(0.999, dtype=dtype).pow(exponent))
        assert math.isclose(two, 0.999**step, rel_tol=1e-5)


def test_the_device_is_asked_once_in_a_window(monkeypatch):
    asked = []
    pow_of_torch = torch.pow
    monkeypatch.setattr(torch, "pow", lambda *args: asked.append(1) or pow_of_torch(*args))
    powers = DevicePowers("cpu")
    for step in range(1, 4000):
        powers.rows((0.9, 0.999), torch.float32, [step])
    assert len(asked) == 2  # one for each beta


def test_rules_follow_each_parameters_own_steps():
    parameters = [torch.ones(4, requires_grad=True) for _ in range(3)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    maker = RuleMaker(optimizer, as_cuda(optimizer))
    told = []
    for with_gradient in ([0, 1], [0], [0, 1, 2]):
        for i, p in enumerate(parameters):
            p.grad = torch.ones(4) if i in with_gradient else None
        told.append([row[0] for row in maker.make().groups[0].powers])
        optimizer.step()
    assert told == [[1], [2], [1, 2, 3]]
    # Another one, made in the middle, reads the counts from the optimizer.
    later = RuleMaker(optimizer, as_cuda(optimizer))
    assert [row[0] for row in later.make().groups[0].powers] == [2, 3, 4]


def test_too_many_different_counts_are_refused(monkeypatch):
    monkeypatch.setattr(trainer, "MAX_POWERS", 2)
    parameters = [torch.ones(4, requires_grad=True) for _ in range(3)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    for done in (1, 2, 3):
        for i, p in enumerate(parameters):
            p.grad = torch.ones(4) if i < done else None
        optimizer.step()
    with pytest.raises(ConfigError, match=r"group 0 have made 3 different numbers of steps.*use foreach=True"):
        RuleMaker(optimizer, as_cuda(optimizer)).make()


def test_float64_beside_smaller_ones_is_refused():
    parameters = [torch.ones(4, requires_grad=True), torch.ones(4, dtype=torch.float64, requires_grad=True)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    for p in parameters:
        p.grad = torch.ones_like(p)
    with pytest.raises(ConfigError, match="group 0 mixes float64"):
        RuleMaker(optimizer, as_cuda(optimizer)).make()


def test_parameters_off_the_vectors_are_named_by_their_places():
    room = torch.zeros(64)
    parameters = [room[i : i + 4] for i in (0, 5, 12, 16)]
    optimizer = torch.optim.Adam(parameters, fused=True)
    listed = list(reversed(parameters))
    maker = RuleMaker(optimizer, as_cuda(optimizer, listed, lanes=0xEE), listed)
    grads = torch.zeros(64)
    for p, at in zip(parameters, (0, 4, 9, 16), strict=True):
        p.grad = grads[at : at + 4]
    assert maker.make().unaligned == (1, 2)  # its gradient; itself
    parameters[1].grad = None
    assert maker.make().unaligned == (1,)
    assert RuleMaker(optimizer, as_cuda(optimizer, listed), listed).make().unaligned == ()


def test_other_trainers_tell_their_hyperparameters_only():
    parameters = [torch.ones(4, requires_grad=True)]
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    spec = OptimizerSpec.of(optimizer)
    assert spec.groups == (GroupSpec((0,)),)
    rule = RuleMaker(optimizer, spec).make(inverse_scale=0.25)
    assert rule == UpdateRule.of(optimizer, inverse_scale=0.25)
    assert np.isfinite(rule.groups[0].lr)
