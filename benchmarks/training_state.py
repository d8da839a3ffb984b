"""A real torch training whose state has a chosen size: linear layers under AdamW."""

from __future__ import annotations

from typing import Any

import torch

_WIDE, _NARROW = 1024, 128
_WIDE_FROM_BYTES = 64 << 20
_BYTES_PER_PARAMETER = 12
"""fp32 weight and two moments."""


class LinearTraining:
    """A stack of square linear layers, trained on one fixed batch of `batch` rows."""

    def __init__(self, state_bytes: int, device: str = "cpu", seed: int = 0, batch: int = 4) -> None:
        torch.manual_seed(seed)
        width = _WIDE if state_bytes >= _WIDE_FROM_BYTES else _NARROW
        layers = max(1, round(state_bytes / (_BYTES_PER_PARAMETER * width * (width + 1))))
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._batch = torch.randn(batch, width, device=device)
        self.steps = 0

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpointer is given."""
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        """One training step; the first makes the optimizer's moments."""
        loss = (self.model(self._batch) - self._batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
