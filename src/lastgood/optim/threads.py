"""torch's intra-op threads for the time of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lastgood._lazy import torch

__all__ = ["intra_op_threads"]


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """`count` threads inside, as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
