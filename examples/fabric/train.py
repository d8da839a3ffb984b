"""Train a small network in a loop on Lightning Fabric. End it at any time, start it again, and it goes on.

    python train.py --directory checkpoints --steps 60

What is Lastgood's is one import, one call, the loader that is gone through, and one call after each update.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from lastgood.integrations.lightning import use_lastgood

SAMPLES, BATCH = 44, 4


def shown(step: int, loss: float) -> None:
    """One line for each step."""
    print(f"step {step}: loss {loss:.4f}", flush=True)


def main(arguments: Sequence[str] | None = None, told: Callable[[int, float], None] = shown) -> dict[str, Any]:
    """Train, and return what the training ended with."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", required=True, help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args(arguments)

    torch.manual_seed(1)
    fabric = lightning.Fabric(accelerator="auto", devices=1)
    network = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(32, 1)
    )
    model, optimizer = fabric.setup(network, torch.optim.AdamW(network.parameters(), lr=1e-2))
    inputs = torch.randn(SAMPLES, 8)
    loader = fabric.setup_dataloaders(
        DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=BATCH, shuffle=True)
    )

    parts = {"model": model, "optimizer": optimizer, "steps": {"done": 0}}
    ckpt = use_lastgood(fabric, given.directory, interval_steps=5, parts=parts, data=loader)
    while parts["steps"]["done"] < given.steps:
        for samples, targets in ckpt.data:
            loss = torch.nn.functional.mse_loss(model(samples), targets)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            parts["steps"]["done"] += 1
            told(parts["steps"]["done"], loss.item())
            ckpt.step(loss)  # after a SIGTERM this ends the training
            if parts["steps"]["done"] == given.steps:
                break
    ckpt.save(given.steps)
    ckpt.close()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}


if __name__ == "__main__":
    main()
