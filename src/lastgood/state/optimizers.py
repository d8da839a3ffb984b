"""The optimizers in a state: also those that another object steps, as wrappers of optimizers do.

A wrapper (accelerate's, Lookahead, ScheduleFree's) is an optimizer by its methods, and holds the one that does the
work. torch's hooks of steps and loads are called by optimizers whose class went through torch's own constructor; a
wrapper often has none, or has them and never calls them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lastgood._lazy import torch
from lastgood.errors import StateError

__all__ = ["calls_step_hooks", "is_optimizer", "optimizers_beneath", "optimizers_of", "state_of", "trained_parameters"]

_DEPTH = 4
"""Wrappers around wrappers that are looked through."""
_MOST_ITEMS = 10_000
"""A longer container holds a training's values, or its data, and no optimizers."""
_FORWARDERS = {
    "accelerate.optimizer.AcceleratedOptimizer": "optimizer",
    "lightning.fabric.wrappers._FabricOptimizer": "_optimizer",
    "lightning_fabric.wrappers._FabricOptimizer": "_optimizer",
    "lightning.pytorch.core.optimizer.LightningOptimizer": "_optimizer",
    "pytorch_lightning.core.optimizer.LightningOptimizer": "_optimizer",
}
"""Wrappers of frameworks that change nothing themselves, and where each keeps the optimizer that it steps.

They are called for each micro-batch, and step what is beneath at the end of a window only; their ``train`` and ``eval``
are called before each batch, whether or not what is beneath has them.
"""


def is_optimizer(part: Any) -> bool:
    """Whether `part` updates parameters: torch's optimizers, and whatever has their methods and groups."""
    if isinstance(part, torch.optim.Optimizer):
        return True
    if isinstance(part, (torch.nn.Module, torch.Tensor, type)):
        return False
    methods = all(callable(getattr(part, name, None)) for name in ("step", "state_dict", "load_state_dict"))
    return methods and isinstance(getattr(part, "param_groups", None), list)


def calls_step_hooks(optimizer: Any) -> bool:
    """Whether `optimizer.step()` calls the hooks that are registered on it: torch marks the class's step."""
    return (
        isinstance(optimizer, torch.optim.Optimizer)
        and bool(getattr(type(optimizer).step, "hooked", False))
        and isinstance(getattr(optimizer, "_optimizer_step_pre_hooks", None), Mapping)
    )


def _forwards_to(optimizer: Any) -> Any | None:
    """The optimizer that a known wrapper hands each step on to, if nobody has given it a step of his own."""
    for kind in type(optimizer).__mro__:
        place = _FORWARDERS.get(f"{kind.__module__}.{kind.__qualname__}")
        if place is not None:
            own = getattr(type(optimizer), "step", None) is getattr(kind, "step", None)
            return vars(optimizer).get(place) if own else None
    return None


def optimizers_beneath(part: Any) -> list[Any]:
    """All optimizers in an entry of a state, outermost first: `part` itself, and what it holds in attributes or items.

    Of a framework's wrapper that only hands steps on, the one that steps is taken alone. It may be an optimizer, a list
    or mapping of some, or a user's own object that keeps one (a trainer).
    """
    found: list[Any] = []
    _collect(part, found, _DEPTH)
    return found


def optimizers_of(state: Mapping[str, Any]) -> list[torch.optim.Optimizer]:
    """Every optimizer of a state whose steps can be seen, each once: entries, and what lies beneath entries."""
    found: list[torch.optim.Optimizer] = []
    for part in state.values():
        for optimizer in optimizers_beneath(part):
            if calls_step_hooks(optimizer) and not any(optimizer is known for known in found):
                found.append(optimizer)
    return found


def trained_parameters(optimizer: Any) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(group, place in the group, parameter) of all parameters of an optimizer, in the order of its numbers."""
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            yield number, place, parameter


def state_of(part: Any, path: str) -> Any:
    """What `part.state_dict()` returns.

    Raises StateError for an optimizer that still has state of a replaced parameter: torch numbers parameters by the
    groups, and finds no number for one that is in none of them.
    """
    for optimizer in optimizers_beneath(part) if is_optimizer(part) else []:
        if not isinstance(getattr(optimizer, "state", None), Mapping):
            continue
        known = {id(parameter) for _, _, parameter in trained_parameters(optimizer)}
        lost = [key for key in optimizer.state if isinstance(key, torch.Tensor) and id(key) not in known]
        if lost:
            raise StateError(
                f"{path}: the {type(optimizer).__name__} holds state of {len(lost)} parameters that are in none of its "
                f"groups any more (the first has the shape {tuple(lost[0].shape)}), as after a layer was replaced; "
                "make the optimizer again from the parameters of now, or take the old ones out of its `state`"
            )
    return part.state_dict()


def _collect(part: Any, found: list[Any], depth: int) -> None:
    if any(part is known for known in found):
        return
    if not is_optimizer(part):
        if depth:
            for item in _held(part):
                _collect(item, found, depth - 1)
        return
    beneath = _forwards_to(part)
    if beneath is not None:
        _collect(beneath, found, depth)
        return
    found.append(part)
    if depth:
        for name, value in list(getattr(part, "__dict__", {}).items()):
            if name in ("state", "param_groups"):
                continue
            if isinstance(value, (dict, list, tuple)):
                held = list(value.values() if isinstance(value, dict) else value)
                held = [item for item in held if isinstance(item, torch.optim.Optimizer)]
            else:
                held = [value]
            for item in held:
                if is_optimizer(item):
                    _collect(item, found, depth - 1)


def _held(part: Any) -> list[Any]:
    """What may be, or hold, an optimizer in something that is none: items of a container, attributes of an object."""
    kind = type(part)
    if issubclass(kind, (torch.nn.Module, torch.Tensor, type)):
        return []
    if issubclass(kind, (dict, list, tuple)):
        if len(part) > _MOST_ITEMS:
            return []
        items = list(part.values() if issubclass(kind, dict) else part)
    elif callable(getattr(kind, "load_state_dict", None)):
        items = list(getattr(part, "__dict__", {}).values())
    else:
        return []
    # By classes alone: an attribute may be a proxy of something that is gone, and must not be asked.
    leads_on = (dict, list, tuple)
    return [
        item
        for item in items
        if issubclass(type(item), leads_on) or callable(getattr(type(item), "load_state_dict", None))
    ]
