"""What each update of a training uses beside gradients: hyperparameters by step, clipping, loss scale, powers of betas.

The numbers are those of the training's own optimizer and scheduler, stepped ahead once (`describe`), so no code of them
is needed here. They hold for a number of steps; a training without a scheduler has the same ones for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import Field, model_validator
from typing_extensions import Self

from lastgood.errors import ConfigError, CorruptCheckpoint
from lastgood.mirror.job.columns import MAX_STEPS, Column, StrictModel
from lastgood.optim.checked_data import MAX_GROUPS
from lastgood.optim.rule import ClipNorm, ClipValue, GroupRule, UpdateRule

__all__ = ["Change", "ClipSettings", "PowerTable", "Rules", "ScalerSettings", "ScalerState", "Varying"]

GroupKey = Literal["lr", "beta1", "beta2", "eps", "weight_decay", "momentum", "dampening"]
_MAX_COLUMNS: Final = 4 * MAX_GROUPS
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Varying(StrictModel):
    """A number of one parameter group that a column tells."""

    group: Annotated[int, Field(ge=0, lt=MAX_GROUPS)]
    key: GroupKey
    column: Annotated[int, Field(ge=0, lt=_MAX_COLUMNS)]


class Change(StrictModel):
    """A value in the scheduler's state_dict, by its path, that a column tells: as it is after step t, in row t."""

    path: Annotated[tuple[Annotated[str, Field(max_length=100)] | int, ...], Field(min_length=1, max_length=20)]
    column: Annotated[int, Field(ge=0, lt=_MAX_COLUMNS)]


class ClipSettings(StrictModel):
    """The one clipping of all gradients before each update."""

    kind: Literal["norm", "value"]
    limit: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    norm_type: Annotated[float, Field(gt=0)] = 2.0
    foreach: bool | None = None
    error_if_nonfinite: bool = False


class ScalerSettings(StrictModel):
    """A torch.amp.GradScaler as it is before the first step."""

    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 65536.0
    growth_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 2.0
    backoff_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    growth_interval: Annotated[int, Field(ge=1, lt=1 << 31)] = 2000
    growth_tracker: Annotated[int, Field(ge=0, lt=1 << 31)] = 0

    def start(self) -> ScalerState:
        """Before the first step."""
        return ScalerState(float(np.float32(self.scale)), self.growth_tracker)


@dataclass(frozen=True)
class ScalerState:
    """A loss scale, and the number of steps without overflow since it changed."""

    scale: float
    growth_tracker: int

    @property
    def inverse(self) -> float:
        """What GradScaler.unscale_ multiplies gradients by."""
        return float(np.float32(1.0 / self.scale))

    def after(self, settings: ScalerSettings, overflow: bool) -> ScalerState:
        """After GradScaler.update(), in float32 as torch's kernels have it."""
        if overflow:
            return ScalerState(float(np.float32(self.scale * settings.backoff_factor)), 0)
        good = self.growth_tracker + 1
        if good < settings.growth_interval:
            return replace(self, growth_tracker=good)
        with np.errstate(over="ignore"):
            grown = float(np.float32(self.scale * settings.growth_factor))
        return ScalerState(grown if np.isfinite(grown) else self.scale, 0)


class PowerTable(StrictModel):
    """beta**t for t from 1 on, by the pow of the trainers' device; what is beyond the table is the last value."""

    beta: Finite
    wide: bool
    """Whether in float64."""
    powers: Column


class Rules(StrictModel):
    """All that `rule` needs."""

    initial: Annotated[tuple[dict[str, Any], ...], Field(min_length=1, max_length=MAX_GROUPS)]
    """What `GroupRule.to_data` wrote for each group before the first step."""
    columns: Annotated[tuple[Column, ...], Field(max_length=_MAX_COLUMNS)] = ()
    varying: Annotated[tuple[Varying, ...], Field(max_length=_MAX_COLUMNS)] = ()
    steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] | None = None
    """For how many steps the columns tell; None: for ever."""
    scheduler: Annotated[str, Field(max_length=200)] = ""
    """Its class, for messages; empty: there is none."""
    scheduler_changes: Annotated[tuple[Change, ...], Field(max_length=_MAX_COLUMNS)] = ()
    clip: ClipSettings | None = None
    scaler: ScalerSettings | None = None
    powers: Annotated[tuple[PowerTable, ...], Field(max_length=2 * MAX_GROUPS)] = ()

    @property
    def groups(self) -> int:
        """How many parameter groups they are for."""
        return len(self.initial)

    @cached_property
    def _initial(self) -> tuple[GroupRule, ...]:
        return tuple(GroupRule.from_data(one) for one in self.initial)

    def rule(
        self,
        step: int,
        *,
        inverse_scale: float | None = None,
        grad_scale: float | None = None,
        clip: ClipNorm | ClipValue | None = None,
        counts: Sequence[Sequence[int]] = (),
    ) -> UpdateRule:
        """The update of step `step` (from 0: also steps that a loss scaler skips count).

        `counts` are, for each group, the different numbers of updates that its parameters will have made after this
        one; needed if the description has powers. Raises ConfigError beyond the steps that are described.
        """
        if self.steps is not None and step >= self.steps:
            raise ConfigError(
                f"the job description tells hyperparameters of {self.steps} steps, and step {step} comes: make it "
                "again with a larger --steps"
            )
        groups = list(self._initial)
        for one in self.varying:
            groups[one.group] = _changed(groups[one.group], one.key, float(self.columns[one.column].at(step)))
        if self.powers and counts:
            groups = [
                replace(
                    group, powers=tuple((t, self._power(group.betas[0], t), self._power(group.betas[1], t)) for t in of)
                )
                for group, of in zip(groups, counts, strict=True)
            ]
        return UpdateRule(tuple(groups), inverse_scale, grad_scale, clip)

    def _power(self, beta: float, count: int) -> float:
        for table in self.powers:
            if table.beta == beta:
                last = table.powers.steps or 1
                return float(table.powers.at(min(count, last) - 1))
        raise ConfigError(f"the job description has no powers of beta {beta}: make it again on the trainers' device")

    def scheduler_state(self, step: int) -> list[tuple[tuple[str | int, ...], float | int]]:
        """What differs in the scheduler's state_dict after step `step` from a fresh one: (path, value).

        Two paths may lead to one list in a live scheduler's state_dict: change a copy of it, with a list for each.
        """
        return [(one.path, self.columns[one.column].at(step)) for one in self.scheduler_changes]

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            count = len(self._initial)
        except CorruptCheckpoint as error:
            raise ValueError(str(error)) from error
        used = [one.column for one in self.varying] + [one.column for one in self.scheduler_changes]
        if used and max(used) >= len(self.columns):
            raise ValueError(f"column {max(used)} of {len(self.columns)}")
        if any(one.group >= count for one in self.varying):
            raise ValueError(f"a group that is none of the {count}")
        for column in self.columns:
            if column.steps is not None and (self.steps is None or column.steps < self.steps):
                raise ValueError(f"a column of {column.steps} steps, and {self.steps or 'all'} are told")
        return self


def _changed(group: GroupRule, key: GroupKey, value: float) -> GroupRule:
    if key == "beta1":
        return replace(group, betas=(value, group.betas[1]))
    if key == "beta2":
        return replace(group, betas=(group.betas[0], value))
    number: dict[str, Any] = {key: value}
    return replace(group, **number)
