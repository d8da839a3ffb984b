"""How NCCL's protocol LL puts data on the wire: the generator's side; native code reads it, and LL128.

Each 8 bytes of data are a line of 16: data, flag, data, flag, 4 bytes each, little-endian. All flags of a message are
equal: the connection's step, counted from 1. So a line shows by itself whether it has arrived.
"""

from __future__ import annotations

from typing import Final

import numpy as np

__all__ = ["LL_LINE", "encode", "ll_bytes"]

LL_LINE: Final = 16


def ll_bytes(nbytes: int) -> int:
    """Bytes on the wire of a message of `nbytes` bytes of data with protocol LL: whole lines."""
    return -(-nbytes // 8) * LL_LINE


def encode(data: memoryview | bytes, flag: int) -> bytes:
    """Data as protocol LL sends it; the last line is filled up with zeros."""
    words = np.zeros(ll_bytes(len(data)) // 4, "<u4").reshape(-1, 4)
    words[:, 1::2] = flag
    padded = bytes(data) + bytes(-len(data) % 8)
    words[:, ::2] = np.frombuffer(padded, "<u4").reshape(-1, 2)
    return words.tobytes()
