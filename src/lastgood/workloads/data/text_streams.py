"""Batches of token ids, int64 of shape (batch, length): blocks in shuffled order, or lanes that run on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from lastgood.errors import DataError
from lastgood.workloads.base import Batch, BatchStream
from lastgood.workloads.data.order import EpochOrder

__all__ = ["BlockStream", "LaneStream"]


class BlockStream(BatchStream):
    """Blocks of `length` consecutive tokens, each visited once an epoch, in an order that the seed sets.

    Batches hold ``input_ids`` only: a causal model's labels are its inputs, one place on.
    """

    def __init__(self, tokens: npt.NDArray[np.int32], batch_size: int, length: int, seed: int, name: str) -> None:
        super().__init__()
        if len(tokens) < length:
            raise DataError(f"{name}: {len(tokens)} tokens are less than one sequence of {length}; give a longer text")
        self._blocks = tokens[: len(tokens) // length * length].reshape(-1, length)
        self._batch_size = batch_size
        self._order = EpochOrder(len(self._blocks), seed)

    def batch(self, index: int) -> Batch:
        """Token ids; see `BatchStream.batch`."""
        blocks = self._blocks[self._order.batch(index, self._batch_size)]
        return {"input_ids": torch.from_numpy(blocks.astype(np.int64))}


class LaneStream(BatchStream):
    """The text cut into as many equal lanes as a batch has rows; batch `i + 1` goes on in each lane where `i` ended.

    Lanes begin again when they end. The text is rotated first, by an offset that the seed sets. Batches hold
    ``input_ids`` and ``labels``, the same places one token on.
    """

    def __init__(self, tokens: npt.NDArray[np.int32], batch_size: int, length: int, seed: int, name: str) -> None:
        super().__init__()
        self._segments = (len(tokens) // batch_size - 1) // length
        if self._segments < 1:
            raise DataError(
                f"{name}: {len(tokens)} tokens do not fill {batch_size} lanes of one segment of {length} and a label; "
                "give a longer text"
            )
        self._tokens = tokens
        self._length = length
        self._lane_starts = np.arange(batch_size) * (len(tokens) // batch_size)
        self._offset = int(np.random.default_rng(seed).integers(len(tokens)))

    def batch(self, index: int) -> Batch:
        """Token ids and the ids that follow them; see `BatchStream.batch`."""
        start = self._offset + index % self._segments * self._length
        places = (self._lane_starts[:, None] + np.arange(start, start + self._length + 1)) % len(self._tokens)
        rows = torch.from_numpy(self._tokens[places].astype(np.int64))
        return {"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}
