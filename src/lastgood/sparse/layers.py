"""The layers of a model: the parameters that its optimizer trains, each once, in the model's order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lastgood._lazy import torch
from lastgood.errors import ConfigError
from lastgood.sparse.blocks import MAX_ELEMENTS

__all__ = ["Layer", "digest_of", "find_layers", "flat_gradient", "refuse_other_gradients"]


@dataclass(frozen=True, eq=False)
class Layer:
    """A parameter. `number` is its place in the model, and so its priority."""

    number: int
    name: str
    parameter: torch.nn.Parameter

    @property
    def line(self) -> str:
        """What must be the same on all ranks, as a text."""
        return f"{self.name} {tuple(self.parameter.shape)} {self.parameter.dtype}"


def find_layers(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Layer]:
    """What `optimizer` trains: parameters of `model` under their (first) names, then others under their numbers.

    Frozen parameters and empty ones are left out. Raises ConfigError for what cannot be trained so.
    """
    trained = {
        id(parameter): (f"optimizer.param_groups[{group}]['params'][{place}]", parameter)
        for group, held in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(held["params"])
    }
    named = [(name, one) for name, one in model.named_parameters() if id(one) in trained]
    known = {id(one) for _, one in named}
    named += [(name, one) for name, one in trained.values() if id(one) not in known]
    layers: list[Layer] = []
    for name, parameter in named:
        if torch.nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"{name} has no shape yet (a lazy module); run one forward pass before the engine is made"
            )
        if not parameter.requires_grad or not parameter.numel():
            continue
        if parameter.device.type not in ("cpu", "cuda"):
            raise ConfigError(f"{name} is on {parameter.device}: the sparse engine trains on the CPU and on CUDA")
        if not parameter.is_contiguous():
            raise ConfigError(f"{name} is not contiguous; make it so, as parameter.data = parameter.data.contiguous()")
        if parameter.numel() > MAX_ELEMENTS:
            raise ConfigError(
                f"{name} has {parameter.numel()} elements; the sparse engine takes {MAX_ELEMENTS} at most"
            )
        layers.append(Layer(len(layers), name, parameter))
    if not layers:
        raise ConfigError("the optimizer trains no parameter: all are frozen, or empty")
    return layers


def flat_gradient(layer: Layer) -> torch.Tensor:
    """The gradient of a layer as a flat tensor in the parameter's order; a copy only if it lies in another one.

    Raises ConfigError for sparse gradients.
    """
    gradient = layer.parameter.grad
    assert gradient is not None
    if gradient.layout is not torch.strided:
        raise ConfigError(f"{layer.name} has a gradient of layout {gradient.layout}; make it dense, as sparse=False")
    return gradient.detach().contiguous().view(-1)


def refuse_other_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError if there is one once the layers' are taken: torch's step would make a step of this rank's own.

    To be called before the optimizer's step.
    """
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter.grad is not None:
                raise ConfigError(
                    f"parameter {place} of group {number}, of shape {tuple(parameter.shape)}, has a gradient, and "
                    "was frozen or in no group when the engine was made; make the engine after that change"
                )


def digest_of(tensors: Iterable[torch.Tensor], words: Sequence[object] = ()) -> str:
    """Of the tensors' bytes and some words, in 64 hexadecimal digits."""
    hasher = hashlib.sha256(repr(tuple(words)).encode())
    for tensor in tensors:
        hasher.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()
