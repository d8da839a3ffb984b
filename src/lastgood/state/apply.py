"""Put a restored tree back into live objects, in place, to the bit, or refuse with both sides named."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lastgood._lazy import lazy_module
from lastgood.errors import MismatchError
from lastgood.state.flatten import is_stateful
from lastgood.state.optimizers import is_optimizer, optimizers_beneath
from lastgood.state.shards import is_sharded, local_part, same_place

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

__all__ = ["apply_tree", "check_tree", "holds_its_values", "load_tree", "other_order", "plain_names"]


def apply_tree(state: Mapping[str, Any], tree: Mapping[str, Any], where: str) -> None:
    """Load `tree` (what `unflatten` gave) into the objects of `state`.

    Objects with load_state_dict are loaded through it, tensors are overwritten in place, plain values are replaced in
    the mapping (which must then be mutable). Everything is checked before anything is changed: names, and dtypes and
    shapes of modules' and plain tensors, so that nothing is cast or broadcast silently.

    Raises MismatchError, naming `where`, the entry and both sides.
    """
    check_tree(state, tree, where)
    load_tree(state, tree, where)


def holds_its_values(value: Any) -> bool:
    """Whether `load_tree` puts values back into this object itself, where all who hold it see them."""
    return isinstance(value, (MutableMapping, list, np.ndarray)) or _holds_live_parts(value)


def check_tree(state: Mapping[str, Any], tree: Mapping[str, Any], where: str) -> None:
    """The first half of `apply_tree`: refuse what does not fit. Looks at no tensor's content."""
    missing, unexpected = sorted(state.keys() - tree.keys()), sorted(tree.keys() - state.keys())
    if missing or unexpected:
        raise MismatchError(
            f"{where}: the checkpoint lacks {missing or 'nothing'} and holds {unexpected or 'nothing'} beyond the "
            f"state to restore (state: {sorted(state)}, checkpoint: {sorted(tree)})"
        )
    for name, live in state.items():
        _check(live, tree[name], f"{where}: {name}")


def load_tree(state: Mapping[str, Any], tree: Mapping[str, Any], where: str) -> None:
    """The second half of `apply_tree`, for a tree that was checked. Tensors already in their live memory stay."""
    for name, live in state.items():
        _load(state, name, live, tree[name], f"{where}: {name}")


def _check(live: Any, saved: Any, path: str) -> None:
    if isinstance(live, torch.Tensor):
        _check_tensor(live, saved, path)
    elif isinstance(live, torch.nn.Module):
        current = live.state_dict()
        if current.keys() != saved.keys():
            raise MismatchError(
                f"{path}: the checkpoint lacks {sorted(current.keys() - saved.keys()) or 'nothing'} and holds "
                f"{sorted(saved.keys() - current.keys()) or 'nothing'} beyond the model's entries"
            )
        for key, value in current.items():
            if isinstance(value, torch.Tensor):
                _check_tensor(value, saved[key], f"{path}.{key}")
    elif is_optimizer(live):
        _check_optimizer(live, saved, path)
    elif isinstance(live, Mapping) and not is_stateful(live):
        if not isinstance(saved, Mapping):
            raise MismatchError(f"{path}: the state holds a mapping, the checkpoint a {type(saved).__name__}")
        lost = [key for key in live.keys() - saved.keys() if _holds_live_parts(live[key])]
        if lost:
            raise MismatchError(f"{path}: the checkpoint lacks {sorted(map(str, lost))}, which the state holds")
        for key in live.keys() & saved.keys():
            _check(live[key], saved[key], f"{path}.{key}")
    elif isinstance(live, (list, tuple)) and _holds_live_parts(live):
        if not isinstance(saved, (list, tuple)) or len(saved) != len(live):
            size = f"{len(saved)} entries" if isinstance(saved, (list, tuple)) else f"a {type(saved).__name__}"
            raise MismatchError(f"{path}: the state holds {len(live)} entries, the checkpoint {size}")
        for number, (item, saved_item) in enumerate(zip(live, saved, strict=True)):
            _check(item, saved_item, f"{path}[{number}]")
            if not isinstance(live, list) and not _holds_live_parts(item) and item != saved_item:
                raise MismatchError(
                    f"{path}[{number}] is a plain value in a tuple, which cannot be changed; use a list"
                )


def _check_optimizer(live: Any, saved: Any, path: str) -> None:
    """Compare groups, where the state has torch's own form; a wrapper's own form is kept as it is."""
    if not isinstance(saved, Mapping) or not isinstance(saved.get("param_groups"), list):
        return
    _check_optimizer_kind(live, saved, path)
    sizes = [len(group["params"]) for group in live.param_groups]
    stored = [len(group["params"]) for group in saved["param_groups"]]
    if sizes != stored:
        raise MismatchError(f"{path}: the checkpoint's groups hold {stored} parameters, the optimizer's {sizes}")
    for number, (ours, theirs) in enumerate(zip(live.param_groups, saved["param_groups"], strict=True)):
        names = [plain_names(group["param_names"]) for group in (theirs, ours) if "param_names" in group]
        if len(names) == 2 and names[0] != names[1]:
            raise MismatchError(f"{path}: group {number}: {other_order(*names)}")


_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def plain_names(names: Sequence[str]) -> list[str]:
    """Names of parameters without what wrappers of modules put into them (DDP, torch.compile, FSDP)."""
    return [".".join(word for word in name.split(".") if word not in _WRAPPERS) for name in names]


def other_order(saved: Sequence[str], live: Sequence[str]) -> str:
    """What to say of parameters that are not in the order of the checkpoint, from the first difference on."""
    first = next((i for i, pair in enumerate(zip(saved, live, strict=False)) if pair[0] != pair[1]), len(saved))
    both = [
        f"{', '.join(names[first : first + 4])}{', ...' if len(names) > first + 4 else ''}" for names in (saved, live)
    ]
    return (
        f"the optimizer's parameters are in another order, or are other ones: from number {first} on the checkpoint "
        f"has {both[0]}, and the optimizer has {both[1]}; state is kept by number, so give the parameters to the "
        "optimizer in the order of before"
    )


def _check_optimizer_kind(live: torch.optim.Optimizer, saved: Any, path: str) -> None:
    """Refuse another optimizer's state, which torch would load: a state dict names no class, but hyperparameters do.

    Versions of torch add hyperparameters, so that one side alone may have more.
    """
    for ours, theirs in zip(live.param_groups, saved["param_groups"], strict=False):
        unknown, lacking = sorted(theirs.keys() - ours.keys()), sorted(ours.keys() - theirs.keys())
        decoupled = [group.get("decoupled_weight_decay") for group in (theirs, ours)]
        if (set(unknown) - _ADDED_BY_SCHEDULERS and lacking) or (
            None not in decoupled and decoupled[0] != decoupled[1]
        ):
            raise MismatchError(
                f"{path}: the checkpoint is another optimizer's: its groups hold {sorted(theirs)}, those of this "
                f"{type(live).__name__} {sorted(ours)} (decoupled_weight_decay {decoupled[0]} and {decoupled[1]}); "
                "attach the kind that it was made with"
            )


_ADDED_BY_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}


def _holds_live_parts(value: Any) -> bool:
    """Whether something in `value` must be loaded in place: an object with load_state_dict, or a tensor."""
    if isinstance(value, torch.Tensor) or is_stateful(value):
        return True
    if isinstance(value, Mapping):
        return any(map(_holds_live_parts, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_holds_live_parts, value))


def _check_tensor(live: torch.Tensor, saved: Any, path: str) -> None:
    if not isinstance(saved, torch.Tensor):
        raise MismatchError(f"{path}: the state holds a tensor, the checkpoint a {type(saved).__name__}")
    if live.dtype != saved.dtype or live.shape != saved.shape:
        raise MismatchError(
            f"{path}: the checkpoint holds {saved.dtype} {tuple(saved.shape)}, "
            f"the state {live.dtype} {tuple(live.shape)}"
        )
    if is_sharded(live) != is_sharded(saved) or (is_sharded(live) and not same_place(live, saved)):
        kinds = [str(getattr(tensor, "placements", "in one piece")) for tensor in (saved, live)]
        raise MismatchError(f"{path}: the checkpoint's tensor is spread as {kinds[0]}, the state's as {kinds[1]}")


def _load(container: Any, key: Any, live: Any, saved: Any, path: str) -> None:
    """Load `saved` into `live`, which is ``container[key]``; a plain value is replaced there."""
    if is_optimizer(live):
        _load_optimizer(live, saved)
    elif isinstance(live, torch.nn.Module):
        current = live.state_dict(keep_vars=True)
        # torch copies a tensor into itself without touching its bytes, but not one that only lies in the same place.
        given = OrderedDict(
            (key, current[key] if _same_place(current.get(key), value) else value) for key, value in saved.items()
        )
        # Versions of the modules' state dicts: without them torch takes each for the oldest.
        given._metadata = getattr(current, "_metadata", None)  # type: ignore[attr-defined]
        live.load_state_dict(given)
    elif is_stateful(live):
        live.load_state_dict(saved)
    elif isinstance(live, torch.Tensor):
        if not _same_place(live, saved):
            live, saved = local_part(live), local_part(saved)  # spread in one way, so the parts fit
            with torch.no_grad():
                # A bool may hold any byte, and a copy of bools makes each of them 0 or 1.
                as_bytes = live.dtype is torch.bool and saved.is_contiguous() and live.is_contiguous()
                (live.view(torch.uint8) if as_bytes else live).copy_(saved.view(torch.uint8) if as_bytes else saved)
    elif isinstance(live, MutableMapping) and isinstance(saved, Mapping):
        for name in list(live.keys() - saved.keys()):
            del live[name]
        for name, value in saved.items():
            _load(live, name, live.get(name), value, f"{path}.{name}")
    elif isinstance(live, (list, tuple)) and _holds_live_parts(live):
        for number, (item, value) in enumerate(zip(live, saved, strict=True)):
            if isinstance(live, list) or _holds_live_parts(item):
                _load(live, number, item, value, f"{path}[{number}]")
    elif isinstance(live, list) and isinstance(saved, list):
        live[:] = saved
    elif isinstance(live, np.ndarray) and _same_kind_of_array(live, saved):
        live[...] = saved
    elif isinstance(container, (MutableMapping, list)):
        container[key] = saved
    else:
        raise MismatchError(
            f"{path} is a plain {type(live).__name__} in a container that cannot be changed; "
            "pass a dict, or wrap the value in an object with load_state_dict"
        )


def _same_kind_of_array(live: np.ndarray, saved: Any) -> bool:
    return (
        isinstance(saved, np.ndarray)
        and live.flags.writeable
        and (live.dtype, live.shape) == (saved.dtype, saved.shape)
    )


def _same_place(live: Any, saved: Any) -> bool:
    """Whether two tensors are one piece of memory, seen in the same way."""
    if is_sharded(live) or is_sharded(saved):
        both = is_sharded(live) and is_sharded(saved)
        return both and same_place(live, saved) and _same_place(local_part(live), local_part(saved))
    return (
        isinstance(live, torch.Tensor)
        and isinstance(saved, torch.Tensor)
        and live.device == saved.device
        and live.dtype == saved.dtype
        and live.shape == saved.shape
        and live.stride() == saved.stride()
        and live.data_ptr() == saved.data_ptr()
        and live.is_conj() == saved.is_conj()
        and live.is_neg() == saved.is_neg()
    )


def _load_optimizer(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """load_state_dict, and then each tensor once more in the dtype it was saved in.

    Optimizer.load_state_dict casts floating-point entries to their parameter's dtype: fp32 moments of a bf16 parameter
    would lose 16 bits each. A wrapper hands a part of its own state on to what is beneath it: that is seen there.
    """
    given: list[tuple[Any, Any]] = []
    handles = [
        inner.register_load_state_dict_pre_hook(lambda *what: given.append(what))
        for inner in optimizers_beneath(optimizer)
        if isinstance(getattr(inner, "_optimizer_load_state_dict_pre_hooks", None), Mapping)
    ]
    try:
        optimizer.load_state_dict(dict(saved))
    finally:
        for handle in handles:
            handle.remove()
    if not given and isinstance(saved.get("param_groups"), list):  # its own load_state_dict calls none of torch's hooks
        given.append((optimizer, saved))
    for inner, state in given:
        _restore_dtypes(inner, state)


def _restore_dtypes(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    numbered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    for index, parameter in zip(indices, numbered, strict=True):
        loaded = optimizer.state.get(parameter, {})
        for key, value in saved["state"].get(index, {}).items():
            if isinstance(value, torch.Tensor) and key in loaded and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)
