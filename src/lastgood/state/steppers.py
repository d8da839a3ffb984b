"""Optimizers whose steps another part of the training makes, from something else than their parameters' gradients."""

from __future__ import annotations

import weakref
from typing import Any

__all__ = ["note_stepper", "stepper_of"]

_steppers: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def note_stepper(optimizer: Any, part: Any) -> None:
    """From here on `part`, which has a state of its own, makes the steps of `optimizer`, as long as it lives."""
    _steppers[optimizer] = weakref.ref(part)


def stepper_of(optimizer: Any) -> Any | None:
    """The part that makes the steps of `optimizer`; None for an optimizer that makes them itself."""
    try:
        found = _steppers.get(optimizer)
    except TypeError:  # a wrapper that has no hash, or that nothing can refer to weakly
        return None
    return None if found is None else found()
