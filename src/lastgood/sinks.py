"""Where the bytes of a checkpoint go: what a bound is limited by, and where a system's checkpoints are safe."""

from __future__ import annotations

import enum

__all__ = ["Sink"]


class Sink(str, enum.Enum):
    """One kind of place for checkpoints. Records and tables have its value."""

    DISK = "disk"
    """A disk of the machine that trains."""
    LINK = "link"
    """The network: checkpoints, or gradients, go to other machines, and the link is slower than what takes them."""
    MEMORY = "memory"
    """The memory of other processes."""
    OBJECT_STORE = "object_store"
    """Objects under keys, as S3 has them."""

    def __str__(self) -> str:
        # Python 3.10 and 3.11 would print it differently, and neither as tables have it.
        return self.value
