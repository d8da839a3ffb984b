"""Copies pieces of a message to their places in a buffer, by native code."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lastgood import _native

__all__ = ["scatter"]


def scatter(memory: npt.NDArray[np.uint8], begin: int, end: int, pieces: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """Copy pieces (PIECE) of a message whose payload is bytes `begin` to `end` of `memory`, without the GIL.

    What would lie outside of that range, or of the memory, is left out. Returns the ranges of `memory` that were
    written, in the order of the pieces, neighbours joined.
    """
    rows = np.ascontiguousarray(pieces)
    return _native.scatter_pieces(memory.ctypes.data, len(memory), begin, end, rows.ctypes.data, len(rows))
