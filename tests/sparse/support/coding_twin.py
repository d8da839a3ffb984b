"""The plain twin of the kernels for indices of sparse blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lastgood.sparse.coding import Coding

LOW: dict[Coding, tuple[int, npt.DTypeLike]] = {Coding.LOW_8: (8, "<u1"), Coding.LOW_16: (16, "<u2")}


def write_indices(coding: Coding, indices: npt.NDArray[np.uint32], places: int) -> bytes:
    if coding is Coding.ALL:
        return b""
    if coding is Coding.BITS:
        return set_bits(indices, places)
    if coding is Coding.NUMBERS:
        return indices.astype("<u4").tobytes()
    low, kind = LOW[coding]
    numbers = (indices >> np.uint32(low)) + np.arange(len(indices), dtype=np.int64)
    return indices.astype(kind).tobytes() + set_bits(numbers, len(indices) + ((places - 1) >> low))


def set_bits(numbers: npt.NDArray[Any], length: int) -> bytes:
    bits = np.zeros(length, np.uint8)
    bits[numbers] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def read_indices(coding: Coding, content: bytes, places: int, count: int) -> list[int] | None:
    """None where `sparse_read_indices` says False."""
    if coding is Coding.ALL:
        return list(range(places))
    if coding is Coding.NUMBERS:
        return np.frombuffer(content, "<u4").tolist()
    if coding is Coding.BITS:
        return find_bits(content, places, count)
    low, kind = LOW[coding]
    split = low // 8 * count
    high = find_bits(content[split:], count + ((places - 1) >> low), count)
    if high is None:
        return None
    lows = np.frombuffer(content[:split], kind).tolist()
    return [(bit - at << low) | one for at, (bit, one) in enumerate(zip(high, lows, strict=True))]


def find_bits(content: bytes, length: int, count: int) -> list[int] | None:
    found = np.flatnonzero(np.unpackbits(np.frombuffer(content, np.uint8), bitorder="little")).tolist()
    return found if len(found) == count and (not found or found[-1] < length) else None
