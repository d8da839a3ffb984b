"""What an entry of a state holds: modules, tensors and optimizers in its containers, and in a user's own objects."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lastgood._lazy import torch
from lastgood.state.checked import Checked
from lastgood.state.flatten import is_stateful
from lastgood.state.layout_rules import MAX_DEPTH
from lastgood.state.optimizers import is_optimizer

__all__ = ["held_in"]

_DEPTH = 4
"""Attributes of attributes that are looked through."""
_MOST = 10_000
"""Values that are looked at in one user's object: it may hold the data."""
_HOLDS_NOTHING = (str, bytes, bytearray, int, float, complex, type, types.ModuleType, types.FunctionType, Checked)


def held_in(part: Any, name: str, *, objects: bool = True) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Modules, tensors and optimizers that `part` is, or holds: the keys that lead there from `name` on, and each.

    Looked through are mappings, lists and tuples, and, with `objects`, the attributes of objects with state_dict and
    load_state_dict (a trainer, an application's state), to a bounded depth and number; no method of theirs is called.
    """
    return _Search(objects).held(part, (name,), 0)


class _Search:
    def __init__(self, objects: bool) -> None:
        self._objects = objects
        self._seen: set[int] = set()
        self._left = _MOST

    def held(self, value: Any, keys: tuple[Any, ...], depth: int) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """`depth`: attributes that lead to `value`."""
        kind = type(value)  # an attribute may be a proxy of something that is gone, and must not be asked
        if value is None or issubclass(kind, _HOLDS_NOTHING):
            return
        if issubclass(kind, (torch.nn.Module, torch.Tensor)) or _updates(value, depth):
            yield keys, value
            return
        if id(value) in self._seen or len(keys) > MAX_DEPTH + _DEPTH:  # so deep a state is refused by its path
            return
        self._seen.add(id(value))
        items: Iterable[tuple[Any, Any]] = ()
        if issubclass(kind, dict) or (depth == 0 and issubclass(kind, Mapping)):
            items = list(value.items())
        elif issubclass(kind, (list, tuple)):
            items = enumerate(value)
        elif self._objects and depth < _DEPTH and (depth > 0 or is_stateful(value)):
            items = list(getattr(value, "__dict__", {}).items())
            depth += 1
        for key, item in items:
            if depth:
                self._left -= 1
                if self._left < 0:
                    return
            yield from self.held(item, (*keys, key), depth)


def _updates(value: Any, depth: int) -> bool:
    # What lies deep in an object may be anything, also something that answers to every name.
    return is_optimizer(value) if depth == 0 or hasattr(type(value), "step") else False
