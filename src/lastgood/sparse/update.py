"""Native steps over a few elements of a tensor, and over those steps that an element missed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from lastgood import _native
from lastgood._lazy import torch
from lastgood.sparse.blocks import SparseGradient

__all__ = ["Rows", "catch_up", "type_names", "update", "update_all"]

Rows = npt.NDArray[np.float64]
"""[steps, ROW], C order: one row for each step, in their order."""

_EVERYWHERE: Final = 0  # no counters: nothing is made up


def update(
    adam: bool,
    parameter: torch.Tensor,
    moments: Sequence[torch.Tensor],
    gathered: Sequence[SparseGradient],
    scale: float,
    rows: Rows,
    base: int = 0,
    touched: torch.Tensor | None = None,
    *,
    threads: int = 1,
    variant: str = "",
) -> None:
    """Make the last of `rows` at the elements that some rank sent; before it, with `touched`, what each missed.

    The gradient there is the sum of what ranks sent, from zero and in their order, times `scale`, in float32.
    `parameter` and `moments` are flat float32 tensors. `touched` (int32) holds, for each place (element or block), the
    number of the last step that was made there; row i is step base + 1 + i. ValueError, and nothing has changed, for
    indices or values that are not valid; that they are uint32, and as many as they should be, is not checked.
    """
    kept = _contiguous(gathered)
    _native.sparse_update(
        adam,
        _addresses(parameter, moments, gathered[0].width),
        [_block(one) for one in kept],
        scale=scale,
        rows=rows.ctypes.data,
        steps=len(rows),
        base=base,
        touched=_EVERYWHERE if touched is None else touched.data_ptr(),
        threads=threads,
        variant=variant,
    )


def update_all(
    adam: bool,
    tensors: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor], Sequence[SparseGradient]]],
    scale: float,
    rows: Rows,
    *,
    threads: int = 1,
    variant: str = "",
) -> None:
    """`update` of several tensors in one call: parameter, moments and what ranks sent of each; a row for each.

    Nothing has changed after a ValueError.
    """
    kept = [_contiguous(gathered) for _, _, gathered in tensors]
    _native.sparse_update_all(
        adam,
        [_addresses(parameter, moments, gathered[0].width) for parameter, moments, gathered in tensors],
        [[_block(one) for one in blocks] for blocks in kept],
        scale=scale,
        rows=rows.ctypes.data,
        threads=threads,
        variant=variant,
    )


def catch_up(
    adam: bool,
    parameter: torch.Tensor,
    moments: Sequence[torch.Tensor],
    rows: Rows,
    base: int,
    touched: torch.Tensor,
    width: int,
    *,
    threads: int = 1,
    variant: str = "",
) -> None:
    """Make all that any element missed of `rows`, as `update` does; `touched` then holds the last step everywhere."""
    _native.sparse_catch_up(
        adam,
        _addresses(parameter, moments, width),
        rows=rows.ctypes.data,
        steps=len(rows),
        base=base,
        touched=touched.data_ptr(),
        threads=threads,
        variant=variant,
    )


@functools.cache
def type_names() -> dict[torch.dtype, str]:
    """The types that values may have, and what native code calls them."""
    return {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def _contiguous(gathered: Sequence[SparseGradient]) -> list[tuple[npt.NDArray[np.uint32], torch.Tensor]]:
    return [(np.ascontiguousarray(one.indices), one.values.contiguous()) for one in gathered]


def _block(one: tuple[npt.NDArray[np.uint32], torch.Tensor]) -> tuple[int, int, int, str]:
    """As native code takes it, of arrays that the caller keeps."""
    indices, values = one
    # `ctypes.data` takes three times as long.
    return indices.__array_interface__["data"][0], len(indices), values.data_ptr(), type_names()[values.dtype]


def _addresses(parameter: torch.Tensor, moments: Sequence[torch.Tensor], width: int) -> tuple[int, int, int, int, int]:
    first, second, *_ = [*(moment.data_ptr() for moment in moments), 0, 0]
    return parameter.data_ptr(), first, second, parameter.numel(), width
