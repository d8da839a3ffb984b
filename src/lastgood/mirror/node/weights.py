"""Tensors that DDP broadcasts: the initial parameters and buffers of an incarnation, and the buffers of each step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lastgood._lazy import torch
from lastgood.mirror.conversation.places import Expect
from lastgood.mirror.job.description import JobDescription, TensorInfo
from lastgood.mirror.node.layout import NodeLayout, memory_shape

__all__ = ["Broadcast", "frozen_of", "in_memory_order", "initial_tensors", "named_weights", "weights_of"]

Buffer = npt.NDArray[np.uint8]


class Broadcast:
    """Some named tensors that come in one collective or several."""

    def __init__(self, tensors: Iterable[TensorInfo]) -> None:
        self._infos = {one.name: one for one in tensors}
        self.tensors: dict[str, torch.Tensor] = {}
        """Those that have come, each of its own shape, contiguous."""

    @property
    def complete(self) -> bool:
        """Whether all have come."""
        return len(self.tensors) == len(self._infos)

    def take(self, expected: Expect, memory: Buffer) -> None:
        """A collective is complete; its tensors lie one after another, each in its logical order."""
        at = 0
        for name in expected.tensors:
            info = self._infos[name]
            held = torch.from_numpy(memory[at : at + info.nbytes].copy())
            self.tensors[name] = held.view(getattr(torch, info.dtype)).view(info.shape)
            at += info.nbytes


def initial_tensors(job: JobDescription) -> list[TensorInfo]:
    """What the first broadcasts of an incarnation carry."""
    return [*job.parameters, *(job.buffers if job.ddp.init_buffers else ())]


def in_memory_order(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The bytes of a contiguous tensor as they lie in a memory of this order of dimensions."""
    return tensor.permute(tuple(order)).contiguous().reshape(-1).view(torch.uint8)


def frozen_of(job: JobDescription, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters that no optimizer updates."""
    updated = {job.parameters[one].name for one in job.optimized}
    return {one.name: tensors[one.name] for one in job.parameters if one.name not in updated}


def weights_of(layout: NodeLayout, tensors: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The parameters that an optimizer updates, by layout index, each in memory order."""
    found = {}
    for index, parameter in enumerate(layout.job.optimized):
        info = layout.job.parameters[parameter]
        declared = layout.gradients.parameters[index]
        memory = in_memory_order(tensors[info.name], info.order)
        found[index] = memory.view(getattr(torch, info.dtype)).view(declared.shape)
    return found


def named_weights(
    layout: NodeLayout, weights: Mapping[int, torch.Tensor], frozen: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """All parameters by name, each of its own shape, of what `weights_of` and `frozen_of` give."""
    found = dict(frozen)
    for index, parameter in enumerate(layout.job.optimized):
        info = layout.job.parameters[parameter]
        places = [info.order.index(dim) for dim in range(len(info.order))]
        found[info.name] = weights[index].view(memory_shape(info)).permute(places)
    return found
