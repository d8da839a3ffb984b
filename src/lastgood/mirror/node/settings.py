"""How a mirror node is to run."""

from __future__ import annotations

from dataclasses import dataclass

from lastgood.gradients.layout.layout import BUCKET_BYTES
from lastgood.units import GIB, MIB

__all__ = ["NodeSettings"]


@dataclass(frozen=True)
class NodeSettings:
    """Beside those of its shadow (`ShadowSettings`)."""

    spill_every: int = 0
    """Steps between two that are made durable; 0: none is."""
    bucket_bytes: int = BUCKET_BYTES
    """Of the shadow's own buckets."""
    buffers_bytes: int = 2 * GIB
    """Memory for collectives that are open."""
    staged_bytes: int = 256 * MIB
    """Memory for pieces whose place is not known yet."""
    log_bytes: int = GIB
    """Memory for gradients that are logged while the node is blind."""
    wait_s: float = 60.0
    """Longest wait for the shadow."""
    fresh: bool = False
    """Take weights that are those of no held step for a beginning, with an optimizer that has no state yet."""
