"""Messages that are coded as NCCL's LL and LL128, read by the plain parser.

LL is in lastgood/mirror/streams/ll.py. LL128: 120 bytes of data and a flag of 8 in each 128. A parser of mirrored
packets checks that all flags of a message are equal.
"""

from __future__ import annotations

import enum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lastgood.mirror.streams.ll import LL_LINE

LL128_LINE: Final = 128
LL128_DATA: Final = 120


class Coding(enum.IntEnum):
    """What the bytes of a message are."""

    RAW = 0
    """Data: protocol Simple."""
    LL = 1
    LL128 = 2


def data_bytes(coding: Coding, wire_bytes: int) -> int:
    """Bytes of data in so many bytes of a message, from its begin or another line's begin on."""
    if coding is Coding.LL:
        return wire_bytes // 2
    if coding is Coding.LL128:
        return wire_bytes // LL128_LINE * LL128_DATA
    return wire_bytes


def one_flag(coding: Coding, payload: memoryview | bytes) -> int:
    """The flag that all lines have; 0 if they differ, or if these are not whole lines."""
    line = LL128_LINE if coding is Coding.LL128 else LL_LINE
    if not len(payload) or len(payload) % line:
        return 0
    flags: NDArray[Any]
    if coding is Coding.LL128:
        flags = np.frombuffer(payload, "<u8").reshape(-1, 16)[:, 15]
    else:
        flags = np.frombuffer(payload, "<u4").reshape(-1, 4)[:, 1::2]
    first = int(flags.flat[0])
    return first if bool((flags == first).all()) else 0


def decode(coding: Coding, payload: memoryview | bytes) -> NDArray[np.uint8]:
    """The data of whole lines, in memory of its own."""
    if coding is Coding.LL:
        words = np.frombuffer(payload, "<u4").reshape(-1, 4)[:, ::2]
        return np.ascontiguousarray(words).reshape(-1).view(np.uint8)
    if coding is Coding.LL128:
        rows = np.frombuffer(payload, np.uint8).reshape(-1, LL128_LINE)[:, :LL128_DATA]
        return np.ascontiguousarray(rows).reshape(-1)
    return np.frombuffer(payload, np.uint8).copy()
