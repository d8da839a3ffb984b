"""Train a small language model with FSDP2, and go on after a kill, on any number of ranks.

    torchrun --nproc-per-node 2 train.py --folder ckpt --steps 60
    torchrun --nproc-per-node 3 train.py --folder ckpt --steps 60       # goes on where the first one was killed

A loop as torchtitan's: the model is made on the meta device, its blocks are sharded by `fully_shard`, and the state
goes through `torch.distributed.checkpoint`. What is Lastgood's is one argument of `dcp.save` and one of `dcp.load`.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from lastgood.integrations.dcp import LastgoodReader, LastgoodWriter

VOCABULARY, WIDTH, HEADS, BLOCKS, LENGTH, BATCH = 256, 64, 4, 3, 32, 12
_STEP = re.compile(r"step-(\d+)")


class Block(nn.Module):
    """Attention and a feed-forward layer, each beside a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm_mlp = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, WIDTH) to the same."""
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm_mlp(x))))


class Decoder(nn.Module):
    """Predicts the next byte."""

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
        return self.head(self.norm(x))


def make_model(device: torch.device) -> Decoder:
    """The model, sharded over all ranks; each has memory for its own shards only."""
    with torch.device("meta"):
        model = Decoder()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device=device)
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def batch_of(step: int, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the batch of a step, which is the same on any number of ranks that divides BATCH."""
    generator = torch.Generator().manual_seed(step)
    begins = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator)
    mine = begins.chunk(dist.get_world_size())[dist.get_rank()]
    tokens, wanted = (torch.stack([text[b + shift : b + shift + LENGTH] for b in mine]) for shift in (0, 1))
    return tokens, wanted


def newest(folder: Path) -> Path | None:
    """The newest checkpoint: one that has its metadata is complete, for Lastgood gives it its name last."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _STEP.fullmatch(path.name))]
    return max((one for one in found if (one[1] / ".metadata").exists()), default=(0, None))[1]


def main() -> None:
    """One rank, started by torchrun."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints, which all ranks see")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="file of bytes to learn")
    arguments = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    if BATCH % dist.get_world_size():
        raise SystemExit(f"{dist.get_world_size()} ranks do not divide a batch of {BATCH}")
    text = torch.tensor(list(arguments.text.read_bytes()))
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # Every rank must take the same one, whatever a shared file system shows it at this moment.
    chosen = [newest(arguments.folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(chosen)
    begin = 0
    if chosen[0] is not None:
        begin = restore(model, optimizer, chosen[0])
        say(f"goes on from {chosen[0].name}")

    for step in range(begin, arguments.steps):
        tokens, wanted = (one.to(device) for one in batch_of(step, text))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss, op=dist.ReduceOp.SUM)
        say(f"step {step + 1}: loss {loss.item() / dist.get_world_size():.9f}")
        if (step + 1) % arguments.every == 0:
            save(model, optimizer, step + 1, arguments.folder)
    dist.destroy_process_group()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, folder: Path) -> None:
    """Save all that a later run needs."""
    tensors, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": tensors, "optimizer": moments, "step": step}
    dcp.save(state, storage_writer=LastgoodWriter(folder / f"step-{step}"))


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> int:
    """Load a checkpoint into model and optimizer; the number of steps that were done."""
    tensors, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": tensors, "optimizer": moments, "step": 0}
    dcp.load(state, storage_reader=LastgoodReader(path))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(state["step"])


def say(text: str) -> None:
    """By one rank for all."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
