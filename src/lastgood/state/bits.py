"""Copies between tensors of one dtype and shape that keep every bit, wherever and however the target lies in memory."""

from __future__ import annotations

import contextlib

from lastgood._lazy import torch
from lastgood.errors import MismatchError
from lastgood.state.shards import local_part

__all__ = ["copy_bits", "needs_own_copy"]


def needs_own_copy(tensor: torch.Tensor) -> bool:
    """Whether torch's own copy into `tensor` would change bits (of bools), or be refused (expanded, inference)."""
    local = local_part(tensor)
    return local.dtype is torch.bool or local.is_inference() or _overlaps(local)


def copy_bits(live: torch.Tensor, saved: torch.Tensor, path: str) -> None:
    """Overwrite `live` with `saved`, which has its dtype and shape, and is spread as it is.

    Raises MismatchError, naming `path`, if elements of `live` share memory that are different in `saved`.
    """
    target, source = local_part(live), local_part(saved)
    inference = torch.inference_mode() if target.is_inference() else contextlib.nullcontext()
    with torch.no_grad(), inference:
        if target.dtype is torch.bool:
            # A bool may hold any byte, and a copy of bools makes each of them 0 or 1.
            target, source = target.view(torch.uint8), source.view(torch.uint8)
        if _overlaps(target):
            _copy_shared(target, source, path)
        else:
            target.copy_(source)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory: expanded tensors, windows. True for some odd strides that only seem to."""
    if tensor.numel() < 2 or tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _copy_shared(target: torch.Tensor, source: torch.Tensor, path: str) -> None:
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(target.element_size())
    if as_integers is not None:
        target, source = target.view(as_integers), source.view(as_integers)
    source = source.to(target.device)
    offsets = torch.zeros((), dtype=torch.int64, device=target.device)
    for dimension, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        steps = torch.arange(size, device=target.device) * stride
        offsets = offsets + steps.reshape([-1 if one == dimension else 1 for one in range(target.dim())])
    offsets = offsets.reshape(-1)
    memory = target.as_strided((int(offsets.max()) + 1,), (1,))
    wanted = source.reshape(-1)
    memory[offsets] = wanted
    if not torch.equal(memory[offsets], wanted):
        raise MismatchError(
            f"{path}: elements of the state's tensor share memory (it is expanded), and are different ones in the "
            "checkpoint; make it a tensor of its own with clone()"
        )
