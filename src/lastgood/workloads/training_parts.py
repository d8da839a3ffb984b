"""What the workloads' builders share: seeded building, and the optimizers with their schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim.lr_scheduler import LambdaLR

from lastgood.workloads.base import Setting

__all__ = ["adamw_with_warmup", "seeded_build"]

_WARMUP_STEPS = 100


@contextmanager
def seeded_build(setting: Setting) -> Iterator[None]:
    """Build on the device of `setting` from its seed; torch's generators are left as a fresh `manual_seed` leaves them.

    So a model's weights do not depend on what was drawn before, nor its dropout on how its weights were drawn.
    """
    torch.manual_seed(setting.seed)
    with torch.device(setting.device):
        yield
    torch.manual_seed(setting.seed)


def adamw_with_warmup(model: torch.nn.Module, learning_rate: float) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """AdamW under the schedule of Vaswani et al. 2017: linear warm-up, then the inverse square root of the step.

    The schedule never ends, so every step's rate depends on the step count, and a lost count shows in the losses.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01, fused=True)
    return optimizer, LambdaLR(optimizer, _warmup_then_inverse_square_root)


def _warmup_then_inverse_square_root(step: int) -> float:
    count = step + 1
    return min(count / _WARMUP_STEPS, math.sqrt(_WARMUP_STEPS / count))
