"""What one update needs beside the gradients: the numbers as the trainer's own step used them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lastgood._lazy import torch
from lastgood.errors import ConfigError
from lastgood.optim.checked_data import MAX_GROUPS, MAX_PARAMETERS, Reader

__all__ = ["MAX_POWERS", "ClipNorm", "ClipValue", "GroupRule", "UpdateRule"]

MAX_POWERS: Final = 64
"""Of different step counts in one group: parameters that had no gradient lag."""

_DTYPES: Final = ("float32", "float64", "bfloat16", "float16")
_NUMBERS: Final = ("eps", "weight_decay", "momentum", "dampening")


@dataclass(frozen=True)
class ClipNorm:
    """Gradients times `coefficient`, a scalar tensor of `dtype`: what torch.nn.utils.clip_grad_norm_ multiplied by."""

    coefficient: float
    dtype: str = "float32"

    def factor(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """That scalar tensor."""
        return torch.tensor(self.coefficient, dtype=getattr(torch, self.dtype), device=device)


@dataclass(frozen=True)
class ClipValue:
    """Gradients bounded to [-limit, limit], as torch.nn.utils.clip_grad_value_ does."""

    limit: float


@dataclass(frozen=True)
class GroupRule:
    """Hyperparameters of one group, to the bit.

    `tensor_lr` is the dtype of a learning rate that is a tensor, "" for a number. `powers` are rows of a step count t,
    beta1**t and beta2**t as the trainer's device computes them (`OptimizerSpec.needs_powers`).
    """

    lr: float
    tensor_lr: str = ""
    betas: tuple[float, float] = (0.0, 0.0)
    eps: float = 0.0
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    powers: tuple[tuple[int, float, float], ...] = ()

    @property
    def learning_rate(self) -> float | torch.Tensor:
        """As torch's step takes it: a number, or a tensor on the CPU."""
        return torch.tensor(self.lr, dtype=getattr(torch, self.tensor_lr), device="cpu") if self.tensor_lr else self.lr

    @classmethod
    def of(cls, group: Mapping[str, Any], powers: Sequence[tuple[int, float, float]] = ()) -> GroupRule:
        """The numbers of a torch parameter group. Reading a learning rate on a device waits for the device."""
        lr = group["lr"]
        tensor_lr = str(lr.dtype).removeprefix("torch.") if isinstance(lr, torch.Tensor) else ""
        if tensor_lr and tensor_lr not in _DTYPES:
            raise ConfigError(f"a learning rate of dtype {tensor_lr}; a shadow takes {', '.join(_DTYPES)}")
        beta1, beta2 = group.get("betas", (0.0, 0.0))
        return cls(
            lr=_number("lr", lr),
            tensor_lr=tensor_lr,
            betas=(_number("betas", beta1), _number("betas", beta2)),
            powers=tuple(powers),
            **{key: _number(key, group.get(key, 0.0)) for key in _NUMBERS},
        )

    def to_data(self) -> dict[str, Any]:
        """As JSON data."""
        data: dict[str, Any] = {"lr": self.lr.hex(), "betas": [beta.hex() for beta in self.betas]}
        data |= {key: getattr(self, key).hex() for key in _NUMBERS}
        if self.tensor_lr:
            data["tensor_lr"] = self.tensor_lr
        if self.powers:
            data["powers"] = [[step, one.hex(), two.hex()] for step, one, two in self.powers]
        return data

    @classmethod
    def from_data(cls, data: Any) -> GroupRule:
        """What `to_data` wrote. Raises CorruptCheckpoint for anything else."""
        reader = Reader(data, "an update's group", ("lr", "betas", *_NUMBERS, "tensor_lr", "powers"))
        beta1, beta2 = reader.numbers("betas", 2)
        return cls(
            lr=reader.number("lr"),
            tensor_lr=reader.choice("tensor_lr", _DTYPES) if reader.has("tensor_lr") else "",
            betas=(beta1, beta2),
            powers=reader.powers("powers", MAX_POWERS) if reader.has("powers") else (),
            **{key: reader.number(key) for key in _NUMBERS},
        )


@dataclass(frozen=True)
class UpdateRule:
    """One update, in the trainer's order: unscale, clip, step.

    `inverse_scale` is what GradScaler multiplied gradients by before the step; `grad_scale` what a fused optimizer
    divided them by in its kernel. `unaligned` are the places of parameters whose tensors or gradients did not lie at
    multiples of four elements on the device (`OptimizerSpec.needs_alignment`).
    """

    groups: tuple[GroupRule, ...]
    inverse_scale: float | None = None
    grad_scale: float | None = None
    clip: ClipNorm | ClipValue | None = None
    unaligned: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        optimizer: torch.optim.Optimizer,
        *,
        inverse_scale: float | None = None,
        grad_scale: float | None = None,
        clip: ClipNorm | ClipValue | None = None,
    ) -> UpdateRule:
        """The rule of the step that `optimizer` makes now; `trainer.RuleMaker` adds what CUDA trainers must tell."""
        groups = tuple(GroupRule.of(group) for group in optimizer.param_groups)
        return cls(groups, inverse_scale, grad_scale, clip)

    def to_data(self) -> dict[str, Any]:
        """As JSON data."""
        data: dict[str, Any] = {"groups": [group.to_data() for group in self.groups]}
        if self.inverse_scale is not None:
            data["inverse_scale"] = self.inverse_scale.hex()
        if self.grad_scale is not None:
            data["grad_scale"] = self.grad_scale.hex()
        if isinstance(self.clip, ClipNorm):
            data["clip_norm"] = [self.clip.coefficient.hex(), self.clip.dtype]
        elif self.clip is not None:
            data["clip_value"] = self.clip.limit.hex()
        if self.unaligned:
            data["unaligned"] = list(self.unaligned)
        return data

    @classmethod
    def from_data(cls, data: Any) -> UpdateRule:
        """What `to_data` wrote. Raises CorruptCheckpoint for anything else, naming the key."""
        keys = ("groups", "inverse_scale", "grad_scale", "clip_norm", "clip_value", "unaligned")
        reader = Reader(data, "an update", keys)
        if reader.has("clip_norm") and reader.has("clip_value"):
            raise reader.bad("clip_value", "allowed beside clip_norm")
        clip: ClipNorm | ClipValue | None = None
        if reader.has("clip_norm"):
            pair = reader.rows("clip_norm", 2)
            if len(pair) != 2:
                raise reader.bad("clip_norm", "a number and a dtype")
            inner = Reader(
                {"coefficient": pair[0], "dtype": pair[1]}, "an update's clip_norm", ("coefficient", "dtype")
            )
            # A norm that is no number makes the trainer's gradients none as well.
            clip = ClipNorm(inner.number("coefficient", finite=False), inner.choice("dtype", _DTYPES))
        elif reader.has("clip_value"):
            clip = ClipValue(reader.number("clip_value"))
            if clip.limit < 0:
                raise reader.bad("clip_value", "a number from 0 up")
        rule = cls(
            groups=tuple(GroupRule.from_data(row) for row in reader.rows("groups", MAX_GROUPS)),
            inverse_scale=reader.number("inverse_scale") if reader.has("inverse_scale") else None,
            grad_scale=reader.number("grad_scale") if reader.has("grad_scale") else None,
            clip=clip,
            unaligned=reader.integers("unaligned", MAX_PARAMETERS, MAX_PARAMETERS) if reader.has("unaligned") else (),
        )
        if rule.grad_scale == 0.0:
            raise reader.bad("grad_scale", "a number other than 0")
        return rule


def _number(key: str, value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ConfigError(f"{key} of a parameter group is {number}: no update of it can be kept")
    return number
