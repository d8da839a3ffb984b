"""The base of models that are read from outside, or kept: unknown keys are refused, and values never change."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["FrozenModel"]


class FrozenModel(BaseModel):
    """A pydantic model that refuses unknown keys and never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)
