"""One step of torch's SGD, Adam or AdamW in numbers: what a group says at an iteration, as a row for the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from lastgood._lazy import torch
from lastgood.errors import ConfigError

__all__ = [
    "ADAM_MOMENTS",
    "FIRST",
    "MAXIMIZE",
    "NESTEROV",
    "ROW",
    "SGD_MOMENTS",
    "Hyperparameters",
    "adam_row",
    "check_optimizer",
    "read_group",
    "sgd_row",
]

SGD_MOMENTS: Final = ("momentum_buffer",)
ADAM_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
"""torch's names of an optimizer's state, in the order in which kernels take it."""

ROW: Final = 9
"""Numbers of a row, float64. SGD: weight decay, momentum, 1 - dampening, -lr, then zeros, flags. Adam: L2 decay, factor
of decoupled decay, 1 - beta1, beta2, 1 - beta2, -lr / (1 - beta1^t), sqrt(1 - beta2^t), eps, flags."""
MAXIMIZE: Final = 1
NESTEROV: Final = 2
FIRST: Final = 4
"""Flags of a row; FIRST: SGD's momentum starts as the gradient."""

_REFUSED: Final = ("amsgrad", "differentiable", "capturable")
_NUMBERS: Final = ("lr", "momentum", "dampening", "weight_decay", "eps")


@dataclass(frozen=True)
class Hyperparameters:
    """What one group of a torch optimizer says at one iteration."""

    lr: float
    weight_decay: float
    maximize: bool
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    decoupled: bool = False


def check_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is Adam or AdamW, and not SGD. ConfigError for any other optimizer, and for unsupported options."""
    made = type(optimizer)
    known: tuple[Any, ...] = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    if made not in known:
        names = ", ".join(one.__name__ for one in known)
        raise ConfigError(
            f"the sparse optimizer makes the steps of torch.optim's {names}, and not of {made.__qualname__}"
        )
    for number, group in enumerate(optimizer.param_groups):
        _check_group(group, f"{made.__name__}, group {number}")
    return made is not torch.optim.SGD


def _check_group(group: dict[str, Any], source: str) -> None:
    for option in _REFUSED:
        if group.get(option):
            raise ConfigError(f"{source}: the sparse optimizer does not support {option}")
    named = [(name, group[name]) for name in _NUMBERS if name in group]
    for name, value in [*named, *(("betas", beta) for beta in group.get("betas", ()))]:
        if isinstance(value, torch.Tensor):
            raise ConfigError(f"{source}: the sparse optimizer does not support {name} as a tensor: give a number")
        if not math.isfinite(value):
            raise ConfigError(f"{source}: {name} is {value}")
    for parameter in group["params"]:
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"{source}: the sparse optimizer does not support parameters of {parameter.dtype}: keep them in float32"
            )


def read_group(group: dict[str, Any], source: str) -> Hyperparameters:
    """The group's numbers now. ConfigError, naming `source`, if one is not supported."""
    _check_group(group, source)
    lr, decay, maximize = float(group["lr"]), float(group["weight_decay"]), bool(group["maximize"])
    if "betas" not in group:
        momentum, dampening = float(group["momentum"]), float(group["dampening"])
        return Hyperparameters(lr, decay, maximize, momentum, dampening, bool(group["nesterov"]))
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return Hyperparameters(
        lr,
        decay,
        maximize,
        beta1=beta1,
        beta2=beta2,
        eps=float(group["eps"]),
        decoupled=bool(group.get("decoupled_weight_decay", False)),
    )


def sgd_row(given: Hyperparameters, first: bool) -> tuple[float, ...]:
    """The row of an SGD step; `first` if its momentum holds nothing yet."""
    nesterov = NESTEROV if given.nesterov else 0
    flags = (MAXIMIZE if given.maximize else 0) | nesterov | (FIRST if first else 0)
    return given.weight_decay, given.momentum, 1 - given.dampening, -given.lr, 0.0, 0.0, 0.0, 0.0, float(flags)


def adam_row(given: Hyperparameters, step: int) -> tuple[float, ...]:
    """The row of step number `step`, from 1 on, of Adam or AdamW; computed as torch does it, in float64."""
    l2 = 0.0 if given.decoupled else given.weight_decay
    factor = 1 - given.lr * given.weight_decay if given.decoupled and given.weight_decay != 0 else 1.0
    size = given.lr / (1 - given.beta1**step)
    correction = (1 - given.beta2**step) ** 0.5
    flags = MAXIMIZE if given.maximize else 0
    return l2, factor, 1 - given.beta1, given.beta2, 1 - given.beta2, -size, correction, given.eps, float(flags)
