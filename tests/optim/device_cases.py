"""The cases of cuda_cases.py, run by the shadow's optimizer in CUDA's arithmetic."""

import zlib

import numpy as np
import torch

from lastgood.optim.dense import DenseOptimizer
from lastgood.optim.rule import GroupRule, UpdateRule
from lastgood.optim.spec import GroupSpec, OptimizerSpec
from tests.optim import cuda_cases
from tests.optim.cuda_cases import DTYPES, STEPS, Case


def spec_of(case: Case, lanes=0xFF, scaled_lanes=0xFF) -> OptimizerSpec:
    places = tuple(range(len(cuda_cases.SHAPES)))
    group = GroupSpec(places, case.amsgrad, case.maximize, case.nesterov, lanes, scaled_lanes)
    return OptimizerSpec(case.kind, case.implementation, "cuda", (group,), 1, "2.11.0")


def rule_of(case: Case, step: int, powers=()) -> UpdateRule:
    """The rule of step `step` (from 0)."""
    lr = case.rate(step)
    group = GroupRule(
        lr=float(np.float32(lr)) if case.tensor_lr else lr,
        tensor_lr="float32" if case.tensor_lr else "",
        betas=case.betas,
        eps=case.eps,
        weight_decay=case.weight_decay,
        momentum=case.momentum,
        dampening=case.dampening,
        powers=tuple(powers),
    )
    return UpdateRule((group,), grad_scale=case.grad_scale or None, unaligned=(0, 1, 2, 3) if case.misaligned else ())


def run(case: Case, powers_of, spec: OptimizerSpec, variant="") -> tuple[np.ndarray, list[dict[str, torch.Tensor]]]:
    """CRC-32 of all tensors after all steps, in cuda_cases' order, and the tensors at the end."""
    dtype = DTYPES[case.dtype]
    weights = [torch.from_numpy(v).to(dtype) for v in case.parameters()]
    optimizer = DenseOptimizer(spec, weights, [0] * len(weights), places=range(len(weights)))
    optimizer._way._variant = variant
    if case.first_step:
        moments = [
            {
                "step": torch.tensor(float(case.first_step)),
                "exp_avg": torch.from_numpy(cuda_cases.floats(500 + i, w.numel(), -12, -2)).to(dtype),
                "exp_avg_sq": torch.from_numpy(np.abs(cuda_cases.floats(600 + i, w.numel(), -24, -4))).to(dtype),
            }
            for i, w in enumerate(weights)
        ]
        optimizer.load_state(moments)
    sums, applied = [], case.first_step
    for step in range(STEPS):
        if step not in case.skipped:
            applied += 1
            powers = powers_of(case, applied) if spec.needs_powers else ()
            optimizer.step([torch.from_numpy(g).to(dtype) for g in case.gradients(step)], rule_of(case, step, powers))
        ends = [{"param": w, **s} for w, s in zip(weights, optimizer.state(), strict=True)]
        sums.append([zlib.crc32(cuda_cases.raw(held[key]).tobytes()) for held in ends for key in sorted(held)])
    return np.array(sums, dtype=np.uint32), ends
