"""Optimizer state in flat buffers, one for each of torch's keys and dtypes: a spill or a fetch is a few ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from lastgood._lazy import torch
from lastgood.errors import MismatchError
from lastgood.host_memory import fresh_memory
from lastgood.optim.spec import OptimizerSpec

__all__ = ["FlatState"]

_ALIGN_BYTES: Final = 64


class FlatState:
    """State tensors of some parameters, under torch's own keys.

    A parameter has no state before its first step, as in torch: `started` says which have. Moments and momentum have
    the parameter's shape and dtype; `step` is a float32 scalar.
    """

    def __init__(self, spec: OptimizerSpec, parameters: Sequence[torch.Tensor], groups: Sequence[int]) -> None:
        self.started = [False] * len(parameters)
        keys = ["momentum_buffer"] if spec.kind == "sgd" else ["exp_avg", "exp_avg_sq"]
        self.tensors: list[dict[str, torch.Tensor]] = [{} for _ in parameters]
        if spec.kind != "sgd":
            steps = torch.zeros(len(parameters), dtype=torch.float32, device="cpu")
            for held, step in zip(self.tensors, steps.unbind(), strict=True):
                held["step"] = step
        for key in keys:
            self._add(key, range(len(parameters)), parameters)
        largest = [i for i, group in enumerate(groups) if spec.groups[group].amsgrad]
        self._add("max_exp_avg_sq", largest, parameters)

    def _add(self, key: str, which: Sequence[int], parameters: Sequence[torch.Tensor]) -> None:
        for dtype in dict.fromkeys(parameters[i].dtype for i in which):
            chosen = [i for i in which if parameters[i].dtype == dtype]
            whole = _ALIGN_BYTES // dtype.itemsize
            counts = [-(-parameters[i].numel() // whole) * whole for i in chosen]
            buffer = fresh_memory(sum(counts) * dtype.itemsize).view(dtype)
            at = 0
            for i, count in zip(chosen, counts, strict=True):
                shape = parameters[i].shape
                self.tensors[i][key] = buffer[at : at + shape.numel()].view(shape)
                at += count

    def get(self) -> list[dict[str, torch.Tensor]]:
        """The state of each parameter under torch's keys, as views: empty for one that never made a step."""
        return [dict(held) if started else {} for held, started in zip(self.tensors, self.started, strict=True)]

    def load(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Copy in what `get` gave elsewhere. Nothing changes unless all of it fits; raises MismatchError, naming it."""
        if len(states) != len(self.tensors):
            raise MismatchError(f"state of {len(states)} parameters for an optimizer of {len(self.tensors)}")
        for number, (held, given) in enumerate(zip(self.tensors, states, strict=True)):
            if given:
                _compare(number, held, given)
        for number, (held, given) in enumerate(zip(self.tensors, states, strict=True)):
            self.started[number] = bool(given)
            for key, tensor in held.items():
                if given:
                    tensor.copy_(given[key])
                else:
                    tensor.zero_()


def _compare(number: int, held: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> None:
    if set(given) != set(held):
        raise MismatchError(
            f"state of parameter {number} holds {', '.join(sorted(given))}; here it is {', '.join(sorted(held))}"
        )
    for key, tensor in held.items():
        other = given[key]
        if key == "step":
            # torch keeps it as float64 if that is the default dtype.
            if other.numel() != 1 or float(other) != float(other.float()) or not 0 <= float(other) < 2**24:
                raise MismatchError(f"step of parameter {number} is no count below 2^24")
        elif other.shape != tensor.shape or other.dtype != tensor.dtype:
            raise MismatchError(
                f"{key} of parameter {number} is {other.dtype} {tuple(other.shape)}; "
                f"this optimizer's is {tensor.dtype} {tuple(tensor.shape)}"
            )
