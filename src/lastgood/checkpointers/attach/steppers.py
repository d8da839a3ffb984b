"""Whether a system can keep a training whose optimizer's steps another part makes (lastgood.sparse.Engine)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lastgood.errors import ConfigError
from lastgood.state.steppers import stepper_of

__all__ = ["check_steppers"]


def check_steppers(system: str, state: Mapping[str, Any], optimizers: Sequence[Any], *, takes_gradients: bool) -> None:
    """Raise ConfigError if such a training cannot be given back from what `system` is given."""
    parts = list(_parts(state))
    for optimizer in optimizers:
        stepper = stepper_of(optimizer)
        if stepper is None:
            continue
        kind, made = type(stepper).__name__, type(optimizer).__name__
        if takes_gradients:
            raise ConfigError(
                f"{system}: the steps of this {made} are made by a sparse {kind} from what all ranks sent, and "
                f"{system} repeats steps from dense gradients, of which there are none; use another system, as PCcheck"
            )
        has_stepper, has_optimizer = (any(part is one for part in parts) for one in (stepper, optimizer))
        if has_optimizer and not has_stepper:
            raise ConfigError(
                f"{system}: the steps of this {made} are made by a sparse {kind}, whose residuals are in no attached "
                "part, so that a restart would begin with none; attach it as well, as attach(..., engine=engine)"
            )
        if has_stepper and not has_optimizer:
            raise ConfigError(
                f"{system}: a sparse {kind} is attached and its {made} is not, so that a restart would begin with new "
                "moments; attach it as well, as attach(..., optimizer=engine.optimizer)"
            )


def _parts(state: Mapping[str, Any]) -> Iterator[Any]:
    """What mappings, lists and tuples hold. They may hold themselves, or be deeper than the stack: others say so."""
    waiting: list[Any] = [dict(state)]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping) or type(value) in (list, tuple):
            if id(value) not in seen:
                seen.add(id(value))
                waiting += value.values() if isinstance(value, Mapping) else value
        else:
            yield value
