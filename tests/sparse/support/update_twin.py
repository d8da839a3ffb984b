"""The sparse optimizer's native kernels in torch's own operations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from lastgood.sparse.blocks import SparseGradient
from lastgood.sparse.steps import FIRST, MAXIMIZE, NESTEROV

__all__ = ["Rows", "catch_up", "merge", "update"]

Rows = npt.NDArray[np.float64]
"""[steps, ROW]: one row for each step, in their order."""


def merge(gathered: Sequence[SparseGradient], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements (int64, ascending) that some rank sent, and the sums of their values in rank order, times `scale`."""
    width, elements = gathered[0].width, gathered[0].elements
    places = np.unique(np.concatenate([one.indices for one in gathered]))
    sums = torch.zeros(len(places), width, dtype=torch.float32, device="cpu")
    for one in gathered:
        at = torch.from_numpy(np.searchsorted(places, one.indices).astype(np.int64))
        sums[at] += one.values.float().view(-1, width)
    chosen = (torch.from_numpy(places.astype(np.int64))[:, None] * width + torch.arange(width, device="cpu")).flatten()
    inside = chosen < elements
    return chosen[inside], sums.flatten()[inside].mul_(scale)


def update(
    adam: bool,
    parameter: torch.Tensor,
    moments: Sequence[torch.Tensor],
    gathered: Sequence[SparseGradient],
    scale: float,
    rows: Rows,
    base: int = 0,
    touched: torch.Tensor | None = None,
) -> None:
    """Make the last of `rows` at the elements that some rank sent; before it, with `touched`, what each missed.

    `parameter` and `moments` are flat float32 tensors. `touched` (int32) holds, for each place (element or block), the
    number of the last step that was made there; row i is step base + 1 + i.
    """
    chosen, gradient = merge(gathered, scale)
    values = [tensor[chosen] for tensor in (parameter, *moments)]
    if touched is not None:
        places = chosen // gathered[0].width
        _missed(adam, values, rows[:-1], touched[places].long() - base)
        touched[places] = base + len(rows)
    _step(adam, values, gradient, rows[-1])
    for tensor, value in zip((parameter, *moments), values, strict=True):
        tensor[chosen] = value


def catch_up(
    adam: bool,
    parameter: torch.Tensor,
    moments: Sequence[torch.Tensor],
    rows: Rows,
    base: int,
    touched: torch.Tensor,
    width: int,
) -> None:
    """Make all that any element missed of `rows`, as `update` does; `touched` then holds the last step everywhere."""
    made = (touched.long() - base).repeat_interleave(width)[: parameter.numel()]
    _missed(adam, [parameter, *moments], rows, made)
    touched.fill_(base + len(rows))


def _missed(adam: bool, values: Sequence[torch.Tensor], rows: Rows, made: torch.Tensor) -> None:
    """Steps with gradients of zero, in place, from row number `made` on, for each element."""
    for number in range(int(made.min()) if made.numel() else len(rows), len(rows)):
        late = made <= number
        part = [value[late] for value in values]
        _step(adam, part, torch.zeros_like(part[0]), rows[number])
        for value, own in zip(values, part, strict=True):
            value[late] = own


def _step(adam: bool, values: Sequence[torch.Tensor], gradient: torch.Tensor, row: npt.NDArray[np.float64]) -> None:
    """The operations of torch's single-tensor SGD and Adam, in place, but for the square root."""
    flags = int(row[-1])
    if flags & MAXIMIZE:
        gradient = -gradient
    if adam:
        _adam(values[0], values[1], values[2], gradient, [float(number) for number in row])
        return
    parameter, buffers = values[0], values[1:]
    decay, momentum, undampened, negative_lr = (float(number) for number in row[:4])
    if decay != 0:
        gradient = gradient.add(parameter, alpha=decay)
    if momentum != 0:
        buffer = buffers[0]
        if flags & FIRST:
            buffer.copy_(gradient)
        else:
            buffer.mul_(momentum).add_(gradient, alpha=undampened)
        gradient = gradient.add(buffer, alpha=momentum) if flags & NESTEROV else buffer
    parameter.add_(gradient, alpha=negative_lr)


def _adam(
    parameter: torch.Tensor, first: torch.Tensor, second: torch.Tensor, gradient: torch.Tensor, row: Sequence[float]
) -> None:
    l2, factor, weight1, beta2, weight2, negative_size, correction, eps, _ = row
    if factor != 1:
        parameter.mul_(factor)
    if l2 != 0:
        gradient = gradient.add(parameter, alpha=l2)
    first.lerp_(gradient, weight1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=weight2)
    # torch's square root may be MKL's, which is not always the nearest number; numpy's is, and its fused kernels' too.
    root = torch.from_numpy(np.sqrt(second.numpy()))
    parameter.addcdiv_(first, (root / correction).add_(eps), value=negative_size)
