"""Data-parallel training of a small GPT on random tokens: plain torch, with nothing of Lastgood in it.

    torchrun --nproc-per-node 2 train.py --steps 20 --losses losses.txt
    torchrun --nproc-per-node 2 train.py --steps 20 --losses losses.txt --resume state.pt

What FlowCheck does beside such a training stands in README.md. All that is random follows from the seed, the step and
the rank, so a training that goes on from step n does what one does that was never stopped, dropout included.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH, HEADS, BLOCKS, LENGTH, BATCH = 512, 128, 4, 4, 64, 4
DROPOUT, CLIP_NORM, WARMUP, SEED = 0.1, 1.0, 10, 1


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each beside a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm_mlp = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, WIDTH) to the same."""
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        out: torch.Tensor = x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm_mlp(x)))))
        return out


class GPT(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length) of int64 to logits (batch, length, VOCABULARY)."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def make() -> dict[str, Any]:
    """All that is trained, before its first step: this script's own, and what a mirror node has described to it.

    `lastgood mirror describe --factory train:make` calls it, so the node knows what is not on the wire: optimizer,
    schedule and clipping.
    """
    torch.manual_seed(SEED)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "clip_norm": CLIP_NORM,
        "name": "gpt_ddp",
    }


def tokens_of(step: int, rank: int) -> torch.Tensor:
    """The batch of a step: (BATCH, LENGTH + 1) random tokens, which follow from step and rank alone."""
    generator = torch.Generator().manual_seed(SEED * 1_000_003 + step * 1009 + rank)
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def resume(parts: dict[str, Any], path: Path) -> int:
    """Load a file of torch.save with model, optimizer, scheduler and step; returns the number of steps done."""
    saved = torch.load(path, weights_only=True)
    for name in ("model", "optimizer", "scheduler"):
        parts[name].load_state_dict(saved[name])
    return int(saved["step"])


def train(steps: int, losses: Path | None, resume_from: Path | None, save_to: Path | None, pause_s: float) -> None:
    """Train on this rank until `steps` updates are done. Rank 0 writes its own loss of each step, and saves at the end.

    Losses are hexadecimal, so that two trainings can be compared to the bit.
    """
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = make()
    done = resume(parts, resume_from) if resume_from is not None else 0
    model = DistributedDataParallel(parts["model"])
    file = losses.open("a") if losses is not None and rank == 0 else None
    for step in range(done, steps):
        torch.manual_seed(SEED + 7919 * step + rank)  # dropout's
        tokens = tokens_of(step, rank)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        parts["optimizer"].zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        parts["optimizer"].step()
        parts["scheduler"].step()
        if file is not None:
            file.write(f"{step} {float(loss).hex()}\n")
            file.flush()
        time.sleep(pause_s)
    if file is not None:
        file.close()
    if save_to is not None and rank == 0:
        saved = {name: parts[name].state_dict() for name in ("model", "optimizer", "scheduler")}
        torch.save({**saved, "step": steps}, save_to)
    dist.barrier()
    if rank == 0:
        print(f"{ranks} ranks, {steps} steps done", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--losses", type=Path, help="rank 0 appends a line for each step: its number, its own loss")
    parser.add_argument("--resume", type=Path, help="a file of torch.save to go on from")
    parser.add_argument("--save", type=Path, help="write such a file at the end")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, as a slower model takes")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(given.threads))
    train(given.steps, given.losses, given.resume, given.save, given.pause)


if __name__ == "__main__":
    main()
