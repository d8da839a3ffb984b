"""Memory of a capture: computed before anything is taken, and where it lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lastgood.errors import HostError
from lastgood.units import format_bytes
from lastgood.wire.frames import available_memory_bytes

__all__ = ["address_of", "check_memory", "memory_lines"]


def address_of(data: memoryview) -> int:
    """Where the bytes of `data` lie; it must be kept as long as the address is used."""
    return int(np.frombuffer(data, np.uint8).ctypes.data) if len(data) else 0


def memory_lines(needs: Mapping[str, int]) -> Sequence[str]:
    """A line for each need, and their sum."""
    lines = [f"{what}: {format_bytes(nbytes)}" for what, nbytes in needs.items()]
    return [*lines, f"together: {format_bytes(sum(needs.values()))}"]


def check_memory(needs: Mapping[str, int], available_bytes: int | None = None) -> None:
    """Raise HostError, with all needs, if this machine does not have so much memory now."""
    there = available_memory_bytes() if available_bytes is None else available_bytes
    if sum(needs.values()) > there:
        raise HostError(
            f"this machine has {format_bytes(there)} of memory free; {'; '.join(memory_lines(needs))}: "
            f"take smaller rings, or free memory"
        )
