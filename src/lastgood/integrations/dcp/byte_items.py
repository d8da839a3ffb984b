"""Byte items: what DCP's planners put through torch.save, and load with ``weights_only=False``, that is, as a program.

Each is read as data first. What the planner gets is that value, saved anew by this process.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lastgood.bounds import Budget, Refused
from lastgood.checkpointers.torch_files.archive import TorchFile, reading
from lastgood.errors import CorruptCheckpoint, StateError

__all__ = ["allowed_names", "check_readable", "checked_bytes"]


def checked_bytes(content: bytes, where: str, allow: tuple[tuple[str, str], ...]) -> io.BytesIO:
    """A byte item for torch's planner, once nothing in it but plain data, tensors and `allow` was found.

    `where` names the file and the entry. Raises CorruptCheckpoint.
    """
    with reading(Path(where)):
        try:
            value, foreign = _read(content, allow)
        except Refused as error:
            if error.unknown is not None:
                raise CorruptCheckpoint(
                    f"{where}: {error}; if it is yours, name it: LastgoodReader(..., allow=[...])"
                ) from error
            raise
    if foreign:
        return io.BytesIO(content)
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def allowed_names(allow: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    """The names by which pickles have these classes and functions."""
    return tuple((one.__module__, one.__qualname__) for one in allow)


def check_readable(content: bytes, name: str, allow: tuple[tuple[str, str], ...]) -> None:
    """Raise StateError for a byte item that `checked_bytes` would refuse."""
    try:
        _read(content, allow)
    except ValueError as error:
        raise StateError(
            f"{name}: Lastgood would not load this value again: {error}; keep it as plain values and tensors, or name "
            "its class for writer and reader: allow=[...]"
        ) from error


def _read(content: bytes, allow: tuple[tuple[str, str], ...]) -> tuple[Any, bool]:
    """The value, and whether it holds objects of allowed classes."""
    descriptor = os.memfd_create("lastgood-item", os.MFD_CLOEXEC)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(content)
        try:
            return TorchFile(descriptor, 0, len(content), Budget(len(content))).read(), False
        except Refused as error:
            if error.unknown is None or not allow:
                raise
        return TorchFile(descriptor, 0, len(content), Budget(len(content))).read(allow), True
    finally:
        os.close(descriptor)
