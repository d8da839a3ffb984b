"""What is noted of each step of an optimizer."""

from __future__ import annotations

from dataclasses import replace

import torch

from lastgood.gradients.trainer.parameters import TrackedParameters
from lastgood.gradients.trainer.updates import UpdateNotes
from lastgood.optim.spec import OptimizerSpec


def test_steps_are_counted_on_behind_one_that_cannot_be_told() -> None:
    # As a CUDA trainer's, whose fused kernels have powers of their own; they are asked of the CPU here.
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    state = {"optimizer": optimizer}
    spec = replace(OptimizerSpec.of(optimizer), arithmetic="cuda")
    notes = UpdateNotes(state, TrackedParameters(state), spec, reduced=False)

    def told(rate: float) -> int | str:
        parameter.grad = torch.ones(4)
        optimizer.param_groups[0]["lr"] = rate
        notes.begin_iteration()
        part = notes.look()
        notes.add(part)
        optimizer.step()
        update = notes.update()
        return part.fault or int((update.rule or {})["groups"][0]["powers"][0][0])

    assert [told(0.1), told(0.1)] == [1, 2]
    assert "lr of a parameter group is inf" in str(told(float("inf")))
    assert [told(0.1), told(0.1)] == [4, 5]
