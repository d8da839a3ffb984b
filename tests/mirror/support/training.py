"""A small DDP training with what FlowCheck must get right; ranks run it, and job descriptions come from it.

Seeds differ between the ranks before DDP's first broadcast, so only rank 0's weights are the training's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class SmallModel(nn.Module):
    """Linear layers, a BatchNorm, and a frozen parameter."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.ones(width), requires_grad=False)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)) * self.scale)
        result: torch.Tensor = self.last(torch.relu(self.second(x)))
        return result


def make(width: int = 24) -> tuple[nn.Module, torch.optim.Optimizer, None]:
    """The factory: model, optimizer, and no schedule."""
    model = SmallModel(width)
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9), None


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and labels of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 16, generator=generator), torch.randint(0, 10, (8,), generator=generator)


def hook(name: str) -> Any:
    """A communication hook of DDP's by name."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[name]
