"""Which of the steps that a shadow holds a restarted training began with: told by the weights that it broadcast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lastgood._lazy import torch
from lastgood.errors import CheckpointError
from lastgood.gradients.layout.entries import Entry, Saved
from lastgood.gradients.shadow.core import ShadowCore
from lastgood.gradients.shadow.memory import tensor_bytes
from lastgood.gradients.shadow.restore import read_side, reading_tensors
from lastgood.gradients.trainer.parameters import PARAMETER
from lastgood.mirror.node.side import read_side_part

__all__ = ["find_held", "held_side", "holds_something", "next_incarnation", "updates_made"]


def next_incarnation(core: ShadowCore) -> int:
    """A number that no incarnation of this job has had yet."""
    status = core.status()
    return max([status.epoch, *(saved.epoch for saved in (*status.memory, *status.durable))]) + 1


def holds_something(core: ShadowCore) -> bool:
    """Whether a step of this job can be given back, or could be once."""
    status = core.status()
    return bool(status.memory or status.durable or status.promised is not None)


def find_held(core: ShadowCore, incarnation: int, weights: Mapping[int, torch.Tensor]) -> Saved | None:
    """The held step whose parameters are these (by layout index, in memory order), and the shadow stands there then.

    Of those in memory the one that was given back in this incarnation first, then oldest first: looking at one brings
    the shadow to it, and there is no way back. If none is held in memory, the spills, newest first. None if no step is.
    """
    status, restored = core.status(), core.body.restored
    held: list[tuple[Saved, str]] = [(saved, "memory") for saved in status.memory]
    held.sort(key=lambda one: (one[0] != restored, one[0].iteration))
    if not held:
        held = [(saved, "durable") for saved in status.durable]
    for saved, source in held:
        try:
            with reading_tensors(core.body, incarnation, saved, source) as tensors:
                if _are_those(tensors, weights):
                    return saved
        except CheckpointError:  # one that is passed already, or damaged; another one may be it
            continue
    return None


def _are_those(tensors: Sequence[tuple[Entry, memoryview]], weights: Mapping[int, torch.Tensor]) -> bool:
    parameters = {entry.parameter: view for entry, view in tensors if entry.key == PARAMETER}
    return parameters.keys() == weights.keys() and all(
        parameters[index] == tensor_bytes(one) for index, one in weights.items()
    )


def held_side(core: ShadowCore, saved: Saved) -> Mapping[str, Any]:
    """What a held step's side record says. Raises CheckpointError."""
    record = read_side(core.body, core.body.state.incarnation, saved, 0, "memory")
    return read_side_part(record.content, f"step {saved.step}")


def updates_made(core: ShadowCore) -> dict[int, int]:
    """How many updates each parameter has had, of an optimizer that counts them; the shadow is fenced, or stands."""
    memory = core.body.memory
    assert memory is not None
    found: dict[int, int] = {}
    with core.body.stopped():
        for bucket in memory.owned:
            for entry, tensor in memory.value(bucket).tensors():
                if entry.key == "step":
                    found[entry.parameter] = int(tensor)
    return found
