"""Steps of CUDA trainers, by native code that follows torch's CUDA kernels operation by operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lastgood import _native
from lastgood._lazy import torch
from lastgood.errors import MismatchError
from lastgood.optim.flat_state import FlatState
from lastgood.optim.rule import ClipNorm, ClipValue, GroupRule, UpdateRule
from lastgood.optim.spec import OptimizerSpec

__all__ = ["DeviceStep"]


@dataclass
class DeviceStep:
    """SGD, Adam or AdamW as the CUDA kernels of torch step them, on host memory."""

    _spec: OptimizerSpec
    _parameters: Sequence[torch.Tensor]
    _groups: Sequence[int]
    _state: FlatState
    _threads: int
    _places: Sequence[int]
    _variant: str = ""

    def step(self, gradients: Sequence[torch.Tensor | None], rule: UpdateRule) -> None:
        """One step in place; gradients stay as they are."""
        together: dict[tuple[int, torch.dtype], list[int]] = {}
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                together.setdefault((self._groups[i], self._parameters[i].dtype), []).append(i)
        # All that can be wrong with the rule is found before anything is changed.
        sizes = {i: self._sizes(i, rule.groups[group]) for (group, _), which in together.items() for i in which}
        unaligned = frozenset(rule.unaligned)
        for (group, dtype), which in together.items():
            tensors = [self._tensor(i, gradients[i], rule.groups[group], sizes[i], unaligned) for i in which]
            _native.device_step(tensors, **self._numbers(group, dtype, rule))
            for i in which:
                self._count(i, rule.groups[group])

    def _sizes(self, i: int, numbers: GroupRule) -> tuple[float, float]:
        """Adam's step size and bias correction of one parameter, each rounded as the kernels round."""
        if self._spec.kind == "sgd":
            return 0.0, 1.0
        step = int(self._state.tensors[i]["step"]) + 1
        beta1, beta2 = numbers.betas
        if self._spec.implementation != "fused":
            # In Python's floats, as torch does for both.
            return numbers.lr / (1 - beta1 ** float(step)) * -1, (1 - beta2 ** float(step)) ** 0.5
        for count, one, two in numbers.powers:
            if count == step:
                real = np.float64 if self._parameters[i].dtype == torch.float64 else np.float32
                lr, power1, power2 = real(numbers.lr), real(one), real(two)
                # numpy's root is the right one; torch's on a CPU is up to one unit off.
                return float(lr / (real(1) - power1)), float(np.sqrt(real(1) - power2))
        raise MismatchError(
            f"parameter {self._places[i]} makes its step {step}, and the update carries the betas' powers for "
            f"{', '.join(str(row[0]) for row in numbers.powers) or 'none'}: seed the parameter again"
        )

    def _tensor(
        self,
        i: int,
        gradient: torch.Tensor | None,
        numbers: GroupRule,
        sizes: tuple[float, float],
        unaligned: frozenset[int],
    ) -> tuple[int, int, int, int, int, int, float, float, bool, bool]:
        held = self._state.tensors[i]
        assert gradient is not None  # by `step`
        has_momentum = self._spec.kind == "sgd" and numbers.momentum != 0
        first = held["momentum_buffer"] if has_momentum else held.get("exp_avg")
        addresses = [
            0 if tensor is None else tensor.data_ptr()
            for tensor in (self._parameters[i], gradient, first, held.get("exp_avg_sq"), held.get("max_exp_avg_sq"))
        ]
        fresh = has_momentum and not self._state.started[i]
        one, two, three, four, five = addresses
        count = gradient.numel()
        return one, two, three, four, five, count, *sizes, fresh, self._places[i] not in unaligned

    def _numbers(self, group: int, dtype: torch.dtype, rule: UpdateRule) -> dict[str, Any]:
        numbers, flags = rule.groups[group], self._spec.groups[group]
        factors = [] if rule.inverse_scale in (None, 1.0) else [rule.inverse_scale]
        if isinstance(rule.clip, ClipNorm):
            factors.append(float(rule.clip.factor()))
        decay = "none" if numbers.weight_decay == 0 else "decoupled" if self._spec.kind == "adamw" else "l2"
        return {
            "kind": "sgd" if self._spec.kind == "sgd" else "adam",
            "family": self._spec.implementation,
            "dtype": str(dtype).removeprefix("torch."),
            "decay": decay,
            "lr": numbers.lr,
            "weight_decay": numbers.weight_decay,
            "beta1": numbers.betas[0],
            "beta2": numbers.betas[1],
            "eps": numbers.eps,
            "momentum": numbers.momentum,
            "dampening": numbers.dampening,
            "nesterov": flags.nesterov,
            "maximize": flags.maximize,
            "factors": factors,
            "limit": rule.clip.limit if isinstance(rule.clip, ClipValue) else -1.0,
            "divisor": rule.grad_scale or 0.0,
            "lanes": flags.lanes if rule.grad_scale is None else flags.scaled_lanes,
            "threads": self._threads,
            "variant": self._variant,
        }

    def _count(self, i: int, numbers: GroupRule) -> None:
        if self._spec.kind != "sgd":
            self._state.tensors[i]["step"].add_(1)
        elif numbers.momentum == 0:
            return  # SGD without momentum has no state
        self._state.started[i] = True
