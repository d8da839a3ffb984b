"""Parts of a rank in switch mode, made without processes."""

from __future__ import annotations

import torch

from lastgood.checkpointers.checkmate.system import CheckmateOptions
from lastgood.gradients.tap.ring import RingTap
from lastgood.gradients.trainer.parameters import TrackedParameters


def ring_options(**more):
    addresses = {"ring_listen": ("a:1", "b:1"), "ring_next": ("switch:1", "switch:2")}
    return CheckmateOptions(**{"tap": "ring", **addresses, **more})


class TapOf(RingTap):
    """Of a DDP that reduces over so many ranks."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks = ranks

    @property
    def reduced_ranks(self):
        return self.ranks


def tracked_of(device="cpu", dtype=torch.float32):
    model = torch.nn.Linear(3, 2, device=device, dtype=dtype)
    return TrackedParameters({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
