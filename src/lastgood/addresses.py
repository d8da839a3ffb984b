"""Addresses for native code, derived in one place from memory that is known to hold what they stand for.

Native code believes every address and length. What says how long something is may be a file or a connection, so each
range is compared here with the memory that it lies in: a tensor's own extent, not the storage that it is a view of,
since what lies beside it there belongs to others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lastgood.errors import CorruptCheckpoint

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["address_in", "check_range", "memory_address", "row_addresses"]


def address_in(target: torch.Tensor, offset: int, nbytes: int) -> int:
    """The address of `nbytes` bytes from byte `offset` of a CPU tensor on; the caller keeps the tensor.

    Raises CorruptCheckpoint if the tensor, from its first to its last element, does not hold them all.
    """
    begin, extent = _extent(target)
    check_range(offset, nbytes, extent)
    return begin + offset


def memory_address(memory: bytearray | memoryview, offset: int, nbytes: int) -> tuple[int, Any]:
    """The same for writable bytes of Python's: their address, and an object that keeps them where they are."""
    size = memory.nbytes if isinstance(memory, memoryview) else len(memory)
    check_range(offset, nbytes, size)
    if not size:
        return 0, memory
    anchor = (ctypes.c_char * size).from_buffer(memory)
    return ctypes.addressof(anchor) + offset, (anchor, memory)


def row_addresses(
    target: torch.Tensor, dtype: torch.dtype, begins: np.ndarray[Any, Any] | Sequence[int], elements: int
) -> list[int]:
    """The addresses of rows of `elements` elements of `dtype` that begin at these elements of a CPU tensor.

    Raises CorruptCheckpoint if the tensor is of another dtype, or does not hold a row.
    """
    if target.dtype != dtype:
        raise CorruptCheckpoint(f"elements of {dtype} for a tensor of {target.dtype}")
    begin, extent = _extent(target)
    item = target.element_size()
    if len(begins):
        check_range(int(min(begins)) * item, 0, extent)
        check_range(int(max(begins)) * item, elements * item, extent)
    return [begin + int(first) * item for first in begins]


def _extent(target: torch.Tensor) -> tuple[int, int]:
    """Address of the first element, and bytes from there to the end of the last one."""
    if target.device.type != "cpu":
        raise CorruptCheckpoint(f"native code cannot reach a tensor on {target.device}")
    if target.numel() == 0:
        return target.data_ptr(), 0
    reach = sum((size - 1) * step for size, step in zip(target.shape, target.stride(), strict=True))
    return target.data_ptr(), (reach + 1) * target.element_size()


def check_range(offset: int, nbytes: int, extent: int) -> None:
    """Raise CorruptCheckpoint unless `nbytes` from byte `offset` on are inside of memory of `extent` bytes."""
    if offset < 0 or nbytes < 0 or offset + nbytes > extent:
        raise CorruptCheckpoint(f"{nbytes} bytes at byte {offset} are outside of memory of {extent} bytes")
