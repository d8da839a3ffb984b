"""The trainer's side: the rule of each step that a live optimizer makes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from lastgood._lazy import torch
from lastgood.errors import ConfigError
from lastgood.optim.rule import MAX_POWERS, ClipNorm, ClipValue, GroupRule, UpdateRule
from lastgood.optim.spec import OptimizerSpec

__all__ = ["DevicePowers", "RuleMaker"]

_WINDOW: Final = 4096
"""Step counts whose powers are asked of the device at once, so that it is waited for once in so many steps."""
_LANES: Final = 4  # elements that a CUDA thread takes at a time


class DevicePowers:
    """beta**t by the device's own pow, whose last bits are its own: fused kernels correct the moments' bias by it."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._known: dict[tuple[float, torch.dtype], tuple[int, np.ndarray[Any, Any]]] = {}

    def rows(
        self, betas: tuple[float, float], dtype: torch.dtype, steps: Iterable[int]
    ) -> list[tuple[int, float, float]]:
        """Rows of `GroupRule.powers` for these counts; `dtype` is the kernel's working precision."""
        return [(step, self._power(betas[0], dtype, step), self._power(betas[1], dtype, step)) for step in steps]

    def _power(self, beta: float, dtype: torch.dtype, step: int) -> float:
        first, values = self._known.get((beta, dtype), (0, np.empty(0)))
        if not first <= step < first + len(values):
            counts = torch.arange(step, step + _WINDOW, dtype=dtype, device=self._device)
            first, values = step, torch.pow(torch.full_like(counts, beta), counts).cpu().numpy()
            self._known[beta, dtype] = first, values
        return float(values[step - first])


class RuleMaker:
    """Makes the rule of each step of a live optimizer; `parameters` is the list that `spec` counts places in.

    For CUDA it keeps count of steps on the host, so that no step waits for the device. After `load_state_dict` make
    another one, while the optimizer has all of its groups and parameters; at a step it may have some only.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        spec: OptimizerSpec,
        parameters: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._spec = spec
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self._place_of = {id(p): place for place, p in enumerate(held if parameters is None else parameters)}
        self._group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._numbers = [GroupRule.of(group) for group in optimizer.param_groups]
        self._powers: DevicePowers | None = None
        self._steps: dict[int, int] = {}
        if spec.needs_powers:
            self._powers = DevicePowers(str(held[0].device))
            counts = [_steps_made(optimizer, p) for p in held]
            found = torch.stack([count.to(held[0].device) for count in counts]).tolist()
            self._steps = {id(p): int(step) for p, step in zip(held, found, strict=True)}

    def make(
        self,
        *,
        inverse_scale: float | None = None,
        grad_scale: float | None = None,
        clip: ClipNorm | ClipValue | None = None,
    ) -> UpdateRule:
        """The rule of the step that the optimizer makes next. Call it once for each step that is really made.

        Gradients must be as the step will find them: a parameter without one makes no step. Groups that the optimizer
        does not have at this step keep the numbers that they had last. Raises ConfigError for parameters that it had
        not before, or more different counts of steps than an update can tell.
        """
        for group in self._optimizer.param_groups:
            number = self._number_of(group)
            if number is not None:
                self._numbers[number] = (
                    GroupRule.of(group) if self._powers is None else self._with_powers(number, group)
                )
        rule = UpdateRule(tuple(self._numbers), inverse_scale, grad_scale, clip)
        if self._spec.needs_alignment:
            rule = replace(rule, unaligned=self._unaligned())
        return rule

    def _number_of(self, group: Mapping[str, Any]) -> int | None:
        """Which of the optimizer's groups this is; None for one without parameters at this step."""
        numbers = {self._group_of.get(id(p)) for p in group["params"]}
        if len(numbers) > 1 or None in numbers:
            raise ConfigError(
                "the optimizer has parameters that it had not when checkpointing began, or in other groups; close() "
                "the checkpointer, and start it again after such a change"
            )
        return numbers.pop() if numbers else None

    def _with_powers(self, number: int, group: Mapping[str, Any]) -> GroupRule:
        assert self._powers is not None  # by `make`
        stepping = [p for p in group["params"] if p.grad is not None]
        for p in stepping:
            self._steps[id(p)] += 1
        counts = sorted({self._steps[id(p)] for p in stepping})
        if len(counts) > MAX_POWERS:
            raise ConfigError(
                f"parameters of group {number} have made {len(counts)} different numbers of steps, and an update tells "
                f"at most {MAX_POWERS}: use foreach=True, or give those that seldom have gradients a group of their own"
            )
        wide = {p.dtype == torch.float64 for p in group["params"]}
        if len(wide) > 1:
            raise ConfigError(f"group {number} mixes float64 with smaller parameters; give them groups of their own")
        rows = self._powers.rows(group["betas"], torch.float64 if True in wide else torch.float32, counts)
        return GroupRule.of(group, rows)

    def _unaligned(self) -> tuple[int, ...]:
        found = []
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                tensors = [p, p.grad, *(t for t in self._optimizer.state.get(p, {}).values() if t.shape == p.shape)]
                if any(tensor.data_ptr() % (_LANES * tensor.element_size()) for tensor in tensors):
                    found.append(self._place_of[id(p)])
        return tuple(sorted(found))


def _steps_made(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    # Not by indexing: torch's state would gain an entry.
    made = optimizer.state.get(parameter, {}).get("step")
    return torch.zeros((), device="cpu") if made is None else made.float()
