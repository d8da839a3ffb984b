"""What each update was, told from the reduced gradients and the job description: loss scale, clipping, hyperparameters.

The twin does what the training's own scaler, clipping and scheduler do, on the same numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from lastgood._lazy import torch
from lastgood.mirror.job.rules import ClipSettings, ScalerState
from lastgood.mirror.node.layout import NodeLayout
from lastgood.mirror.node.side import make_side
from lastgood.optim.rule import ClipNorm, ClipValue
from lastgood.optim.threads import intra_op_threads

__all__ = ["Twin"]


class Twin:
    """A training's state beside parameters, buffers and the optimizer's tensors. Iterations count updates from 1."""

    def __init__(self, layout: NodeLayout) -> None:
        self._layout = layout
        self._rules = layout.job.rules
        self._spec = layout.job.spec
        self.scaler: ScalerState | None = None if self._rules.scaler is None else self._rules.scaler.start()
        self._made = np.zeros(len(layout.job.optimized), np.int64)
        """Updates that each parameter of the layout has had."""

    def begin(self, scaler: Mapping[str, Any] | None, made: Mapping[int, int]) -> None:
        """Go on from a state: of the scaler (None: as it begins), and the updates that parameters have had."""
        settings = self._rules.scaler
        if settings is not None:
            self.scaler = settings.start()
            if scaler is not None:
                self.scaler = ScalerState(float(scaler["scale"]), int(scaler["growth_tracker"]))
        self._made[:] = 0
        for index, count in made.items():
            self._made[index] = count

    # -- an update -------------------------------------------------------------------------------------------------

    def update(
        self, iteration: int, gradients: Sequence[torch.Tensor], absent: Collection[int]
    ) -> dict[str, Any] | None:
        """The rule of an iteration, whose gradients are given by the layout's indices; None for a skipped step.

        Raises ConfigError beyond the steps that the job description tells.
        """
        present = [index for index in self._layout.module_order if index not in absent]
        settings, scaler = self._rules.scaler, self.scaler
        overflow = False
        inverse_scale: float | None = None
        grad_scale: float | None = None
        if settings is not None and scaler is not None:
            overflow = not all(bool(torch.isfinite(gradients[index]).all()) for index in present)
            self.scaler = scaler.after(settings, overflow)
            # A fused optimizer unscales in its kernel, unless the training unscaled before, as it must for a clipping.
            if self._spec.implementation == "fused" and self._rules.clip is None:
                grad_scale = scaler.scale
            else:
                inverse_scale = scaler.inverse
        if overflow or not present:
            return None
        clip = None
        if self._rules.clip is not None:
            clip = self._clip(self._rules.clip, [gradients[index] for index in present], inverse_scale)
        self._made[present] += 1
        rule = self._rules.rule(
            iteration - 1, inverse_scale=inverse_scale, grad_scale=grad_scale, clip=clip, counts=self._counts(present)
        )
        return rule.to_data()

    def _clip(
        self, settings: ClipSettings, gradients: list[torch.Tensor], inverse_scale: float | None
    ) -> ClipNorm | ClipValue:
        if settings.kind == "value":
            return ClipValue(settings.limit)
        with torch.no_grad(), intra_op_threads(self._spec.threads):
            if inverse_scale is not None:
                factor = torch.tensor(inverse_scale, dtype=torch.float32)
                gradients = [gradient * factor.to(gradient.dtype) for gradient in gradients]
            total = torch.nn.utils.get_total_norm(
                gradients, settings.norm_type, settings.error_if_nonfinite, settings.foreach
            )
            coefficient = torch.clamp(settings.limit / (total + 1e-6), max=1.0)
        return ClipNorm(float(coefficient), str(coefficient.dtype).removeprefix("torch."))

    def _counts(self, present: Sequence[int]) -> list[list[int]]:
        """For each group the different numbers of updates that its parameters have had."""
        if not self._spec.needs_powers:
            return []
        found: list[set[int]] = [set() for _ in self._spec.groups]
        for index in present:
            found[self._layout.grouped[index]].add(int(self._made[index]))
        return [sorted(counts) for counts in found]

    # -- the side record -------------------------------------------------------------------------------------------

    def side(self, iteration: int, frozen: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> bytes:
        """All of the state after an iteration that gradients do not carry."""
        job, rules = self._layout.job, self._rules
        following = iteration if rules.steps is None else min(iteration, rules.steps - 1)
        part = {
            "step": iteration,
            "frozen": dict(frozen),
            "buffers": dict(buffers),
            "groups": [group.to_data() for group in rules.rule(following).groups],
            "scheduler": [[list(path), value] for path, value in rules.scheduler_state(iteration - 1)],
            "scaler": self._scaler_data(),
            "data": job.data.start + iteration * job.data.per_step,
        }
        return make_side(part)

    def _scaler_data(self) -> dict[str, Any] | None:
        if self.scaler is None:
            return None
        return {"scale": self.scaler.scale, "growth_tracker": self.scaler.growth_tracker}
