"""Train a small network with Lightning's Trainer. End it at any time, start it again, and it goes on.

    python train.py --directory checkpoints --steps 60

What is Lastgood's is one import and one callback.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from lastgood.integrations.lightning import Lastgood

SAMPLES, BATCH, WINDOW = 44, 4, 2


class Sums(lightning.LightningModule):
    """Learns the sum of eight numbers."""

    def __init__(self, steps: int, told: Callable[[int, float], None]) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(32, 1)
        )
        self.steps = steps
        self.told = told

    def training_step(self, batch: Sequence[torch.Tensor], number: int) -> torch.Tensor:
        """Loss of one batch."""
        del number
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
        """Tell the loss of each update's last batch."""
        del batch
        if (number + 1) % WINDOW == 0 or number + 1 == self.trainer.num_training_batches:
            self.told(self.global_step, float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        """AdamW, with a schedule that is stepped at each update."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def shown(step: int, loss: float) -> None:
    """One line for each step."""
    print(f"step {step}: loss {loss:.4f}", flush=True)


def main(arguments: Sequence[str] | None = None, told: Callable[[int, float], None] = shown) -> dict[str, Any]:
    """Train, and return what the training ended with."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", required=True, help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args(arguments)

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.manual_seed(1)
    module = Sums(given.steps, told)
    inputs = torch.randn(SAMPLES, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=BATCH, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=1,
        max_steps=given.steps,
        accumulate_grad_batches=WINDOW,
        callbacks=[Lastgood(given.directory, interval_steps=5)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    return {"model": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()["state"]}


if __name__ == "__main__":
    main()
