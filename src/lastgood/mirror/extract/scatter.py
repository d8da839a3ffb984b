"""Copies pieces of a message to their places in a buffer: by native code, and as its plain twin."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from lastgood import _native

__all__ = ["scatter", "scatter_plain"]


def scatter(memory: npt.NDArray[np.uint8], begin: int, end: int, pieces: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """As `scatter_plain`, at the speed of memory and without the GIL."""
    rows = np.ascontiguousarray(pieces)
    return _native.scatter_pieces(memory.ctypes.data, len(memory), begin, end, rows.ctypes.data, len(rows))


def scatter_plain(
    memory: npt.NDArray[np.uint8], begin: int, end: int, pieces: npt.NDArray[Any]
) -> list[tuple[int, int]]:
    """Copy pieces (PIECE) of a message whose payload is bytes `begin` to `end` of `memory`.

    What would lie outside of that range, or of the memory, is left out. Returns the ranges of `memory` that were
    written, in the order of the pieces, neighbours joined.
    """
    if not 0 <= begin <= end <= len(memory):
        return []
    written: list[tuple[int, int]] = []
    base = memory.ctypes.data
    room = end - begin
    offsets, addresses, sizes = (pieces[name].tolist() for name in ("offset", "address", "nbytes"))
    for offset, address, nbytes in zip(offsets, addresses, sizes, strict=True):
        count = min(nbytes, room - offset)
        if count <= 0:
            continue
        low = begin + offset
        ctypes.memmove(base + low, address, count)
        if written and written[-1][1] == low:
            written[-1] = (written[-1][0], low + count)
        else:
            written.append((low, low + count))
    return written
