"""The training that FlowCheck's figure watches: a small GPT in plain torch, on tokens that follow from the step."""

from __future__ import annotations

import os
from typing import Any, Final

import torch
from torch import nn

from lastgood.experiments.records.flowcheck import GptShape
from lastgood.text import parse_model
from lastgood.units import MIB

__all__ = ["SHAPE_VARIABLE", "loss_of", "make", "make_described"]

SHAPE_VARIABLE: Final = "LASTGOOD_FLOWCHECK_SHAPE"
"""Environment variable with the shape, as JSON, for `make_described`."""
_CLIP_NORM: Final = 1.0
_SEED: Final = 1


class _Block(nn.Module):
    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm_mlp(x))))
        return out


class _Gpt(nn.Module):
    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def make(shape: GptShape) -> dict[str, Any]:
    """Model, optimizer and clipping before the first step, as `lastgood mirror describe` takes them."""
    torch.manual_seed(_SEED)
    model = _Gpt(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    return {"model": model, "optimizer": optimizer, "clip_norm": _CLIP_NORM, "name": "flowcheck figure"}


def make_described() -> dict[str, Any]:
    """As `make`, of the shape in the environment: for ``--factory``."""
    return make(parse_model(GptShape, os.environ[SHAPE_VARIABLE], SHAPE_VARIABLE, most_bytes=MIB))


def loss_of(model: nn.Module, shape: GptShape, step: int, rank: int) -> torch.Tensor:
    """The loss of one rank's batch of a step."""
    generator = torch.Generator().manual_seed(_SEED * 1_000_003 + step * 1009 + rank)
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1), generator=generator)
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
