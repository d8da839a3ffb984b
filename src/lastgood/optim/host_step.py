"""Steps of CPU trainers (fused Adam has a way of its own): torch's own optimizer on the shadow's buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from lastgood._lazy import torch
from lastgood.optim.flat_state import FlatState
from lastgood.optim.preparation import Preparation
from lastgood.optim.rule import GroupRule, UpdateRule
from lastgood.optim.spec import Kind, OptimizerSpec
from lastgood.optim.threads import intra_op_threads

__all__ = ["HostStep", "torch_class"]

_PART_ELEMENTS: Final = 1 << 20  # 4 MiB of gradients in float32


class HostStep:
    """Torch optimizers over tensors that somebody else owns; their state are views of `state`'s buffers.

    Parameters are stepped some at a time, so that gradients which were unscaled or clipped are still in the cache.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        parameters: Sequence[torch.Tensor],
        groups: Sequence[int],
        state: FlatState,
        threads: int,
    ) -> None:
        self._parameters = parameters
        self._state = state
        # For 16-bit parameters torch's CPU kernels, but for the fused ones, cut a tensor by the number of threads and
        # round the ends of the parts otherwise.
        cut = spec.implementation != "fused" and any(p.element_size() == 2 for p in parameters)
        self._threads = spec.threads if cut else threads
        self._parts = [_Part(spec, parameters, groups, which) for which in _cut(parameters)]

    def step(self, gradients: Sequence[torch.Tensor | None], rule: UpdateRule) -> None:
        """One step in place. Gradients are changed in place as well if they are unscaled or clipped."""
        prepare = Preparation(rule)
        with torch.no_grad(), intra_op_threads(self._threads):
            for part in self._parts:
                self._step_part(part, gradients, rule, prepare)

    def _step_part(
        self, part: _Part, gradients: Sequence[torch.Tensor | None], rule: UpdateRule, prepare: Preparation
    ) -> None:
        optimizer = part.optimizer
        present = [(i, gradient) for i in part.which if (gradient := gradients[i]) is not None]
        held = [gradient for _, gradient in present]
        prepare(held, held)
        for group, number in zip(optimizer.param_groups, part.groups, strict=True):
            _set_numbers(group, rule.groups[number])
        for i, gradient in present:
            self._parameters[i].grad = gradient
            self._lend_state(optimizer, i)
        if rule.grad_scale is not None:
            optimizer.grad_scale = torch.tensor(rule.grad_scale, dtype=torch.float32, device="cpu")
            optimizer.found_inf = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        try:
            optimizer.step()
        finally:
            optimizer.grad_scale = optimizer.found_inf = None
            for i, _ in present:
                self._parameters[i].grad = None
        for i, _ in present:
            self._take_state(optimizer, i)

    def _lend_state(self, optimizer: Any, i: int) -> None:
        held = self._state.tensors[i]
        if self._state.started[i] or "momentum_buffer" not in held:
            optimizer.state[self._parameters[i]] = dict(held)
        else:
            # SGD's first step copies the gradient; an empty buffer would be dampened.
            optimizer.state[self._parameters[i]] = {}

    def _take_state(self, optimizer: Any, i: int) -> None:
        made = optimizer.state.pop(self._parameters[i])
        held = self._state.tensors[i]
        buffer = made.get("momentum_buffer")
        if "momentum_buffer" in held and buffer is None:
            return  # SGD without momentum has no state
        if buffer is not None and buffer is not held["momentum_buffer"]:
            held["momentum_buffer"].copy_(buffer)
        self._state.started[i] = True


class _Part:
    """Some of the parameters, under an optimizer of their own."""

    def __init__(
        self, spec: OptimizerSpec, parameters: Sequence[torch.Tensor], groups: Sequence[int], which: Sequence[int]
    ) -> None:
        self.which = which
        self.groups = sorted({groups[i] for i in which})
        described = [
            {"params": [parameters[i] for i in which if groups[i] == number], **_flags(spec, number)}
            for number in self.groups
        ]
        named = {name: spec.implementation == name for name in ("fused", "foreach")}
        self.optimizer: Any = torch_class(spec.kind)(described, **named)


def _cut(parameters: Sequence[torch.Tensor]) -> list[list[int]]:
    """Neighbours, as many as have `_PART_ELEMENTS` together, or a larger one alone."""
    parts: list[list[int]] = []
    room = 0
    for i, parameter in enumerate(parameters):
        if not parts or parameter.numel() > room:
            parts.append([])
            room = _PART_ELEMENTS
        parts[-1].append(i)
        room -= parameter.numel()
    return parts


def torch_class(kind: Kind) -> Any:
    """The class of torch's own optimizers of this kind."""
    return {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind]


def _flags(spec: OptimizerSpec, number: int) -> dict[str, Any]:
    group = spec.groups[number]
    if spec.kind != "sgd":
        return {"amsgrad": group.amsgrad, "maximize": group.maximize}
    # torch checks nesterov against a momentum, which the first rule brings.
    return {"nesterov": group.nesterov, "maximize": group.maximize, "momentum": 0.9 if group.nesterov else 0.0}


def _set_numbers(group: dict[str, Any], rule: GroupRule) -> None:
    group["lr"] = rule.learning_rate
    group["weight_decay"] = rule.weight_decay
    if "betas" in group:
        group["betas"] = rule.betas
        group["eps"] = rule.eps
    else:
        group["momentum"] = rule.momentum
        group["dampening"] = rule.dampening
