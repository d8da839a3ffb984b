"""A state of one process, and how it is compared with what came back."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from lastgood.checkpointers.dcp.torch_io import first_cause
from lastgood.errors import ConfigError


def example():
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(300, 70, generator=generator)
    return {
        "model": {"w": weights, "slice": weights[10:20, ::3], "empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5)},
        "half": torch.randn(5, 6, generator=generator).bfloat16().t(),
        "flags": torch.tensor([True, False, True]),
        "conj": torch.randn(4, dtype=torch.complex64, generator=generator).conj(),
        "optimizer": {"lr": 0.1, "betas": (0.9, 0.95), "steps": [1, torch.arange(5)]},
        "step": 7,
    }


def emptied(value):
    """The same structure without what it holds."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value.resolve_conj())
    if isinstance(value, dict):
        return {key: emptied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(emptied, value))
    return type(value)()


def same(first, second):
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype
        ours, theirs = (one.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for one in (first, second))
        return first.shape == second.shape and torch.equal(ours, theirs)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return type(first) is type(second) and all(map(same, first, second))
    return first == second


def refused(call):
    """What went wrong inside DCP."""
    with pytest.raises((CheckpointException, ConfigError)) as caught:
        call()
    return first_cause(caught.value)
