"""What a rank of a training over links is told, and what comes of it. Needs no torch."""

from __future__ import annotations

from pydantic import Field

from lastgood.experiments.records.stellatrain import LinkBlock, LinksSettings, Way
from lastgood.models import FrozenModel

__all__ = ["LinksOrder", "LinksResult"]


class LinksOrder(FrozenModel):
    """What a rank is told, on its command line."""

    settings: LinksSettings
    rate_bits_per_s: int
    rounds: list[list[Way]]
    """The ways of each round, in their order."""
    seed: int
    result: str
    """The file to which rank 0 writes its result."""


class LinksResult(FrozenModel):
    """What rank 0 knows in the end."""

    parameters: int = Field(ge=1)
    blocks: list[LinkBlock]
