"""Give optimizers their saved state back to the bit.

torch's Optimizer.load_state_dict casts each floating-point and integer tensor in a parameter's state, nested ones as
well, to the parameter's dtype, and rebuilds whatever can be iterated over: texts become the name of a generator, arrays
raise a TypeError. Its dtypes and containers are the checkpoint's here; only devices follow torch's rule.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

from lastgood._lazy import torch
from lastgood.state.optimizers import optimizers_beneath
from lastgood.state.shards import is_sharded

__all__ = ["has_torch_layout", "load_optimizer"]


def has_torch_layout(saved: Any) -> bool:
    """Whether `saved` is laid out as torch's own Optimizer.state_dict returns it."""
    if not isinstance(saved, Mapping) or not isinstance(saved.get("state"), Mapping):
        return False
    groups = saved.get("param_groups")
    return isinstance(groups, (list, tuple)) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups
    )


def load_optimizer(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Load what `optimizer.state_dict()` returned at the save; it was compared before.

    A wrapper hands a part of its own state on to what is beneath it: that is seen there.
    """
    seen: list[Any] = []

    def keep_exact(inner: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        seen.append(inner)
        if not has_torch_layout(state):
            return None
        owners = _owners(inner, state)
        # torch keeps what is under no parameter's number as it is, under the key that it is given: here the parameter.
        exact = {
            owners[number][0] if number in owners else number: _placed(entry, *owners[number])
            if number in owners
            else entry
            for number, entry in state["state"].items()
        }
        return {**state, "state": exact}

    # The last of the hooks: those of the optimizer's own see what torch would show them.
    handles = [
        inner.register_load_state_dict_pre_hook(keep_exact)
        for inner in optimizers_beneath(optimizer)
        if isinstance(getattr(inner, "_optimizer_load_state_dict_pre_hooks", None), Mapping)
    ]
    try:
        optimizer.load_state_dict(dict(saved))
    finally:
        for handle in handles:
            handle.remove()
    # Its own load_state_dict may call none of torch's hooks.
    if not seen and has_torch_layout(saved) and isinstance(getattr(optimizer, "state", None), Mapping):
        for number, (parameter, group) in _owners(optimizer, saved).items():
            if number in saved["state"] and parameter in optimizer.state:
                exact = _placed(saved["state"][number], parameter, group)
                optimizer.state[parameter] = _mended(optimizer.state[parameter], exact)


def _owners(optimizer: Any, saved: Mapping[str, Any]) -> dict[Any, tuple[torch.Tensor, Mapping[str, Any]]]:
    """The live parameter, and the saved group, of each number in a saved state."""
    numbered = [(number, group) for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # If there are more of one, torch refuses the state.
    return {number: (parameter, group) for (number, group), parameter in zip(numbered, parameters, strict=False)}


def _placed(value: Any, parameter: torch.Tensor, group: Mapping[str, Any], key: Any = None) -> Any:
    """`value` on the device where torch's load_state_dict would put it, with its own dtype; containers are new ones."""
    if isinstance(value, torch.Tensor):
        stays = is_sharded(value) or (key == "step" and not (group.get("fused") or group.get("capturable")))
        return value if stays else value.to(device=parameter.device)
    if type(value) in (dict, OrderedDict, Counter):
        made = type(value)()
        for name, item in value.items():
            made[name] = _placed(item, parameter, group, name)
        return made
    if type(value) in (list, tuple):
        return type(value)([_placed(item, parameter, group) for item in value])
    return value


def _mended(loaded: Any, exact: Any) -> Any:
    """What an optimizer made of `exact`, with the bits that a cast has changed as they were."""
    if isinstance(exact, torch.Tensor) and isinstance(loaded, torch.Tensor):
        cast = loaded.dtype != exact.dtype and loaded.shape == exact.shape
        return exact.to(loaded.device) if cast else loaded
    if isinstance(exact, Mapping) and isinstance(loaded, dict):
        for name in exact.keys() & loaded.keys():
            loaded[name] = _mended(loaded[name], exact[name])
        return loaded
    if type(exact) in (list, tuple) and type(loaded) is type(exact) and len(loaded) == len(exact):
        return type(exact)([_mended(one, other) for one, other in zip(loaded, exact, strict=True)])
    return exact if isinstance(exact, (str, bytes, bytearray)) else loaded
