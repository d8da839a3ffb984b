"""What an optimizer's step is about to do, noted in its pre-hook, and whether it does that with what was sent."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lastgood._lazy import torch
from lastgood.errors import CheckpointError, ConfigError
from lastgood.gradients.trainer.parameters import TrackedParameters, flat_bytes
from lastgood.gradients.trainer.step_parts import OpenUpdate, StepPart
from lastgood.optim.rule import ClipNorm, ClipValue
from lastgood.optim.spec import OptimizerSpec
from lastgood.optim.trainer import RuleMaker
from lastgood.state.shards import local_part

__all__ = ["Samples", "Shares", "Update", "UpdateNotes"]

_PER_BUFFER = 2
"""Parameters of each reduced buffer that are looked at in an iteration; other ones in the next."""
_STRIDE = 7919
"""A prime: the elements that are looked at wander through all of a parameter."""


@dataclass(frozen=True)
class Update:
    """What the optimizer did in one iteration."""

    rule: dict[str, Any] | None
    """None: it changed nothing (a loss scaler found an overflow)."""
    absent: tuple[int, ...] = ()
    """This rank's parameters that it left alone."""


@dataclass(frozen=True)
class Shares:
    """Where each rank's parameters lie in the layout: one share for all ranks if they have the same ones."""

    firsts: tuple[int, ...] = (0,)
    """The first index of each share."""
    alike: bool = True
    """Whether all have the same number of parameters in each group."""
    rank: int = 0


class UpdateNotes:
    """Reads an optimizer's hyperparameters at each step, and what was done to gradients before it.

    `spec` is of this rank's optimizer; the layout holds its groups once for each of the `shares`. With `reduced`,
    shadows have gradients as they were reduced, and repeat unscaling and clipping; otherwise they have
    them as the optimizer's step takes them.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        tracked: TrackedParameters,
        spec: OptimizerSpec,
        *,
        reduced: bool,
        shares: Shares = Shares(),
    ) -> None:
        self._tracked = tracked
        self._spec = spec
        self._rules: RuleMaker | None = self._make_rules()
        self._group_of = spec.group_of()
        self._shares = shares
        self._reduced = reduced
        self._open = OpenUpdate()
        self._scalers = [part for part in state.values() if isinstance(part, torch.amp.GradScaler)]
        self._clip: ClipNorm | ClipValue | None = None
        self._clips = 0
        self.samples = Samples(tracked)

    # -- clipping --------------------------------------------------------------------------------------------------

    def clip_norm(self, parameters: Any, max_norm: float, **options: Any) -> torch.Tensor:
        """torch.nn.utils.clip_grad_norm_, and a note of the factor. Raises ConfigError for a part of the parameters."""
        given = self._all_of(parameters)
        total = torch.nn.utils.clip_grad_norm_(given, max_norm, **options)
        # torch's own formula, on the same numbers.
        factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
        self._note(ClipNorm(float(factor), str(factor.dtype).removeprefix("torch.")))
        return total

    def clip_value(self, parameters: Any, clip_value: float, **options: Any) -> None:
        """torch.nn.utils.clip_grad_value_, and a note of the bound. Raises ConfigError for a part of the parameters."""
        torch.nn.utils.clip_grad_value_(self._all_of(parameters), clip_value, **options)
        self._note(ClipValue(float(clip_value)))

    def _all_of(self, parameters: Any) -> list[torch.Tensor]:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self._reduced:
            held = {id(parameter) for parameter in given}
            lacking = sum(id(one) not in held and one.grad is not None for one in self._tracked.parameters)
            if lacking:
                raise ConfigError(
                    f"checkmate: {lacking} of the optimizer's parameters are not among those to clip; shadows repeat "
                    "one clipping of all of them: call clip_grad_norm_() or clip_grad_value_() once, with all"
                )
        return given

    def _note(self, clip: ClipNorm | ClipValue) -> None:
        self._clip = clip
        self._clips += 1

    # -- the step --------------------------------------------------------------------------------------------------

    def begin_iteration(self) -> None:
        """New gradients come; what was noted belongs to older ones."""
        self._clip, self._clips = None, 0
        self._open = OpenUpdate()
        self.samples.clear()

    def look(self) -> StepPart:
        """What the step that begins now does. Call it once for each.

        If that cannot be told (a learning rate that is none, say) the part has a fault. Nothing is raised, since
        keeping a state must never stop the training of it.
        """
        try:
            return self._look()
        except Exception as error:
            self._rules = None  # it has lost count of the steps, which the optimizer makes all the same
            return StepPart(None, fault=f"shadows cannot repeat this step: {error}")

    def _look(self) -> StepPart:
        optimizer, index_of = self._tracked.optimizer, self._tracked.index_of
        # ZeRO puts some of the groups, or of their parameters, into the optimizer for one step.
        held = [one for group in optimizer.param_groups for one in group["params"]]
        if any(id(one) not in index_of for one in held):
            raise ConfigError(
                "the optimizer has parameters that it had not when checkpointing began; close() the checkpointer and "
                "start it again, and shadows follow them"
            )
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and float(found_inf):
            return StepPart(None)
        grad_scale = getattr(optimizer, "grad_scale", None)
        inverse_scale = self._inverse_scale() if self._reduced else None
        clip = self._clip if self._reduced else None
        self._count_again()
        if self._rules is None:
            raise CheckpointError(
                "the step before could not be told to shadows, and how many there were is not known yet"
            )
        rule = self._rules.make(
            inverse_scale=inverse_scale, grad_scale=None if grad_scale is None else float(grad_scale), clip=clip
        )
        fault = None
        if self._reduced:
            if self._clips > 1:
                fault = "gradients were clipped more than once before one step; shadows repeat one clipping"
            else:
                fault = self.samples.difference(inverse_scale, clip)
        stepped = frozenset(index_of[id(one)] for one in held if one.grad is not None)
        if not stepped:
            return StepPart(None, fault=fault)
        return StepPart(rule, stepped, frozenset(self._group_of[index] for index in stepped), fault)

    def takes(self, part: StepPart) -> bool:
        """Whether a step belongs to the iteration that is open: it steps none of its parameters again."""
        return self._open.takes(part)

    def add(self, part: StepPart) -> None:
        """A step belongs to the iteration that is open."""
        self._open.add(part)

    def update(self) -> Update:
        """All steps of the iteration that is open; after the last of them."""
        with contextlib.suppress(ConfigError):  # then the next step raises it
            self._count_again()
        rule, shares = self._open.rule, self._shares
        if rule is None:
            return Update(None)
        # What is not aligned on one rank is not on the others either, if they have the same parameters.
        firsts = shares.firsts if shares.alike else (shares.firsts[shares.rank],)
        unaligned = tuple(first + index for first in firsts for index in rule.unaligned)
        rule = replace(rule, groups=rule.groups * len(shares.firsts), unaligned=unaligned)
        return Update(rule.to_data(), tuple(sorted(self._group_of.keys() - self._open.stepped)))

    def _count_again(self) -> None:
        """Between two steps, if one could not be told. While ZeRO has groups taken out of its optimizer: later."""
        if self._rules is None:
            held = sum(len(group["params"]) for group in self._tracked.optimizer.param_groups)
            if held == len(self._tracked.parameters):
                self._rules = self._make_rules()

    def _make_rules(self) -> RuleMaker:
        return RuleMaker(self._tracked.optimizer, self._spec, self._tracked.parameters)

    def _inverse_scale(self) -> float | None:
        """What a loss scaler has multiplied this iteration's gradients by, as its unscale_ computes it."""
        for scaler in self._scalers:
            mine = scaler._per_optimizer_states.get(id(self._tracked.optimizer))
            # unscale_ notes overflows; so does a step with a fused optimizer, which unscales by itself.
            unscaled = mine is not None and mine["found_inf_per_device"]
            scale = scaler._scale
            if unscaled and scale is not None and getattr(self._tracked.optimizer, "grad_scale", None) is None:
                return float(scale.double().reciprocal().float())
        return None


class Samples:
    """A few elements of what was reduced, to be compared with what the optimizer's step takes."""

    def __init__(self, tracked: TrackedParameters) -> None:
        self._tracked = tracked
        self._taken: list[tuple[int, int, float]] = []

    def clear(self) -> None:
        """Forget all."""
        self._taken = []

    def take(self, buffer: torch.Tensor, parameters: Sequence[tuple[int, int, int]], iteration: int) -> None:
        """Note elements of a reduced buffer; `parameters` are (index, first element, elements) in it."""
        for turn in range(min(_PER_BUFFER, len(parameters))):
            index, begin, elements = parameters[(iteration * _PER_BUFFER + turn) % len(parameters)]
            if elements:
                element = iteration * _STRIDE % elements
                self._taken.append((index, element, buffer[begin + element].item()))

    def difference(self, inverse_scale: float | None, clip: ClipNorm | ClipValue | None) -> str | None:
        """Where a gradient is not what was reduced, unscaled and clipped as noted; None if all are."""
        for index, element, value in self._taken:
            parameter = self._tracked.parameters[index]
            if parameter.grad is None:
                continue
            gradient = local_part(parameter.grad)
            order = self._tracked.order_for(index, gradient)
            found = flat_bytes(gradient, order).view(gradient.dtype)[element]
            expected = torch.tensor(value, dtype=gradient.dtype, device=gradient.device)
            if inverse_scale is not None:
                expected.mul_(torch.tensor(inverse_scale, dtype=torch.float32, device=gradient.device))
            if isinstance(clip, ClipNorm):
                expected.mul_(clip.factor(gradient.device))
            elif clip is not None:
                expected.clamp_(-clip.limit, clip.limit)
            if not torch.equal(expected.view(1).nan_to_num(0.0), found.view(1).nan_to_num(0.0)):
                return (
                    f"the gradient of {self._tracked.names[index]} is {found.item()!r} at optimizer.step(), and what "
                    f"was reduced makes {expected.item()!r} (element {element}): something changed gradients between "
                    "backward() and step(). Clip with checkpointer.clip_grad_norm_ or clip_grad_value_, and put the "
                    "GradScaler into the state; shadows cannot repeat other changes"
                )
        return None
