"""Which rank of how many this process is."""

from __future__ import annotations

import sys

__all__ = ["world_of_torch"]


def world_of_torch() -> tuple[int, int]:
    """(rank, number of ranks) of torch.distributed if it is initialised, else (0, 1)."""
    # Whoever has initialised it has imported it; asking must not cost the import of torch.
    group = sys.modules.get("torch.distributed")
    if group is not None and group.is_available() and group.is_initialized():
        return group.get_rank(), group.get_world_size()
    return 0, 1
