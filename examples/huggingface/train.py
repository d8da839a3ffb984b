"""Train a small GPT-2 with Hugging Face's Trainer. End it at any time, start it again, and it goes on.

    python train.py --directory checkpoints --steps 60

What is Lastgood's is one import and one call.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from lastgood.integrations.huggingface import use_lastgood

VOCABULARY, LENGTH, LINES = 64, 16, 44


class Lines(torch.utils.data.Dataset):
    """Token lines that repeat a few tokens each, so that there is something to learn."""

    def __len__(self) -> int:
        return LINES

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(VOCABULARY, (4,), generator=generator).repeat(LENGTH // 4)
        return {"input_ids": tokens, "labels": tokens}


class Tell(TrainerCallback):
    """Tells each step's loss."""

    def __init__(self, told: Callable[[int, float], None]) -> None:
        self.told = told

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **more: Any) -> None:
        """Called by the Trainer, here after each step."""
        del args, control, more
        if "loss" in logs:
            self.told(state.global_step, logs["loss"])


def shown(step: int, loss: float) -> None:
    """One line for each step."""
    print(f"step {step}: loss {loss:.4f}", flush=True)


def main(arguments: Sequence[str] | None = None, told: Callable[[int, float], None] = shown) -> dict[str, Any]:
    """Train, and return what the training ended with."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", required=True, help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", default="output", help="of the Trainer's own files")
    given = parser.parse_args(arguments)

    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2))
    chosen = TrainingArguments(
        given.output,
        max_steps=given.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model, chosen, train_dataset=Lines(), callbacks=[Tell(told)])
    use_lastgood(trainer, given.directory, interval_steps=5)
    trainer.train()
    return {"model": model.state_dict(), "optimizer": trainer.optimizer.state_dict()["state"]}


if __name__ == "__main__":
    main()
