"""A state of a given size under a step that costs almost nothing: what is timed on it is the checkpoint alone."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from lastgood.workloads.base import Batch, BatchStream, Setting, Workload
from lastgood.workloads.options import BlobOptions
from lastgood.workloads.training_parts import seeded_build

__all__ = ["Blob", "build_blob"]

_PIECE = 16_000_000
"""Parameters of one tensor of the rest, 64 MB: about the size of a large layer's weight."""
_BATCH_SIZE = 16
_LEARNING_RATE = 0.01


class Blob(nn.Module):
    """A linear regression, and parameters that never get a gradient.

    The optimizer holds all of them, so a checkpointer must treat the rest as it treats any weight. It is random: a disk
    that compresses or leaves out zeros would otherwise write less than the state's size.
    """

    def __init__(self, options: BlobOptions) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(options.TRAINED))
        left = options.parameters() - options.TRAINED
        sizes = [_PIECE] * (left // _PIECE) + ([left % _PIECE] if left % _PIECE else [])
        self.rest = nn.ParameterList([nn.Parameter(torch.empty(size).uniform_(-1, 1)) for size in sizes])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(batch, TRAINED) to (batch,)."""
        return inputs @ self.weight


class _Points(BatchStream):
    """Points of a linear function of the seed; batch `i` comes from the seed and `i`."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._true = torch.randn(width, generator=torch.Generator().manual_seed(seed))

    def batch(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + index + 1)
        inputs = torch.randn(_BATCH_SIZE, len(self._true), generator=generator)
        # Element-wise, not a matrix product: the sum's order does not depend on the machine's BLAS.
        return {"inputs": inputs, "targets": (inputs * self._true).sum(dim=1)}


def build_blob(options: BlobOptions, setting: Setting) -> Workload:
    """Build the workload ``blob``; it reads no data."""
    stream = _Points(options.TRAINED, setting.seed)
    with seeded_build(setting):
        model = Blob(options).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)

    def loss(batch: Batch) -> torch.Tensor:
        errors: torch.Tensor = model(batch["inputs"]) - batch["targets"]
        return errors.square().mean()

    first = stream.batch(0)
    digest = hashlib.sha256(b"".join(first[name].numpy().tobytes() for name in sorted(first))).hexdigest()
    facts = {"name": "points", "source": "made from the seed", "sha256": digest}
    return Workload(name="blob", model=model, optimizer=optimizer, data=stream, loss=loss, data_facts=facts)
