"""The kernel's page cache: dropping what it has of files, and how much of them it still has."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

__all__ = ["cached_share", "forget_cached_pages"]

_WINDOW = 1 << 30
"""Looked at at once: a byte of memory for each of its pages."""


def forget_cached_pages(folder: Path) -> None:
    """Ask the kernel to drop the files from its page cache, so that a restore reads the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(folder: Path) -> float | None:
    """Which part of the bytes of all files below a folder is in the page cache; None if there are none.

    The kernel tells that of files that this user may write to, and of others that they are there completely.
    """
    nbytes = cached = 0
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                nbytes += size
                for begin in range(0, size, _WINDOW):
                    cached += _cached_bytes(file.fileno(), begin, min(_WINDOW, size - begin))
    return min(1.0, cached / nbytes) if nbytes else None


def _cached_bytes(descriptor: int, begin: int, nbytes: int) -> int:
    pages = np.zeros(-(-nbytes // mmap.PAGESIZE), dtype=np.uint8)
    with mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ, offset=begin) as mapped:
        address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_void_p(pages.ctypes.data)):
            raise OSError(ctypes.get_errno(), "mincore")
    return int((pages & 1).sum()) * mmap.PAGESIZE
