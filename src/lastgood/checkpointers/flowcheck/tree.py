"""A whole state's tree of what a mirror node holds, which has seen the training's packets and nothing else of it.

Parameters, buffers and the optimizer's state are the node's. A scheduler, a scaler, the step and the place in the data
follow from the number of steps. What is not on the wire (random generators, a user's own values) stays as it is here.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from lastgood._lazy import torch
from lastgood.checkpointers.attach.attachment import Progress
from lastgood.checkpointers.attach.data_cursor import CountedLoader
from lastgood.errors import MismatchError
from lastgood.gradients.trainer.parameters import PARAMETER, TrackedParameters
from lastgood.mirror.node.side import side_part
from lastgood.optim.rule import GroupRule
from lastgood.state import flatten, unflatten

__all__ = ["tree_of_node"]

_log = logging.getLogger("lastgood")

_NUMBERS = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening")


def tree_of_node(
    state: Mapping[str, Any],
    tracked: TrackedParameters,
    side: Mapping[str, Any],
    tensors: Mapping[tuple[int, str], torch.Tensor],
    where: str,
) -> dict[str, Any]:
    """As `TreeMaker`. Raises MismatchError for a state that is another training's than the node's."""
    part = side_part(side, where)
    tree: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    for name, live in state.items():
        if isinstance(live, torch.nn.Module):
            tree[name] = _module_tree(name, live, tracked, part, tensors, where)
        elif name == tracked.part:
            tree[name] = _optimizer_tree(tracked, part["groups"], tensors, where)
        elif isinstance(live, torch.optim.lr_scheduler.LRScheduler):
            tree[name] = _scheduler_tree(name, live, part["scheduler"], where)
        elif isinstance(live, torch.amp.GradScaler):
            tree[name] = _scaler_tree(name, live, part["scaler"], where)
        elif isinstance(live, Progress):
            tree[name] = {**live.state_dict(), "step": int(part["step"])}
        elif isinstance(live, CountedLoader):
            tree[name] = live.place_after(int(part["data"]))
        else:
            kept[name] = live
    if kept:
        flat = flatten(kept)
        blocks = [block.detach().cpu().clone() for block in flat.blocks]
        tree |= unflatten(flat.layout, blocks, where)
        _log.warning(
            "flowcheck: %s: not on the wire, so not restored: it stays as it is in this process", ", ".join(kept)
        )
    return tree


def _module_tree(
    name: str,
    live: torch.nn.Module,
    tracked: TrackedParameters,
    part: Mapping[str, Any],
    tensors: Mapping[tuple[int, str], torch.Tensor],
    where: str,
) -> dict[str, Any]:
    """A module's state_dict: parameters by their place, all else by its name on the node."""
    held = {**part["frozen"], **part["buffers"]}
    by_place = {parameter.data_ptr(): index for index, parameter in enumerate(tracked.parameters) if parameter.numel()}
    found: dict[str, Any] = {}
    for key, value in live.state_dict(keep_vars=True).items():
        index = tracked.index_of.get(id(value))
        if index is None and isinstance(value, torch.Tensor) and value.numel():
            index = by_place.get(value.data_ptr())
        if index is not None:
            found[key] = tensors[index, PARAMETER]
        elif key in held:
            found[key] = held[key]
        else:
            raise MismatchError(f"{where}: {name}.{key} is none of the tensors that the node has seen")
    return found


def _optimizer_tree(
    tracked: TrackedParameters, groups: Sequence[Mapping[str, Any]], tensors: Mapping[tuple[int, str], Any], where: str
) -> dict[str, Any]:
    live = tracked.optimizer.state_dict()
    if len(groups) != len(live["param_groups"]):
        raise MismatchError(
            f"{where}: the node's optimizer has {len(groups)} groups, {tracked.part} has {len(live['param_groups'])}"
        )
    numbered = []
    first = 0
    for group, data in zip(live["param_groups"], groups, strict=True):
        rule = GroupRule.from_data(data)
        numbers = {key: getattr(rule, key) for key in _NUMBERS if key in group}
        if isinstance(group["lr"], torch.Tensor):
            numbers["lr"] = rule.learning_rate
        count = len(group["params"])
        numbered.append({**group, **numbers, "params": list(range(first, first + count))})
        first += count
    restored: dict[int, dict[str, Any]] = {}
    for (index, key), tensor in tensors.items():
        if key != PARAMETER:
            restored.setdefault(index, {})[key] = tensor
    return {"state": restored, "param_groups": numbered}


def _scheduler_tree(name: str, live: Any, changes: Sequence[Any], where: str) -> dict[str, Any]:
    found: dict[str, Any] = copy.deepcopy(live.state_dict())
    for path, value in changes:
        at: Any = found
        try:
            for step in path[:-1]:
                at = at[step]
            kind = type(at[path[-1]])
            at[path[-1]] = kind(value) if kind in (int, float, bool) else value
        except (KeyError, IndexError, TypeError) as error:
            raise MismatchError(f"{where}: {name} has no {'.'.join(map(str, path))}, which the job's has") from error
    return found


def _scaler_tree(name: str, live: torch.amp.GradScaler, held: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    if held is None:
        raise MismatchError(f"{where}: {name} is a GradScaler, and the job description has none")
    return {**live.state_dict(), "scale": float(held["scale"]), "_growth_tracker": int(held["growth_tracker"])}
