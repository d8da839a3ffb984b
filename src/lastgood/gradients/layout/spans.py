"""Which part of what was reduced a rank sends, and where its bytes belong in the declared layout. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lastgood.gradients.layout.layout import GradientLayout
from lastgood.wire.records import ITEM_BYTES, DType

__all__ = ["Cover", "Span", "sent_range", "spans_of"]

Cover = Literal["balanced", "artefact"]
"""How ranks share out what all of them hold after a reduction: a part each; or, as in the paper's artefact, rank 0 the
first of N parts and the last rank all others (the links that its switch marks)."""


@dataclass(frozen=True)
class Span:
    """A run of bytes that is contiguous at both ends."""

    bucket: int
    dtype: DType
    offset: int
    """In the declared bucket."""
    source: int
    """In the memory that was reduced."""
    nbytes: int


def sent_range(elements: int, rank: int, ranks: int, cover: Cover) -> tuple[int, int]:
    """Elements [begin, end) of a reduced buffer that `rank` sends. The ranges of all ranks are the buffer, once."""
    part = -(-elements // ranks)
    if cover == "balanced":
        return min(rank * part, elements), min((rank + 1) * part, elements)
    if rank == 0:
        return 0, elements if ranks == 1 else part
    return (part, elements) if rank == ranks - 1 else (elements, elements)


def spans_of(
    layout: GradientLayout,
    reduced: Sequence[tuple[int | None, int]],
    dtype: DType | None,
    sent: tuple[int, int],
) -> list[Span]:
    """The runs of `sent` (an element range of a buffer) that belong to the layout, in the buffer's order.

    `reduced` says what lies in the buffer, without gaps: for each tensor the parameter's index in the layout, or None
    for one that no optimizer updates, and its elements. `dtype` is the buffer's (None: one that no record can carry).
    Raises ValueError if a parameter is not of the size and dtype that was declared.
    """
    found: list[Span] = []
    begin = 0
    itemsize = 0 if dtype is None else ITEM_BYTES[dtype]
    for index, elements in reduced:
        end = begin + elements
        if index is not None:
            declared = layout.parameters[index]
            if declared.nbytes != elements * itemsize or declared.dtype is not dtype:
                raise ValueError(
                    f"{declared.name} has {declared.nbytes} bytes of {declared.dtype.name}, its gradient "
                    f"{elements * itemsize} of {'another type' if dtype is None else dtype.name}"
                )
            low, high = max(sent[0], begin), min(sent[1], end)
            if low < high:
                offset = declared.offset + (low - begin) * itemsize
                _append(found, Span(declared.bucket, declared.dtype, offset, low * itemsize, (high - low) * itemsize))
        begin = end
    return found


def _append(found: list[Span], span: Span) -> None:
    """Add a run, joined to the one before it if both ends go on."""
    if found:
        last = found[-1]
        following = (last.bucket, last.offset + last.nbytes, last.source + last.nbytes)
        if (span.bucket, span.offset, span.source) == following:
            found[-1] = replace(last, nbytes=last.nbytes + span.nbytes)
            return
    found.append(span)
