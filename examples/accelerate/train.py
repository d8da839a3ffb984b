"""Train a small network in a loop on accelerate. End it at any time, start it again, and it goes on.

    python train.py --directory checkpoints --steps 60

What is Lastgood's is one import, one call, the loader that is gone through, and one call at the loop's end.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from lastgood.integrations.accelerate import use_lastgood

SAMPLES, BATCH, WINDOW = 44, 4, 2


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
    accelerator = Accelerator(gradient_accumulation_steps=WINDOW, cpu=not torch.cuda.is_available())
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps)
    inputs = torch.randn(SAMPLES, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=BATCH, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    training = use_lastgood(accelerator, given.directory, interval_steps=5)
    step = training.resumed
    while step < given.steps:
        for samples, targets in training.data:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(samples), targets)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                told(step + 1, loss.item())
            step = training.step(loss)  # after a SIGTERM this ends the training
            if step == given.steps:
                break
    training.save(step)
    training.close()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}


if __name__ == "__main__":
    main()
