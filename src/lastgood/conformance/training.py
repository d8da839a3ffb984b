"""A small training with everything that makes saving hard.

Buffers that change in forward, moments made in the first step, tied weights, a schedule, dropout, plain values.
"""

from __future__ import annotations

from typing import Any

import torch

from lastgood.state import RngState, state_digest

__all__ = ["SmallTraining"]


class SmallTraining:
    """Trains `model` on random numbers; `state` is what a checkpointer is given.

    Two trainings of one seed and device do the same to the bit, and so does one that went on from a restored state.
    """

    def __init__(self, width: int = 64, seed: int = 0, device: str = "cpu") -> None:
        torch.manual_seed(seed)
        tied = torch.nn.Linear(width, width)
        self.model = torch.nn.Sequential(
            tied, torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.1), torch.nn.Linear(width, width), torch.nn.Tanh()
        )
        self.model[3].weight = tied.weight
        self.model.to(device)
        self.device = device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.9)
        self.plain: dict[str, Any] = {"step": 0, "moving": torch.zeros(3, dtype=torch.float64, device=device)}
        self.width = width
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "rng": RngState(),
            "plain": self.plain,
        }

    @property
    def step_number(self) -> int:
        """Finished steps."""
        return int(self.plain["step"])

    def step(self) -> float:
        """Train one step; returns the loss."""
        loss = (self.model(torch.randn(4, self.width, device=self.device)) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.plain["step"] += 1
        self.plain["moving"] += 0.1
        return float(loss.detach())

    def digest(self) -> str:
        """Of the complete state."""
        return state_digest(self.state)
