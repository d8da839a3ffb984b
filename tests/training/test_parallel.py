"""A workload's stream, shared out among ranks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lastgood.training.parallel import RankStream
from lastgood.workloads.base import Batch, BatchStream


class Numbers(BatchStream):
    def batch(self, index: int) -> Batch:
        return {"number": torch.tensor(index)}


@given(st.integers(1, 5), st.integers(0, 6), st.integers(0, 6))
def test_ranks_together_see_every_batch_once_in_order(ranks: int, before: int, after: int) -> None:
    streams = [RankStream(Numbers(), rank, ranks) for rank in range(ranks)]
    seen = [int(next(stream)["number"]) for _ in range(before) for stream in streams]
    (position,) = {tuple(stream.state_dict().items()) for stream in streams}
    assert dict(position) == {"consumed": before}
    # Fresh ones, at the saved place.
    streams = [RankStream(Numbers(), rank, ranks) for rank in range(ranks)]
    for stream in streams:
        stream.load_state_dict(dict(position))
    seen += [int(next(stream)["number"]) for _ in range(after) for stream in streams]
    assert seen == list(range(ranks * (before + after)))
