"""Sees the beginning and the end of every step of an optimizer, also of those that call none of torch's hooks."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from lastgood.state.optimizers import calls_step_hooks

__all__ = ["see_steps"]

_CHANGES_WEIGHTS = ("train", "eval")
"""Methods of schedule-free optimizers (Defazio et al. 2024) that swap weights in place, outside of any step."""


Before = Callable[[Any, FrameType], None]
After = Callable[[Any], None]


def see_steps(optimizer: Any, before: Before, after: After) -> list[Any]:
    """Call ``before(optimizer, frame)`` before each step and each swap of weights, and ``after(optimizer)`` at its end.

    What is returned takes it away again by `remove`. The step lasts no longer than the frame; one that an exception
    ends has no end here. Both are bound methods, whose object is not kept alive: what was dropped is called no more. A
    wrapper whose step calls no hooks gets a `step` of its own in the instance, as torch's schedulers do it.
    """
    if not hasattr(optimizer, "__dict__"):
        return []  # nothing can be put into it, and what it holds is not found: its parameters are copied in the save
    first, last = _weakly(before), _weakly(after)
    swaps = [name for name in _CHANGES_WEIGHTS if callable(getattr(type(optimizer), name, None))]
    handles: list[Any] = [_Wrapped(optimizer, name, first, last) for name in swaps]
    if not calls_step_hooks(optimizer):
        return [*handles, _Wrapped(optimizer, "step", first, last)]
    handles.append(optimizer.register_step_pre_hook(lambda part, *_: first(part, sys._getframe(1))))
    handles.append(optimizer.register_step_post_hook(lambda part, *_: last(part)))
    return handles


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    known = weakref.WeakMethod(method)

    def call(*what: Any) -> None:
        found = known()
        if found is not None:
            found(*what)

    return call


class _Wrapped:
    """A method of one object, with a call before and one after, until it is removed."""

    def __init__(self, owner: Any, name: str, first: Callable[..., None], last: Callable[..., None]) -> None:
        self._owner = weakref.ref(owner)
        self._name = name
        self._removed = False
        inner = getattr(owner, name)
        self._before = vars(owner).get(name)
        own = getattr(inner, "__self__", None) is owner

        @functools.wraps(inner)
        def seen(part: Any, *args: Any, **kwargs: Any) -> Any:
            # A copy of the object (copy.deepcopy) has this method too, bound to itself.
            step = inner if part is self._owner() or not own else types.MethodType(inner.__func__, part)
            if self._removed or step is not inner:  # others may have put their own method over this one
                return step(*args, **kwargs)
            first(part, sys._getframe())
            result = step(*args, **kwargs)
            last(part)
            return result

        self._seen = types.MethodType(seen, owner)  # bound: torch's schedulers look for __func__
        setattr(owner, name, self._seen)

    def remove(self) -> None:
        """Give the object its own method back."""
        self._removed = True
        owner = self._owner()
        if owner is not None and vars(owner).get(self._name) is self._seen:
            if self._before is None:
                delattr(owner, self._name)
            else:
                setattr(owner, self._name, self._before)
