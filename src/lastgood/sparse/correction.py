"""What is done to a gradient before it is compressed, so that late parts of it do no harm (DGC, ICLR'18, section 3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lastgood._lazy import torch
from lastgood.errors import ConfigError, MismatchError
from lastgood.sparse.blocks import SparseGradient

__all__ = ["Correction", "MomentumCorrection", "clip_gradient", "warm_up"]


@dataclass(frozen=True)
class Correction:
    """What an engine does to gradients before it compresses them. All ranks must do the same.

    Raises ConfigError for numbers that cannot be.
    """

    momentum: float = 0.0
    """Of a velocity that is sent in place of the gradient (`MomentumCorrection`). The optimizer is then SGD without
    momentum. 0: none."""
    nesterov: bool = False
    masking: bool = True
    """Forget the velocity where it was sent."""
    clip: float | None = None
    """The norm that all ranks' gradients of one iteration may have together (`clip_gradient`). Layers then leave when
    the backward pass has ended, and not while it runs."""
    warm_up: int = 0
    """In so many iterations compression rises from 0.75 to the one that is asked for."""

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1 or self.warm_up < 0 or not (self.clip is None or 0 < self.clip < math.inf):
            raise ConfigError(
                f"a correction of momentum {self.momentum}, clip {self.clip}, warm_up {self.warm_up}: momentum is at "
                "least 0 and below 1, clip above 0, and warm_up at least 0"
            )

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ConfigError for an optimizer that cannot be used beside it."""
        if self.momentum and any(group.get("momentum", 1.0) for group in optimizer.param_groups):
            raise ConfigError("momentum correction takes the place of the optimizer's: give it SGD with momentum=0")

    def of_layer(self, elements: int) -> MomentumCorrection | None:
        """The velocity of a layer of so many elements, if there is to be one."""
        return MomentumCorrection(elements, self.momentum, nesterov=self.nesterov) if self.momentum else None


def clip_gradient(gradient: torch.Tensor, norm: float, limit: float, nodes: int) -> None:
    """Scale a gradient in place, before its residual is added, so that all nodes together stay under a norm.

    `norm` is that of this node's gradients of all parameters. Each node may have limit / sqrt(nodes) of it, since
    gradients of different nodes add up as independent ones do (section 3.2). What is not finite stays so.
    """
    if limit <= 0 or nodes < 1:
        raise ValueError(f"a norm of {limit} for {nodes} nodes")
    own = limit / math.sqrt(nodes)
    if norm > own:
        gradient.mul_(own / norm)


def warm_up(compression: float, epoch: float, epochs: float, *, first: float = 0.75) -> float:
    """The compression in a warm-up of so many epochs: the share that is sent falls exponentially from 1 - first.

    With `epochs` 4 and 0.999: 0.75, 0.937, 0.984, 0.996 and then 0.999, as in section 3.3.
    """
    if not 0 <= first < 1 or not 0 <= compression < 1 or epoch < 0:
        raise ValueError(f"compression from {first} to {compression} at epoch {epoch}")
    if epoch >= epochs or compression <= first:
        return compression
    sent, last = 1 - first, 1 - compression
    share: float = sent * (last / sent) ** (epoch / epochs)
    return 1 - share


class MomentumCorrection:
    """Momentum before compression: a velocity is sent in place of the gradient, and forgotten where it was sent.

    The optimizer must then have no momentum of its own. Without it, momentum multiplies parts of a gradient that come
    late and at once (section 3.1); forgetting it where it was sent is DGC's factor masking (section 3.2).
    """

    def __init__(self, elements: int, momentum: float, *, nesterov: bool = False) -> None:
        if not 0 < momentum < 1:
            raise ValueError(f"a momentum of {momentum}")
        self.momentum = momentum
        self.nesterov = nesterov
        self.velocity = torch.zeros(elements, dtype=torch.float32, device="cpu")

    def correct(self, gradient: torch.Tensor) -> torch.Tensor:
        """What is compressed in place of a flat gradient; it counts until the next call.

        A gradient that is not finite comes back as it is, so that its parameter is skipped, and leaves no trace.
        """
        if not bool(torch.isfinite(gradient).all()):
            return gradient
        self.velocity.mul_(self.momentum).add_(gradient)
        if self.nesterov:
            return self.velocity.mul(self.momentum).add_(gradient)
        return self.velocity

    def mask(self, sparse: SparseGradient) -> None:
        """Forget the velocity of what was sent."""
        if sparse.width == 1:
            self.velocity[torch.from_numpy(sparse.indices.astype(np.int64))] = 0
            return
        end = len(self.velocity) // sparse.width * sparse.width
        complete = int(np.searchsorted(sparse.indices, end // sparse.width))
        self.velocity[:end].view(-1, sparse.width)[torch.from_numpy(sparse.indices[:complete].astype(np.int64))] = 0
        if complete < len(sparse.indices):
            self.velocity[end:] = 0

    def state_dict(self) -> dict[str, Any]:
        """The velocity, which is this rank's own, and the momentum that made it."""
        return {"momentum": self.momentum, "nesterov": self.nesterov, "velocity": self.velocity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Raises MismatchError for another momentum or number of elements."""
        velocity = state["velocity"]
        own = (self.momentum, self.nesterov, self.velocity.shape)
        given = (state["momentum"], state["nesterov"], velocity.shape)
        if given != own:
            raise MismatchError(f"a velocity of (momentum, nesterov, elements) {given}, here they are {own}")
        self.velocity.copy_(velocity)
