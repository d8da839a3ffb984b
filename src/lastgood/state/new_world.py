"""A training that goes on with another number of ranks than its checkpoint was written by."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

__all__ = ["NewWorld"]


@dataclass(frozen=True)
class NewWorld:
    """Where a part of a state goes on.

    A part with a method ``load_from_ranks(states, world)`` is given what its `state_dict` returned on every rank that
    wrote the checkpoint, in their order, and decides itself; of all others the ranks' values must be equal.
    """

    rank: int
    world_size: int
    saved_world_size: int
    step: int
    job_id: str
    """Of the job that wrote the checkpoint, 32 hexadecimal digits."""

    def seed(self, purpose: str) -> int:
        """A number below 2**63 that depends on job, step, rank and purpose alone."""
        text = f"{purpose} {self.job_id} {self.step} {self.rank}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
