"""Small models of which all, a tenth, or only low-rank adapters are trained."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

__all__ = ["Trained", "changed_bytes", "make_model", "take_step"]

Trained = Literal["all", "frozen", "lora"]
_RANK = 8
_MOMENTS = 2
"""Of AdamW, beside each parameter that is trained."""


class _Adapted(nn.Module):
    """A frozen layer, and two narrow ones beside it that are trained (Hu et al. 2022, LoRA)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, _RANK, bias=False)
        self.up = nn.Linear(_RANK, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, width), as its input."""
        found: torch.Tensor = self.base(x) + self.up(self.down(x))
        return found


def make_model(kind: Trained, width: int, layers: int, seed: int = 0) -> tuple[nn.Sequential, torch.optim.AdamW]:
    """Square layers; all are trained, or the last tenth of them (``frozen``), or adapters beside each (``lora``)."""
    torch.manual_seed(seed)
    if kind == "lora":
        model = nn.Sequential(*(_Adapted(width) for _ in range(layers)))
    else:
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        if kind == "frozen":
            for layer in model[: layers - max(1, layers // 10)]:
                layer.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-4)


def changed_bytes(model: nn.Module) -> int:
    """What a step changes: parameters that are trained, and their moments."""
    return (1 + _MOMENTS) * sum(one.nbytes for one in model.parameters() if one.requires_grad)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
    """One step on random numbers of the global generator."""
    width = next(model.parameters()).shape[1]
    model(torch.randn(batch, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
