"""A small training with everything that makes saving hard: buffers that change in forward, moments made in the first
step,
tied weights, a schedule, dropout, plain values."""

from __future__ import annotations

import torch

from lastgood.state import RngState, state_digest


class SmallTraining:
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
        self.plain = {"step": 0, "moving": torch.zeros(3, dtype=torch.float64, device=device)}
        self.width = width
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "rng": RngState(),
            "plain": self.plain,
        }

    @property
    def step_number(self) -> int:
        return self.plain["step"]

    def step(self) -> float:
        loss = (self.model(torch.randn(4, self.width, device=self.device)) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.plain["step"] += 1
        self.plain["moving"] += 0.1
        return float(loss.detach())

    def digest(self) -> str:
        return state_digest(self.state)
