"""The plain twin of `scatter`."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["scatter_plain"]


def scatter_plain(
    memory: npt.NDArray[np.uint8], begin: int, end: int, pieces: npt.NDArray[Any]
) -> list[tuple[int, int]]:
    """As `scatter`, in plain Python."""
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
