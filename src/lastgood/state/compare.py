"""Compares a checkpoint's tree with the live objects it is for, before any of them is changed.

What an object of the user's own takes only its load_state_dict knows; of all else kinds, names, dtypes and shapes are
compared here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from lastgood._lazy import torch
from lastgood.errors import MismatchError
from lastgood.state.checked import Checked
from lastgood.state.flatten import is_stateful
from lastgood.state.layout_rules import MAX_DEPTH
from lastgood.state.optimizer_loads import has_torch_layout
from lastgood.state.optimizers import is_optimizer
from lastgood.state.shards import is_sharded, same_place

__all__ = ["Keys", "check_tree", "holds_live_parts", "other_order", "plain_names", "same_entries", "stays_itself"]

Keys = tuple[Any, ...]
"""Where something is in a tree: the keys of mappings and numbers of sequences that lead to it."""

_EXTRA_STATE = "_extra_state"
"""What a key of a module's state_dict ends with that its get_extra_state made; its tensors may be of any shape."""


def check_tree(
    state: Mapping[str, Any], tree: Mapping[str, Any], where: str, objects: frozenset[Keys] | None = None
) -> None:
    """Refuse a tree that does not fit the state. Looks at no tensor's content.

    `objects` says which entries of the tree are what an object's state_dict returned (`stateful_paths` of its layout),
    None that this is not known. Raises MismatchError, naming `where`, the entry and both sides.
    """
    missing, unexpected = state.keys() - tree.keys(), tree.keys() - state.keys()
    if missing or unexpected:
        raise MismatchError(
            f"{where}: the checkpoint lacks {_listed(missing)} and holds {_listed(unexpected)} beyond the state to "
            f"restore (state: {_listed(state)}, checkpoint: {_listed(tree)})"
        )
    compare = _Comparison(objects)
    for name, live in state.items():
        saved, path = tree[name], f"{where}: {name}"
        compare.entry(live, saved, path, (name,))
        if _family(live) != _family(saved) and not _is_object(live):
            raise MismatchError(f"{path}: the state holds {_kind(live)}, the checkpoint {_kind(saved)}")
        if isinstance(live, np.ndarray) and live.flags.writeable and _kind(live) != _kind(saved):
            raise MismatchError(f"{path}: the state holds {_kind(live)}, the checkpoint {_kind(saved)}")
        if not isinstance(state, MutableMapping) and not stays_itself(live, saved):
            raise MismatchError(
                f"{path} is a plain {type(live).__name__} (in the checkpoint {_kind(saved)}) in a container that "
                "cannot be changed; pass a dict, or wrap the value in an object with load_state_dict"
            )


def holds_live_parts(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether something in `value` must be loaded in place: an object with load_state_dict, or a tensor.

    What lies deeper than a state may is not looked for: `flatten` refuses it by its path.
    """
    if isinstance(value, torch.Tensor) or is_stateful(value):
        return True
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return depth > 0 and any(holds_live_parts(item, depth - 1) for item in items)


def stays_itself(live: Any, saved: Any) -> bool:
    """Whether a load puts `saved` into `live` itself, so that all who hold it see the values."""
    if isinstance(live, list):
        return holds_live_parts(live) or isinstance(saved, list)
    if isinstance(live, tuple):
        return holds_live_parts(live) and all(map(stays_itself, live, saved))
    if isinstance(live, np.ndarray):
        alike = isinstance(saved, np.ndarray) and (live.dtype, live.shape) == (saved.dtype, saved.shape)
        return alike and bool(live.flags.writeable)
    if isinstance(live, torch.Tensor) or is_stateful(live):
        return True
    return isinstance(live, MutableMapping) and isinstance(saved, Mapping)


class _Comparison:
    def __init__(self, objects: frozenset[Keys] | None) -> None:
        self._objects = objects

    def entry(self, live: Any, saved: Any, path: str, keys: Keys) -> None:
        if self._objects is not None and (keys in self._objects) != _is_object(live):
            saved_kind = "what an object's state_dict returned" if keys in self._objects else _kind(saved)
            raise MismatchError(f"{path}: the state holds {_kind(live)}, the checkpoint {saved_kind}")
        if isinstance(live, torch.Tensor):
            _check_tensor(live, saved, path)
        elif isinstance(live, torch.nn.Module):
            _check_module(live, saved, path)
        elif is_optimizer(live):
            _check_optimizer(live, saved, path)
        elif isinstance(live, (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)):
            _check_of_torch(live, saved, path)
        elif isinstance(live, Checked):
            if not isinstance(saved, Mapping) or not all(key in saved for key in live.saved_keys):
                raise MismatchError(
                    f"{path}: the state holds {_kind(live)}, the checkpoint {_kind(saved)} of another kind"
                )
            live.check_saved(saved, path)
        elif is_stateful(live):
            return
        elif isinstance(live, Mapping):
            self._mapping(live, saved, path, keys)
        elif isinstance(live, (list, tuple)) and holds_live_parts(live):
            self._sequence(live, saved, path, keys)

    def _mapping(self, live: Mapping[Any, Any], saved: Any, path: str, keys: Keys) -> None:
        if not isinstance(saved, Mapping):
            if holds_live_parts(live):
                raise MismatchError(f"{path}: the state holds a mapping, the checkpoint {_kind(saved)}")
            return
        lost = [key for key in live.keys() - saved.keys() if holds_live_parts(live[key])]
        if lost:
            raise MismatchError(f"{path}: the checkpoint lacks {_listed(lost)}, which the state holds")
        for key in live.keys() & saved.keys():
            self.entry(live[key], saved[key], f"{path}.{key}", (*keys, key))

    def _sequence(self, live: list[Any] | tuple[Any, ...], saved: Any, path: str, keys: Keys) -> None:
        if not isinstance(saved, (list, tuple)) or len(saved) != len(live):
            size = f"{len(saved)} entries" if isinstance(saved, (list, tuple)) else _kind(saved)
            raise MismatchError(f"{path}: the state holds {len(live)} entries, the checkpoint {size}")
        for number, (item, saved_item) in enumerate(zip(live, saved, strict=True)):
            self.entry(item, saved_item, f"{path}[{number}]", (*keys, number))


# -- kinds -------------------------------------------------------------------------------------------------------------


def _is_object(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) and is_stateful(value)


def _family(value: Any) -> str:
    """Plain values and arrays may become each other (a loss is None at first); others may not."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, Mapping):
        return "mapping"
    return "sequence" if isinstance(value, (list, tuple)) else "value"


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor"
    if is_stateful(value):
        return f"an object with load_state_dict ({type(value).__name__})"
    if isinstance(value, Mapping):
        return f"a mapping ({type(value).__name__})"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {value.shape}"
    return "None" if value is None else f"a {type(value).__name__}"


def _listed(names: Iterable[Any]) -> str:
    found = sorted(map(str, names))
    return str(found) if found else "nothing"


# -- parts -------------------------------------------------------------------------------------------------------------


def _check_tensor(live: torch.Tensor, saved: Any, path: str) -> None:
    if not isinstance(saved, torch.Tensor):
        raise MismatchError(f"{path}: the state holds a tensor, the checkpoint {_kind(saved)}")
    if torch.nn.parameter.is_lazy(live):
        raise MismatchError(
            f"{path}: the state's tensor has no shape yet (a lazy module); run one forward pass before the restore"
        )
    if live.dtype != saved.dtype or live.shape != saved.shape:
        raise MismatchError(
            f"{path}: the checkpoint holds {saved.dtype} {tuple(saved.shape)}, "
            f"the state {live.dtype} {tuple(live.shape)}"
        )
    if is_sharded(live) != is_sharded(saved) or (is_sharded(live) and not same_place(live, saved)):
        kinds = [str(getattr(tensor, "placements", "in one piece")) for tensor in (saved, live)]
        raise MismatchError(f"{path}: the checkpoint's tensor is spread as {kinds[0]}, the state's as {kinds[1]}")


def _check_module(live: torch.nn.Module, saved: Any, path: str) -> None:
    if not isinstance(saved, Mapping):
        raise MismatchError(f"{path}: the state holds {_kind(live)}, the checkpoint {_kind(saved)}")
    current = live.state_dict()
    names = same_entries(saved, current)
    if names is None:
        raise MismatchError(
            f"{path}: the checkpoint lacks {_listed(current.keys() - saved.keys())} and holds "
            f"{_listed(saved.keys() - current.keys())} beyond the model's entries"
        )
    for key, own in names.items():
        value = current[own]
        if isinstance(value, torch.Tensor) and not own.endswith(_EXTRA_STATE):
            _check_tensor(value, saved[key], f"{path}.{own}")


def _check_optimizer(live: Any, saved: Any, path: str) -> None:
    if not has_torch_layout(saved):
        # An optimizer with a state_dict of its own (a wrapper's) says itself what it takes.
        if getattr(type(live), "state_dict", None) is torch.optim.Optimizer.state_dict or not isinstance(
            saved, Mapping
        ):
            raise MismatchError(f"{path}: the state holds {_kind(live)}, the checkpoint {_kind(saved)}, no optimizer's")
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
    """Names of entries without what wrappers of modules put into them (DDP, torch.compile, FSDP)."""
    return [".".join(word for word in name.split(".") if word not in _WRAPPERS) for name in names]


def same_entries(saved: Collection[str], live: Collection[str]) -> dict[str, str] | None:
    """For each name of a saved module's entries that of the live one's, wrapped or not; None if they are others.

    A training under torch.compile or DDP goes on without, and the other way round.
    """
    if set(saved) == set(live):
        return {name: name for name in saved}
    found = dict(zip(plain_names(list(saved)), saved, strict=True))
    now = dict(zip(plain_names(list(live)), live, strict=True))
    if found.keys() != now.keys() or len(found) != len(saved) or len(now) != len(live):
        return None
    return {name: now[plain] for plain, name in found.items()}


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


def _check_optimizer_kind(live: Any, saved: Any, path: str) -> None:
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


def _check_of_torch(live: Any, saved: Any, path: str) -> None:
    """Schedulers and scalers take any mapping without a message."""
    if not isinstance(saved, Mapping):
        raise MismatchError(f"{path}: the state holds {_kind(live)}, the checkpoint {_kind(saved)}")
    current = live.state_dict()
    if current and saved and not current.keys() & saved.keys():
        raise MismatchError(
            f"{path}: the state holds {_kind(live)} with {_listed(current)}, the checkpoint {_listed(saved)}"
        )
