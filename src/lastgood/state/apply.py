"""Put a restored tree back into live objects, in place, to the bit, or refuse with both sides named."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from lastgood._lazy import torch
from lastgood.errors import CheckpointError, LastgoodError
from lastgood.state.bits import copy_bits, needs_own_copy
from lastgood.state.checked import loads_last
from lastgood.state.compare import Keys, check_tree, holds_live_parts, same_entries, stays_itself
from lastgood.state.flatten import is_stateful
from lastgood.state.optimizer_loads import load_optimizer
from lastgood.state.optimizers import is_optimizer
from lastgood.state.shards import is_sharded, local_part, same_place

__all__ = ["apply_tree", "check_tree", "holds_its_values", "load_tree"]


def apply_tree(
    state: Mapping[str, Any], tree: Mapping[str, Any], where: str, objects: frozenset[Keys] | None = None
) -> None:
    """Load `tree` (what `unflatten` gave) into the objects of `state`.

    Objects with load_state_dict are loaded through it, tensors are overwritten in place, plain values are replaced in
    the mapping (which must then be mutable). Everything is checked before anything is changed: kinds, names, and dtypes
    and shapes of modules' and plain tensors, so that nothing is cast or broadcast silently. `objects` is as for
    `check_tree`.

    Raises MismatchError, naming `where`, the entry and both sides, and CheckpointError as `load_tree`.
    """
    check_tree(state, tree, where, objects)
    load_tree(state, tree, where)


def holds_its_values(value: Any) -> bool:
    """Whether `load_tree` puts values back into this object itself, so that all who hold it see them."""
    return stays_itself(value, value)


def load_tree(state: Mapping[str, Any], tree: Mapping[str, Any], where: str) -> None:
    """The second half of `apply_tree`, for a tree that was checked. Tensors already in their live memory stay.

    Random generators come last: what other parts do when they are loaded may draw from them.
    Raises CheckpointError for what an object's own load_state_dict refuses, naming it and what was loaded before it.
    """
    loaded: list[str] = []
    for name, live in sorted(state.items(), key=lambda item: loads_last(item[1])):
        path = f"{where}: {name}"
        try:
            value = _loaded(live, tree[name], path)
        except Exception as error:  # whatever a load_state_dict raises
            before = f"; {', '.join(loaded)}: loaded before it, make the state again" if loaded else ""
            if isinstance(error, LastgoodError):
                error.args = (f"{error}{before}",)
                raise
            raise CheckpointError(
                f"{path}: {type(live).__name__} could not be loaded: {type(error).__name__}: {error}{before}"
            ) from error
        if value is not live:
            assert isinstance(state, MutableMapping)  # or check_tree would have refused it
            state[name] = value
        loaded.append(str(name))


def _loaded(live: Any, saved: Any, path: str) -> Any:
    """What is to stand in the place of `live`: itself with the values of `saved`, or `saved` if that is plain."""
    if is_optimizer(live):
        load_optimizer(live, saved)
    elif isinstance(live, torch.nn.Module):
        _load_module(live, saved, path)
    elif isinstance(live, torch.Tensor):
        if not _same_place(live, saved):
            copy_bits(live, saved, path)
    elif is_stateful(live):
        live.load_state_dict(saved)
    elif isinstance(live, MutableMapping) and isinstance(saved, Mapping):
        _load_mapping(live, saved, path)
    elif isinstance(live, (list, tuple)) and holds_live_parts(live):
        items = [_loaded(*pair, f"{path}[{number}]") for number, pair in enumerate(zip(live, saved, strict=True))]
        if isinstance(live, list):
            live[:] = items
        elif any(item is not value for item, value in zip(items, live, strict=True)):
            return tuple(items)
    elif isinstance(live, list) and isinstance(saved, list):
        live[:] = saved
    elif (
        isinstance(live, np.ndarray)
        and isinstance(saved, np.ndarray)
        and live.flags.writeable
        and (live.dtype, live.shape) == (saved.dtype, saved.shape)
    ):
        live[...] = saved
    else:
        return saved
    return live


def _load_mapping(live: MutableMapping[Any, Any], saved: Mapping[Any, Any], path: str) -> None:
    for name in list(live.keys() - saved.keys()):
        del live[name]
    for name, value in saved.items():
        if name in live:
            live[name] = _loaded(live[name], value, f"{path}.{name}")
        else:
            live[name] = value
    if type(live) in (dict, OrderedDict, Counter) and list(live) != list(saved):
        for name in saved:  # an order may mean something (the least recently used)
            live[name] = live.pop(name)


def _load_module(live: torch.nn.Module, saved: Mapping[str, Any], path: str) -> None:
    current = live.state_dict(keep_vars=True)
    given: OrderedDict[str, Any] = OrderedDict()
    inference = False
    # Checked before: a name that the module does not know is refused by torch.
    names = same_entries(saved, current) or {}
    for saved_key, value in saved.items():
        key = names.get(saved_key, saved_key)
        own = current.get(key)
        if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor):
            inference |= local_part(own).is_inference()
            if not _same_place(own, value) and own.shape == value.shape and needs_own_copy(own):
                copy_bits(own, value, f"{path}.{key}")
                value = own
            elif _same_place(own, value):
                value = own
        # torch copies a tensor into itself without touching its bytes, but not one that only lies in the same place.
        given[key] = value
    # Versions of the modules' state dicts: without them torch takes each for the oldest.
    given._metadata = getattr(current, "_metadata", None)  # type: ignore[attr-defined]
    with torch.inference_mode() if inference else contextlib.nullcontext():
        live.load_state_dict(given)


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
