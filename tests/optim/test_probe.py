"""What a device's compiler contracted is found by a probe. Here that is a twin in numpy; with -m gpu a real one."""

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lastgood.errors import ConfigError
from lastgood.optim import probe as probing
from lastgood.optim.probe import Probe, find_lanes, probed, run_on_device
from lastgood.optim.spec import GroupSpec, OptimizerSpec
from lastgood.optim.trainer import DevicePowers
from tests.optim.cuda_twin import AdamTwin, SgdTwin
from tests.suggestions.following import advice, follows, refusal

POWERS = DevicePowers("cpu")


def power(beta, step):
    (row,) = POWERS.rows((beta, beta), torch.float32, [step])
    return row[1]


def twin_device(lanes, change=lambda kind, twin: None):
    """A device whose compiler contracted `lanes`."""

    def run(probe):
        numbers = probe.rule(()).groups[0]
        case = SimpleNamespace(
            kind=probe.kind,
            implementation=probe.implementation,
            weight_decay=numbers.weight_decay,
            amsgrad=probe.group.amsgrad,
            maximize=probe.group.maximize,
            momentum=numbers.momentum,
            dampening=numbers.dampening,
            nesterov=probe.group.nesterov,
            betas=numbers.betas,
            eps=numbers.eps,
            dtype=probe.dtype,
            misaligned=False,
            tensor_lr=False,
            first_step=0,
            grad_scale=3.0 if probe.scaled else 0.0,
        )
        kind = SgdTwin if probe.kind == "sgd" else AdamTwin
        twins = [kind(w.float().numpy(), case, lanes, power) for w in probe.start()]
        states = []
        for step in range(4):
            for twin, gradient in zip(twins, probe.gradients(step), strict=True):
                twin.update(gradient.float().numpy(), numbers.lr)
                change(step, twin)
            states.append([named(twin, probe) for twin in twins])
        return states

    return run


def named(twin, probe):
    tensors = {"param": twin.p}
    if probe.kind == "sgd":
        tensors["momentum_buffer"] = twin.buffer
    else:
        tensors |= {"exp_avg": twin.m, "exp_avg_sq": twin.v}
        if probe.group.amsgrad:
            tensors["max_exp_avg_sq"] = twin.vmax
    found = {k: torch.from_numpy(np.array(v)).to(getattr(torch, probe.dtype)) for k, v in tensors.items()}
    return found if probe.kind == "sgd" else {**found, "step": torch.tensor(float(twin.step))}


@pytest.mark.parametrize("lanes", [0xFF, 0x00, 0xEE, 0xF8, 0x5A, 0x0F])
@pytest.mark.parametrize(
    "probe",
    [
        Probe("adam", "fused", GroupSpec((0,)), "float32", False),
        Probe("adam", "fused", GroupSpec((0,), amsgrad=True, maximize=True), "float32", True),
        Probe("sgd", "fused", GroupSpec((0,), nesterov=True), "float32", False),
        Probe("sgd", "fused", GroupSpec((0,)), "float32", True, dampened=True),
    ],
    ids=["adam", "adam-amsgrad", "sgd-nesterov", "sgd-scaled"],
)
def test_finds_what_the_compiler_did(probe, lanes):
    assert find_lanes(probe, twin_device(lanes), POWERS) == lanes


@pytest.mark.parametrize("implementation", ["foreach", "single", "fused"])
@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_a_device_like_the_known_one_needs_nothing(kind, implementation):
    for dtype in ("float32", "bfloat16"):
        probe = Probe(kind, implementation, GroupSpec((0,)), dtype, False, elements=4096)
        assert find_lanes(probe, twin_device(0xFF), POWERS) == 0xFF


@pytest.mark.parametrize("lanes", [0x00, 0x3C])
def test_it_looks_at_enough_elements_for_16_bits(lanes):
    """An H100's Adam in bfloat16 with `maximize` contracts nothing, which shows in one of 40,000 elements."""
    probe = Probe("adam", "fused", GroupSpec((0,), maximize=True), "bfloat16", False)
    assert find_lanes(probe, twin_device(lanes), POWERS) == lanes


def off_by_one_unit(step, twin):
    if step == 3:
        twin.p.view(np.int32)[1234] ^= 1


@follows("on this device are none that a shadow can repeat to the bit: use foreach=True")
def test_a_device_that_differs_in_one_bit_is_refused():
    probe = Probe("adamw", "fused", GroupSpec((0,), maximize=True), "float32", False)
    message = refusal(lambda: find_lanes(probe, twin_device(0xFF, off_by_one_unit), POWERS))
    assert re.search(r"fused adamw float32 maximize of torch .* use foreach=True", message)
    given = eval(f"dict({advice(message, r'foreach=True')})")
    optimizer = torch.optim.AdamW([torch.ones(3, requires_grad=True)], maximize=True, **given)
    assert optimizer.defaults["foreach"] and optimizer.defaults["fused"] is None
    # Its other kernels are the usual ones.
    assert find_lanes(dataclasses.replace(probe, implementation="foreach"), twin_device(0xFF), POWERS) == 0xFF


def test_a_trainer_on_cpu_is_not_probed(monkeypatch):
    monkeypatch.setattr(probing, "run_on_device", None)
    optimizer = torch.optim.AdamW([torch.ones(3)], fused=True)
    assert probed(optimizer) == OptimizerSpec.of(optimizer)


def test_torch_runs_the_probe_that_is_asked_for():
    """On the CPU torch's SGD comes to the same bits as CUDA's kernels do: the probe's own run is right."""
    probe = Probe("sgd", "foreach", GroupSpec((0,), maximize=True), "float32", False, dampened=True)
    assert find_lanes(probe, lambda probe: run_on_device(probe, "cpu"), POWERS) == 0xFF


def test_its_adam_differs_on_the_cpu():
    probe = Probe("adam", "foreach", GroupSpec((0,)), "float32", False)
    with pytest.raises(ConfigError, match="foreach adam float32"):
        find_lanes(probe, lambda probe: run_on_device(probe, "cpu"), POWERS)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", [{"fused": True}, {"foreach": True}, {"foreach": False, "fused": False}])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_this_machines_device_can_be_repeated(make, implementation):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for flag in ({}, {"maximize": True}, {"amsgrad": True} if make is not torch.optim.SGD else {"momentum": 0.9}):
            optimizer = make([torch.ones(8, device="cuda", dtype=dtype)], lr=0.1, **implementation, **flag)
            assert probed(optimizer).arithmetic == "cuda"
