"""What an attached training trains: which parameter each number of an optimizer is, and whether a part holds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lastgood._lazy import lazy_module
from lastgood.errors import ConfigError, MismatchError
from lastgood.state import flatten, is_stateful
from lastgood.state.compare import other_order, plain_names
from lastgood.state.optimizers import is_optimizer, trained_parameters
from lastgood.state.shards import local_part

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

__all__ = ["Trained"]

_UNKNOWN = "-"
_SKIPPED_BY_A_SCALER = 3
"""A loss scaler leaves steps out now and then, which looks as a window of accumulation does."""


class Trained:
    """The parameters that the optimizers of a state update, by the names that the state's other parts give them."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._parts = parts
        self._known: tuple[int, ...] = ()
        self._order: dict[str, str] = {}
        self._updates = 0
        self._windows = 0

    def order(self) -> dict[str, str]:
        """For each optimizer a line for each of its parameters, in the order of their numbers: name and shape."""
        optimizers = self._optimizers()
        found = tuple(id(one) for part in optimizers.values() for _, _, one in trained_parameters(part))
        if found != self._known or not self._order:
            names = self._names()
            self._order = {
                name: "\n".join(
                    f"{names.get(id(one), _UNKNOWN)} {tuple(one.shape)}" for _, _, one in trained_parameters(part)
                )
                for name, part in optimizers.items()
            }
            self._known = found
        return self._order

    def check_order(self, saved: Any, path: str) -> None:
        """Raise MismatchError, naming both sides, if a number of an optimizer was another parameter in a checkpoint.

        Checkpoints of before this was kept say nothing, and pass; so does a name that one side does not know.
        """
        if not isinstance(saved, Mapping):
            return
        live = self.order()
        for name in live.keys() & saved.keys():
            before, now = str(saved[name]).split("\n"), live[name].split("\n")
            if len(before) == len(now) and any(_differ(*pair) for pair in zip(before, now, strict=True)):
                raise MismatchError(f"{path}: {name}: {other_order(before, now)}")

    def refuse_forgotten(self, state: Mapping[str, Any]) -> None:
        """Raise ConfigError, by name, for what an optimizer trains and no part of the state holds."""
        forgotten = self.forgotten(state)
        if not forgotten:
            return
        more = f" and {len(forgotten) - 3} more" if len(forgotten) > 3 else ""
        named = ", ".join(text for text, _ in forgotten[:3])
        places = ", ".join(place for _, place in forgotten[:3])
        raise ConfigError(
            f"{named}{more}: trained, and in no attached part, so that a restart would begin with new ones; attach "
            f"them as well, as attach(..., more=[{places}{', ...' if more else ''}]), or go on without them with "
            'attach(..., unattached="allow")'
        )

    def forgotten(self, state: Mapping[str, Any]) -> list[tuple[str, str]]:
        """What is trained and lies in no part of `state`: in words, and how to get at it."""
        names = self._names()
        loose = [
            (name, group, place, one)
            for name, part in self._optimizers().items()
            for group, place, one in trained_parameters(part)
            if one.requires_grad and id(one) not in names and one.numel()
        ]
        if not loose:
            return []
        # A part may hold the memory under another object: masters of a wrapper, what its state_dict shows.
        blocks = flatten(state, spread=True).blocks
        held = [(block.device, block.data_ptr(), block.data_ptr() + block.numel()) for block in blocks]
        found = []
        for name, group, place, one in loose:
            local = local_part(one)
            begin, end = local.data_ptr(), local.data_ptr() + local.nbytes
            if not any(local.device == device and first <= begin and end <= last for device, first, last in held):
                text = f"{name}: parameter {place} of group {group}, of shape {tuple(one.shape)}"
                own = self._parts[name].param_groups[group].get("param_names")
                text += "" if own is None else f" ({own[place]})"
                found.append((text, f'{name}.param_groups[{group}]["params"][{place}]'))
        return found

    def loses_gradients(self, updates: int, *, saves: bool) -> bool:
        """Whether a checkpoint lies between two updates, with gradients that it does not hold; true once at most.

        Called at the end of each step, with the number of optimizer steps so far.
        """
        between, self._updates = updates == self._updates, updates
        if not between or not updates or not saves or self._windows < 0:
            return False
        pending = any(
            one.grad is not None for part in self._optimizers().values() for _, _, one in trained_parameters(part)
        )
        scales = any(isinstance(part, torch.amp.GradScaler) for part in self._parts.values())
        self._windows += pending
        if self._windows < (_SKIPPED_BY_A_SCALER if scales else 1):
            return False
        self._windows = -1
        return True

    def _optimizers(self) -> dict[str, Any]:
        return {name: part for name, part in self._parts.items() if is_optimizer(part)}

    def _names(self) -> dict[int, str]:
        """Names of parameters and tensors in all parts that are no optimizers, by the objects' ids."""
        found: dict[int, str] = {}
        for name, part in self._parts.items():
            if not is_optimizer(part):
                for one, path in _tensors_in(part, name):
                    found.setdefault(id(one), plain_names([path])[0])
        return found


def _tensors_in(part: Any, name: str) -> Iterator[tuple[torch.Tensor, str]]:
    if isinstance(part, torch.Tensor):
        yield part, name
    elif isinstance(part, torch.nn.Module):
        for path, one in part.named_parameters(prefix=name, remove_duplicate=False):
            yield one, path
    elif isinstance(part, Mapping) and not is_stateful(part):
        for key, value in part.items():
            yield from _tensors_in(value, f"{name}.{key}")
    elif isinstance(part, (list, tuple)):
        for number, value in enumerate(part):
            yield from _tensors_in(value, f"{name}.{number}")
    elif is_stateful(part):
        # A user's own object around modules: what it keeps of them is its state_dict's to say.
        for key, value in getattr(part, "__dict__", {}).items():
            if isinstance(value, (torch.nn.Module, torch.Tensor)):
                yield from _tensors_in(value, f"{name}.{key}")


def _differ(before: str, now: str) -> bool:
    names, shapes = zip(before.split(" ", 1), now.split(" ", 1), strict=True)
    return shapes[0] != shapes[1] or (_UNKNOWN not in names and names[0] != names[1])
