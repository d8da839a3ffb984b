"""What one rank sends of one parameter's gradient: chosen elements, or chosen blocks of neighbouring elements."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lastgood._lazy import torch
from lastgood.errors import CorruptCheckpoint

__all__ = ["BLOCK_WIDTH", "MAX_ELEMENTS", "SparseGradient", "dense"]

BLOCK_WIDTH = 16
"""Elements in a block: a cache line of float32 (StellaTrain, SIGCOMM'24, section 3.2)."""
MAX_ELEMENTS = 1 << 32
"""Of a parameter, since numbers of elements are sent in 32 bits."""


@dataclass(frozen=True, eq=False)
class SparseGradient:
    """Chosen places of a flat gradient of `elements` elements, in C order, with their values.

    `indices` (uint32, strictly ascending) number elements if `width` is 1, and blocks if it is `BLOCK_WIDTH`: block b
    holds the elements from b * width on. `values` is a flat CPU tensor of float32, float16 or bfloat16 with `width`
    values for each index; what lies beyond the gradient's end, in its last block, is zero. A gradient that is not
    `finite` has no indices: no rank may apply any rank's part of it.
    """

    elements: int
    width: int
    indices: npt.NDArray[np.uint32]
    values: torch.Tensor
    finite: bool = True

    @property
    def places(self) -> int:
        """How many different indices there can be."""
        return -(-self.elements // self.width)

    def check(self, source: str) -> None:
        """Raise CorruptCheckpoint, naming `source`, if this is not what the class promises."""
        why = self._fault()
        if why is not None:
            raise CorruptCheckpoint(f"{source}: not a sparse gradient: {why}")

    def _fault(self) -> str | None:
        if not 0 < self.elements <= MAX_ELEMENTS:
            return f"of {self.elements} elements"
        if self.width not in (1, BLOCK_WIDTH):
            return f"blocks of {self.width} elements"
        if self.indices.dtype != np.uint32 or self.indices.ndim != 1:
            return f"indices are {self.indices.dtype} of {self.indices.ndim} dimensions"
        if self.values.dtype not in (torch.float32, torch.float16, torch.bfloat16) or self.values.dim() != 1:
            return f"values are {self.values.dtype} of {self.values.dim()} dimensions"
        if self.values.numel() != len(self.indices) * self.width:
            return f"{self.values.numel()} values for {len(self.indices)} indices"
        if not len(self.indices):
            return None
        if not self.finite:
            return f"not finite, with {len(self.indices)} indices"
        if self.indices[-1] >= self.places:
            return f"index {self.indices[-1]} of {self.places}"
        if (self.indices[1:] <= self.indices[:-1]).any():
            return "indices do not ascend"
        lowest, highest = torch.aminmax(
            self.values
        )  # a value that is no number is both; isfinite takes 16 times as long
        if not (math.isfinite(lowest) and math.isfinite(highest)):
            return "values that are not finite"
        beyond = (int(self.indices[-1]) + 1) * self.width - self.elements
        if beyond > 0 and self.values[-beyond:].any():
            return "values beyond the end"
        return None


def dense(sparse: SparseGradient) -> torch.Tensor:
    """The flat float32 tensor that has these values, and zeros elsewhere: for tests and references."""
    blocks = torch.zeros(sparse.places * sparse.width, dtype=torch.float32)
    chosen = torch.from_numpy(sparse.indices.astype(np.int64))
    blocks.view(-1, sparse.width)[chosen] = sparse.values.float().view(-1, sparse.width)
    return blocks[: sparse.elements]
