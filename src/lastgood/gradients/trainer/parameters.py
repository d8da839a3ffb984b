"""The parameters that an optimizer updates, as they lie in a training's memory, and their place in the layout.

Shadows know bytes only. Those of a tensor are taken in the order in which they lie in memory, so that a parameter in
channels_last needs no copy; its declared shape is that of its memory then, and its name shows that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lastgood._lazy import torch
from lastgood.errors import ConfigError
from lastgood.gradients.layout.entries import Entry
from lastgood.gradients.layout.layout import GradientLayout
from lastgood.state.optimizers import calls_step_hooks
from lastgood.state.shards import is_sharded, local_part

__all__ = ["PARAMETER", "BucketCopy", "TrackedParameters", "flat_bytes", "memory_order"]

PARAMETER = "parameter"
"""Key of an Entry that is a parameter itself."""


def memory_order(tensor: torch.Tensor, name: str) -> tuple[int, ...]:
    """The dimensions of a tensor, from the one whose steps in memory are largest to the smallest.

    Raises ConfigError for one that has gaps, or elements that are one in memory.
    """
    order = tuple(range(tensor.dim()))
    if not tensor.is_contiguous():
        strides = tensor.stride()
        order = tuple(sorted(order, key=lambda dim: (-strides[dim], dim)))
        if not tensor.permute(order).is_contiguous():
            raise ConfigError(
                f"{name}: shape {tuple(tensor.shape)} with strides {tensor.stride()} is no dense block of memory; "
                "checkmate can shadow it once it is made contiguous()"
            )
    return order


def flat_bytes(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The bytes of a tensor, one-dimensional, in `order`; its own memory if they lie so, else a copy."""
    ordered = tensor.detach().permute(tuple(order)) if len(order) == tensor.dim() else tensor.detach()
    return ordered.contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class BucketCopy:
    """A bucket of the training, with its optimizer's state, copied to host memory."""

    bucket: int
    iteration: int
    entries: tuple[Entry, ...]
    memory: torch.Tensor


class TrackedParameters:
    """What one rank's optimizer updates. Made before the first step; the parameters must stay the same objects.

    `index` of a parameter is its place in the optimizer's groups, one after another. Raises ConfigError for states
    that this system cannot follow, and says what to do.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        optimizers = {name: part for name, part in state.items() if isinstance(part, torch.optim.Optimizer)}
        if len(optimizers) != 1:
            raise ConfigError(
                f"checkmate follows one optimizer, and this state has {len(optimizers)}: "
                f"{', '.join(optimizers) or '-'}{_wrapped(state)}"
            )
        ((self.part, self.optimizer),) = optimizers.items()
        if not calls_step_hooks(self.optimizer):
            raise ConfigError(
                f"checkmate: {self.part} is a {type(self.optimizer).__name__}, which steps another optimizer and calls "
                f"no hooks of torch; attach the one beneath it, as attach({self.part}={self.part}.optimizer)"
            )
        self.parameters: list[torch.Tensor] = [
            parameter for group in self.optimizer.param_groups for parameter in group["params"]
        ]
        names = _names(state, self.parameters)
        self.names = [names.get(id(parameter), f"{self.part}.{i}") for i, parameter in enumerate(self.parameters)]
        still = [name for name, one in zip(self.names, self.parameters, strict=True) if not one.requires_grad]
        if still:
            raise ConfigError(
                f"checkmate: {', '.join(still[:3])}{' ...' if len(still) > 3 else ''} never gets a gradient "
                f"(requires_grad=False); give the optimizer only what it updates: "
                "[p for p in model.parameters() if p.requires_grad]"
            )
        self.orders = [
            memory_order(local_part(one), name) for name, one in zip(self.names, self.parameters, strict=True)
        ]
        self.index_of = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self.spread = any(map(is_sharded, self.parameters))
        """Whether each rank has parts of parameters only."""

    def declared(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Name, shape and dtype of each parameter's local part, as `plan_layout` takes them."""
        found = []
        for name, parameter, order in zip(self.names, self.parameters, self.orders, strict=True):
            local = local_part(parameter)
            shape = tuple(local.shape[dim] for dim in order)
            if order != tuple(range(len(order))):
                name = f"{name}@{','.join(map(str, order))}"
            found.append((name, shape, str(local.dtype).removeprefix("torch.")))
        return found

    def _held(self, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, local tensor) of a parameter and of every tensor of its optimizer state, keys sorted."""
        yield PARAMETER, local_part(parameter)
        kept = self.optimizer.state.get(parameter, {})
        for key in sorted(kept):
            if isinstance(kept[key], torch.Tensor):
                yield key, local_part(kept[key])

    def order_for(self, index: int, tensor: torch.Tensor) -> tuple[int, ...]:
        """The order of bytes of a tensor of this parameter: the parameter's own, if it has as many dimensions."""
        order = self.orders[index]
        return order if tensor.dim() == len(order) else tuple(range(tensor.dim()))

    def copy_bucket(self, layout: GradientLayout, bucket: int, iteration: int, first: int) -> BucketCopy:
        """A bucket as it is now, in host memory. `first` is this rank's first index in the layout.

        The entries are one after another: for each parameter in the bucket's order itself, then its optimizer state.
        """
        entries, sources = [], []
        for declared in layout.buckets[bucket].parameters:
            index = declared - first
            for key, tensor in self._held(self.parameters[index]):
                order = self.order_for(index, tensor)
                shape = tuple(tensor.shape[dim] for dim in order)
                sources.append(flat_bytes(tensor, order))
                dtype = str(tensor.dtype).removeprefix("torch.")
                entries.append(Entry(parameter=declared, key=key, dtype=dtype, shape=shape, nbytes=tensor.nbytes))
        pinned = any(source.is_cuda for source in sources)
        memory = torch.empty(sum(entry.nbytes for entry in entries), dtype=torch.uint8, pin_memory=pinned, device="cpu")
        at = 0
        for source in sources:
            memory[at : at + source.numel()].copy_(source, non_blocking=True)
            at += source.numel()
        if pinned:
            torch.cuda.current_stream(next(one.device for one in sources if one.is_cuda)).synchronize()
        return BucketCopy(bucket, iteration, tuple(entries), memory)


def _wrapped(state: Mapping[str, Any]) -> str:
    """What to do about an optimizer that DeepSpeed has put into one of its own."""
    for name, part in state.items():
        inner = getattr(part, "optimizer", None)  # schedulers have one as well
        if isinstance(inner, torch.optim.Optimizer) and callable(getattr(part, "backward", None)):
            return (
                f"; {name} is DeepSpeed's {type(part).__name__}: give the parts of LiveZero in its place, with ZeRO 1, "
                "2 or 3 (docs/deepspeed.md)"
            )
    return ""


def _names(state: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> dict[int, str]:
    """Names of parameters in the state's modules."""
    wanted = {id(parameter) for parameter in parameters}
    found: dict[int, str] = {}
    for part, value in state.items():
        if isinstance(value, torch.nn.Module):
            for name, parameter in value.named_parameters(prefix=part):
                if id(parameter) in wanted:
                    found.setdefault(id(parameter), name)
    return found
