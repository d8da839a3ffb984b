"""What an attached training trains: which parameter each number of an optimizer is, and whether a part holds it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from lastgood._lazy import torch
from lastgood.errors import ConfigError, MismatchError
from lastgood.state import flatten
from lastgood.state.compare import other_order, plain_names
from lastgood.state.held import held_in
from lastgood.state.optimizers import is_optimizer, trained_parameters
from lastgood.state.shards import local_part

__all__ = ["Trained"]

_UNKNOWN = "-"
_SKIPPED_BY_A_SCALER = 3
"""A loss scaler leaves steps out now and then, which looks as a window of accumulation does."""


class Trained:
    """The parameters that the optimizers of a state update, by the names that the state's other parts give them."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._parts = parts
        self._known: tuple[int, ...] | None = None
        self._order: dict[str, str] = {}
        self._updates = 0
        self._windows = 0

    def order(self) -> dict[str, str]:
        """For each optimizer a line for each of its parameters, in the order of their numbers: name and shape."""
        optimizers = self._optimizers()
        found = tuple(id(one) for part in optimizers.values() for _, _, one in trained_parameters(part))
        if found != self._known:
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

        Checkpoints of before this was kept say nothing, and pass; so does a name that one side does not know, or gives
        to nothing any more (an attribute of a user's object that was renamed).
        """
        if not isinstance(saved, Mapping):
            return
        live, known = self.order(), set(self._names().values())
        for name in live.keys() & saved.keys():
            before, now = str(saved[name]).split("\n"), live[name].split("\n")
            names = {line.split(" ", 1)[0] for line in before}
            if len(before) == len(now) and any(_differ(*pair, names, known) for pair in zip(before, now, strict=True)):
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
        names, optimizers = self._names(), self._optimizers()
        loose = [
            (name, group, place, one)
            for name, part in optimizers.items()
            for group, place, one in trained_parameters(part)
            if one.requires_grad and id(one) not in names and one.numel()
        ]
        if not loose:
            return []
        # A part may hold the memory under another object: masters of a wrapper, what its state_dict shows.
        blocks = flatten(state, spread=True).blocks
        held = [(block.device, block.data_ptr(), block.data_ptr() + block.numel()) for block in blocks]
        reached = {  # how a user gets at each part
            ".".join(map(str, keys)): str(keys[0]) + "".join(f"[{key!r}]" for key in keys[1:])
            for keys, _ in self._held(objects=False)
        }
        found = []
        for name, group, place, one in loose:
            local = local_part(one)
            begin, end = local.data_ptr(), local.data_ptr() + local.nbytes
            if not any(local.device == device and first <= begin and end <= last for device, first, last in held):
                text = f"{name}: parameter {place} of group {group}, of shape {tuple(one.shape)}"
                own = optimizers[name].param_groups[group].get("param_names")
                text += "" if own is None else f" ({own[place]})"
                found.append((text, f'{reached[name]}.param_groups[{group}]["params"][{place}]'))
        return found

    @property
    def scales(self) -> bool:
        """Whether a loss scaler is among the parts."""
        return any(isinstance(part, torch.amp.GradScaler) for part in self._parts.values())

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
        self._windows += pending
        if self._windows < (_SKIPPED_BY_A_SCALER if self.scales else 1):
            return False
        self._windows = -1
        return True

    def _held(self, *, objects: bool) -> Iterator[tuple[tuple[Any, ...], Any]]:
        # In an order that does not hang on that of the call: what several parts share has the name of the first.
        for name in sorted(self._parts):
            yield from held_in(self._parts[name], name, objects=objects)

    def _optimizers(self) -> dict[str, Any]:
        """Those that were attached, alone or in containers. What an object of the user's own steps is its affair."""
        return {".".join(map(str, keys)): one for keys, one in self._held(objects=False) if is_optimizer(one)}

    def _names(self) -> dict[int, str]:
        """Names of parameters and tensors in all parts that are no optimizers, by the objects' ids."""
        found: dict[int, str] = {}
        for keys, one in self._held(objects=True):
            path = ".".join(map(str, keys))
            if isinstance(one, torch.nn.Module):
                for name, parameter in one.named_parameters(prefix=path, remove_duplicate=False):
                    found.setdefault(id(parameter), plain_names([name])[0])
            elif isinstance(one, torch.Tensor):
                found.setdefault(id(one), plain_names([path])[0])
        return found


def _differ(before: str, now: str, saved: Collection[str], known: Collection[str]) -> bool:
    names, shapes = zip(before.split(" ", 1), now.split(" ", 1), strict=True)
    if shapes[0] != shapes[1]:
        return True
    return _UNKNOWN not in names and names[0] != names[1] and (names[0] in known or names[1] in saved)
