"""The shadow's dense optimizer: a trainer's update, repeated on any part of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lastgood._lazy import torch
from lastgood.errors import ConfigError, MismatchError
from lastgood.optim.device_step import DeviceStep
from lastgood.optim.flat_state import FlatState
from lastgood.optim.fused_step import FusedStep
from lastgood.optim.host_step import HostStep
from lastgood.optim.rule import UpdateRule
from lastgood.optim.spec import OptimizerSpec

__all__ = ["DenseOptimizer"]


class DenseOptimizer:
    """Steps some of a model's parameters as the trainer steps all of them, equal to the bit.

    `parameters` are contiguous CPU tensors, changed in place; `groups` the group of each; `places` their places in
    the model's list, by which rules and messages name them (default: the order here). Steps of CPU trainers are torch's
    own, steps of CUDA trainers native code's, on `threads` threads. Not for several threads at once.

    Raises ConfigError for a tensor that cannot be stepped, MismatchError for a group that the trainer has not.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        parameters: Sequence[torch.Tensor],
        groups: Sequence[int],
        threads: int = 1,
        *,
        places: Sequence[int] | None = None,
    ) -> None:
        self._places = list(range(len(parameters)) if places is None else places)
        if not len(parameters) == len(groups) == len(self._places):
            raise MismatchError(f"{len(parameters)} parameters, {len(groups)} groups, {len(self._places)} places")
        if threads < 1:
            raise ConfigError(f"a step needs at least one thread, not {threads}")
        if places is None and spec.needs_alignment:
            raise ConfigError(
                "this trainer's steps depend on how its tensors were aligned: give the parameters' places"
            )
        strange = [group for group in groups if not 0 <= group < len(spec.groups)]
        if strange:
            raise MismatchError(f"group {strange[0]} of a trainer's optimizer that has {len(spec.groups)}")
        for place, parameter in zip(self._places, parameters, strict=True):
            _check(place, parameter, spec)
        self.spec = spec
        self._parameters = list(parameters)
        self._state = FlatState(spec, self._parameters, groups)
        self._way: HostStep | FusedStep | DeviceStep
        if spec.arithmetic == "cuda":
            self._way = DeviceStep(spec, self._parameters, groups, self._state, threads, self._places)
        elif spec.implementation == "fused" and spec.kind != "sgd":
            self._way = FusedStep(spec, self._parameters, groups, self._state, threads)
        else:
            self._way = HostStep(spec, self._parameters, groups, self._state, threads)

    def step(self, gradients: Sequence[torch.Tensor | None], rule: UpdateRule) -> None:
        """Unscale, clip and apply one step. None is a parameter that had no gradient: it and its state stay.

        Gradients may be changed in place. Raises MismatchError, before anything is changed, for gradients or a rule
        that do not belong to these parameters.
        """
        if len(gradients) != len(self._parameters):
            raise MismatchError(f"{len(gradients)} gradients for {len(self._parameters)} parameters")
        if len(rule.groups) != len(self.spec.groups):
            raise MismatchError(f"an update of {len(rule.groups)} groups for an optimizer of {len(self.spec.groups)}")
        if rule.grad_scale is not None and self.spec.implementation != "fused":
            raise MismatchError(f"an update with a loss scale in the kernel, which {self.spec.implementation} has not")
        for place, parameter, gradient in zip(self._places, self._parameters, gradients, strict=True):
            if gradient is None:
                continue
            if gradient.shape != parameter.shape or gradient.dtype != parameter.dtype or not gradient.is_contiguous():
                raise MismatchError(
                    f"the gradient of parameter {place} is {gradient.dtype} {tuple(gradient.shape)}; "
                    f"the parameter is {parameter.dtype} {tuple(parameter.shape)}, contiguous"
                )
        self._way.step(gradients, rule)

    def state(self) -> list[dict[str, torch.Tensor]]:
        """State of each parameter as torch keeps it, as views of the buffers: empty before its first step."""
        return self._state.get()

    def load_state(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Copy in state as torch keeps it. Raises MismatchError, and changes nothing, if it is of another kind."""
        self._state.load(states)


def _check(place: int, parameter: torch.Tensor, spec: OptimizerSpec) -> None:
    if parameter.device.type != "cpu" or not parameter.is_contiguous() or not parameter.is_leaf:
        raise ConfigError(f"parameter {place} is no contiguous tensor of its own in host memory")
    if spec.arithmetic == "cuda" and parameter.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise ConfigError(
            f"parameter {place} is {parameter.dtype}: steps of CUDA are known for float32, float64, bfloat16"
        )
