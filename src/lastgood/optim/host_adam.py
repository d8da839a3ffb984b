"""Fused Adam and AdamW on a CPU: torch's kernel, and native code that unscales and clips gradients as it reads them."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Final

import numpy as np

from lastgood import _native
from lastgood._lazy import torch
from lastgood.optim.rule import ClipNorm, ClipValue, GroupRule, UpdateRule
from lastgood.optim.spec import GroupSpec

__all__ = ["HostAdam", "TorchAdam", "makes_torchs_steps"]

_log = logging.getLogger(__name__)

_WHOLE_BYTES: Final = 64
_PROBE_ELEMENTS: Final = 1024
_PROBE_STEPS: Final = 3


Rows = Sequence[Sequence["torch.Tensor"]]
"""Of each tensor that is stepped: parameter, moments (the largest second one with amsgrad), gradient; contiguous."""


class TorchAdam:
    """torch's own kernel with one group's numbers, for gradients as they are."""

    def __init__(self, kind: str, flags: GroupSpec, numbers: GroupRule, grad_scale: float | None = None) -> None:
        self._kernel: Any = torch._fused_adamw_ if kind == "adamw" else torch._fused_adam_
        self._arguments = {
            "amsgrad": flags.amsgrad,
            "maximize": flags.maximize,
            "lr": numbers.learning_rate,
            "beta1": numbers.betas[0],
            "beta2": numbers.betas[1],
            "eps": numbers.eps,
            "weight_decay": numbers.weight_decay,
        }
        if grad_scale is not None:
            self._arguments["grad_scale"] = torch.tensor(grad_scale, dtype=torch.float32, device="cpu")
            self._arguments["found_inf"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")

    def __call__(self, rows: Rows, steps: Sequence[torch.Tensor]) -> None:
        """Step in place. `steps` are the counts of each row, with this step."""
        parameters, first, second, *largest, gradients = (list(column) for column in zip(*rows, strict=True))
        self._kernel(parameters, gradients, first, second, largest[0] if largest else [], steps, **self._arguments)


class HostAdam:
    """Native code with one group's numbers: unscales, clips and steps in one pass over memory, as torch does in two.

    Only if `can` is true, and only the first `whole` elements of each tensor: the kernel rounds the last otherwise.
    """

    def __init__(self, kind: str, flags: GroupSpec, numbers: GroupRule, rule: UpdateRule, threads: int) -> None:
        self._numbers = numbers
        self._arguments: dict[str, Any] = {
            "decoupled": kind == "adamw",
            "maximize": flags.maximize,
            "lr": numbers.lr,
            "weight_decay": numbers.weight_decay,
            "beta1": numbers.betas[0],
            "beta2": numbers.betas[1],
            "eps": numbers.eps,
            "factor1": 1.0 if rule.inverse_scale is None else rule.inverse_scale,
            "factor2": float(rule.clip.factor()) if isinstance(rule.clip, ClipNorm) else 1.0,
            "limit": rule.clip.limit if isinstance(rule.clip, ClipValue) else math.inf,
            "threads": threads,
        }

    @staticmethod
    def can(kind: str, dtype: torch.dtype, numbers: GroupRule, rule: UpdateRule) -> bool:
        """Whether native code makes torch's step here, to the bit. Compares with the kernel the first time."""
        if dtype not in (torch.float32, torch.float64) or rule.grad_scale is not None:
            return False
        # From a weight of one half on torch interpolates from the other end.
        return bool(np.float32(1 - numbers.betas[0]) < 0.5) and makes_torchs_steps(kind, str(dtype)[6:])

    @staticmethod
    def whole(gradient: torch.Tensor) -> int:
        """How many of a tensor's elements are stepped: whole 64 bytes."""
        of = _WHOLE_BYTES // gradient.element_size()
        return gradient.numel() // of * of

    def __call__(self, rows: Rows, steps: Sequence[torch.Tensor], variant: str = "") -> None:
        """Step in place; gradients are only read. `steps` are the counts of each row, with this step."""
        beta1, beta2 = self._numbers.betas
        tensors = []
        for row, step in zip(rows, steps, strict=True):
            count = float(step)
            parameter, first, second, *largest, gradient = (tensor.data_ptr() for tensor in row)
            size, correction = self._numbers.lr / (1 - beta1**count), math.sqrt(1 - beta2**count)
            address = largest[0] if largest else 0
            tensors.append((parameter, gradient, first, second, address, self.whole(row[-1]), size, correction))
        wide = rows[0][0].dtype == torch.float64
        _native.host_adam(tensors, wide=wide, variant=variant, **self._arguments)


@functools.cache
def makes_torchs_steps(kind: str, dtype: str) -> bool:
    """Whether native code and this torch's kernel come to the same bits, in all cases that native code is used for.

    What a compiler contracts into FMA differs between builds of torch. Costs some milliseconds, once.
    """
    if _native.step_variants() == ["portable"]:
        return False  # right, but slow: each FMA is a call
    # With the last pair, 1 - lr * decay is another number in float64 if that is contracted.
    rates = ((0.013, 0.0), (0.013, 0.37), (0.75, 1.7))
    alike = all(_alike(kind, dtype, *case) for case in product((False, True), (False, True), rates))
    if not alike:
        _log.info(
            "fused %s of %s of torch %s rounds otherwise than native code here: clipped gradients are made in a pass "
            "of their own",
            kind,
            dtype,
            torch.__version__,
        )
    return alike


def _alike(kind: str, dtype: str, amsgrad: bool, maximize: bool, rates: tuple[float, float]) -> bool:
    flags = GroupSpec((0,), amsgrad=amsgrad, maximize=maximize)
    numbers = GroupRule(lr=rates[0], betas=(0.9, 0.98), eps=1e-6, weight_decay=rates[1])
    draw = _values(getattr(torch, dtype))
    # Moments start anywhere: what is contracted shows best where both sides of a sum are of one size.
    start = [draw(), draw(), draw().square(), *([draw().square()] if amsgrad else [])]
    ours, theirs = ([tensor.clone() for tensor in start] for _ in range(2))
    for count in range(1, _PROBE_STEPS + 1):
        step, gradient = torch.tensor(float(count), device="cpu"), draw()
        HostAdam(kind, flags, numbers, UpdateRule((numbers,)), 1)([[*ours, gradient]], [step])
        TorchAdam(kind, flags, numbers)([[*theirs, gradient]], [step])
    return all(torch.equal(own, other) for own, other in zip(ours, theirs, strict=True))


def _values(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """Draws of full mantissas, of both signs and some sizes; torch's own generators stay as they are."""
    source = np.random.Generator(np.random.PCG64(19))
    return lambda: torch.from_numpy(source.standard_normal(_PROBE_ELEMENTS)).to(dtype)
