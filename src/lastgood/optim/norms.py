"""The global norm of gradients on several shards, as torch.nn.utils.clip_grad_norm_ computes it for a whole model.

For shadows whose trainers send no coefficient. On a CPU, torch's reduction of one tensor depends on its number of
threads, so a shard must run on as many as the trainer. A norm that was reduced on CUDA differs in its last bits: CUDA
trainers send theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lastgood._lazy import torch
from lastgood.errors import MismatchError
from lastgood.optim.rule import ClipNorm

__all__ = ["clip_by_norm", "global_norm", "parameter_norms"]


def parameter_norms(gradients: Sequence[torch.Tensor], norm_type: float = 2.0) -> list[torch.Tensor]:
    """The norm of each gradient: scalars of its dtype."""
    return [torch.linalg.vector_norm(gradient, norm_type) for gradient in gradients]


def global_norm(norms: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The norm over all parameters, from their norms in the order of the model's list, of all shards.

    torch takes norms of one dtype together, in an order of its own, and so does this. Raises MismatchError if a norm
    is no scalar.
    """
    if any(norm.dim() != 0 for norm in norms):
        raise MismatchError("a parameter's norm is one number; gather one from each parameter of every shard, in order")
    if not norms:
        return torch.tensor(0.0)
    from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

    grouped = _group_tensors_by_device_and_dtype([list(norms)])
    ordered = [norm for (alike,), _ in grouped.values() for norm in alike if norm is not None]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(ordered), norm_type)
    return total


def clip_by_norm(total: torch.Tensor, max_norm: float) -> ClipNorm:
    """The coefficient that gradients of norm `total` are multiplied by, never over 1."""
    coefficient = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    value = float(coefficient)
    return ClipNorm(math.nan if math.isnan(value) else value, str(coefficient.dtype).removeprefix("torch."))
