"""Large host memory, in huge pages if the kernel has them.

Small pages fault slowly, and each of them is looked up in tables again and again: on a virtual machine in two sets of
tables. If a whole state is written or read once an iteration, that is a good part of the time.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

from lastgood._lazy import torch

__all__ = ["fresh_memory", "into_huge_pages", "map_memory"]

_HUGE_FROM = 2 << 20
_MADV_COLLAPSE = 25  # from Linux 6.1 on
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_memory(size: int) -> mmap.mmap:
    """`size` bytes (at least 1) of fresh memory of this process, all zero; none is taken before it is touched."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def fresh_memory(size: int) -> torch.Tensor:
    """The same as a uint8 tensor on the CPU, which holds it as long as anything looks at it."""
    if size < _HUGE_FROM:
        return torch.zeros(size, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(map_memory(size), dtype=torch.uint8)


def into_huge_pages(tensor: torch.Tensor) -> bool:
    """Move what a contiguous tensor on the CPU holds into huge pages; its content and its addresses stay.

    False if the kernel cannot, or if no huge page would fit into it. Takes about as long as a copy of it.
    """
    begin = -(-tensor.data_ptr() // _HUGE_FROM) * _HUGE_FROM
    end = (tensor.data_ptr() + tensor.nbytes) // _HUGE_FROM * _HUGE_FROM
    return end > begin and _libc.madvise(begin, end - begin, _MADV_COLLAPSE) == 0
