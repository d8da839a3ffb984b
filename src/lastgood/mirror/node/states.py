"""A state of the followed training that comes another way: a checkpoint of any system, or the training's own word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lastgood._lazy import torch
from lastgood.errors import MismatchError
from lastgood.gradients.trainer.parameters import PARAMETER
from lastgood.mirror.agent.messages import bare_name
from lastgood.mirror.node.layout import NodeLayout
from lastgood.mirror.node.weights import frozen_of, in_memory_order

__all__ = ["GivenState", "given_state"]

_SMALL = "step"


@dataclass(frozen=True)
class GivenState:
    """What `Follower.give` takes."""

    iteration: int
    tensors: Mapping[tuple[int, str], torch.Tensor]
    """As `life.Start` has them."""
    frozen: Mapping[str, torch.Tensor]
    scaler: Mapping[str, Any] | None
    made: Mapping[int, int]
    """Updates that parameters have had."""


def given_state(layout: NodeLayout, tree: Mapping[str, Any], step: int, where: str) -> GivenState:
    """The state of `step` updates in a tree as checkpoints hold it: a module's and an optimizer's state_dict in it.

    Parts are told by what they hold, since nobody says their names here. Raises MismatchError, naming what is missing.
    """
    job = layout.job
    module = _module_part(tree, [one.name for one in job.parameters], where)
    for one in job.parameters:
        held = module[one.name]
        if tuple(held.shape) != one.shape or str(held.dtype) != f"torch.{one.dtype}":
            raise MismatchError(
                f"{where}: {one.name} is {held.dtype} {tuple(held.shape)}; the job's is {one.dtype} {one.shape}"
            )
    states = _optimizer_part(tree, len(job.optimized), where)
    tensors: dict[tuple[int, str], torch.Tensor] = {}
    made: dict[int, int] = {}
    for index, parameter in enumerate(job.optimized):
        info = job.parameters[parameter]
        declared = layout.gradients.parameters[index]

        def ordered(tensor: torch.Tensor, order: tuple[int, ...] = info.order) -> torch.Tensor:
            flat = in_memory_order(tensor.detach().contiguous(), order)
            return flat.view(tensor.dtype)

        tensors[index, PARAMETER] = ordered(module[info.name]).view(declared.shape)
        for key, value in states.get(index, {}).items():
            if not isinstance(value, torch.Tensor):
                continue
            if key == _SMALL:
                made[index] = int(value)
                tensors[index, key] = value.detach().cpu().reshape(())
            else:
                tensors[index, key] = ordered(value).view(declared.shape)
    return GivenState(step, tensors, frozen_of(job, module), _scaler_part(tree), made)


def _module_part(tree: Mapping[str, Any], names: list[str], where: str) -> dict[str, torch.Tensor]:
    best: list[str] = names
    for part in tree.values():
        if not isinstance(part, Mapping):
            continue
        held = {bare_name(str(key)): value for key, value in part.items() if isinstance(value, torch.Tensor)}
        missing = [name for name in names if name not in held]
        if not missing:
            return held
        best = min(best, missing, key=len)
    raise MismatchError(f"{where}: no part of it holds all parameters of the job; {best[0]} is missing")


def _optimizer_part(tree: Mapping[str, Any], count: int, where: str) -> dict[int, Mapping[str, Any]]:
    for part in tree.values():
        if isinstance(part, Mapping) and isinstance(part.get("param_groups"), (list, tuple)) and "state" in part:
            places = [place for group in part["param_groups"] for place in group["params"]]
            if len(places) != count:
                raise MismatchError(f"{where}: its optimizer has {len(places)} parameters, the job's {count}")
            state = part["state"]
            return {index: state[place] for index, place in enumerate(places) if place in state}
    raise MismatchError(f"{where}: it holds no optimizer's state, without which no step can be repeated")


def _scaler_part(tree: Mapping[str, Any]) -> dict[str, Any] | None:
    for part in tree.values():
        if isinstance(part, Mapping) and {"scale", "_growth_tracker"} <= part.keys():
            return {"scale": float(part["scale"]), "growth_tracker": int(part["_growth_tracker"])}
    return None
