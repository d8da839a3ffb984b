"""Steps of CPU trainers: torch's own optimizer, in the trainer's implementation, on the shadow's buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lastgood._lazy import lazy_module
from lastgood.optim.flat_state import FlatState
from lastgood.optim.rule import ClipNorm, GroupRule, UpdateRule
from lastgood.optim.spec import OptimizerSpec

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

__all__ = ["HostStep"]


class HostStep:
    """A torch optimizer over tensors that somebody else owns; its state are views of `state`'s buffers."""

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
        self._used = sorted(set(groups))
        described = [
            {
                "params": [p for p, own in zip(parameters, groups, strict=True) if own == number],
                **_flags(spec, number),
            }
            for number in self._used
        ]
        self._optimizer = _torch_class(spec)(described, **_implementation(spec)) if described else None

    def step(self, gradients: Sequence[torch.Tensor | None], rule: UpdateRule) -> None:
        """One step in place. Gradients are changed in place as well where they are unscaled or clipped."""
        if self._optimizer is None:
            return
        optimizer: Any = self._optimizer
        present = [(i, gradient) for i, gradient in enumerate(gradients) if gradient is not None]
        with torch.no_grad(), _intra_op_threads(self._threads):
            _prepare([gradient for _, gradient in present], rule)
            for group, number in zip(optimizer.param_groups, self._used, strict=True):
                _set_numbers(group, rule.groups[number])
            for i, gradient in present:
                self._parameters[i].grad = gradient
                self._lend_state(optimizer, i)
            if rule.grad_scale is not None:
                optimizer.grad_scale = torch.tensor(rule.grad_scale, dtype=torch.float32)
                optimizer.found_inf = torch.tensor(0.0, dtype=torch.float32)
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


@contextmanager
def _intra_op_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _prepare(gradients: Sequence[torch.Tensor], rule: UpdateRule) -> None:
    if rule.inverse_scale is not None and rule.inverse_scale != 1.0:
        for gradient in gradients:
            gradient.mul_(rule.inverse_scale)
    if isinstance(rule.clip, ClipNorm):
        coefficient = torch.tensor(rule.clip.coefficient, dtype=getattr(torch, rule.clip.dtype))
        for gradient in gradients:
            gradient.mul_(coefficient)
    elif rule.clip is not None:
        for gradient in gradients:
            gradient.clamp_(min=-rule.clip.limit, max=rule.clip.limit)


def _torch_class(spec: OptimizerSpec) -> Any:
    return {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[spec.kind]


def _implementation(spec: OptimizerSpec) -> dict[str, bool]:
    return {"fused": spec.implementation == "fused", "foreach": spec.implementation == "foreach"}


def _flags(spec: OptimizerSpec, number: int) -> dict[str, Any]:
    group = spec.groups[number]
    if spec.kind != "sgd":
        return {"amsgrad": group.amsgrad, "maximize": group.maximize}
    # torch checks nesterov against a momentum, which the first rule brings.
    return {"nesterov": group.nesterov, "maximize": group.maximize, "momentum": 0.9 if group.nesterov else 0.0}


def _set_numbers(group: dict[str, Any], rule: GroupRule) -> None:
    tensor = bool(rule.tensor_lr)
    group["lr"] = torch.tensor(rule.lr, dtype=getattr(torch, rule.tensor_lr)) if tensor else rule.lr
    group["weight_decay"] = rule.weight_decay
    if "betas" in group:
        group["betas"] = rule.betas
        group["eps"] = rule.eps
    else:
        group["momentum"] = rule.momentum
        group["dampening"] = rule.dampening
