"""A model with all that a sparse engine must cope with, and its batches."""

from __future__ import annotations

import copy

import torch
from torch import nn


class Odd(nn.Module):
    """A parameter that two layers share, a frozen one, one that nothing uses, one that is used now and then."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(23, 18)
        self.frozen = nn.Linear(18, 18)
        self.norm = nn.BatchNorm1d(18)
        self.unused = nn.Linear(3, 3)
        self.sometimes = nn.Linear(18, 18)
        self.head = nn.Linear(18, 23, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens, detour):
        values = self.norm(torch.tanh(self.frozen(self.embedding(tokens))))
        if detour:
            values = self.sometimes(values)
        return self.head(values)


with torch.random.fork_rng():
    torch.manual_seed(5)
    PROTOTYPE = Odd()


def loss_of(model, rank, iteration):
    generator = torch.Generator().manual_seed(1000 * iteration + rank)
    tokens = torch.randint(23, (2, 9), generator=generator)
    return nn.functional.cross_entropy(model(tokens[0], detour=(iteration + rank) % 3 == 0), tokens[1])


def make(adam=False, model=None):
    model = copy.deepcopy(PROTOTYPE) if model is None else model
    if adam:
        return model, torch.optim.Adam(model.parameters(), lr=0.1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def bits(model):
    return {name: value.clone() for name, value in model.state_dict().items()}
