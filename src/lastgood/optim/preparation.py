"""What a trainer does to its gradients before the step, repeated on a CPU: unscale, clip."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lastgood._lazy import torch
from lastgood.optim.rule import ClipNorm, ClipValue, UpdateRule

__all__ = ["Preparation"]


class Preparation:
    """The operations that a rule asks for, each with torch's rounding to the gradient's dtype. False if none are."""

    def __init__(self, rule: UpdateRule) -> None:
        self._operations: list[Callable[[torch.Tensor, torch.Tensor], object]] = []
        if rule.inverse_scale is not None and rule.inverse_scale != 1.0:
            self._operations.append(_product(rule.inverse_scale))
        if isinstance(rule.clip, ClipNorm) and rule.clip.coefficient != 1.0:
            self._operations.append(_product(rule.clip.factor()))
        elif isinstance(rule.clip, ClipValue):
            limit = rule.clip.limit
            self._operations.append(lambda given, to: torch.clamp(given, min=-limit, max=limit, out=to))

    def __bool__(self) -> bool:
        return bool(self._operations)

    def __call__(self, gradients: Sequence[torch.Tensor], to: Sequence[torch.Tensor]) -> None:
        """Write the prepared gradients to tensors of the same shapes and dtypes, which may be the gradients."""
        for operation in self._operations:
            for given, prepared in zip(gradients, to, strict=True):
                operation(given, prepared)
            gradients = to


def _product(factor: float | torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], object]:
    return lambda given, to: torch.mul(given, factor, out=to)
