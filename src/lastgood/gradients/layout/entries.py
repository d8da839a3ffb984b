"""Describes what a shadow keeps of an iteration: tensors in a stream, a rank's own state, the iteration itself.

These go into messages as well as into spills, so they are checked like all that comes from outside.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lastgood.wire.records import MAX_ITERATION

__all__ = ["Entry", "FrozenModel", "Iteration", "Number", "Saved", "Side"]

Number = Annotated[int, Field(ge=0, lt=1 << 63)]
Iteration = Annotated[int, Field(ge=0, lt=MAX_ITERATION)]


class FrozenModel(BaseModel):
    """Unknown keys and wrong types are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def content(self) -> dict[str, Any]:
        """As `Wire.send_message` takes it."""
        return self.model_dump(mode="json")


class Saved(FrozenModel):
    """An iteration that a shadow could give back."""

    kind: Literal["saved"] = "saved"
    epoch: Number
    """The incarnation that made it: in another one the same number is a different state."""
    iteration: Iteration
    step: Number


class Entry(FrozenModel):
    """One tensor in a stream of chunks, contiguous; streams hold their entries one after another without gaps."""

    kind: Literal["entry"] = "entry"
    parameter: Number
    key: Annotated[str, Field(max_length=100)]
    """`parameter` for the parameter itself, else the key in the optimizer's state of it."""
    dtype: Annotated[str, Field(max_length=20)]
    shape: Annotated[tuple[Number, ...], Field(max_length=64)]
    nbytes: Number


class Side(FrozenModel):
    """A rank's own state after an iteration: what gradients do not carry. Its chunks follow."""

    kind: Literal["side"] = "side"
    rank: Number
    iteration: Iteration
    step: Number
    layout: dict[str, Any] | None
    """How the rank's whole state is laid out; None: as in this rank's side record before."""
    nbytes: Number
